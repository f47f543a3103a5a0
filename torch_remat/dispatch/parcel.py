"""Parcels: parts of storages that are away, each sent once, however many places need it.

In: tensors that may leave, and an offloader. Kept: the offloader's ticket, and a copy of the tensor's version counter
without its data. Out: the same bytes; the ticket's release, once, when the last place that needs them is gone.

NOTE [ What travels ]
1. Plain strided tensors with data, but no leaf that requires a gradient and no parameter, nor a view of one: autograd's
   graph holds those anyway.
2. The tensor's storage, or its part of a much larger one; a second tensor on that part is rebuilt from the same parcel,
   if both are views of one tensor and nothing changed it in between. What only shares memory, through ``detach()``
   or ``.data``, has a history of changes of its own and travels by itself.
3. The value that comes back has the version that the tensor had, so that in-place changes are noticed as ever: of the
   tensor that was sent, since a copy of its counter is kept, and of the value by a backward that reads it.
4. A value is kept from its first read until the parcel is gone, since autograd may unpack it again, and others may be
   views of it; where the graph is kept, it is given away with each read.
5. `onload` makes a value usable on the stream that is current. Readers on other streams wait for that one, and the
   allocator is told of them, as the value's memory may belong to none of these streams.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from typing import Any, Literal
from weakref import finalize, ref

import torch

from torch_remat._compat import graph_is_kept, set_version, without_dispatch_modes
from torch_remat.errors import MutationError, OffloadError
from torch_remat.offload.lanes import Arrival, arrival_of
from torch_remat.offload.placement import Placement, Span, flattened, travelling_span
from torch_remat.offload.protocol import Offloader, OffloadInfo

_NOTHING = torch.empty(0)


Name = tuple[str, str | None, str, Literal["residual", "input"]]
"""The first four fields of an `OffloadInfo`."""


class Trip:
    """A tensor's way from offload to release: what releases it knows no more than this.

    Attributes:
        bytes: How many bytes travel.
        asked_on: The books in which it stands while it was asked for ahead and not read yet.
    """

    __slots__ = ("asked_on", "bytes", "offloader", "ticket")

    def __init__(self, offloader: Offloader, ticket: Any, count: int) -> None:
        self.offloader = offloader
        self.ticket = ticket
        self.bytes = count
        self.asked_on: dict[Trip, Any] | None = None

    def told(self, method: str) -> Any:
        """Return what one of the offloader's optional methods tells of the tensor; None if it tells nothing."""
        ask = getattr(self.offloader, method, None)
        try:
            return None if ask is None else ask(self.ticket)
        except Exception:
            return None  # a report does not fail because of an offloader

    def stays(self) -> bool:
        """Whether the tensor was taken and could not leave after all."""
        return self.told("stays") is True


