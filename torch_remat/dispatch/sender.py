"""What the runtime deals with: a sender for each region, and what stands in for a tensor that it sent.

In: a tensor that a region would keep. Kept: a view of a transfer in its place. Out: the tensor, brought back when
backward or replay needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from torch_remat._compat import storage_key, without_dispatch_modes
from torch_remat.dispatch.views import offset_in_bytes
from torch_remat.offload.cpu import CpuOffloader
from torch_remat.offload.prefetch import RegionTransfers
from torch_remat.offload.protocol import Kind, Offloader, OffloadInfo, chosen
from torch_remat.offload.table import Batch, table_of
from torch_remat.offload.transfer import Placement, Transfer, may_travel


@cache
def default_offloader() -> CpuOffloader:
    """Return the offloader that all regions share that name none."""
    return CpuOffloader()


class Offloaded:
    """What stands in for one tensor that is away: a view of a transfer.

    Attributes:
        transfer: The transfer; the last of its views releases it.
        info: What the tensor is called here.
        placement: How the tensor lay in its storage.
    """

    __slots__ = ("_place", "_sender", "_sent", "info", "placement", "transfer")

    def __init__(
        self, sender: Sender, sent: RegionTransfers, transfer: Transfer, tensor: torch.Tensor, info: OffloadInfo
    ) -> None:
        self.transfer = transfer
        self.info = info._replace(bytes=transfer.copy.bytes)
        self.placement = Placement.of(tensor)
        self._sender = sender
        self._sent = sent
        self._place = sent.add(transfer, info.kind)
        sender.tell(tensor, transfer)

    def another(self, tensor: torch.Tensor, op: str | None, name: str) -> Offloaded | None:
        """Return what stands, in a slot, for another view of the same storage; None if it must travel by itself."""
        if not (may_travel(tensor) and self.transfer.is_unchanged(Placement.of(tensor))):
            return None
        info = OffloadInfo(self.info.region, op or None, name, "input", 0)
        return Offloaded(self._sender, self._sent, self.transfer, tensor, info)

    def load(self) -> torch.Tensor:
        """Return the tensor, with the version that it had.

        Raises:
            MutationError: It was changed in place after its offload began.
            OffloadError: It could not be brought back.
        """
        with torch.no_grad(), without_dispatch_modes():
            flat, missing = self.transfer.take(self.info)
            self._sent.prefetcher.reached(self._sent, self._place, self.transfer, missing)
            return self.placement.seen_in(flat, offset_in_bytes(flat) - self.transfer.span.start)


class Sender:
    """Sends what one region keeps: to its own offloader, that of `offload_to`, or the default one.

    Args:
        region: The region's name.
        offloader: The region's own offloader, if it has one.
        tell: Called with each tensor that an offloader has taken, now or under an earlier name, and its transfer.
    """

    __slots__ = ("_batch", "_offloader", "_region", "_sent", "_staying", "tell")

    def __init__(
        self, region: str, offloader: Offloader | None, tell: Callable[[torch.Tensor, Transfer], None]
    ) -> None:
        self.tell = tell
        self._region = region
        self._offloader = offloader
        self._sent: dict[int, RegionTransfers] = {}  # by the id of the offloader, which the transfers keep alive
        self._batch: tuple[object, Batch] = (None, Batch())
        self._staying: set[int] = set()

    def know_parameters(self, values: Iterable[Any]) -> None:
        """Let the memory of those values that are parameters stay, also where a detached alias of them is sent."""
        self._staying.update(storage_key(value) for value in values if type(value) is torch.nn.Parameter)

    def send(
        self, tensor: torch.Tensor, op: str | None, name: str, kind: Kind, together: object = None
    ) -> Offloaded | None:
        """Send a tensor away; None if it stays.

        Args:
            tensor: The tensor.
            op: The op that needs it; empty or None for none.
            name: What it is called.
            kind: What it is needed for.
            together: Equal for those that are sent with nothing run in between; None for what is sent by itself.
        """
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
        return Offloaded(self, sent, transfer, tensor, info)
