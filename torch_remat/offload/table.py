"""What is away with one offloader, so that nothing is sent twice.

In: tensors that may leave. Kept: weak references to the transfers of those that have left. Out: the transfer of a
tensor, a new one if there was none; see NOTE [ What travels ], 2.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any
from weakref import ref

import torch

from torch_remat._compat import storage_key, without_dispatch_modes
from torch_remat.offload.placement import Placement, flattened, travelling_span
from torch_remat.offload.prefetch import Prefetcher
from torch_remat.offload.protocol import Offloader, OffloadInfo
from torch_remat.offload.shared import warn_user
from torch_remat.offload.transfer import StoredCopy, Transfer


class Batch:
    """Tensors that are sent together, with nothing run in between that could change their memory.

    Attributes:
        key: What tells it from other batches.
        fresh: What was sent in it, by the storages of the tensors, which live as long as it lasts.
    """

    __slots__ = ("fresh", "key")

    def __init__(self, key: object) -> None:
        self.key = key
        self.fresh: dict[int, ref[Transfer]] = {}


class Table:
    """The transfers to one offloader."""

    def __init__(self) -> None:
        self._transfers: dict[int, list[ref[Transfer]]] = {}  # by the id of the tensor that all are views of
        self._of_thread = threading.local()
        self._warned = False

    @property
    def prefetcher(self) -> Prefetcher:
        """This thread's prefetcher."""
        known: Prefetcher | None = getattr(self._of_thread, "prefetcher", None)
        if known is None:
            known = self._of_thread.prefetcher = Prefetcher()
        return known

    def send(
        self, offloader: Offloader, tensor: torch.Tensor, info: OffloadInfo, batch: Batch | None = None
    ) -> Transfer | None:
        """Return a tensor's transfer, after sending it if there was none; None if it stays.

        Args:
            offloader: The offloader.
            tensor: The tensor.
            info: What it is called; its bytes are not known yet.
            batch: What it is sent together with.
        """
        owner = tensor if tensor._base is None else tensor._base
        placement = Placement.of(tensor)
        for known in self._transfers.get(id(owner), ()):
            transfer = known()
            if transfer is not None and transfer.serves(owner, tensor._version, placement):
                return transfer
        fresh = None if batch is None else batch.fresh.get(storage_key(tensor))
        transfer = None if fresh is None else fresh()
        with torch.no_grad(), without_dispatch_modes():
            if transfer is not None and transfer.copy.offloader is offloader and transfer.is_unchanged(placement):
                return self._noted(transfer.shared_by(tensor, placement, owner), owner)
            span = travelling_span(tensor, placement)
            flat = flattened(tensor, span)
            info = info._replace(bytes=flat.nbytes)
            try:
                ticket = offloader.offload(flat, info)
            except Warning:
                raise  # the user has made errors of warnings
            except Exception as error:
                self._warn(offloader, info, error)
                return None
            if ticket is None:
                return None
            transfer = self._noted(Transfer(StoredCopy(offloader, ticket, flat.nbytes), flat, owner, span), owner)
        if batch is not None:
            batch.fresh[storage_key(tensor)] = ref(transfer)
        return transfer

    def _noted(self, transfer: Transfer, owner: torch.Tensor) -> Transfer:
        key, table = id(owner), ref(self)

        def forget(_: ref[Transfer]) -> None:
            known = table()
            if known is not None:
                alive = [one for one in known._transfers.pop(key, ()) if one() is not None]
                if alive:
                    known._transfers.setdefault(key, []).extend(alive)

        self._transfers.setdefault(key, []).append(ref(transfer, forget))
        return transfer

    def _warn(self, offloader: Offloader, info: OffloadInfo, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warn_user(
                f"{type(offloader).__name__} could not take {info.name} ({info.bytes:,} bytes): {error!r}. It stays "
                "where it is, as other tensors may; training goes on."
            )


_tables: dict[int, tuple[ref[Any], Table]] = {}


def table_of(offloader: Offloader) -> Table:
    """Return what is known of an offloader; nothing of one that cannot be known weakly."""
    key = id(offloader)
    known = _tables.get(key)
    if known is not None and known[0]() is offloader:
        return known[1]
    table = Table()
    with suppress(TypeError):
        _tables[key] = (ref(offloader, lambda _: _tables.pop(key, None)), table)
    return table
