"""Ops of a block: how the runtime treats them, what it keeps to run them again, and what was measured of them.

In: ops of the dispatcher, with arguments in which storages stand for tensors that the block made. Kept: one `Kind` for
each op seen; of each run its arguments, the random state and the dispatch state in which it ran. Out: the op's results
once more, bit for bit; costs and sizes by op and shapes.
"""

from __future__ import annotations

import inspect
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from torch_remat._compat import (
    any_autocast_enabled,
    below_autograd,
    dispatch_state,
    has_effect,
    storage_key,
    with_dispatch_state,
    without_dispatch_modes,
)
from torch_remat.dispatch.ambient import Ambient, RngState, capture_ambient
from torch_remat.dispatch.ops.schema import LIFT, WRITES_WITHOUT_SAYING, effects_of
from torch_remat.dtr._storage import Alias, Version, derive
from torch_remat.errors import MutationError, UsageError, shown
from torch_remat.policies.collectives import is_of_collectives

_SAMPLES = 15  # runs of an op at the same shapes of which the median is taken
_MOST_KNOWN = 100_000
_MOST_TERMS = 4  # of a sum of gradients that is recomputed rather than pinned
_KEEP = (
    "Change tensors in the thread of the block and by ops, and not by assignments to .data, until the block's results "
    "that depend on them are gone."
)
NO_ROOTS: Mapping[Version, torch.Tensor] = {}

Cost = Literal["measured", "flops"] | Callable[..., float]
# Batch norms in training write their running statistics and do not read them: (name, place of `training`, or -1 for
# one that always trains). Their other results can be recomputed without writing the statistics twice.
_BATCH_NORMS = {
    "native_batch_norm": 5,
    "cudnn_batch_norm": 5,
    "miopen_batch_norm": 5,
    "_native_batch_norm_legit": 5,
    "_batch_norm_with_update": -1,
}
_STATISTICS = ((3, "running_mean"), (4, "running_var"))
# What autograd calls, in the node of a leaf, to make the leaf's gradient.
_ACCUMULATING = frozenset(("detach", "clone", "add", "new_empty", "new_empty_strided", "view_as", "view", "copy_"))
# These return their argument, or parts of it, though their schemas promise a new tensor.
_SILENT_VIEWS = frozenset(("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"))


class Kind:
    """How the runtime treats an op.

    Attributes:
        name: For people: ``aten.mm``.
        view: Whether its results are views of its first argument, and it does nothing else.
        reshapes: Whether it changes only the place of its tensor in its storage, as ``squeeze_`` does.
        factory: Whether it needs nothing but the metadata of its one tensor.
        written: The arguments that it writes, by place and name.
        returned: For each result, which of the written arguments it is; -1 for a new one.
        random: Whether it may draw random numbers.
        once: Whether it must not run twice.
        lifts: Whether it is how a tensor made of Python values enters.
        training: Where a batch norm's ``training`` stands, -1 if it always trains; None for other ops.
        accumulates: Whether autograd may call it to make the gradient of a leaf.
        adds: Whether it is the addition of two tensors.
        higher: Whether it is a higher-order op, which may take anything.
    """

    def __init__(self, op: Any) -> None:
        effects = effects_of(op)  # which keeps the op alive, so that its id stays its own
        self.higher = getattr(op, "_schema", None) is None
        self.name = str(op).removesuffix(".default") if not self.higher else effects.name
        torchs = effects.namespace in ("aten", "prims", "prim")
        self.view = effects.viewed is not None or effects.name in _SILENT_VIEWS
        self.reshapes = effects.reshapes
        self.factory = effects.factory
        self.written = _STATISTICS if effects.name in WRITES_WITHOUT_SAYING else effects.written
        self.returned = effects.returned
        self.random = effects.random
        runs_once = is_of_collectives(op) or effects.namespace == "profiler"
        self.once = self.higher or runs_once or (not torchs and has_effect(op))
        self.lifts = op is LIFT
        self.training = _BATCH_NORMS.get(effects.name)
        self.adds = op is torch.ops.aten.add.Tensor
        self.accumulates = effects.name in _ACCUMULATING


