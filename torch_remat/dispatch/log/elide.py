"""Saved tensors of a call that are not kept, since replay has what they are, or are views of, again.

In: a saved tensor, and the argument or variable of the call that it is, or shares the storage of. Kept: where both lay
in their storage. Out: the saved tensor, taken from what the call gets in replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from torch_remat.dispatch.placeholder import Placeholder, new_tuple
from torch_remat.offload.transfer import Placement

if TYPE_CHECKING:
    from torch_remat.dispatch.holder import OpHolder


def placement_in(meta: Any) -> Placement:
    """Return the placement of a tensor that a `Meta` describes."""
    shape, stride, offset = meta.geometry
    return Placement(shape, stride, offset * meta.dtype.itemsize, meta.dtype, *meta.lazy)


def offset_in_bytes(tensor: torch.Tensor) -> int:
    """Return where a tensor's first element lies in its storage."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


class Elided(NamedTuple):
    """A saved tensor that is taken in replay from an argument or a variable of its call: its source.

    Attributes:
        holder: The holder that waits for it.
        place: Which argument the source is; variables are counted after the arguments.
        view: Where the tensor lay in the source's storage; None if it is the source itself.
        source: Where the source lay; None likewise.
    """

    holder: ref[OpHolder]
    place: int
    view: Placement | None
    source: Placement | None

    @classmethod
    def of(cls, tensor: torch.Tensor, holder: OpHolder, place: int, source: torch.Tensor) -> Elided:
        """Describe a saved tensor that shares the storage of its source."""
        places = (None, None) if source is tensor else (Placement.of(tensor), Placement.of(source))
        made: Elided = new_tuple(cls, (ref(holder), place, *places))
        return made

    def value(self, source: torch.Tensor, with_history: bool = False) -> torch.Tensor | None:
        """Return the saved tensor, from replay's counterpart of its source; None if that lies otherwise in memory."""
        view, known = self.view, self.source
        if view is None or known is None:
            return source.detach()
        if known._replace(offset_bytes=offset_in_bytes(source)) != Placement.of(source):
            # Hooks around the region may give its inputs back in another order.
            ordered = _laid_out(source, known)
            if ordered is None:
                return None
            source = ordered
        moved = offset_in_bytes(source) - known.offset_bytes
        if not isinstance(source, Placeholder) and not view.lies_within(source.untyped_storage().nbytes(), moved):
            return None
        return view.seen_in(source if with_history else source.detach(), moved)


def _laid_out(tensor: torch.Tensor, like: Placement) -> torch.Tensor | None:
    """Return a copy of a tensor with other strides; None if it would not fill its memory, each element once."""
    now = Placement.of(tensor)
    if like != now._replace(stride=like.stride, offset_bytes=like.offset_bytes) or now.conjugated or now.negated:
        return None
    if like.span.stop - like.span.start != tensor.nbytes:
        return None
    with torch.no_grad():
        made = torch.empty_strided(like.shape, like.stride, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)
