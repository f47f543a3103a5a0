"""Other tensors in the storage of one: a kept or recomputed tensor, seen as what forward had in the same place.

In: a tensor, and where another lay in its storage. Kept: of a saved tensor that replay makes again, its description.
Out: that other tensor.

NOTE [ When an elided tensor is complete ]
The value is taken at the producer, where it is an output, since a handle does not know the inputs of its op. It shares
the storage with replay's own tensor, and a write that no version counter shows (``h.data``, ``h.detach().numpy()``)
may stand between the producer and the op that saved it. So replay does not stop before it comes to that op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch

from torch_remat._compat import negative_view
from torch_remat.dispatch.placeholder import Geometry, geometry_of, new_tuple

if TYPE_CHECKING:
    from torch_remat.dispatch.holder import OpHolder


def view_of(
    source: torch.Tensor, source_offset: int, geometry: Geometry, dtype: torch.dtype, conjugated: bool, negated: bool
) -> torch.Tensor:
    """Return a view of replay's counterpart of a tensor.

    Args:
        source: The counterpart.
        source_offset: Where the tensor lay in its storage in forward, in bytes.
        geometry: Where the view lay in the same storage.
        dtype: The view's dtype.
        conjugated: Whether the view is a lazy conjugate.
        negated: Whether it is a lazy negative.
    """
    base = source.detach()
    shape, stride, offset = geometry
    if (
        base.shape == shape
        and base.stride() == stride
        and base.dtype == dtype
        and offset * dtype.itemsize == source_offset
        and base.is_conj() == conjugated
        and base.is_neg() == negated
    ):
        return base  # it is no view of the tensor, but the tensor
    moved = offset_in_bytes(source) - source_offset
    return in_same_storage(base, Geometry(shape, stride, offset + moved // dtype.itemsize), dtype, conjugated, negated)


def in_same_storage(
    tensor: torch.Tensor, geometry: Geometry, dtype: torch.dtype, conjugated: bool, negated: bool
) -> torch.Tensor:
    """Return another tensor in the storage of one without a history."""
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = negative_view(tensor)
    if tensor.dtype != dtype:
        count = max(1, dtype.itemsize // tensor.dtype.itemsize)
        tensor = tensor.as_strided((count,), (1,), 0).view(dtype)
    tensor = tensor.as_strided(*geometry)
    if conjugated:
        tensor = tensor.conj()
    return negative_view(tensor) if negated else tensor


def lies_within(geometry: Geometry, dtype: torch.dtype, size_bytes: int) -> bool:
    """Whether a storage of a size holds all elements of a tensor."""
    shape, _, offset = geometry
    return offset >= 0 and (0 in shape or (offset + _extent(geometry)) * dtype.itemsize <= size_bytes)


def laid_out(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor | None:
    """Return a copy of a tensor with other strides; None if it would not fill its memory, each element once."""
    if _extent(geometry) != tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return None
    with torch.no_grad():
        made = torch.empty_strided(geometry.shape, geometry.stride, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)


def _extent(geometry: Geometry) -> int:
    """Return the number of elements from a tensor's first to its last in memory; meaningless if it is empty."""
    return 1 + sum((size - 1) * step for size, step in zip(geometry.shape, geometry.stride, strict=True))


def offset_in_bytes(tensor: torch.Tensor) -> int:
    """Return where a tensor's first element lies in its storage."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


class Look(NamedTuple):
    """How a tensor shows its storage."""

    geometry: Geometry
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Look:
        """Return how a tensor shows its storage."""
        made: Look = new_tuple(cls, (geometry_of(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg()))
        return made


class Elided(NamedTuple):
    """A saved tensor that is not kept, since replay makes it, or what it is a view of, again.

    Attributes:
        holder: The holder that waits for it.
        place: Which output of its producer, or which input of its op, it is or is a view of: its source.
        view: How it shows the source's storage; None if it is the source itself.
        source: How the source showed it in forward; None likewise.
    """

    holder: ref[OpHolder]
    place: int
    view: Look | None
    source: Look | None

    @classmethod
    def of(cls, tensor: torch.Tensor, holder: OpHolder, place: int, source: torch.Tensor) -> Elided:
        """Describe a saved tensor that shares the storage of its source."""
        looks = (None, None) if source is tensor else (Look.of(tensor), Look.of(source))
        made: Elided = new_tuple(cls, (ref(holder), place, *looks))
        return made

    def value(self, source: torch.Tensor) -> torch.Tensor | None:
        """Return the saved tensor, from replay's counterpart of its source; None if that lies otherwise in memory."""
        known = self.source
        if self.view is None or known is None:
            return source.detach()
        (shape, stride, offset), dtype, _, _ = self.view
        known_offset = known.geometry.storage_offset * known.dtype.itemsize
        if known != (now := Look.of(source)):
            if known._replace(geometry=now.geometry) != now or known.geometry.shape != source.shape:
                return None
            if known.geometry.stride != now.geometry.stride:
                # Hooks around the region may give its inputs back in another order.
                ordered = laid_out(source, known.geometry)
                if ordered is None:
                    return None
                source = ordered
        moved = offset_in_bytes(source) - known_offset
        place = Geometry(shape, stride, offset + moved // dtype.itemsize)
        if not lies_within(place, dtype, source.untyped_storage().nbytes()):
            return None
        return view_of(source, known_offset, *self.view)
