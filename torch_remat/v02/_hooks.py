"""Saved-tensor hooks that take what regions keep, and names for what custom Functions save.

In: pairs of hooks, around checkpointed functions or in them. Kept: what the hooks made of tensors, in their place. Out:
the tensors, from the unpack hooks, when backward or replay reads them.

In a checkpointed function the hooks take what saved calls keep, once the call is over, as offloading does: what replay
makes again passes no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any
from weakref import ref

import torch
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat.dispatch.holder import OpHolder
from torch_remat.dispatch.log.meta import key_of
from torch_remat.dispatch.log.slot import Slot, counter_of
from torch_remat.dispatch.mode import current_mode, unseen
from torch_remat.dispatch.placeholder import geometry_of
from torch_remat.errors import MutationError, UsageError
from torch_remat.v02._names import checked
from torch_remat.v02._scope import Hooks, Output, scope

Holders = Sequence[ref[OpHolder]]


class SavedTensorKind(Enum):
    """Why a tensor is packed: replay starts from it, backward reads it, or replay reads this result of a saved call."""

    CHECKPOINT_INPUT = auto()
    BACKWARD = auto()
    SAVE_OUTPUT = auto()


@dataclass(frozen=True)
class SavedTensorInfo:
    """What is known of the tensor whose pack hook runs.

    Attributes:
        kind: Why it is packed.
        context: What ``capture_context`` returned where a saved call made it; None without one, and for other tensors.
    """

    kind: SavedTensorKind
    context: object = None


_info: ContextVar[SavedTensorInfo | None] = ContextVar("torch_remat_v02_info", default=None)


def current_saved_tensor_info() -> SavedTensorInfo:
    """Return what is known of the tensor whose pack hook runs, of a pair given to this module.

    Raises:
        UsageError: No such pack hook runs here.
    """
    info = _info.get()
    if info is None:
        raise UsageError(
            "current_saved_tensor_info() was called outside of a pack hook",
            remedy="Call it in the pack hook of saved_tensors_hooks(), or of checkpoint(saved_tensors_hooks=...).",
        )
    return info


class NativePack:
    """The pack hook of a pair that stands around regions, where autograd and regions call it themselves."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def __call__(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor that is saved outside of regions, or an input of one that begins."""
        run = scope.get().run
        enters = run is not None and run.entering
        kind = SavedTensorKind.CHECKPOINT_INPUT if enters else SavedTensorKind.BACKWARD
        return _packed(self.hooks, tensor, kind, None)


@contextmanager
def saved_tensors_hooks(
    pack_hook: Callable[[torch.Tensor], Any],
    unpack_hook: Callable[[Any], torch.Tensor],
    *,
    capture_context: Callable[[], Any] | None = None,
) -> Iterator[None]:
    """Let a pair of hooks take what is saved inside, as `torch.autograd.graph.saved_tensors_hooks` does.

    In a checkpointed function they take what the saved calls inside keep for backward, and those of their results that
    replay reads. Around one they take its inputs besides. What replay makes again, and parameters, pass no hook.

    Args:
        pack_hook: Takes a tensor, returns what is kept of it; `current_saved_tensor_info` tells it more.
        unpack_hook: Takes that, returns the tensor.
        capture_context: Called in a checkpointed function where a saved call ends, for each tensor that is packed; what
            it returns stands in `SavedTensorInfo.context`, also if the tensor is packed later.

    Yields:
        None.

    Raises:
        UsageError: A hook is not callable.
    """
    hooks = checked_hooks((pack_hook, unpack_hook), capture_context)
    mode = None if is_compiling() else current_mode()
    if mode is None:
        with torch.autograd.graph.saved_tensors_hooks(NativePack(hooks), unpack_hook):
            yield
        return
    around = scope.get()
    if around.call is not None:
        before = len(mode.region.tape.holders)
        yield
        hand_over(mode.region.tape.holders[before:], around.call.name, hooks)
        return
    token = scope.set(around._replace(hooks=hooks))
    try:
        yield
    finally:
        scope.reset(token)


def checked_hooks(pair: Any, capture: Any = None) -> Hooks:
    """Return a pair of hooks, if it is one.

    Raises:
        UsageError: It is none.
    """
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(callable, pair)):
        return Hooks(pair[0], pair[1], capture)
    raise UsageError(
        f"{pair!r} is no pair of saved-tensor hooks",
        remedy="A pair is (pack_hook, unpack_hook): a function of a tensor, and one of what that returned.",
    )


def hand_over(holders: Holders, name: str, hooks: Hooks) -> None:
    """Let hooks take what a saved call of this name keeps for backward."""
    for holder in _residents(holders, name):
        assert holder.value is not None
        unpack = _Checked(hooks.unpack, holder.value, holder.region.name, name, holder.tensor_name)
        holder.packed = _packed(hooks, holder.value, SavedTensorKind.BACKWARD, hooks.context())
        holder.value, holder.unpack = None, unpack


def _residents(holders: Holders, name: str) -> Iterator[OpHolder]:
    """Yield the holders of what a call keeps and nobody has taken or changed; the read of the last tells of that."""
    for entry in holders:
        holder = entry()
        if holder is None or holder.op != name or not holder.resident or (value := holder.value) is None:
            continue
        if value._version == holder.metadata[0]:
            yield holder


