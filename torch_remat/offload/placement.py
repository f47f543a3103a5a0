"""Tensors as places in memory: what of a storage travels, and how a view is rebuilt on it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_remat._compat import negative_view

# Where a part of a storage is cut out, it starts at a multiple of this: kernels may take another path on memory that is
# aligned in another way, and give other last bits.
ALIGNMENT_BYTES = 512


class Span(NamedTuple):
    """A range of bytes in a storage."""

    start: int
    stop: int

    def covers(self, other: Span) -> bool:
        """Whether another range lies within this one."""
        return self.start <= other.start and other.stop <= self.stop


class Placement(NamedTuple):
    """Where and how a tensor lies in its storage; ``stride`` is in elements, and conjugates and negatives are lazy."""

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

    def rebuilt_on(self, flat: torch.Tensor, start: int) -> torch.Tensor:
        """Return the same view of another storage; it shares the version counter of ``flat``.

        Args:
            flat: A one-dimensional contiguous tensor, of a dtype whose elements are as large as this one's or larger.
            start: Which byte of the former storage its first element is.
        """
        base = flat if flat.dtype == self.dtype else flat.view(self.dtype)
        offset = int(base.storage_offset()) + (self.offset_bytes - start) // self.dtype.itemsize
        value = base.as_strided(self.shape, self.stride, offset)
        if self.conjugated:
            value = value.conj()
        return negative_view(value) if self.negated else value


def travelling_span(tensor: torch.Tensor, placement: Placement) -> Span:
    """Return which part of its storage a tensor takes along.

    That is all of it if the tensor reaches over half of it or more: then the rest is probably needed too, by views
    that will come (query, key and value of one projection). Of a larger storage it is the tensor's own part.
    """
    item = placement.dtype.itemsize
    start, stop = placement.span
    total = tensor.untyped_storage().nbytes()
    if 2 * (stop - start) >= total:
        return Span(0, total - total % item)
    return Span(start - start % ALIGNMENT_BYTES, stop)


def flattened(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Return a part of a tensor's storage as a one-dimensional alias; it shares the tensor's version counter."""
    base = tensor.detach()
    if base.is_conj():
        base = base.conj()
    if base.is_neg():
        base = negative_view(base)
    item = base.dtype.itemsize
    return base.as_strided(((span.stop - span.start) // item,), (1,), span.start // item)
