"""`list_names`: the results of a function's ops by name, from which a user chooses what to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec

import torch

from torch_remat._compat import eager_only
from torch_remat._flops import flops_of
from torch_remat.dispatch.log.entry import ONE, WRITTEN, Entry
from torch_remat.dispatch.log.meta import Meta
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.options import Options
from torch_remat.dispatch.region.forward import run_region
from torch_remat.dispatch.region.inputs import leaves_of, with_leaves
from torch_remat.errors import UsageError
from torch_remat.policies.kinds import FunctionPolicy, as_policy

P = ParamSpec("P")


@dataclass(frozen=True)
class NamedResult:
    """One result of an op.

    Attributes:
        name: Its automatic name, or that given by `checkpoint_name`.
        op: The op, as ``aten.mm.default``.
        shape: Its shape.
        dtype: Its dtype.
        bytes: Its size in bytes; 0 for a view, which owns no memory. What an op changes in place, or is given by
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


class NameTable(Sequence[NamedResult]):
    """The results of all ops of a function, in order; prints as a table."""

    def __init__(self, rows: Sequence[NamedResult]) -> None:
        self._rows = tuple(rows)

    def __getitem__(self, index: Any) -> Any:
        """Return a row, or a tuple of rows."""
        return self._rows[index]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    @property
    def names(self) -> list[str]:
        """The names, in order."""
        return [row.name for row in self._rows]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain dicts."""
        return [asdict(row) for row in self._rows]

    def __str__(self) -> str:
        """Return the table as text."""
        cells = [_HEADER, *(_cells(row) for row in self._rows)]
        kept = sum(row.bytes for row in self._rows if row.kept)
        needed = sum(row.bytes for row in self._rows if row.needed)
        widths = [max(len(row[at]) for row in cells) for at in range(len(_HEADER))]
        lines = [
            "  ".join(cell.ljust(width) if at in _LEFT else cell.rjust(width)
                      for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in cells
        ]  # fmt: skip
        count = f"{len(self)} result{'s' * (len(self) != 1)}"
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, f"{count}; needed by backward: {needed:,} bytes; kept: {kept:,} bytes"])

    def __repr__(self) -> str:
        """Return the table as text."""
        return str(self)


_HEADER = ("name", "op", "shape", "dtype", "bytes", "FLOPs", "needed", "kept")
_LEFT = (0, 1, 2, 3)


@eager_only
def list_names(function: Callable[P, Any], policy: Any = None) -> Callable[P, NameTable]:
    """Run a function's forward once and list the results of its ops by name.

    Args:
        function: What shall be a checkpointed region; a module is the root of the names.
        policy: A policy for ``checkpoint(policy=...)``; the table shows what it keeps. Without one nothing is kept.

    Returns:
        A callable that takes the function's arguments and returns the table.

    Raises:
        UsageError: The function is not callable.
        PolicyError: ``policy`` is no policy; or from the call, if an entry of it matched nothing.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        >>> table = remat.list_names(block)(torch.randn(4, 8))
        >>> table.names
        ['0.t_0_0', '0.addmm_0_0', '1.gelu_0_0']
    """
    if not callable(function):
        raise UsageError(
            f"list_names() cannot run a {type(function).__name__}",
            remedy="The form is list_names(function, policy=None)(*args, **kwargs).",
        )
    chosen = _nothing if policy is None else as_policy(policy)

    def run(*args: P.args, **kwargs: P.kwargs) -> NameTable:
        seen: list[tuple[Entry, int]] = []
        options = Options(
            region_name=default_name(function),
            policy=chosen,
            observer=lambda call, *what: seen.append((call, flops_of(call.op, *what))),
        )

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor | list[torch.Tensor]:
            output = function(*args, **kwargs)
            return [leaf for leaf in leaves_of((output,), {}) if isinstance(leaf, torch.Tensor)]

        counted.__wrapped__ = function  # type: ignore[attr-defined]  # the root of the names
        with torch.inference_mode(False), torch.enable_grad():  # where a region would be none
            leaves = leaves_of(args, kwargs)
            if any(map(_is_inference, leaves)):
                normal = [leaf.clone() if _is_inference(leaf) else leaf for leaf in leaves]
                args, kwargs = with_leaves(args, kwargs, normal)  # type: ignore[assignment]
            output = run_region(counted, args, kwargs, options)
        rows = [row for call, flops in seen for row in _rows(call, flops)]
        del output
        return NameTable(rows)

    return run


def _is_inference(leaf: Any) -> bool:
    """Whether a value is a tensor made under ``torch.inference_mode()``, which autograd cannot save."""
    return isinstance(leaf, torch.Tensor) and leaf.is_inference()


def _rows(call: Entry, flops: int) -> Iterator[NamedResult]:
    """Yield the results of an op, once forward is over."""
    results = call.results if type(call.results) is list else [call.results]
    made = {0} if call.kind == ONE else {place for place, _ in call.made}
    returned = call.effects.returned
    for place, meta in enumerate(results):
        if type(meta) is Meta:
            changed = place < len(returned) and returned[place] >= 0
            booked = WRITTEN if changed else place
            needed = booked in call.packed
            kept = booked in call.saved and (needed or (bool(call.written) if changed else place in call.kept))
            owns = (needed or kept) if changed else (call.effects.viewed is None and place in made)
            shape, dtype = meta.geometry[0], str(meta.dtype).removeprefix("torch.")
            size = meta.dtype.itemsize * shape.numel() if owns else 0
            yield NamedResult(call.label(place), str(call.op), tuple(shape), dtype, size, flops, needed, kept)
            flops = 0


def _cells(row: NamedResult) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    marks = ["yes" if mark else "" for mark in (row.needed, row.kept)]
    return (row.name, row.op, shape, row.dtype, f"{row.bytes:,}", f"{row.flops:,}" if row.flops else "", *marks)


_nothing = FunctionPolicy(lambda ctx, op, *args, **kwargs: False)
