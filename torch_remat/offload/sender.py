"""What one region sends away: to its own offloader, that of `offload_to`, or the default one.

In: a tensor that the region would keep. Kept: an `Offloaded`, a view of a transfer, in its place. Out: the tensor,
brought back when backward or replay needs it.

It takes the way of saved-tensor hooks around a region: what is kept is packed, and unpacked with each read. Where there
are such hooks, they decide, and nothing is offloaded: an enclosing region recomputes what this one would send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import SavedTensorHooks, storage_key, with_shared_versions, without_dispatch_modes
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
        placement: The place of the tensor in its storage.
    """

    __slots__ = ("__weakref__", "_place", "_sent", "info", "placement", "transfer")

    def __init__(self, sent: RegionTransfers, transfer: Transfer, tensor: torch.Tensor, info: OffloadInfo) -> None:
        self.transfer = transfer
        self.info = info._replace(bytes=transfer.copy.bytes)
        self.placement = Placement.of(tensor)
        self._sent = sent
        self._place = sent.add(transfer, info.kind)

    def seen_as(self, tensor: torch.Tensor, op: str | None, name: str) -> Offloaded:
        """Return what stands for another view of the same storage, which replay needs."""
        info = OffloadInfo(self.info.region, op, name, "input", 0)
        return Offloaded(self._sent, self.transfer, tensor, info)

    def load(self) -> torch.Tensor:
        """Return the tensor, with the version that it had, if nothing has changed it since its offload began."""
        with torch.no_grad(), without_dispatch_modes():
            flat, missing = self.transfer.take(self.info)
            self._sent.prefetcher.reached(self._sent, self._place, self.transfer, missing)
            return self.placement.seen_in(flat, Placement.of(flat).offset_bytes - self.transfer.span.start)


# Each is told, in whatever thread, of a tensor whose memory an offloader has taken, and of the id of the `StoredCopy`.
told: list[Callable[[torch.Tensor, int], None]] = []


def _tell(tensor: torch.Tensor, key: int) -> None:
    for tell in tuple(told):
        tell(tensor, key)


class Sender:
    """Sends what one region keeps.

    Args:
        region: The region's name.
        offloader: Its own offloader, if any.
        parameters: Among which are those whose memory stays.
    """

    __slots__ = ("_batch", "_offloader", "_region", "_sent", "_staying")

    def __init__(self, region: str, offloader: Offloader | None, parameters: Iterable[Any]) -> None:
        self._region = region
        self._offloader = offloader
        self._sent: dict[int, RegionTransfers] = {}  # by the id of the offloader, which the transfers keep alive
        self._batch: tuple[object, Batch] = (None, Batch())
        self._staying: set[int] = set()
        self.know_parameters(parameters)

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
            sent = self._sent[id(offloader)] = RegionTransfers(table.of_thread.prefetcher)
        _tell(tensor, id(transfer.copy))
        return Offloaded(sent, transfer, tensor, info)

    def share(self, away: Offloaded, tensor: torch.Tensor, op: str | None, name: str) -> Offloaded | None:
        """Return what stands for a tensor whose storage has left, for replay; None if it must travel by itself."""
        placement = Placement.of(tensor)
        if placement == away.placement:
            return away
        if not (may_travel(tensor) and away.transfer.is_unchanged(placement)):
            return None
        _tell(tensor, id(away.transfer.copy))
        return away.seen_as(tensor, op or None, name)


class Sending(Protocol):
    """What is asked of a region that sends."""

    def sender(self) -> Sender:
        """Return its sender."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory stays with its inputs."""


class Resident(Protocol):
    """What a holder keeps of a tensor: its value, or what a pair of hooks makes of it.

    Attributes:
        op: The name of the op that saves it.
        tensor_name: Its name there.
        value: The tensor, if it is here.
        packed: What the pack hook returned.
        unpack: The unpack hook.
    """

    op: str
    tensor_name: str
    value: torch.Tensor | None
    packed: Any
    unpack: Callable[[Any], torch.Tensor] | None


class Departures:
    """What leaves the device in one forward of a region, each by a pair of hooks.

    Args:
        region: The region.
        unwatched: Shows the ops of a transfer to nobody.

    Attributes:
        waiting: Residents that are to leave, with their tensors: an op may fill a buffer after it has saved it.
    """

    __slots__ = ("_region", "_sent", "_unwatched", "waiting")

    def __init__(self, region: Sending, unwatched: Callable[[], AbstractContextManager[None]]) -> None:
        self.waiting: list[tuple[Resident, torch.Tensor]] = []
        self._region = region
        self._unwatched = unwatched
        # What has left, by storage, with the version that it had: kept results of the same memory share its way.
        self._sent: dict[int, tuple[StorageWeakRef, int, Offloaded]] = {}

    def send(self) -> None:
        """Send what waits, now that its op is over."""
        waiting, together = [*self.waiting], object()
        self.waiting.clear()
        for holder, tensor in waiting:
            with torch.no_grad(), self._unwatched(), without_dispatch_modes(), with_shared_versions():
                if self.take(holder, tensor, together):
                    holder.value = None
                    storage = StorageWeakRef(tensor.untyped_storage())
                    self._sent[storage_key(tensor)] = storage, tensor._version, holder.packed

    def take(self, holder: Resident, tensor: torch.Tensor, together: object = None) -> bool:
        """Send what a holder would keep, by default together with all that its op saves; False if it stays."""
        if self._region.holds(tensor):
            return False
        sender = self._region.sender()
        away = sender.send(tensor, holder.op, holder.tensor_name, "residual", together or holder.op)
        if away is None:
            return False
        holder.packed, holder.unpack = away, Offloaded.load
        return True

    def hooks_of(self, op: str | None, name: str, tensor: torch.Tensor) -> SavedTensorHooks | None:
        """Send a result that replay needs, unless its storage is away already; return its hooks, None if it stays."""
        sender, away = self._region.sender(), None
        if (known := self._known(tensor)) is not None:
            away = sender.share(known, tensor, op, name)
        if away is None:
            away = sender.send(tensor, op, name, "input")
        return None if away is None else ((lambda _: away), Offloaded.load)

    def _known(self, tensor: torch.Tensor) -> Offloaded | None:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        storage, version, away = self._sent.get(storage_key(tensor), (None, 0, None))
        return away if storage is not None and not storage.expired() and version == tensor._version else None
