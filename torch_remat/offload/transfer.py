"""Transfers: parts of storages that are away, each sent once, however many places need it.

Kept are the offloader's ticket, and the tensor's version counter without its data. The ticket is released, once, when
the last place that needs the tensor is gone.

NOTE [ What travels ]
1. Plain strided tensors with data, but no leaf that requires a gradient and no parameter, nor a view of one: autograd's
   graph holds those anyway.
2. The tensor's storage, or its part of a much larger one; a second tensor on it is rebuilt from the same transfer, if
   both are views of one tensor and nothing changed it in between. What only shares memory, through ``detach()`` or
   ``.data``, may have a version counter of its own, which does not tell of changes. If both are sent in one batch, with
   nothing run in between, they are two transfers of one stored copy, each with its counter and its value. Otherwise it
   travels by itself.
3. The value that comes back has the version that the tensor had, so that in-place changes are noticed as ever: of the
   tensor that was sent, since its counter is kept, and of the value by a backward that reads it.
4. A value is kept from its first read until the transfer is gone, since autograd may unpack it again, and others may be
   views of it; where the graph is kept, it is given away with each read.
5. `onload` makes a value usable on the current stream; later readers, perhaps on other streams, wait for that one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import finalize

import torch

from torch_remat._compat import graph_is_kept, negative_view, set_version, storage_key
from torch_remat.errors import MutationError, OffloadError
from torch_remat.offload.protocol import Offloader, OffloadInfo
from torch_remat.offload.streams import Event, event_after, use

_NOTHING = torch.empty(0)

ALIGNMENT_BYTES = 512  # of parts that are cut out: kernels may give different last bits on memory aligned otherwise


class Span(NamedTuple):
    """A range of bytes in a storage."""

    start: int
    stop: int

    def covers(self, other: Span) -> bool:
        """Whether another range lies within this one."""
        return self.start <= other.start and other.stop <= self.stop


class Placement(NamedTuple):
    """The place of a tensor in its storage; ``stride`` is in elements, and conjugates and negatives are lazy."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Placement:
        """Describe a strided tensor."""
        offset_bytes = int(tensor.storage_offset()) * tensor.dtype.itemsize
        return cls(tuple(tensor.shape), tensor.stride(), offset_bytes, tensor.dtype, tensor.is_conj(), tensor.is_neg())

    @property
    def span(self) -> Span:
        """The bytes from its first to its last element, in between those of others too."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return Span(self.offset_bytes, self.offset_bytes + (last + 1) * self.dtype.itemsize)

    def lies_within(self, size_bytes: int, moved: int = 0) -> bool:
        """Whether a storage of a size holds all its elements, so many bytes further on than here."""
        return self.offset_bytes + moved >= 0 and (0 in self.shape or self.span.stop + moved <= size_bytes)

    def seen_in(self, tensor: torch.Tensor, moved: int = 0) -> torch.Tensor:
        """Return the same view of another tensor's storage, so many bytes further on; it shares its version counter."""
        if tensor.is_conj():
            tensor = tensor.conj()
        if tensor.is_neg():
            tensor = negative_view(tensor)
        if tensor.dtype != self.dtype:
            count = 0 if 0 in self.shape else max(1, self.dtype.itemsize // tensor.dtype.itemsize)
            flat = tensor.as_strided((count,), (1,), 0)
            # Autograd knows parts of complex numbers, and no other views of another dtype.
            tensor = torch.view_as_real(flat) if flat.dtype.to_real() is self.dtype else flat.view(self.dtype)
        value = tensor.as_strided(self.shape, self.stride, (self.offset_bytes + moved) // self.dtype.itemsize)
        if self.conjugated:
            value = value.conj()
        return negative_view(value) if self.negated else value


def travelling_span(tensor: torch.Tensor, placement: Placement) -> Span:
    """Return which part of its storage a tensor takes along: its own, or all if it reaches over half of it or more.

    Then the rest is probably needed too, by views that will come (query, key and value of one projection).
    """
    item = placement.dtype.itemsize
    start, stop = placement.span
    total = tensor.untyped_storage().nbytes()
    if 2 * (stop - start) >= total:
        return Span(0, total - total % item)
    return Span(start - start % ALIGNMENT_BYTES, stop)


def flattened(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Return a part of a tensor's storage as a one-dimensional alias; it shares the tensor's version counter."""
    count = (span.stop - span.start) // tensor.dtype.itemsize
    return Placement((count,), (1,), span.start, tensor.dtype, False, False).seen_in(tensor.detach())


class StoredCopy:
    """What an offloader holds under one ticket, so many bytes; the lock is held while it brings them back."""

    __slots__ = ("__weakref__", "bytes", "lock", "offloader", "ticket")

    def __init__(self, offloader: Offloader, ticket: Any, count: int) -> None:
        self.offloader = offloader
        self.ticket = ticket
        self.bytes = count
        self.lock = threading.Lock()
        finalize(self, offloader.release, ticket).atexit = False

    def told(self, method: str) -> Any:
        """Return what one of the offloader's optional methods says of this; None if it says nothing."""
        ask = getattr(self.offloader, method, None)
        try:
            return None if ask is None else ask(self.ticket)
        except Exception:
            return None  # a report does not fail because of an offloader

    def unless_read(self, method: Callable[[Any], object]) -> bool:
        """Call an offloader's method with the ticket, unless the tensor is on its way back; whether it worked."""
        if self.lock.acquire(blocking=False):
            try:
                method(self.ticket)
                return True
            except Exception:
                return False  # the next `onload` will tell
            finally:
                self.lock.release()
        return False


class Transfer:
    """A part of a storage that is away; see NOTE [ What travels ].

    Attributes:
        copy: What the offloader holds.
        span: Which bytes of the storage.
        value: The tensor that came back, as long as it is kept.
    """

    __slots__ = (
        *("__weakref__", "_arrival", "_counter", "_form", "_not_in", "_version"),
        *("copy", "span", "value"),
    )

    def __init__(self, copy: StoredCopy, flat: torch.Tensor, span: Span) -> None:
        self.copy = copy
        self.span = span
        self.value: torch.Tensor | None = None
        self._arrival: Event = None
        self._form = flat.numel(), flat.dtype, flat.device  # what has to come back
        self._not_in = 0
        self._version = flat._version
        self._counter = flat.detach()
        self._counter.data = _NOTHING

    def shared_by(self, tensor: torch.Tensor, placement: Placement) -> Transfer:
        """Return another transfer of the same copy, for a tensor with the same memory and perhaps another counter."""
        other = Transfer(self.copy, flattened(tensor, placement.span), self.span)
        other._form = self._form
        # What comes back may be the first tensor itself, with that one's counter.
        other._not_in = storage_key(tensor)
        return other

    def is_unchanged(self, placement: Placement) -> bool:
        """Whether another view of the storage that travelled can be rebuilt from this as it is now."""
        fits = self.span.covers(placement.span) and placement.dtype.itemsize <= self._form[1].itemsize
        return fits and self._counter._version == self._version

    def take(self, info: OffloadInfo) -> tuple[torch.Tensor, bool]:
        """Return the bytes, one-dimensional, and whether they had to be brought back for it; ``info`` is for errors."""
        with self.copy.lock:
            value = self.value
            missing = value is None
            if self._counter._version != self._version or (value is not None and value._version != self._version):
                raise MutationError(
                    "this tensor was modified in place after its offload began",
                    region=info.region,
                    op=info.op,
                    tensor=info.tensor,
                    remedy="Use the out-of-place form of the op that changes it, or change it after backward.",
                )
            if value is None:
                value = self._bring_back(info)
                self._arrival = event_after(value)
            else:
                use(value, self._arrival)
            self.value = None if graph_is_kept() else value
        return value, missing

    def _bring_back(self, info: OffloadInfo) -> torch.Tensor:
        offloader = self.copy.offloader
        try:
            flat = offloader.onload(self.copy.ticket)
        except (OffloadError, Warning):  # the user has made errors of warnings
            raise
        except Exception as error:
            raise _failed(offloader, info, f"could not bring this tensor back: {error!r}") from error
        form = (flat.numel(), flat.dtype, flat.device) if type(flat) is torch.Tensor and flat.dim() == 1 else None
        if form != self._form or flat.layout is not torch.strided or not flat.is_contiguous() or flat.requires_grad:
            wanted = "{:,} {} on {}".format(*self._form)
            got = f"{tuple(flat.shape)} {flat.dtype} on {flat.device}" if isinstance(flat, torch.Tensor) else flat
            raise _failed(offloader, info, f"brought back {got} where {wanted} were sent, contiguous and without graph")
        if self._not_in and storage_key(flat) == self._not_in:
            flat = flat.clone()
        if flat._version != self._version:
            set_version(flat, self._version)
        return flat


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


def _failed(offloader: Offloader, info: OffloadInfo, what: str) -> OffloadError:
    return OffloadError(
        f"{type(offloader).__name__} {what}",
        region=info.region,
        op=info.op,
        tensor=info.tensor,
        remedy="remat.testing.check_offloader(offloader) checks an offloader against its contract.",
    )
