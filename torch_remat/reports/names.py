"""`list_names`: the results of a function's ops by name, from which a user chooses what to save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
from torch.nn import Module

from torch_remat._compat import as_written, eager_only
from torch_remat._options import says_form
from torch_remat._util.flops import flops_of
from torch_remat._util.storages import tensors_in
from torch_remat._util.table import Table
from torch_remat._util.text import aligned, plural
from torch_remat.dispatch.call.functions import Census
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.ops.entry import ONE, WRITTEN, Entry
from torch_remat.dispatch.ops.meta import Meta, Raised, WrapperMeta
from torch_remat.dispatch.options import Options
from torch_remat.dispatch.region.forward import Recording, run_region
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.errors import PolicyError, UsageError
from torch_remat.policies.by_op import PolicyFunction
from torch_remat.policies.decision import Decision
from torch_remat.policies.given import as_policy
from torch_remat.policies.policy import Decider, OpContext, OpPolicy

P = ParamSpec("P")


@dataclass(frozen=True)
class NamedResult:
    """One result of an op.

    Attributes:
        name: Its automatic name, or that given by `checkpoint_name`.
        op: The op, as ``aten.mm.default``.
        shape: Its shape; of a DTensor that of the local tensor, as in all other columns.
        dtype: Its dtype.
        bytes: Its size in bytes; 0 for a view, which owns no memory. What an op modifies in place, or is given by
            ``out=``, is counted there if backward needs it or the policy keeps it as that op left it, else 0.
        flops: Floating point operations of the op, as `torch.utils.flop_counter` counts them; 0 where it does not. An
            op with several results shows them at the first.
        needed: Whether autograd saves it for backward.
        kept: Whether it is kept under the policy.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    flops: int
    needed: bool
    kept: bool


@dataclass(frozen=True)
class NamedCall:
    """One call of a function of torch, which a policy by function can keep.

    Attributes:
        name: Its name in reports.
        function: The function, as ``F.linear``.
        results: The names of the results of its ops.
    """

    name: str
    function: str
    results: tuple[str, ...]


class NameTable(Table[NamedResult]):
    """The results of all ops of a function, in order; prints as a table, below the calls that ran them.

    Attributes:
        calls: The calls of functions of torch that ran ops, in order.
    """

    def __init__(self, rows: Sequence[NamedResult] = (), calls: Sequence[NamedCall] = ()) -> None:
        super().__init__(rows)
        self.calls = tuple(calls)

    @property
    def names(self) -> list[str]:
        """The names, in order."""
        return [row.name for row in self._rows]

    def __str__(self) -> str:
        """Return the table as text."""
        kept = sum(row.bytes for row in self._rows if row.kept)
        needed = sum(row.bytes for row in self._rows if row.needed)
        calls = iter(self.calls)
        cells: list[tuple[str, ...]] = []
        inside: list[str] = []  # the names of what is yet to come of a call
        call = next(calls, None)
        for row in self._rows:
            name, *others = _cells(row)
            if not inside and call is not None and call.results[0] == row.name:
                cells.append((call.name, call.function, *[""] * len(others[1:])))
                inside, call = list(call.results), next(calls, None)
            is_inside = inside[:1] == [row.name]
            del inside[:is_inside]
            cells.append((f"  {name}" if is_inside else name, *others))
        rule = ["-" * max(map(len, column)) for column in zip(_HEADER, *cells, strict=True)]
        end = f"{plural(len(self), 'result')}; needed by backward: {needed:,} bytes; kept: {kept:,} bytes"
        return "\n".join([*aligned([_HEADER, rule, *cells], right=_RIGHT), end])


_HEADER = ("name", "op", "shape", "dtype", "bytes", "FLOPs", "needed", "kept")
_RIGHT = (4, 5, 6, 7)
_FORM = "remat.list_names(function, policy=None, layer=None)(*args, **kwargs)"