class Parcel:
    """A part of a storage that is away; see NOTE [ What travels ].

    Attributes:
        trip: Its ticket.
        span: Which bytes of the storage.
        value: The tensor that came back, as long as it is kept.
        lock: Held while the offloader brings it back.
    """

    __slots__ = (
        *("__weakref__", "_arrival", "_counter", "_device", "_dtype", "_length", "_owner", "_version"),
        *("lock", "span", "trip", "value"),
    )

    def __init__(self, trip: Trip, flat: torch.Tensor, owner: torch.Tensor, span: Span) -> None:
        self.trip = trip
        self.span = span
        self.value: torch.Tensor | None = None
        self._arrival: Arrival | None = None
        self.lock = threading.Lock()
        self._owner = ref(owner)
        self._length, self._dtype, self._device = flat.numel(), flat.dtype, flat.device
        self._version = flat._version
        self._counter = flat.detach()
        self._counter.data = _NOTHING

    def serves(self, owner: torch.Tensor, version: int, placement: Placement) -> bool:
        """Whether a tensor can be rebuilt from this."""
        return self._owner() is owner and self._version == version and self._holds(placement)

    def is_unchanged(self, placement: Placement) -> bool:
        """Whether another view of the storage that travelled can be rebuilt from this as it is now."""
        return self._counter._version == self._version and self._holds(placement)

    def take(self, info: OffloadInfo) -> tuple[torch.Tensor, bool]:
        """Return the bytes, one-dimensional, and whether they had to be brought back for it.

        Args:
            info: Who asks.

        Raises:
            MutationError: The tensor that was sent, or the value that came back, was changed in place.
            OffloadError: The offloader failed.
        """
        with self.lock:
            value = self.value
            missing = value is None
            if self._counter._version != self._version or (value is not None and value._version != self._version):
                raise MutationError(
                    "this tensor was changed in place after its offload began",
                    region=info.region,
                    op=info.op,
                    tensor=info.tensor,
                    remedy="Use the out-of-place form of the op that changes it, or change it after backward.",
                )
            if value is None:
                value = self._bring_back(info)
                self._arrival = arrival_of(value)
            elif self._arrival is not None:
                self._arrival.reach(value)
            self.value = None if graph_is_kept() else value
        return value, missing

    def ask_ahead(self) -> bool:
        """Have the offloader bring it back soon; return whether it was asked."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            if self.value is not None:
                return False
            self.trip.offloader.prefetch(self.trip.ticket)
        except Exception:
            return False  # `onload` will tell
        finally:
            self.lock.release()
        return True

    def drop_asked(self) -> None:
        """Let go of what was brought back ahead of a backward that did not need it."""
        if self.lock.acquire(blocking=False):
            try:
                if self.value is None:
                    with suppress(Exception):  # nobody needs it
                        self.trip.offloader.onload(self.trip.ticket)
            finally:
                self.lock.release()

    def _holds(self, placement: Placement) -> bool:
        return self.span.covers(placement.span) and placement.dtype.itemsize <= self._dtype.itemsize

    def _bring_back(self, info: OffloadInfo) -> torch.Tensor:
        offloader = self.trip.offloader
        try:
            flat = offloader.onload(self.trip.ticket)
        except OffloadError:
            raise
        except Exception as error:
            raise _failed(offloader, info, f"could not bring this tensor back: {error!r}") from error
        if not (
            type(flat) is torch.Tensor
            and flat.shape == (self._length,)
            and flat.dtype is self._dtype
            and flat.device == self._device
            and flat.layout is torch.strided
            and flat.is_contiguous()
            and not flat.requires_grad
        ):
            wanted = f"{self._length:,} {self._dtype} on {self._device}"
            got = f"{tuple(flat.shape)} {flat.dtype} on {flat.device}" if isinstance(flat, torch.Tensor) else flat
            raise _failed(offloader, info, f"brought back {got} where {wanted} were sent, contiguous and without graph")
        if flat._version != self._version:
            set_version(flat, self._version)
        return flat


class Port:
    """What the runtime knows of one offloader: what is away with it, so that nothing is sent twice."""

    def __init__(self) -> None:
        self.local = threading.local()
        self._parcels: dict[int, list[ref[Parcel]]] = {}  # by the id of the tensor that all are views of
        self._warned = False

    def send(self, offloader: Offloader, tensor: torch.Tensor, name: Name) -> Parcel | None:
        """Return the parcel that has a tensor, after sending it if there was none; None if it stays.

        Args:
            offloader: The offloader.
            tensor: The tensor.
            name: What it is called.
        """
        owner = tensor if tensor._base is None else tensor._base
        placement = Placement.of(tensor)
        for known in self._parcels.get(id(owner), ()):
            parcel = known()
            if parcel is not None and parcel.serves(owner, tensor._version, placement):
                return parcel
        with torch.no_grad(), without_dispatch_modes():
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
            trip = Trip(offloader, ticket, flat.nbytes)
            parcel = Parcel(trip, flat, owner, span)
        key = id(owner)
        self._parcels.setdefault(key, []).append(ref(parcel))
        finalize(parcel, _end, trip, ref(self), key).atexit = False
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


def may_travel(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of the kind that travels; see NOTE [ What travels ], 1."""
    owner = tensor if tensor._base is None else tensor._base
    return (
        type(tensor) is torch.Tensor
        and type(owner) is torch.Tensor
        and not (owner.requires_grad and owner.grad_fn is None)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_inference()
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() >= Placement.of(tensor).span.stop
    )


def _end(trip: Trip, port: ref[Port], key: int) -> None:
    """Release a parcel that is gone."""
    if trip.asked_on is not None:
        trip.asked_on.pop(trip, None)
    known = port()
    if known is not None:
        known.forget(key)
    trip.offloader.release(trip.ticket)


def _failed(offloader: Offloader, info: OffloadInfo, what: str) -> OffloadError:
    return OffloadError(
        f"{type(offloader).__name__} {what}",
        region=info.region,
        op=info.op,
        tensor=info.tensor,
        remedy="remat.testing.check_offloader(offloader) checks an offloader against its contract.",
    )


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
