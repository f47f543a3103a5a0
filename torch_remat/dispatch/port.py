"""What is away with one offloader, so that nothing is sent twice.

In: tensors that may leave. Kept: weak references to the parcels that have left. Out: the parcel that has a tensor, a
new one if there was none; see NOTE [ What travels ], 2.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from typing import Any
from weakref import finalize, ref

import torch

from torch_remat._compat import storage_key, without_dispatch_modes
from torch_remat.dispatch.parcel import Name, Parcel, Trip
from torch_remat.offload.placement import Placement, flattened, travelling_span
from torch_remat.offload.protocol import Offloader, OffloadInfo


def _gone() -> None:
    return None


class Batch:
    """Tensors that are sent together, with nothing run in between that could change their memory.

    Attributes:
        key: What tells it from other batches.
        fresh: What was sent in it, by the storages of the tensors, which live as long as it lasts.
    """

    __slots__ = ("fresh", "key")

    def __init__(self, key: object) -> None:
        self.key = key
        self.fresh: dict[int, ref[Parcel]] = {}


class Port:
    """What the runtime knows of one offloader: what is away with it, so that nothing is sent twice."""

    def __init__(self) -> None:
        self.local = threading.local()
        self._parcels: dict[int, list[ref[Parcel]]] = {}  # by the id of the tensor that all are views of
        self._warned = False

    def send(self, offloader: Offloader, tensor: torch.Tensor, name: Name, batch: Batch | None = None) -> Parcel | None:
        """Return the parcel that has a tensor, after sending it if there was none; None if it stays.

        Args:
            offloader: The offloader.
            tensor: The tensor.
            name: What it is called.
            batch: What it is sent together with.
        """
        owner = tensor if tensor._base is None else tensor._base
        placement = Placement.of(tensor)
        for known in self._parcels.get(id(owner), ()):
            parcel = known()
            if parcel is not None and parcel.serves(owner, tensor._version, placement):
                return parcel
        parcel = None if batch is None else batch.fresh.get(storage_key(tensor), _gone)()
        with torch.no_grad(), without_dispatch_modes():
            if parcel is not None and parcel.trip.offloader is offloader and parcel.is_unchanged(placement):
                return self._noted(parcel.shared_by(tensor, placement, owner), owner)
            span = travelling_span(tensor, placement)
            flat = flattened(tensor, span)
            info = OffloadInfo(*name, flat.nbytes)
            try:
                ticket = offloader.offload(flat, info)
            except Warning:
                raise  # the user has made errors of warnings
            except Exception as error:
                self._warn(offloader, info, error)
                return None
            if ticket is None:
                return None
            parcel = self._noted(Parcel(Trip(offloader, ticket, flat.nbytes), flat, owner, span), owner)
        if batch is not None:
            batch.fresh[storage_key(tensor)] = ref(parcel)
        return parcel

    def _noted(self, parcel: Parcel, owner: torch.Tensor) -> Parcel:
        key = id(owner)
        self._parcels.setdefault(key, []).append(ref(parcel))
        finalize(parcel, _end, parcel.trip, ref(self), key).atexit = False
        return parcel

    def forget(self, key: int) -> None:
        """Forget the parcels of a tensor that are gone."""
        alive = [known for known in self._parcels.pop(key, ()) if known() is not None]
        if alive:
            self._parcels.setdefault(key, []).extend(alive)

    def _warn(self, offloader: Offloader, info: OffloadInfo, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(offloader).__name__} could not take {info.name} ({info.bytes:,} bytes): {error!r}. It stays "
                "where it is, as other tensors may; training goes on.",
                RuntimeWarning,
                stacklevel=2,
            )


def _end(trip: Trip, port: ref[Port], key: int) -> None:
    """Note that a parcel is gone, and release the ticket if it was the trip's last."""
    known = port()
    if known is not None:
        known.forget(key)
    if trip.further:
        with suppress(IndexError):  # one call of C code: of two threads that come here at once, one is the last
            trip.further.pop()
            return
    if trip.asked_on is not None:
        trip.asked_on.pop(trip, None)
    trip.offloader.release(trip.ticket)


_ports: dict[int, tuple[ref[Any], Port]] = {}


def port_of(offloader: Offloader) -> Port:
    """Return what is known of an offloader; nothing of one that cannot be known weakly."""
    key = id(offloader)
    known = _ports.get(key)
    if known is not None and known[0]() is offloader:
        return known[1]
    port = Port()
    with suppress(TypeError):
        _ports[key] = (ref(offloader, lambda _: _ports.pop(key, None)), port)
    return port
