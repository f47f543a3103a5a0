"""Residents, slots and inputs of a region that leave the device.

In: a tensor that the region would keep. Kept: an `Offloaded`, a view of a transfer, in its place. Out: the tensor,
brought back when backward or replay needs it.

It takes the way of saved-tensor hooks around a region: what is kept is packed, and unpacked with each read. Where
there are such hooks, they decide, and nothing is offloaded: an enclosing region recomputes what this one would send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from torch_remat._compat import SavedTensorHooks, storage_key, without_dispatch_modes
from torch_remat.dispatch.observe import observers
from torch_remat.dispatch.views import offset_in_bytes
from torch_remat.offload.prefetch import RegionTransfers
from torch_remat.offload.protocol import Kind, Offloader, OffloadInfo, chosen
from torch_remat.offload.table import Batch, table_of
from torch_remat.offload.transfer import Placement, Transfer, may_travel


@cache
def default_offloader() -> Offloader:
    """Return the offloader that all regions share that name none."""
    from torch_remat.offload.cpu import CpuOffloader  # loaded when the first tensor is to leave

    return CpuOffloader()


class Offloaded:
    """What stands in for one tensor that is away: a view of a transfer.

    Attributes:
        transfer: The transfer; the last of its views releases it.
        info: What the tensor is called here.
        placement: How the tensor lay in its storage.
    """

    __slots__ = ("__weakref__", "_place", "_sent", "info", "placement", "transfer")

    def __init__(self, sent: RegionTransfers, transfer: Transfer, tensor: torch.Tensor, info: OffloadInfo) -> None:
        self.transfer = transfer
        self.info = info._replace(bytes=transfer.copy.bytes)
        self.placement = Placement.of(tensor)
        self._sent = sent
        self._place = sent.add(transfer, info.kind)
        for observer in observers():
            observer.offload_began(tensor, id(transfer.copy))

    def another(self, tensor: torch.Tensor, op: str | None, name: str) -> Offloaded | None:
        """Return what stands, in a slot, for another view of the same storage; None if it must travel by itself."""
        if not (may_travel(tensor) and self.transfer.is_unchanged(Placement.of(tensor))):
            return None
        info = OffloadInfo(self.info.region, op or None, name, "input", 0)
        return Offloaded(self._sent, self.transfer, tensor, info)

    @property
    def hooks(self) -> SavedTensorHooks:
        """The hooks by which a slot keeps it."""
        return (lambda _: self), Offloaded.load

    def load(self) -> torch.Tensor:
        """Return the tensor, with the version that it had, if nothing has changed it since its offload began."""
        with torch.no_grad(), without_dispatch_modes():
            flat, missing = self.transfer.take(self.info)
            self._sent.prefetcher.reached(self._sent, self._place, self.transfer, missing)
            return self.placement.seen_in(flat, offset_in_bytes(flat) - self.transfer.span.start)


class Sender:
    """Sends what one region keeps: to its own offloader, that of `offload_to`, or the default one."""

    __slots__ = ("_batch", "_offloader", "_region", "_sent", "_staying")

    def __init__(self, region: Any) -> None:
        self._region: str = region.name
        self._offloader: Offloader | None = region.options.offloader
        self._sent: dict[int, RegionTransfers] = {}  # by the id of the offloader, which the transfers keep alive
        self._batch: tuple[object, Batch] = (None, Batch())
        self._staying: set[int] = set()
        self.know_parameters(region.parameters)
        if region.inputs is not None:
            self.know_parameters(region.inputs.parameters())

    def know_parameters(self, values: Iterable[Any]) -> None:
        """Let the memory of those values that are parameters stay, also where a detached alias of them is sent."""
        self._staying.update(storage_key(value) for value in values if type(value) is torch.nn.Parameter)

    def send(
        self, tensor: torch.Tensor, op: str | None, name: str, kind: Kind, together: object = None
    ) -> Offloaded | None:
        """Send a tensor away; None if it stays. Between those with an equal ``together`` nothing runs."""
        if not may_travel(tensor) or storage_key(tensor) in self._staying:
            return None
        offloader = self._offloader or chosen.get() or default_offloader()
        table = table_of(offloader)
        info = OffloadInfo(self._region, op or None, name, kind, 0)
        if together is not None and self._batch[0] != together:
            self._batch = (together, Batch())
        transfer = table.send(offloader, tensor, info, Batch() if together is None else self._batch[1])
        if transfer is None:
            return None
        sent = self._sent.get(id(offloader))
        if sent is None:
            sent = self._sent[id(offloader)] = RegionTransfers(table.prefetcher)
        return Offloaded(sent, transfer, tensor, info)


def sender_of(region: Any) -> Sender:
    """Return a region's sender, made when the first tensor is to leave."""
    if region.offloading is None:
        region.offloading = Sender(region)
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


def slot_hooks(region: Any, op: str | None, name: str, tensor: torch.Tensor) -> SavedTensorHooks | None:
    """Send what a slot would keep; return the hooks by which the slot keeps it, None if it stays."""
    away = sender_of(region).send(tensor, op, name, "input")
    return None if away is None else away.hooks


def offload_inputs(region: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Send those of a region's inputs that travel."""
    sender, together = sender_of(region), object()
    region.inputs.give_away(args, kwargs, lambda tensor, place: sender.send(tensor, None, place, "input", together))
