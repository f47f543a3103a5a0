"""What is away with one offloader, so that nothing is sent twice; see NOTE [ What travels ], 2."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_remat._compat import storage_key, without_dispatch_modes
from torch_remat.errors import warn
from torch_remat.offload.prefetch import Prefetcher
from torch_remat.offload.protocol import Offloader, OffloadInfo
from torch_remat.offload.transfer import Placement, StoredCopy, Transfer, flattened, travelling_span

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
            if known.serves(tensor._version, placement):
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
