"""What one region sends away: to its own offloader, that of `offload_to`, or the default one.

In: a tensor that the region would keep. Kept: an `Offloaded`, a view of a transfer, in its place. Out: the tensor,
brought back when backward or replay needs it.

It takes the way of saved-tensor hooks around a region: what is kept is packed, and unpacked with each read. Where there
are such hooks, they decide, and nothing is offloaded: an enclosing region recomputes what this one would send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableMapping
from functools import cache
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_remat._compat import storage_key, without_dispatch_modes
from torch_remat.errors import warn
from torch_remat.offload.prefetch import Prefetcher, RegionTransfers
from torch_remat.offload.protocol import Kind, Offloader, OffloadInfo, chosen
from torch_remat.offload.transfer import Placement, StoredCopy, Transfer, flattened, may_travel, travelling_span


@cache
def default_offloader() -> Offloader:
    """Return the offloader that all regions share that name none."""
    from torch_remat.offload.cpu import CpuOffloader  # loaded when the first tensor is to leave

    return CpuOffloader()


# Each is told, in whatever thread, of a tensor that is brought back.
told: list[Callable[[torch.Tensor], None]] = []


class Offloaded:
    """What stands in for one tensor that is away: a view of a transfer.

    Attributes:
        transfer: The transfer; the last of its views releases it.
        info: What the tensor is called here.
        placement: The place of the tensor in its storage.
        sent: What its region has sent with it.
    """

    __slots__ = ("__weakref__", "_place", "info", "placement", "sent", "transfer")

    def __init__(self, sent: RegionTransfers, transfer: Transfer, tensor: torch.Tensor, info: OffloadInfo) -> None:
        self.transfer = transfer
        self.info = info._replace(bytes=transfer.copy.bytes)
        self.placement = Placement.of(tensor)
        self.sent = sent
        self._place = sent.add(transfer, info.kind)

    def load(self) -> torch.Tensor:
        """Return the tensor, with the version that it had, if nothing has changed it since its offload began."""
        with torch.no_grad(), without_dispatch_modes():
            flat, missing = self.transfer.take(self.info)
            self.sent.prefetcher.reached(self.sent, self._place, self.transfer, missing)
            for tell in tuple(told):
                tell(flat)
            return self.placement.seen_in(flat, Placement.of(flat).offset_bytes - self.transfer.span.start)


Batch = WeakValueDictionary[int, Transfer]
"""What was sent with nothing run in between that could change it, by the storages, which live as long as it lasts."""


class _OfThread(threading.local):
    """What each thread has of a table."""

    def __init__(self) -> None:
        self.prefetcher = Prefetcher()


class Table:
    """The transfers to one offloader.

    Attributes:
        of_thread: Has this thread's prefetcher.
    """

    def __init__(self) -> None:
        self.of_thread = _OfThread()
        # By the tensor that all are views of.
        self._transfers: MutableMapping[torch.Tensor, WeakSet[Transfer]] = WeakIdKeyDictionary()
        self._warned = False

    def send(self, offloader: Offloader, tensor: torch.Tensor, info: OffloadInfo, batch: Batch) -> Transfer | None:
        """Return a tensor's transfer, after sending it if there was none; None if it stays. ``info`` lacks bytes."""
        owner = tensor if tensor._base is None else tensor._base
        placement = Placement.of(tensor)
        for known in list(self._transfers.get(owner, ())):
            if known.is_unchanged(placement):
                return known
        transfer = batch.get(storage_key(tensor))
        with torch.no_grad(), without_dispatch_modes():
            if transfer is not None and transfer.copy.offloader is offloader and transfer.is_unchanged(placement):
                return self._noted(transfer.shared_by(tensor, placement), owner)
            span = travelling_span(tensor, placement)
            flat = flattened(tensor, span)
            ticket = self._offload(offloader, flat, info._replace(bytes=flat.nbytes))
            if ticket is None:
                return None
            transfer = self._noted(Transfer(StoredCopy(offloader, ticket, flat.nbytes), flat, span), owner)
        batch[storage_key(tensor)] = transfer
        return transfer

    def _offload(self, offloader: Offloader, flat: torch.Tensor, info: OffloadInfo) -> Any | None:
        try:
            return offloader.offload(flat, info)
        except Warning:
            raise  # the user has made errors of warnings
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"{type(offloader).__name__} could not take {info.name} ({info.bytes:,} bytes): {error!r}. "
                    "It stays where it is, as other tensors may; training goes on."
                )
            return None

    def _noted(self, transfer: Transfer, owner: torch.Tensor) -> Transfer:
        self._transfers.setdefault(owner, WeakSet()).add(transfer)
        return transfer


_tables: MutableMapping[Any, Table] = WeakIdKeyDictionary()


def table_of(offloader: Offloader) -> Table:
    """Return an offloader's table; a new one for an offloader that cannot be known weakly."""
    try:
        return _tables[offloader]
    except KeyError:
        return _tables.setdefault(offloader, Table())
    except TypeError:
        return Table()


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
        return Offloaded(sent, transfer, tensor, info)

    def share(self, away: Offloaded, tensor: torch.Tensor, op: str | None, name: str) -> Offloaded | None:
        """Return what stands for a tensor whose storage has left, for replay; None if it must travel by itself."""
        placement = Placement.of(tensor)
        if placement == away.placement:
            return away
        if not (may_travel(tensor) and away.transfer.is_unchanged(placement)):
            return None
        info = OffloadInfo(self._region, op or None, name, "input", 0)
        return Offloaded(away.sent, away.transfer, tensor, info)