def kind_of(op: Any) -> Kind:
    """Return how to treat an op."""
    kind = _kinds.get(id(op))  # ops hash themselves in Python
    if kind is None:
        kind = _kinds[id(op)] = Kind(op)
    return kind


_kinds: dict[int, Kind] = {}


def leaves(result: Any) -> list[Any]:
    """Return the parts of an op's result, in order: tensors, numbers, None."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [leaf for part in result for leaf in leaves(part)]
    return [result]


def refilled(result: Any, parts: Any) -> Any:
    """Return a result of the same form with other parts, taken from an iterator."""
    if isinstance(result, (tuple, list)):
        made = [refilled(part, parts) for part in result]
        return made if isinstance(result, list) else tuple(made)
    return next(parts)


class Found:
    """The arguments of an op, taken apart."""

    __slots__ = ("consts", "inputs", "key", "ready", "tensors")

    def __init__(self, kind: Kind) -> None:
        self.key: list[Any] = [kind]  # what its results' sizes and its cost depend on
        self.inputs: list[Version] = []  # each once
        self.consts: list[Const] = []
        self.tensors: list[Any] = []  # of the block
        self.ready = True  # whether all inputs are resident


def memory_key(tensor: torch.Tensor) -> int:
    """Return what stands for a tensor's memory: its address, or for one without a storage (sparse) the tensor."""
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


