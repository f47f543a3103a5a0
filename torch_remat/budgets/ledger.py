"""Bytes by storage, each counted once, however many holders and inputs share it.

In: the storages that regions begin or cease to hold, by address. Kept: counts and sizes; no storage. Out: the sum.

An address stands for a storage as long as something that was added holds it. Whoever lets go of a storage without
saying so has to be looked up before the sum is believed: see `KeptRegion.refresh`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count

import torch
from torch import Tensor

from torch_remat._compat import USES_BY_PYTHON, storage_key, storage_uses
from torch_remat.dispatch.placeholder import is_placeholder

Keys = int | tuple[int, ...]  # addresses of what is counted for a tensor: 0 for none; several for a subclass
_next_number = count(-1, -1).__next__


def each(keys: Keys) -> tuple[int, ...]:
    """Return the addresses."""
    return keys if isinstance(keys, tuple) else (keys,) if keys else ()


class Ledger:
    """Counts how many times each storage is held, and its bytes.

    Args:
        device_type: The type of the devices whose memory counts.

    Attributes:
        counts: How many holders and inputs hold a storage, by its address.
        sizes: Its bytes.
        total: The sum of these.
        settle: Counts what the region keeps that may keep without asking, and ends that; None if no region may.
    """

    __slots__ = ("counts", "device_type", "settle", "sizes", "total")

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.counts: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.total = 0
        self.settle: Callable[[], None] | None = None

    def settled(self) -> int:
        """Return the sum, with what the region keeps that runs and may keep without asking, which ends."""
        if self.settle is not None:
            settle, self.settle = self.settle, None
            settle()
        return self.total

    def add(self, key: int, tensor: Tensor) -> int:
        """Count a storage that a tensor is in; return its bytes if it is new."""
        size = tensor.untyped_storage().nbytes()  # from now on it has a Python object: see `is_held_by`
        if key in self.counts:
            self.counts[key] += 1
            if tensor.device.type == self.device_type:
                self.resize(key, size)
            return 0
        self.counts[key] = 1
        size = self.sizes[key] = size if tensor.device.type == self.device_type else 0
        self.total += size
        return size

    def add_bytes(self, size: int) -> int:
        """Count bytes whose storages are not known; return what stands for their address."""
        key = _next_number()
        self.counts[key], self.sizes[key] = 1, size
        self.total += size
        return key

    def resize(self, key: int, size: int) -> None:
        """Note the bytes of a storage that is counted: what was at its address may be gone without having said so."""
        self.total += size - self.sizes[key]
        self.sizes[key] = size

    def is_held_by(self, key: int, count: int) -> bool:
        """Whether so many holders, and nothing else, hold a storage, which must be alive."""
        return count == self.counts.get(key) and storage_uses(key) == count + USES_BY_PYTHON

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

    def remove_all(self, found: Sequence[Keys]) -> None:
        """Do that for many."""
        counts, sizes = self.counts, self.sizes
        for keys in found:
            for key in each(keys):
                if left := counts[key] - 1:
                    counts[key] = left
                else:
                    del counts[key]
                    self.total -= sizes.pop(key)


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
