"""What is away with one offloader, so that nothing is sent twice; see NOTE [ What travels ], 2."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch

from torch_remat._compat import storage_key, without_dispatch_modes
from torch_remat.errors import warn
from torch_remat.offload.prefetch import Prefetcher
from torch_remat.offload.protocol import Offloader, OffloadInfo
from torch_remat.offload.transfer import Placement, StoredCopy, Transfer, flattened, travelling_span

Batch = WeakValueDictionary[int, Transfer]
"""What was sent with nothing run in between that could change it, by the storages, which live as long as it lasts."""


class Table:
    """The transfers to one offloader."""

    def __init__(self) -> None:
        self._transfers: dict[int, WeakSet[Transfer]] = {}  # by the id of the tensor that all are views of
        self._limit = 64
        self._of_thread = threading.local()
        self._warned = False

    @property
    def prefetcher(self) -> Prefetcher:
        """This thread's prefetcher."""
        if not hasattr(self._of_thread, "prefetcher"):
            self._of_thread.prefetcher = Prefetcher()
        prefetcher: Prefetcher = self._of_thread.prefetcher
        return prefetcher

    def send(self, offloader: Offloader, tensor: torch.Tensor, info: OffloadInfo, batch: Batch) -> Transfer | None:
        """Return a tensor's transfer, after sending it if there was none; None if it stays. ``info`` lacks bytes."""
        owner = tensor if tensor._base is None else tensor._base
        placement = Placement.of(tensor)
        for known in list(self._transfers.get(id(owner), ())):
            if known.serves(owner, tensor._version, placement):
                return known
        transfer = batch.get(storage_key(tensor))
        with torch.no_grad(), without_dispatch_modes():
            if transfer is not None and transfer.copy.offloader is offloader and transfer.is_unchanged(placement):
                return self._noted(transfer.shared_by(tensor, placement, owner), owner)
            span = travelling_span(tensor, placement)
            flat = flattened(tensor, span)
            ticket = self._offload(offloader, flat, info._replace(bytes=flat.nbytes))
            if ticket is None:
                return None
            transfer = self._noted(Transfer(StoredCopy(offloader, ticket, flat.nbytes), flat, owner, span), owner)
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
        if len(self._transfers) > self._limit:  # forget those that are gone
            self._transfers = {key: known for key, known in list(self._transfers.items()) if known}
            self._limit = 2 * len(self._transfers) + 64
        self._transfers.setdefault(id(owner), WeakSet()).add(transfer)
        return transfer


_tables: dict[int, tuple[ref[Any], Table]] = {}


def table_of(offloader: Offloader) -> Table:
    """Return an offloader's table; a new one for an offloader that cannot be known weakly."""
    key = id(offloader)
    known = _tables.get(key)
    if known is not None and known[0]() is offloader:
        return known[1]
    table = Table()
    with suppress(TypeError):
        _tables[key] = (ref(offloader, lambda _: _tables.pop(key, None)), table)
    return table