@eager_only
@says_form(f"The form is {_FORM}.")
def list_names(
    function: Callable[P, Any], policy: Any = None, *, layer: Module | None = None
) -> Callable[P, NameTable]:
    """Run a function's forward once and list the results of its ops by name, below the calls of functions of torch.

    Args:
        function: What shall be a checkpointed region; a module is the root of the names.
        policy: A policy for ``checkpoint(policy=...)``; the table shows what it keeps. Without one nothing is kept.
        layer: A module that the function calls, which shall be the region instead. The function runs up to its first
            call of the layer, and the layer on what it is given there. The names are those for a policy of the layer,
            as in ``checkpoint_modules(model, "layers.*", policy=save_names(...))``.

    Returns:
        A callable that takes the function's arguments and returns the table.

    Raises:
        UsageError: The function is not callable, or its arguments are in the same call; or from the call, if the
            function does not call the layer.
        PolicyError: ``policy`` is not a policy; or from the call, if an entry of it matched nothing.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        >>> table = remat.list_names(block)(torch.randn(4, 8))
        >>> table.names
        ['0.t_0_0', '0.addmm_0_0', '1.gelu_0_0']
        >>> remat.list_names(block, layer=block[1])(torch.randn(4, 8)).names
        ['gelu_0_0']
    """
    if not callable(function):
        raise UsageError(f"list_names() cannot run a {type(function).__name__}", remedy=f"The form is {_FORM}.")
    if any(True for _ in tensors_in(policy)):
        raise UsageError("a tensor is not a policy: it belongs in the second call", remedy=f"The form is {_FORM}.")
    if not (layer is None or isinstance(layer, Module)):
        raise UsageError(f"layer takes a module, not a {type(layer).__name__}", remedy="Pass layer=model.layers[0].")
    chosen = _nothing if policy is None else as_policy(policy)

    def run(*args: P.args, **kwargs: P.kwargs) -> NameTable:
        if torch.is_inference_mode_enabled():
            raise UsageError("list_names() was called under torch.inference_mode()", remedy="Call it outside.")
        if layer is not None:
            given, named = _given_to(layer, function, args, kwargs)
            return list_names(layer.forward, policy)(*given, **named)  # hooks are outside of a layer's region
        flops: list[int] = []
        census = Census(function)
        entries: list[Sequence[Entry]] = []
        options = Options(region_name=default_name(function), policy=_Listed(chosen, flops))

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor | list[torch.Tensor]:
            mode = current_mode()
            assert isinstance(mode, Recording)
            entries.append(mode.region.tape.calls)
            output = census.around(function, lambda: len(entries[0]), args, kwargs)
            return [leaf for leaf in leaves_of((output,), {}) if isinstance(leaf, torch.Tensor)]

        counted.__wrapped__ = function  # type: ignore[attr-defined]  # the root of the names
        with torch.enable_grad():
            output = run_region(counted, args, kwargs, options)
        ops = [entry for entry in entries[0] if not entry.is_call and type(entry.results) is not Raised]
        rows = {id(entry): list(_rows(entry, count)) for entry, count in zip(ops, flops, strict=True)}
        calls = [
            NamedCall(name, label, tuple(row.name for row in made))
            for name, label, begin, end in census.calls
            if (made := [row for entry in entries[0][begin:end] for row in rows.get(id(entry), ())])
            and any(row.bytes for row in made)  # else it returned views, and is never kept
        ]
        del output
        return NameTable([row for entry in ops for row in rows[id(entry)]], calls)

    return run


class _Listed(OpPolicy):
    """Decides as another policy does, and counts the FLOPs of each op that it is asked about, which are all."""

    def __init__(self, policy: OpPolicy, flops: list[int]) -> None:
        self._policy = policy
        self._flops = flops

    def begin(self) -> Decider:
        return _ListedDecider(self._policy.begin(), self._flops)

    def parts(self) -> tuple[Any, ...]:
        return self._policy.parts()


class _ListedDecider(Decider):
    reads_names = notes_packed = True

    def __init__(self, decider: Decider, flops: list[int]) -> None:
        super().__init__()
        self._decider = decider
        self._flops = flops

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        self._flops.append(flops_of(op, args, kwargs, context.op_output))
        return self._decider.decide(context, op, args, kwargs)

    def decide_name(self, name: str) -> Decision:
        return self._decider.decide_name(name)

    def unmatched(self, names: Iterable[str]) -> PolicyError | None:
        return self._decider.unmatched(names)


class _Reached(BaseException):
    """Ends the function: it calls the layer, with these arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given = args, kwargs


def _given_to(
    layer: Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a layer's forward gets in a function's first call of it."""

    def stop(_layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(args, kwargs)

    hook = layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with as_written(), torch.enable_grad():
            function(*args, **kwargs)
    except _Reached as reached:
        return reached.given
    finally:
        hook.remove()
    raise UsageError(
        f"the function does not call the layer, a {type(layer).__name__}",
        remedy="Pass a module of the model that is called; who calls its forward passes it by.",
    )


def _rows(call: Entry, flops: int) -> Iterator[NamedResult]:
    """Yield the results of an op, once forward is over."""
    results = call.results if type(call.results) is list else [call.results]
    made = {0} if call.kind == ONE else {place for place, _ in call.made}
    returned = call.effects.returned
    for place, meta in enumerate(results):
        if parts := _dense_parts(meta):
            changed = place < len(returned) and returned[place] >= 0
            booked = WRITTEN if changed else place
            needed = booked in call.packed
            kept = booked in call.saved and (needed or booked in call.kept)
            owns = (needed or kept) if changed else (call.effects.viewed is None and place in made)
            shape, dtype = parts[0].geometry[0], str(parts[0].dtype).removeprefix("torch.")
            size = sum(part.dtype.itemsize * part.geometry[0].numel() for part in parts) if owns else 0
            yield NamedResult(call.label(place), str(call.op), tuple(shape), dtype, size, flops, needed, kept)
            flops = 0


def _dense_parts(meta: Any) -> list[Meta]:
    """Return a result that is a tensor, or the tensors inside of one that wraps others."""
    if type(meta) is WrapperMeta:
        return [part for one in meta.parts.values() for part in _dense_parts(one)]
    return [meta] if type(meta) is Meta else []


def _cells(row: NamedResult) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    marks = ["yes" if mark else "" for mark in (row.needed, row.kept)]
    return (row.name, row.op, shape, row.dtype, f"{row.bytes:,}", f"{row.flops:,}" if row.flops else "", *marks)


_nothing = PolicyFunction(lambda ctx, op, *args, **kwargs: False)
