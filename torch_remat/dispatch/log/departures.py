"""What native regions and op-level policies send away, once the op that has saved it is over.

In: residents that shall leave the device, with their tensors, and tensors that replay needs. Kept, until forward ends:
what has left, by storage. Out: holders and slots that stand for what is away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import with_shared_versions, without_dispatch_modes
from torch_remat.dispatch.log.meta import key_of
from torch_remat.dispatch.log.slot import Slot
from torch_remat.dispatch.offloading import Offloaded, offload_resident, slot_hooks
from torch_remat.dispatch.placeholder import Geometry, geometry_of
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.holder import OpHolder


class Sent(NamedTuple):
    """A resident that has left the device: a slot of the same tensor, or of another view of it, shares its way."""

    storage: StorageWeakRef
    geometry: Geometry
    dtype: torch.dtype
    version: int
    packed: Offloaded

    def standing_for(self, tensor: torch.Tensor, op: str, name: str) -> Any:
        """Return what stands for a tensor of the same storage, unchanged; None if it must travel by itself."""
        if self.storage.expired() or self.version != tensor._version:
            return None
        if (self.geometry, self.dtype) == (geometry_of(tensor), tensor.dtype):
            return self.packed
        return self.packed.another(tensor, op, name)


class Departures:
    """What leaves the device in one forward.

    Attributes:
        waiting: Residents that are to leave, with their tensors: an op may fill a buffer after it has saved it.
    """

    __slots__ = ("_mode", "_region", "_sent", "waiting")

    def __init__(self, mode: Any) -> None:
        self.waiting: list[tuple[OpHolder, torch.Tensor]] = []
        self._mode = mode
        self._region = mode.region
        self._sent: dict[int, Sent] = {}

    def send(self) -> None:
        """Send what waits, now that its op is over."""
        waiting, together = [*self.waiting], object()
        self.waiting.clear()
        for holder, tensor in waiting:
            with torch.no_grad(), self._mode.unwatched(), without_dispatch_modes(), with_shared_versions():
                if offload_resident(self._region, holder, tensor, together):
                    holder.value = None
                    storage = StorageWeakRef(tensor.untyped_storage())
                    about = geometry_of(tensor), tensor.dtype, tensor._version
                    self._sent[key_of(tensor)] = Sent(storage, *about, holder.packed)

    def slot_for(
        self,
        op: str,
        name: str,
        tensor: torch.Tensor,
        policy: CheckpointPolicy,
        requires_grad: bool | None = None,
        unchecked: bool = False,
    ) -> Slot:
        """Return the slot for a result of a native region or of an op-level policy."""
        hooks = self._region.hooks
        if hooks is None and policy is CheckpointPolicy.OFFLOAD:
            sent = self._sent.get(key_of(tensor))
            with torch.no_grad(), without_dispatch_modes():
                away = None if sent is None else sent.standing_for(tensor, op, name)
                hooks = slot_hooks(self._region, op, name, tensor) if away is None else away.hooks
        return Slot(tensor, hooks, requires_grad, unchecked)
