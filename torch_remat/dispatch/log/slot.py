"""What the log has of a tensor that replay needs: it keeps it in a slot, or elides it, since replay has it anyway.

In: a tensor, in forward. Kept: an alias of it, or what the hooks around the region made of it; of a saved tensor of a
call that is, or shares the storage of, an argument or variable of the call: where both were in their storage. Out: the
tensor, for one replay, or an error if it was modified in place since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from torch_remat._compat import SavedTensorHooks, without_dispatch_modes
from torch_remat.dispatch.placeholder import Placeholder, new_tuple
from torch_remat.errors import MutationError
from torch_remat.offload.sender import Departures
from torch_remat.offload.transfer import Placement
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.holder import OpHolder

# Of a source: the type of the node that made it, and the `origin` of a holder.
Origin = tuple[type, torch.Tensor | ref[torch.Tensor] | None]
UNCOUNTED = -1
"""The version of a tensor made in inference mode, which counts no changes."""
_NOTHING = torch.empty(0)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was modified in place; `UNCOUNTED` for one made in inference mode."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the version counter of another, but not its data."""
    counter = tensor.detach()
    if not tensor.is_meta:
        counter.data = _NOTHING
    return counter


class Slot:
    """A tensor that the log keeps because replay needs it.

    Like a region's inputs it goes through the saved-tensor hooks around the region.

    Args:
        tensor: The tensor.
        hooks: The saved-tensor hooks that keep it; None to keep an alias.
        requires_grad: Whether replay's tensor needs a gradient; by default as the tensor does.
        unchecked: Whether in-place modifications are allowed.

    Attributes:
        kept: The alias, or what the hooks made of the tensor.
        sources: If the reader of a handle's output keeps it: the handles that made what is in its storage, the last one
            last, each with the name of the output.
    """

    # What most slots have none of is not set for each.
    sources: Sequence[tuple[str, str]] = (("", ""),)
    _requires_grad = False
    _aliases: Sequence[tuple[torch.Tensor, int]] = ()
    _unpack: Callable[[Any], torch.Tensor] | None = None
    _device: torch.device | None = None  # where hooks may have taken the tensor from

    def __init__(
        self,
        tensor: torch.Tensor,
        hooks: SavedTensorHooks | None,
        requires_grad: bool | None = None,
        unchecked: bool = False,
    ) -> None:
        self._requires_grad = tensor.requires_grad if requires_grad is None else requires_grad
        self._version = version_of(tensor)
        if self._version == UNCOUNTED:
            self.kept: Any = tensor.clone()  # nothing counts its changes
        elif hooks is None:
            self.kept = tensor.detach()
            if unchecked:
                self.kept = self.kept.data
                self._version = self.kept._version
        else:
            self._device = tensor.device
            pack, self._unpack = hooks
            with torch.no_grad():
                self.kept = pack(tensor)

    @classmethod
    def of_alias(cls, alias: torch.Tensor, others: Sequence[tuple[torch.Tensor, int]] = ()) -> Slot:
        """Return the slot for an alias without a `grad_fn`, which nobody else has.

        Args:
            alias: It.
            others: Tensors in the same storage that count changes for themselves, with their versions.
        """
        slot = cls.__new__(cls)
        slot.kept, slot._version = alias, alias._version
        if others:
            slot._aliases = others
        return slot

    @property
    def device(self) -> torch.device:
        """Where the tensor was when it was kept."""
        device: torch.device = self._device or self.kept.device
        return device

    def watch(self, aliases: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Look also at tensors that share the storage and count changes for themselves; see `Storages`."""
        self._aliases = [(counter_of(alias), alias._version) for alias, _ in aliases]

    def unchanged(self) -> torch.Tensor | None:
        """Return the tensor without a `grad_fn` if it is simply there; else None: `load` has more to do."""
        kept: torch.Tensor = self.kept
        if self._unpack is not None or self._version == UNCOUNTED or kept._version != self._version:
            return None
        for alias, version in self._aliases:
            if version_of(alias) != version:
                return None
        return kept.detach()

    def load(self, region: str, op: str, name: str) -> torch.Tensor:
        """Return the tensor for one replay; an error calls it ``region::op.name``."""
        kept: torch.Tensor = self.kept
        counted = self._unpack is None and self._version != UNCOUNTED  # what hooks have kept, they check themselves
        if (counted and kept._version != self._version) or any(version_of(alias) != at for alias, at in self._aliases):
            raise MutationError(
                "this tensor was modified in place after it was kept for replay",
                region=region,
                op=op,
                tensor=name,
                remedy="Use the out-of-place form of the op that modifies it, modify it after backward, or let the "
                "region recompute it.",
            )
        if self._unpack is not None:
            with torch.no_grad():
                kept = self._unpack(kept)
        return kept.detach().requires_grad_(self._requires_grad)


def slot_for(
    around: SavedTensorHooks | None,
    departures: Departures,
    op: str,
    name: str,
    tensor: torch.Tensor,
    policy: CheckpointPolicy,
    requires_grad: bool | None = None,
    unchecked: bool = False,
) -> Slot:
    """Return the slot for a result; ``around`` are the hooks around the region, which decide where there are any."""
    if around is None and policy is CheckpointPolicy.OFFLOAD:
        with torch.no_grad(), without_dispatch_modes():
            around = departures.hooks_of(op, name, tensor)
    return Slot(tensor, around, requires_grad, unchecked)


def placement_in(meta: Any) -> Placement:
    """Return the placement of a tensor that a `Meta` describes."""
    shape, stride, offset = meta.geometry
    return Placement(shape, stride, offset * meta.dtype.itemsize, meta.dtype, *meta.lazy)


def offset_in_bytes(tensor: torch.Tensor) -> int:
    """Return the position of a tensor's first element in its storage."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


class Elided(NamedTuple):
    """A saved tensor that is taken in replay from an argument or a variable of its call: its source.

    Attributes:
        holder: The holder that waits for it.
        place: Which argument the source is; variables are counted after the arguments.
        view: The tensor's placement in the source's storage, or its layout in a source that is no view itself; None if
            it is the source itself.
        source: The placement of the source, or its shape with a layout; None if it is the source itself.
        origin: Where the source comes from; None likewise: as its holder says.
    """

    holder: ref[OpHolder]
    place: int
    view: Any
    source: Any
    origin: Origin | None = None

    @classmethod
    def of(
        cls, tensor: torch.Tensor, holder: OpHolder, place: int, source: torch.Tensor, origin: Origin | None
    ) -> Elided:
        """Describe a saved tensor that shares the storage of its source."""
        places = (None, None) if source is tensor else (Placement.of(tensor), Placement.of(source))
        made: Elided = new_tuple(cls, (ref(holder), place, *places, origin))
        return made

    def value(self, source: torch.Tensor, with_history: bool = False) -> torch.Tensor | None:
        """Return the saved tensor, from replay's counterpart of its source; None if that lies otherwise in memory."""
        view, known = self.view, self.source
        if view is None:
            return source.detach()
        if type(known) is torch.Size:
            strides, offset, own = view
            if (holder := self.holder()) is None or source.shape != known or source.stride() != own:
                return None
            return source.detach().as_strided(holder.metadata[1], strides, source.storage_offset() + offset)
        if known._replace(offset_bytes=offset_in_bytes(source)) != Placement.of(source):
            # Hooks around the region may give its inputs back in another order.
            ordered = _laid_out(source, known)
            if ordered is None:
                return None
            source = ordered
        moved = offset_in_bytes(source) - known.offset_bytes
        if not isinstance(source, Placeholder) and not view.lies_within(source.untyped_storage().nbytes(), moved):
            return None
        value: torch.Tensor = view.seen_in(source if with_history else source.detach(), moved)
        return value


def _laid_out(tensor: torch.Tensor, like: Placement) -> torch.Tensor | None:
    """Return a copy of a tensor with other strides; None if it would not fill its memory, each element once."""
    now = Placement.of(tensor)
    if like != now._replace(stride=like.stride, offset_bytes=like.offset_bytes) or now.conjugated or now.negated:
        return None
    if like.span.stop - like.span.start != tensor.nbytes:
        return None
    with torch.no_grad():
        made = torch.empty_strided(like.shape, like.stride, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)
