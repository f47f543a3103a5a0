"""A tensor that the log keeps because replay needs it.

In: a tensor, in forward. Kept: an alias of it, or what the hooks around the region made of it. Out: the tensor, for one
replay, or an error if it was modified in place since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_remat._compat import SavedTensorHooks, without_dispatch_modes
from torch_remat.dispatch.departures import Departures
from torch_remat.dispatch.keys import UNCOUNTED, version_of
from torch_remat.dispatch.ops.meta import Meta
from torch_remat.errors import MutationError
from torch_remat.offload.transfer import Placement
from torch_remat.policies.decision import CheckpointPolicy

_NOTHING = torch.empty(0)


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
        version: That of the alias when it was kept; `UNCOUNTED` for a copy of what counts no changes.
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
        self.version = version_of(tensor)
        if self.version == UNCOUNTED:
            self.kept: Any = tensor.clone()  # nothing counts its changes
        elif hooks is None:
            self.kept = tensor.detach()
            if unchecked:
                self.kept = self.kept.data
                self.version = self.kept._version
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
        slot.kept, slot.version = alias, alias._version
        if others:
            slot._aliases = others
        return slot

    @classmethod
    def holding(cls, tensor: torch.Tensor) -> Slot:
        """Return the slot with a tensor itself, and its graph; for as long as forward runs."""
        slot = cls.__new__(cls)
        slot.kept = tensor
        slot.version = UNCOUNTED if tensor.is_inference() else tensor._version
        return slot

    @property
    def is_changed(self) -> bool:
        """Whether a kept alias was modified in place since; what hooks have kept, they check themselves."""
        if self._unpack is None and self.version != UNCOUNTED and self.kept._version != self.version:
            return True
        return bool(self._aliases) and any(version_of(alias) != version for alias, version in self._aliases)

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
        if self._unpack is not None or self.version == UNCOUNTED or kept._version != self.version:
            return None
        for alias, version in self._aliases:
            if version_of(alias) != version:
                return None
        return kept.detach()

    def load(self, region: str, op: str, name: str) -> torch.Tensor:
        """Return the tensor for one replay; an error calls it ``region::op.name``."""
        kept: torch.Tensor = self.kept
        if self.is_changed:
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


def placement_in(meta: Meta) -> Placement:
    """Return the placement of a tensor that a `Meta` describes."""
    shape, stride, offset = meta.geometry
    return Placement(shape, stride, offset * meta.dtype.itemsize, meta.dtype, *meta.lazy)
