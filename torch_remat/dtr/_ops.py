"""Ops that can run again, and what was measured of them.

In: an op with its arguments, in which storages stand for tensors that the block made. Kept: those, the random state
and the dispatch state in which it ran. Out: the op's results once more, bit for bit; costs and sizes by op and shapes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from time import perf_counter
from typing import Any

import torch

from torch_remat._compat import (
    any_autocast_enabled,
    below_autograd,
    dispatch_state,
    storage_key,
    with_dispatch_state,
    without_dispatch_modes,
)
from torch_remat.dtr._kinds import Kind, capture_ambient, leaves
from torch_remat.dtr._storage import Alias, Version, derive
from torch_remat.errors import MutationError

_SAMPLES = 15  # runs of an op at the same shapes of which the median is taken
_MOST_KNOWN = 100_000


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

    def value(self, kind: Kind) -> torch.Tensor:
        """Return the tensor.

        Raises:
            MutationError: It is no longer what it was.
        """
        tensor = self.tensor
        if memory_key(tensor) != self.address or (self.version >= 0 and tensor._version != self.version):
            raise MutationError(
                f"a tensor of shape {tuple(tensor.shape)} was changed where the budget's block could not see it, and "
                f"{kind.name}, which read it, is to run again",
                op=kind.name,
                remedy="Change tensors in the thread of the block and by ops, and not by assignments to .data, until "
                "the block's results that depend on them are gone.",
            )
        return tensor


class Spare:
    """Stands for the running statistics that a batch norm in training writes: a second run writes somewhere else."""

    __slots__ = ("like",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.like = (tensor.shape, tensor.dtype, tensor.device)

    def value(self) -> torch.Tensor:
        """Return something to write to."""
        shape, dtype, device = self.like
        return torch.zeros(shape, dtype=dtype, device=device)


class Known:
    """What earlier runs of an op at the same shapes have told."""

    __slots__ = ("aliases", "bytes", "cost", "outputs", "samples")

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.cost = 0.0
        self.bytes = -1  # what its results take; -1 while nobody knows
        self.aliases = False  # whether results share memory with arguments or with each other
        self.outputs: list[tuple[torch.Size, tuple[int, ...], torch.dtype, int, Any]] = []

    def took(self, seconds: float) -> None:
        """Take note of a run."""
        samples = self.samples
        if len(samples) < _SAMPLES:
            insort(samples, seconds)
            self.cost = samples[len(samples) // 2]


# By op, shapes and other arguments. It outlives the blocks, which are one training step each: sizes follow from the
# key, and costs are medians over runs of the same op on the same machine.
_known: dict[tuple[Any, ...], Known] = {}


def known_of(key: tuple[Any, ...]) -> Known:
    """Return what is known of an op with these arguments."""
    try:
        known = _known.get(key)
    except TypeError:  # an argument that cannot be hashed
        return Known()
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[key] = Known()
    return known


class Look:
    """The shape, stride, type and device of tensors; each look is one object."""

    __slots__ = ("device", "dtype", "shape", "stride")

    def __init__(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype
        self.device = device

    def on_meta(self) -> torch.Tensor:
        """Return a tensor without data that looks so."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_looks: dict[tuple[Any, ...], Look] = {}


def look_of(tensor: torch.Tensor) -> Look:
    """Return what a tensor looks like."""
    strided = tensor.layout is torch.strided
    key = (tensor.shape, tensor.stride() if strided else (), tensor.dtype, tensor.device)
    look = _looks.get(key)
    if look is None:
        if len(_looks) >= _MOST_KNOWN:
            _looks.clear()
        look = _looks[key] = Look(*key)
    return look


class Op:
    """A run of an op that can be repeated.

    Attributes:
        inputs: The storages that it read, each once.
        written: Those of them that it wrote; a run begins with a copy, and the first outputs are what came of them.
        outputs: The storages that it made; None for those that are gone.
        alive: How many of them are not.
        slots: For each part of its result which of the outputs behind the written ones it is, -1 for none.
        gone: Whether the last output is gone.
        terms: How many terms it adds up, of an addition.
        before: The op whose only result this one wrote, where they run as one: see NOTE [Writes in a row].
        consts: The tensors from outside that it read.
        through: The storage that stands for that result among the arguments.

    NOTE [Writes in a row]. ``gates.sigmoid_()`` supersedes what `gates` was, and if no op has read the old version,
    none ever will. Then the write and the op before it are recorded as one, so that the old version is no evicted
    storage which the heuristics would count, and through which they would see everything connected with everything.
    """

    # The usual, so that an op sets only what is its own.
    alive = 0
    before: Op | None = None
    consts: Sequence[Const] = ()
    dispatch: tuple[Any, Any] | None = None
    gone = False
    has_run = True
    random: tuple[torch.Generator, torch.Tensor] | None = None
    slots: Sequence[int] = (0,)
    terms = 1
    through: Version | None = None
    written: tuple[Version, ...] = ()

    def __init__(
        self,
        kind: Kind,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: tuple[Version, ...],
        known: Known,
    ) -> None:
        self.kind = kind
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
    def name(self) -> str:
        """The op, for people."""
        return self.kind.name

    @property
    def size_bytes(self) -> int:
        """What the results of another run take, but for those that are written into given memory."""
        sizes = [one.size_bytes for one in self.outputs[len(self.written) :] if one is not None]
        return max(sum(sizes), self.sequence()[0].known.bytes)

    def absorb(self, old: Version) -> bool:
        """Become one with the op that made the storage that this one has written; return whether that can be."""
        before = old.op
        if before is None or old.users or len(before.outputs) != 1 or self.written != (old,):
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

    def made(self, result: Sequence[Any], roots: Mapping[Version, torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the data of the outputs, from the parts of a result."""
        fresh = [leaf for leaf, slot in zip(result, self.slots, strict=True) if slot >= 0]
        return [*(roots[one] for one in self.written), *fresh]

    def run(self, roots: Mapping[Version, torch.Tensor]) -> list[Any]:
        """Run the op again; return the parts of its result.

        Args:
            roots: For each storage of `written` the memory to write to.
        """

        def value(argument: Any) -> Any:
            return plain(argument, self.kind, roots)

        args = [value(argument) for argument in self.args]
        kwargs = {name: value(argument) for name, argument in self.kwargs.items()}
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
            if self.dispatch is not None:
                ambient, state = self.dispatch
                for context in ambient.contexts():
                    stack.enter_context(context)
                stack.enter_context(with_dispatch_state(state))
            else:
                for device in _autocasting():
                    stack.enter_context(torch.autocast(device, enabled=False))
                stack.enter_context(below_autograd())
            if self.random is not None:
                generator, start = self.random
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(start)
            yield


def _autocasting() -> list[str]:
    if not any_autocast_enabled():
        return []
    return [device for device, *_ in capture_ambient().autocast]


def plain(argument: Any, kind: Kind, roots: Mapping[Version, torch.Tensor]) -> Any:
    """Return an argument of a recorded op as the op gets it; its storages are resident."""
    form = type(argument)
    if form is Version:
        return roots.get(argument, argument.tensor)
    if form is Alias:
        storage, place = argument
        return derive(roots[storage], place) if storage in roots else storage.at(place)
    if form is Const:
        return argument.value(kind)
    if form is Spare:
        return argument.value()
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
