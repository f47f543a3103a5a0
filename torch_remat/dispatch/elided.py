"""A saved tensor of a SAVE op that is not kept, since replay makes it, or what it is a view of, again.

In: the saved tensor, and the output or input that it is or is a view of. Kept: its description. Out: its value, from
replay's counterpart of that output or input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch

from torch_remat.dispatch.placeholder import Geometry, geometry_of, new_tuple
from torch_remat.dispatch.same_storage import view_of

if TYPE_CHECKING:
    from torch_remat.dispatch.holder import OpHolder


class Elided(NamedTuple):
    """A saved tensor that is not kept, since replay makes it, or what it is a view of, again.

    Attributes:
        holder: The holder that waits for it.
        place: Which output of its producer, or which input of its op, it is or is a view of.
        source_offset: That tensor's storage offset in forward, in bytes.
        geometry: Where the saved tensor lies in the same storage; None if it is the output itself.
        dtype: Its dtype; a view may have another than what it is a view of.
        conjugated: Whether it is a lazy conjugate.
        negated: Whether it is a lazy negative.
    """

    holder: ref[OpHolder]
    place: int
    source_offset: int
    geometry: Geometry | None
    dtype: torch.dtype
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, holder: OpHolder, place: int, source_offset: int) -> Elided:
        """Describe a saved tensor."""
        geometry = geometry_of(tensor)
        about = geometry, tensor.dtype, tensor.is_conj(), tensor.is_neg()
        made: Elided = new_tuple(cls, (ref(holder), place, source_offset, *about))
        return made

    @classmethod
    def whole(cls, holder: OpHolder, place: int) -> Elided:
        """Return what stands for a saved tensor that is the output of an op, and no view of it."""
        made: Elided = new_tuple(cls, (ref(holder), place, 0, None, holder.metadata[2], False, False))
        return made

    def value(self, source: torch.Tensor) -> torch.Tensor:
        """Return the saved tensor, from replay's counterpart of what it is a view of."""
        if self.geometry is None:
            return source.detach()
        return view_of(source, self.source_offset, self.geometry, self.dtype, self.conjugated, self.negated)
