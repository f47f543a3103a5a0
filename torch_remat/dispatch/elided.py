"""A saved tensor of a SAVE op that is not kept, since replay makes it, or what it is a view of, again.

In: the saved tensor, and the output or input that it is or is a view of. Kept: its description. Out: its value, from
replay's counterpart of that output or input.

NOTE [ When an elided tensor is complete ]
The value is taken at the producer, where it is an output, since a handle does not know the inputs of its op. It shares
the storage with replay's own tensor, and a write that no version counter shows (``h.data``, ``h.detach().numpy()``)
may stand between the producer and the op that saved it. So replay does not stop before it comes to that op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch

from torch_remat.dispatch.placeholder import Geometry, geometry_of, new_tuple
from torch_remat.dispatch.same_storage import laid_out, lies_within, offset_in_bytes, view_of

if TYPE_CHECKING:
    from torch_remat.dispatch.holder import OpHolder


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
        source: How the source showed it in forward; None if that was gone, and an alias left.
        source_offset: The source's storage offset in forward, in bytes.
        storage_bytes: The size of the storage in forward.
    """

    holder: ref[OpHolder]
    place: int
    view: Look | None
    source: Look | None
    source_offset: int
    storage_bytes: int

    @classmethod
    def of(
        cls, tensor: torch.Tensor, holder: OpHolder, place: int, source: torch.Tensor | None, source_offset: int
    ) -> Elided:
        """Describe a saved tensor that shares the storage of its source."""
        if source is tensor:
            whole: Elided = new_tuple(cls, (ref(holder), place, None, None, 0, 0))
            return whole
        look = None if source is None else Look.of(source)
        size = tensor.untyped_storage().nbytes()
        made: Elided = new_tuple(cls, (ref(holder), place, Look.of(tensor), look, source_offset, size))
        return made

    def value(self, source: torch.Tensor) -> torch.Tensor | None:
        """Return the saved tensor, from replay's counterpart of its source; None if that lies otherwise in memory."""
        if self.view is None:
            return source.detach()
        (shape, stride, offset), dtype, _, _ = self.view
        known = self.source
        if known is not None and known != (now := Look.of(source)):
            if known._replace(geometry=now.geometry) != now or known.geometry.shape != source.shape:
                return None
            if known.geometry.stride != now.geometry.stride:
                # Hooks around the region may give its inputs back in another order.
                ordered = laid_out(source, known.geometry)
                if ordered is None:
                    return None
                source = ordered
        moved = offset_in_bytes(source) - self.source_offset
        place = Geometry(shape, stride, offset + moved // dtype.itemsize)
        size = source.untyped_storage().nbytes()
        if (known is None and size != self.storage_bytes) or not lies_within(place, dtype, size):
            return None
        return view_of(source, self.source_offset, *self.view)
