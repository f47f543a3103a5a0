"""The end of a block: its tensors become plain.

In: the tensors that are alive. Kept: nothing. Out: the same objects, plain, with their data; an error, if data could
not be made again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_remat.dtr._memory import Memory
from torch_remat.dtr._storage import Buffer, derive, place_of
from torch_remat.dtr._tensor import EvictableTensor, LostTensor, become_plain, plain_gradient


def make_plain(memory: Memory, leaving: Sequence[EvictableTensor]) -> BaseException | None:
    """Make tensors of a block plain; return the first error on the way."""
    storages = dict.fromkeys(tensor._handle.buffer.storage for tensor in leaving if hasattr(tensor, "_handle"))
    failure: BaseException | None = None
    for storage in storages:
        if storage.tensor is not None:
            memory.lock(storage)
    for storage in storages:
        if storage.tensor is None:
            memory.lock(storage)
            for _ in range(2):  # what has failed once need not fail again, and this is the last chance
                try:
                    memory.resident([storage])
                    break
                except Exception as error:
                    failure = failure or error
    bases: dict[Buffer, torch.Tensor] = {}
    for tensor in leaving:
        handle = tensor.__dict__.get("_handle")
        if handle is None:
            continue
        if handle.buffer.storage.tensor is None:
            tensor.__class__ = LostTensor  # type: ignore[assignment]
            continue
        base = bases.get(handle.buffer)
        if base is None:
            base = bases[handle.buffer] = derive(value_of(tensor), place_of(tensor))
            become_plain(tensor, base if handle.buffer.handles == 1 else _again(base, tensor))
        else:
            become_plain(tensor, _again(base, tensor))
    for tensor in leaving:
        plain_gradient(tensor)
    return failure


def value_of(tensor: EvictableTensor) -> torch.Tensor:
    """Return the value of a resident tensor."""
    handle = tensor._handle
    storage = handle.buffer.storage
    if handle.place is not None:
        return storage.at(handle.place)
    assert storage.tensor is not None
    return storage.tensor


def _again(base: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor that lies as a tensor of the block does; it counts versions together with the base."""
    place = place_of(tensor)
    if (base.dtype, base.is_conj(), base.is_neg()) != place[3:]:
        return derive(base, place)
    with torch.enable_grad():
        return base.as_strided(*place[:3])
