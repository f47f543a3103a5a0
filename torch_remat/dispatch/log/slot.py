"""A tensor that the log keeps because replay needs it, and the one rule about versions.

In: a tensor, in forward. Kept: an alias of it, or what the hooks around the region made of it. Out: the tensor, for one
replay, or an error if it was changed in place meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_remat._compat import SavedTensorHooks
from torch_remat.errors import MutationError

UNCOUNTED = -1
"""The version of a tensor made in inference mode, which counts no changes."""
_NOTHING = torch.empty(0)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; `UNCOUNTED` for one made in inference mode."""
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
        unchecked: Whether changes in place are allowed.

    Attributes:
        kept: The alias, or what the hooks made of the tensor.
    """

    # What most slots have none of is not set for each.
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
            self.kept: Any = tensor.clone()  # nothing tells of changes
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
        """Return the slot for an alias without a history, which nobody else has.

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
        """Return the tensor without a history if it is simply there; else None: `load` has more to do."""
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
                "this tensor was changed in place after it was kept for replay",
                region=region,
                op=op,
                tensor=name,
                remedy="Use the out-of-place form of the op that changes it, change it after backward, or let the "
                "region recompute it.",
            )
        if self._unpack is not None:
            with torch.no_grad():
                kept = self._unpack(kept)
        return kept.detach().requires_grad_(self._requires_grad)
