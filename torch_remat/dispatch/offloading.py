"""Residents, slots and inputs of a region that leave the device.

In: a tensor that the region would keep, once the op is over that saves it. Kept: an `Offloaded` in its place. Out: the
tensor, brought back when backward or replay needs it.

It takes the way of saved-tensor hooks around a region: what is kept is packed, and unpacked with each read. Where
there are such hooks, they decide, and nothing is offloaded: an enclosing region recomputes what this one would send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import SavedTensorHooks, with_shared_versions, without_dispatch_modes
from torch_remat.dispatch.log.meta import key_of
from torch_remat.dispatch.log.slot import Slot
from torch_remat.offload.sender import Offloaded, Sender
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.holder import OpHolder


def sender_of(region: Any) -> Sender:
    """Return a region's sender, made when the first tensor is to leave."""
    if region.offloading is None:
        given = () if region.inputs is None else region.inputs.parameters()
        region.offloading = Sender(region.name, region.options.offloader, (*region.parameters, *given))
    sender: Sender = region.offloading
    return sender


def offload_resident(region: Any, holder: Any, tensor: torch.Tensor, together: object = None) -> bool:
    """Send what an `OpHolder` would keep, by default together with all that its op saves; False if it stays."""
    inputs = region.inputs
    if inputs is not None and inputs.holds(tensor if tensor._base is None else tensor._base):
        return False  # its memory stays with the inputs
    away = sender_of(region).send(tensor, holder.op, holder.tensor_name, "residual", together or holder.op)
    if away is None:
        return False
    holder.packed, holder.unpack = away, Offloaded.load
    return True


def slot_hooks(
    region: Any, op: str | None, name: str, tensor: torch.Tensor, known: Offloaded | None = None
) -> SavedTensorHooks | None:
    """Send what a slot would keep, unless its storage is away already; return the slot's hooks, None if it stays."""
    sender = sender_of(region)
    away = None if known is None else sender.share(known, tensor, op, name)
    away = away or sender.send(tensor, op, name, "input")
    return None if away is None else ((lambda _: away), Offloaded.load)


class Departures:
    """What leaves the device in one forward, of native regions, of calls, and by policies for aten ops.

    Attributes:
        waiting: Residents that are to leave, with their tensors: an op may fill a buffer after it has saved it.
    """

    __slots__ = ("_mode", "_region", "_sent", "waiting")

    def __init__(self, mode: Any) -> None:
        self.waiting: list[tuple[OpHolder, torch.Tensor]] = []
        self._mode = mode
        self._region = mode.region
        # What has left, by storage, with the version that it had: slots of the same memory share its way.
        self._sent: dict[int, tuple[StorageWeakRef, int, Offloaded]] = {}

    def send(self) -> None:
        """Send what waits, now that its op is over."""
        waiting, together = [*self.waiting], object()
        self.waiting.clear()
        for holder, tensor in waiting:
            with torch.no_grad(), self._mode.unwatched(), without_dispatch_modes(), with_shared_versions():
                if offload_resident(self._region, holder, tensor, together):
                    holder.value = None
                    storage = StorageWeakRef(tensor.untyped_storage())
                    self._sent[key_of(tensor)] = storage, tensor._version, holder.packed

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
            with torch.no_grad(), without_dispatch_modes():
                hooks = slot_hooks(self._region, op, name, tensor, self._known(tensor))
        return Slot(tensor, hooks, requires_grad, unchecked)

    def _known(self, tensor: torch.Tensor) -> Offloaded | None:
        storage, version, away = self._sent.get(key_of(tensor), (None, 0, None))
        return away if storage is not None and not storage.expired() and version == tensor._version else None