class Const:
    """A tensor that the block did not make, as an argument of a recorded op."""

    __slots__ = ("address", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = memory_key(tensor)
        self.version = -1 if tensor.is_inference() else tensor._version

    def value(self, reader: str, remedy: str = _KEEP) -> torch.Tensor:
        """Return the tensor.

        Raises:
            MutationError: It is no longer what it was.
        """
        tensor = self.tensor
        if memory_key(tensor) != self.address or (self.version >= 0 and tensor._version != self.version):
            raise MutationError(
                f"a tensor of shape {tuple(tensor.shape)} was modified in place, unseen, and {reader}, which read it, "
                "is to run again",
                op=reader,
                remedy=remedy,
            )
        return tensor


class Known:
    """What earlier runs of an op at the same shapes have told."""

    __slots__ = ("aliases", "bytes", "cost", "outputs", "samples")

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.cost = 0.0
        self.bytes = -1  # what its results take; -1 while nobody knows
        self.aliases = False  # whether results share memory with arguments or with each other
        self.outputs: list[tuple[int, Look]] = []  # bytes and looks of new results

    def took(self, seconds: float) -> None:
        """Take note of a run."""
        samples = self.samples
        if len(samples) < _SAMPLES:
            insort(samples, seconds)
            self.cost = samples[len(samples) // 2]


def known_of(key: tuple[Any, ...]) -> Known:
    """Return what is known of an op with these arguments."""
    try:
        return _known(key)
    except TypeError:  # an argument that cannot be hashed
        return Known()


@lru_cache(_MOST_KNOWN)
def _known(key: tuple[Any, ...]) -> Known:
    # By op, shapes and other arguments. It outlives the blocks, which are one training step each: sizes follow from
    # the key, and costs are medians over runs of the same op on the same machine.
    return Known()


@dataclass(frozen=True, eq=False, slots=True)
class Look:
    """The shape, stride, type and device of tensors; each look is one object, and hashed as that."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def on_meta(self) -> torch.Tensor:
        """Return a tensor without data that looks so."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_look = lru_cache(_MOST_KNOWN)(Look)


def look_of(tensor: torch.Tensor) -> Look:
    """Return what a tensor looks like."""
    strided = tensor.layout is torch.strided
    return _look(tensor.shape, tensor.stride() if strided else (), tensor.dtype, tensor.device)


class Op:
    """A run of an op that can be repeated.

    Attributes:
        inputs: The storages that it read, each once.
        written: Those of them that it wrote; a run begins with a copy, and the first outputs are what came of them.
        outputs: The storages that it made; None for those that are gone.
        fresh: For each part of its result whether it is one of the outputs behind the written ones.
        terms: How many terms it adds up, of an addition.
        before: The op whose only result this one wrote, where they run as one: see NOTE [Writes in a row].
        consts: The tensors created outside the block that it read.
        through: The storage that stands for that result among the arguments.

    NOTE [Writes in a row]. ``gates.sigmoid_()`` supersedes what `gates` was, and if no op has read the old version,
    none ever will. Then the write and the op before it are recorded as one, so that the old version is no evicted
    storage which the heuristics would count, and through which they would see everything connected with everything.
    """

    # The usual, so that an op sets only what is its own.
    before: Op | None = None
    consts: Sequence[Const] = ()
    fresh: Sequence[bool] = (True,)
    dispatch: tuple[Ambient, Any] = (Ambient((), None, None), None)
    has_run = True
    random: RngState | None = None
    terms = 1
    through: Version | None = None
    written: tuple[Version, ...] = ()

    def __init__(
        self,
        kind: Kind,
        func: Callable[..., Any],
        args: list[Any],
        kwargs: Mapping[str, Any],
        inputs: tuple[Version, ...],
        known: Known,
    ) -> None:
        self.kind = kind
        self.name = kind.name
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.known = known
        self.outputs: list[Version | None] = []
        self.grad = torch.is_grad_enabled()
        if any_autocast_enabled():
            self.dispatch = (capture_ambient(), dispatch_state())

    @property
    def alive(self) -> bool:
        """Whether an output is not gone."""
        return any(self.outputs)

    @property
    def size_bytes(self) -> int:
        """What the results of another run take, but for those that are written into given memory."""
        sizes = [one.size_bytes for one in self.outputs[len(self.written) :] if one is not None]
        return max(sum(sizes), self.sequence()[0].known.bytes)

    def absorb(self, old: Version) -> bool:
        """Become one with the op that made the storage that this one has written; return whether that can be."""
        before = old.op
        if before is None or old.is_read or len(before.outputs) != 1 or self.written != (old,):
            return False
        inputs = tuple(dict.fromkeys((*before.inputs, *(one for one in self.inputs if one is not old))))
        self.before = copy(before)
        self.before.outputs = []
        self.through = old
        self.inputs = inputs
        self.consts = [*before.consts, *self.consts]
        self.written = ()
        return True

    def sequence(self) -> list[Op]:
        """Return the ops to run, this one last."""
        ops: list[Op] = []
        op: Op | None = self
        while op is not None:
            ops.append(op)
            op = op.before
        ops.reverse()
        return ops

    def given(self, roots: Mapping[Version, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as the op gets them; its inputs are resident."""
        kind = self.kind
        args = [plain(one, kind, roots) for one in self.args]
        return args, {name: plain(value, kind, roots) for name, value in self.kwargs.items()}

    def made(self, result: Sequence[Any], roots: Mapping[Version, torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the data of the outputs, from the parts of a result."""
        made = [leaf for leaf, fresh in zip(result, self.fresh, strict=True) if fresh]
        return [*(roots[one] for one in self.written), *made]

    def run(self, roots: Mapping[Version, torch.Tensor]) -> list[Any]:
        """Run the op again; return the parts of its result.

        Args:
            roots: For each storage of `written` the memory to write to.
        """
        args, kwargs = self.given(roots)
        with self._as_before():
            start = perf_counter()
            result = self.func(*args, **kwargs)
            self.known.took(perf_counter() - start)
        return leaves(result)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Run as the first time: below autograd, with the autocast, the grad mode and the random state of then."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            ambient, state = self.dispatch
            if ambient.autocast or any_autocast_enabled():
                for context in ambient.contexts():
                    stack.enter_context(context)
            stack.enter_context(below_autograd() if state is None else with_dispatch_state(state))
            if self.random is not None:
                stack.enter_context(self.random.replayed())
            yield


def plain(argument: Any, kind: Kind, roots: Mapping[Version, torch.Tensor]) -> Any:
    """Return an argument of a recorded op as the op gets it; its storages are resident."""
    form = type(argument)
    if form is Version:
        return roots.get(argument, argument.tensor)
    if form is Alias:
        storage, place = argument
        return derive(roots[storage] if storage in roots else storage.data(), place)
    if form is Const:
        return argument.value(kind.name)
    if form is Look:
        return torch.zeros(argument.shape, dtype=argument.dtype, device=argument.device)
    if form is list or form is tuple:
        return form([plain(part, kind, roots) for part in argument])
    return argument


def bytes_on_meta(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many bytes the results of an op take, told by a run without data; -1 if that cannot be told."""
    given: list[torch.Tensor] = []  # whose memory is not the results' own

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            given.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))
            return given[-1]
        if isinstance(value, (list, tuple)):
            return type(value)([meta(part) for part in value])
        if isinstance(value, torch.device):
            return torch.device("meta")
        return None if isinstance(value, torch.Generator) else value

    try:
        with without_dispatch_modes():
            result = func(*map(meta, args), **{name: meta(value) for name, value in kwargs.items()})
        sizes = {
            storage_key(leaf): leaf.untyped_storage().nbytes()
            for leaf in leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"
        }
    except Exception:  # no kernel for it, or the sizes depend on the data
        return -1
    for tensor in given:
        sizes.pop(storage_key(tensor), None)
    return sum(sizes.values())


def of_metadata(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a factory with its tensor replaced by one without data."""
    tensor = args[0]
    device = kwargs.get("device")
    return (tensor._handle.look.on_meta(), *args[1:]), {**kwargs, "device": tensor.device if device is None else device}


def generators(args: Sequence[Any], kwargs: Mapping[str, Any]) -> RngState:
    """Return the present state of the generators that an op may draw from."""
    return RngState([value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)])


def adds_many(op: Op) -> bool:
    """Whether an op of backward adds a gradient to a sum of several, as autograd does for weights used many times.

    To make such a sum again takes most of backward, and all that it reads would have to stay known until then.
    """
    op.terms = sum(
        one.op.terms if one.op is not None and one.op.kind.adds else 1 for one in op.inputs if one.op or one.pin
    )
    return op.terms > _MOST_TERMS or any(one.pin == "a sum of many gradients" for one in op.inputs)


class Costs:
    """What ops cost: seconds that were measured, or what a function says.

    Args:
        cost: ``"measured"``, ``"flops"``, or a function of at most four arguments: the op, its arguments, its
            keyword arguments, and its result.
    """

    def __init__(self, cost: Cost) -> None:
        self.measured = cost == "measured"
        function = flops if cost == "flops" else cost
        if callable(function):
            self._function, self._count = function, _arity(function)
        elif not self.measured:
            raise UsageError(
                f"cost={shown(cost)} is no way to tell what ops cost",
                remedy='It is "measured", "flops", or a function of an op, its args, its kwargs and its result.',
            )

    def of(self, known: Known, *run: Any) -> float:
        """Return the cost of a run: of an op, its arguments, its keyword arguments, and its result."""
        return known.cost if self.measured else float(self._function(*run[: self._count]))


def _arity(function: Callable[..., float]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 4
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 4
    return min(4, sum(parameter.kind in (0, 1) for parameter in parameters))


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the floating-point operations of a run; of ops that torch's counter does not know, one per element."""
    count = flop_registry.get(getattr(func, "overloadpacket", None))
    if count is None:
        return float(sum(leaf.numel() for leaf in leaves(result) if isinstance(leaf, torch.Tensor)))
    return float(count(*args, **kwargs, out_val=result))
