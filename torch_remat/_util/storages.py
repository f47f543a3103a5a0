"""Bytes by storage, each counted once, however many holders and inputs share it; and the storages of a value.

In: the storages that regions begin or cease to hold, by address. Kept: counts and sizes; no storage. Out: the sum.

An address stands for a storage as long as something that was added holds it. Code that lets go of a storage without
saying so has to be looked up before the sum is believed: see `KeptRegion.refresh`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_remat._compat import PYTREE_NAMESPACE, adopt_pytree_node, optree, storage_key
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.offload.sender import Offloaded

_SIMPLE = (Tensor, str, bytes, int, float, complex, type(None), type)


class Ledger:
    """Counts how many times each storage is held, and its bytes.

    Args:
        device_type: The type of the devices whose memory `add` counts.

    Attributes:
        counts: How many holders and inputs hold a storage, by its address.
        sizes: Its bytes.
        total: The sum of these.
    """

    __slots__ = ("counts", "device_type", "sizes", "total")

    def __init__(self, device_type: str = "") -> None:
        self.device_type = device_type
        self.counts: dict[Any, int] = {}
        self.sizes: dict[Any, int] = {}
        self.total = 0

    def add(self, key: int, tensor: Tensor) -> int:
        """Count a storage that a tensor is in; return its bytes if it is new."""
        size = tensor.untyped_storage().nbytes() if tensor.device.type == self.device_type else 0
        if key in self.counts:  # what was at its address may be gone without having said so
            self.counts[key] += 1
            self.total += size - self.sizes[key]
            self.sizes[key] = size
            return 0
        self.counts[key], self.sizes[key] = 1, size
        self.total += size
        return size

    def remove(self, key: int) -> int:
        """Count it once less; return its bytes if that was the last time."""
        left = self.counts[key] - 1
        if left:
            self.counts[key] = left
            return 0
        del self.counts[key]
        size = self.sizes.pop(key)
        self.total -= size
        return size


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with storages that a tensor consists of: itself, or what a subclass or a sparse one holds."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:
        try:
            storage_key(tensor)
        except (NotImplementedError, RuntimeError, ValueError):  # inside of a transform of functions
            return []
        return [tensor]
    if is_placeholder(tensor):
        return []
    found: Iterable[object] = ()
    if hasattr(tensor, "__tensor_flatten__"):
        found = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    elif tensor.layout is torch.sparse_coo:
        found = (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        found = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        found = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            storage_key(tensor)
            tensor.untyped_storage()
            return [tensor]
    return [part for one in found if isinstance(one, Tensor) for part in parts_of(one)]


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages behind a tensor: of its parts, if it is sparse or a wrapper around others."""
    return [part.untyped_storage() for part in parts_of(tensor)]


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield all values inside containers, or the value itself if it is no container. Each container is entered once.

    Containers are those of any type, dataclasses, and what is registered with torch's pytrees. Objects of other classes
    are not entered: their attributes may lead anywhere.
    """
    waiting, entered = [value], {}
    while waiting:
        one = waiting.pop()
        parts = _parts(one)
        if parts is None:
            yield one
        elif id(one) not in entered:
            entered[id(one)] = one
            waiting += parts[::-1]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def _parts(value: Any) -> Sequence[Any] | None:
    if isinstance(value, _SIMPLE):
        return None
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, Set, deque)):
        return list(value)
    if isinstance(value, SimpleNamespace):
        return list(vars(value).values())
    if is_dataclass(value):
        return [getattr(value, field.name, None) for field in fields(value)]
    adopt_pytree_node(type(value))
    found, spec = optree.tree_flatten(value, namespace=PYTREE_NAMESPACE)
    return None if spec.is_leaf() else found


class Memory(NamedTuple):
    """Memory that is counted once, however many tensors are in it."""

    key: Hashable  # its identity, as long as the owner lives
    owner: Any  # a storage, or what stands for one that is away
    bytes: int


class Piece(NamedTuple):
    """A kept tensor, or one that is away."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str  # where it is: a device, or the kind of offloader that has it
    memory: list[Memory]  # what it is in
    offloaded: bool = False  # whether it lies elsewhere than where it was made
    # Why it is there, too, although it is offloaded; another piece stands for that.
    besides: Literal["not gone yet", "brought back"] | None = None
    shard: bool = False  # whether it is what this process has of a DTensor


def pieces_in(value: Any, made_on: torch.device | None = None) -> Iterator[Piece]:
    """Yield the tensors in a value; what lies elsewhere than where it was made counts as offloaded."""
    if isinstance(value, Offloaded):
        yield from _pieces_of_away(value)
        return
    leaves = list(leaves_in(value))
    if made_on is None:
        made_on = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            moved = made_on is not None and leaf.device != made_on
            shard = hasattr(leaf, "to_local")
            shape = next(iter(parts_of(leaf)), leaf).shape if shard else leaf.shape
            yield Piece(tuple(shape), leaf.dtype, str(leaf.device), memory_of(leaf), moved, shard=shard)


def _pieces_of_away(away: Offloaded) -> Iterator[Piece]:
    copy, back = away.transfer.copy, away.transfer.value
    shape, dtype, here = tuple(away.placement.shape), away.placement.dtype, copy.told("still_here")
    if not isinstance(here, Tensor):
        here = None
    if here is not None and copy.told("stays") is True:
        yield Piece(shape, dtype, str(here.device), memory_of(here))
        return
    offloader = type(copy.offloader).__name__
    yield Piece(shape, dtype, offloader, [Memory(("away", id(copy)), copy, copy.bytes)], offloaded=True)
    if here is not None:
        yield Piece(shape, dtype, str(here.device), memory_of(here), besides="not gone yet")
    if back is not None:
        yield Piece(shape, dtype, str(back.device), memory_of(back), besides="brought back")


def memory_of(tensor: Tensor) -> list[Memory]:
    """Return the memory of a tensor."""
    return [Memory(storage._cdata, storage, storage.nbytes()) for storage in storages_of(tensor)]


def viewed_parameter(tensor: Tensor) -> torch.nn.Parameter | None:
    """Return the parameter that a tensor is, or is a view of; None for others, detached parameters among them."""
    owner = tensor if tensor._base is None else tensor._base
    return owner if isinstance(owner, torch.nn.Parameter) else None
