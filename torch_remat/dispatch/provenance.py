"""Where a region's tensors come from: a skipped op, a recomputed one, or anything else.

In: the outputs of ops, in forward. Kept, until forward ends: weak references. Out: whether replay will have a tensor.

A tensor is known by itself, by the tensor that it is a view of, or (a detached alias has no such link) by its storage.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.dispatch.record import Record, offset_in_bytes


class Made(NamedTuple):
    """An op's output."""

    record: Record
    output: int
    version: int
    offset_in_bytes: int
    tensor: ref[torch.Tensor]

    def replayed_as(self, tensor: torch.Tensor) -> bool:
        """Whether replay will have a tensor, an output or an alias of it, with the values that it has now."""
        return self.record.policy is CheckpointPolicy.RECOMPUTE and tensor._version == self.version


class Provenance:
    """The outputs of one region's ops, by tensor and by storage."""

    __slots__ = ("_storages", "_tensors")

    def __init__(self) -> None:
        self._tensors: dict[int, Made] = {}
        self._storages: dict[int, tuple[StorageWeakRef, Made]] = {}

    def note(self, record: Record, outputs: tuple[torch.Tensor, ...]) -> None:
        """Note the outputs of an op."""
        for index, tensor in enumerate(outputs):
            known = self._tensors.get(id(tensor))
            if known is not None and known.tensor() is tensor:
                continue  # an input that is returned as it is
            made = Made(record, index, tensor._version, offset_in_bytes(tensor), ref(tensor))
            self._tensors[id(tensor)] = made
            if tensor._base is None:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), made)

    def maker_of(self, tensor: torch.Tensor) -> Made | None:
        """Return the op's output that a tensor is, or is a view or an alias of; None for all other tensors."""
        made = self._tensors.get(id(tensor))
        if made is not None and made.tensor() is tensor:
            return made
        base = tensor._base
        if base is not None:
            made = self._tensors.get(id(base))
            if made is not None and made.tensor() is base:
                return made
        if not self._storages:
            return None
        reference, found = self._storages.get(tensor.untyped_storage()._cdata, (None, None))
        # The weak reference keeps the address from being used again, so a live one is the same storage.
        return found if reference is not None and not reference.expired() else None