def hand_over_outputs(outputs: Sequence[Output]) -> None:
    """Let hooks take the results of saved calls that replay reads, or later ops saved, once forward is over."""
    for region, name, hooks, context in outputs:
        pack = _OnePack(hooks, context)
        for slot in list(_results_of(region, name)):
            if isinstance(slot.kept, torch.Tensor):
                slot.hand_over(pack, _Checked(hooks.unpack, slot.kept, region.name, name, "out"))
        for holder in _residents(region.tape.holders, name):
            assert holder.value is not None
            unpack = _Checked(hooks.unpack, holder.value, region.name, name, holder.tensor_name)
            holder.packed, holder.value, holder.unpack = pack(holder.value), None, unpack


class _Checked:
    """The unpack hook, which refuses a tensor that is in the memory of the packed one and was changed since.

    Args:
        unpack: The hook.
        tensor: The tensor, before it is packed.
        region: The names for the error.
        op: The call.
        name: The tensor.
    """

    def __init__(self, unpack: Callable[[Any], torch.Tensor], tensor: torch.Tensor, region: str, op: str, name: str):
        self._unpack = unpack
        self._names = region, op, name
        self._counter = None
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            with unseen():
                self._counter = counter_of(tensor)
            self._storage = StorageWeakRef(tensor.untyped_storage())
            self._version = tensor._version

    def __call__(self, packed: Any) -> torch.Tensor:
        tensor = self._unpack(packed)
        if self._counter is None or self._counter._version == self._version or self._storage.expired():
            return tensor
        if type(tensor) is torch.Tensor and StorageWeakRef(tensor.untyped_storage()) == self._storage:
            region, op, name = self._names
            raise MutationError(
                "the pack hook kept this tensor as it was, and it was changed in place since",
                region=region,
                op=op,
                tensor=name,
                remedy="Let the hook keep a copy, or use the out-of-place form of the op that changes it.",
            )
        return tensor


class _OnePack:
    """Packs each result once, also if it is kept for two readers."""

    def __init__(self, hooks: Hooks, context: Any) -> None:
        self._hooks = hooks
        self._context = context
        self._taken: list[tuple[torch.Tensor, Any]] = []

    def __call__(self, tensor: torch.Tensor) -> Any:
        for same, packed in self._taken:
            if _is_same(same, tensor):
                return packed
        packed = _packed(self._hooks, tensor, SavedTensorKind.SAVE_OUTPUT, self._context)
        self._taken.append((tensor, packed))
        return packed


def _results_of(region: Any, name: str) -> Iterator[Slot]:
    for call in region.tape.calls:
        if call.group == name:
            yield from call.kept.values()
    record = region.tape.records.get(name)
    yield from getattr(record, "returned", {}).values()
    yield from (result for result in getattr(record, "results", ()) if isinstance(result, Slot))


def _packed(hooks: Hooks, tensor: torch.Tensor, kind: SavedTensorKind, context: Any) -> Any:
    token = _info.set(SavedTensorInfo(kind, context))
    try:
        with torch.no_grad(), unseen():
            return hooks.pack(tensor)
    finally:
        _info.reset(token)


def save_for_backward(ctx: Any, saved: Mapping[str, torch.Tensor | None]) -> None:
    """Do what ``ctx.save_for_backward`` does, and give the tensors names, for the reports of a saved call.

    Args:
        ctx: The context of a custom autograd Function, in its forward.
        saved: The tensors by name, in the order of ``ctx.saved_tensors``; None keeps a place empty.

    Raises:
        UsageError: A name is no string, is empty, or contains ``.``; a value is neither a tensor nor None.
    """
    for name, tensor in saved.items():
        if "." in checked(name, "a saved tensor"):
            raise UsageError(f"the name of a saved tensor must not contain '.', as {name!r} does")
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise UsageError(f"the saved value is a {type(tensor).__name__}, neither a tensor nor None", tensor=name)
    if not is_compiling():
        mode, call = current_mode(), scope.get().call
        if mode is not None and call is not None:
            call.named.append((len(mode.region.tape.holders), dict(saved)))
    ctx.save_for_backward(*saved.values())


def give_names(holders: Holders, named: Sequence[tuple[int, dict[str, torch.Tensor | None]]]) -> None:
    """Give the holders that came after each call of `save_for_backward` the names that it gave."""
    taken: set[str] = set()
    for place, tensors in named:
        waiting = [holder for entry in holders[place:] if (holder := entry()) is not None and holder.resident]
        for name, tensor in tensors.items():
            holder = None if tensor is None else next((one for one in waiting if _holds(one, tensor)), None)
            if holder is not None:
                waiting.remove(holder)
                number = 1
                while (given := name if number == 1 else f"{name}_{number}") in taken:
                    number += 1
                taken.add(given)
                holder.tensor_name = given


def _holds(holder: OpHolder, tensor: torch.Tensor) -> bool:
    """Whether a holder keeps a tensor; of what hooks have taken, only the look tells."""
    if holder.metadata[1:] != (tensor.shape, tensor.dtype, tensor.device):
        return False
    return holder.value is None or _is_same(holder.value, tensor)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie at the same place, without an op that somebody may watch."""
    if one is other:
        return True
    try:
        return key_of(one) == key_of(other) and geometry_of(one) == geometry_of(other) and one.dtype == other.dtype
    except RuntimeError:  # sparse tensors and nested ones have no strides
        return False
