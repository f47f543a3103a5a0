"""What stands behind a kept tensor: the memory that it is in, wherever that is.

In: tensors, and what saved-tensor hooks and offloaders made of them. Kept, while a report is made: the storages and
stored copies, so that no address is used again. Out: pieces, which the ledger counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from torch_remat.dispatch.holder import Holder, is_parameter
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.dispatch.region.region import Region
from torch_remat.dispatch.sender import Offloaded
from torch_remat.offload.transfer import Transfer
from torch_remat.reports.walk import leaves_in, tensors_in

Besides = Literal["not gone yet", "brought back"]


class Memory(NamedTuple):
    """Memory that is counted once, however many tensors are in it.

    Attributes:
        key: Its identity, as long as ``owner`` lives.
        owner: A storage, or the stored copy of what is away.
        bytes: Its bytes.
    """

    key: Hashable
    owner: Any
    bytes: int


class Piece(NamedTuple):
    """A kept tensor, or one that is away.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        place: Where it is: a device, or the kind of offloader that has it.
        memory: What it is in.
        offloaded: Whether it lies elsewhere than where it was made.
        besides: Why it is there although it is offloaded, which another piece tells.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str
    memory: list[Memory]
    offloaded: bool = False
    besides: Besides | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, offloaded: bool = False) -> Piece:
        """Describe a tensor that is there."""
        return cls(tuple(tensor.shape), tensor.dtype, str(tensor.device), _memory_of(tensor), offloaded)


def pieces_in(kept: Any, made_on: torch.device | None = None) -> Iterator[Piece]:
    """Yield the tensors in what saved-tensor hooks returned; nothing is unpacked or brought back.

    What a region around returned is a holder, which that region's own report covers.

    Args:
        kept: A tensor, or what hooks or an offloader made of it.
        made_on: Where the tensor was before; what lies elsewhere is offloaded.
    """
    if isinstance(kept, torch.Tensor):
        yield Piece.of(kept, made_on is not None and kept.device != made_on)
        return
    if type(kept) is Offloaded:
        yield from _offloaded(kept)
        return
    if kept is None or isinstance(kept, Holder) or is_anchor(kept):
        return
    leaves = list(leaves_in(kept))
    if made_on is None:
        made_on = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield Piece.of(leaf, made_on is not None and leaf.device != made_on)


def parameters_in(kept: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that tensors in what saved-tensor hooks returned are, or are views of."""
    if is_anchor(kept):
        kept = kept[0]
    elif isinstance(kept, (Holder, Offloaded)):
        return
    for tensor in tensors_in(kept):
        if (parameter := viewed_parameter(tensor)) is not None:
            yield parameter


def viewed_parameter(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter that a tensor is, or is a view of; None for others. A detached one does not tell."""
    owner = tensor if tensor._base is None else tensor._base
    return owner if is_parameter(owner) else None


def _offloaded(kept: Offloaded) -> Iterator[Piece]:
    transfer, placement = kept.transfer, kept.placement
    here = _told(transfer, "still_here")
    if not isinstance(here, torch.Tensor):
        here = None
    if here is not None and _told(transfer, "stays") is True:
        yield Piece(placement.shape, placement.dtype, str(here.device), _memory_of(here))
        return
    away = Memory(("copy", id(transfer.copy)), transfer.copy, transfer.copy.bytes)
    yield Piece(placement.shape, placement.dtype, type(transfer.copy.offloader).__name__, [away], offloaded=True)
    both: Sequence[tuple[torch.Tensor | None, Besides]] = (
        (here, "not gone yet"),
        (transfer.value, "brought back"),
    )
    for tensor, why in both:
        if tensor is not None:
            yield Piece(placement.shape, placement.dtype, str(tensor.device), _memory_of(tensor), besides=why)


def _told(transfer: Transfer, method: str) -> Any:
    """Return what one of the offloader's optional methods tells of what was sent; None if it tells nothing."""
    ask = getattr(transfer.copy.offloader, method, None)
    try:
        return None if ask is None else ask(transfer.copy.ticket)
    except Exception:
        return None  # a report does not fail because of an offloader


def _memory_of(tensor: torch.Tensor) -> list[Memory]:
    return [Memory(storage._cdata, storage, storage.nbytes()) for storage in storages_of(tensor)]


def is_anchor(packed: Any) -> bool:
    """Whether something is what a region gives autograd instead of a parameter; see `holder.Anchor`."""
    return type(packed) is tuple and len(packed) == 3 and isinstance(packed[2], Region)


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages behind a tensor: of its parts, if it is sparse or a wrapper around others."""
    parts: list[torch.Tensor]
    if is_placeholder(tensor):
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        parts = [getattr(tensor, name) for name in names]
    elif tensor.layout is torch.sparse_coo:
        plain = tensor.detach()
        parts = [plain._indices(), plain._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        try:
            return [tensor.untyped_storage()]
        except (NotImplementedError, RuntimeError, ValueError):  # no storage that Python could see, or none yet
            return []
    return [storage for part in parts if isinstance(part, torch.Tensor) for storage in storages_of(part)]
