"""Where a region's tensors come from: a skipped op, a recomputed one, or anything else.

In: the outputs of ops, in forward. Kept, until forward ends: weak references. Out: whether replay will have a tensor.

A tensor is known by itself, by the tensor that it is a view of, or by its storage: a detached alias has no other link.
What is taken for an output of a skipped op by mistake is kept, which costs memory; the other mistake is an error in
replay.
"""

from __future__ import annotations

from typing import Any, NamedTuple
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

    __slots__ = ("_shared", "_storages", "_tensors", "_unindexed")

    def __init__(self) -> None:
        self._tensors: dict[int, Made] = {}
        # By the storage's address. A weak reference keeps the address from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, Made]] = {}
        # Outputs of skipped ops that are views of other tensors, by the storage that they share.
        self._shared: dict[int, tuple[StorageWeakRef, Made]] = {}
        # Outputs of recomputed ops that are not in `_storages` yet: few are ever looked for there.
        self._unindexed: list[Made] = []

    def note(self, record: Record, outputs: tuple[torch.Tensor, ...], inputs: tuple[Any, ...]) -> None:
        """Note the outputs of an op.

        One that is an input, returned as it is, stays what it was, unless the op is skipped: then replay has neither.
        """
        skipped = record.policy is CheckpointPolicy.SAVE
        for index, tensor in enumerate(outputs):
            if not skipped and any(tensor is given for given in inputs):
                continue
            made = Made(record, index, tensor._version, offset_in_bytes(tensor), ref(tensor))
            self._tensors[id(tensor)] = made
            if skipped:
                _index(self._storages if tensor._base is None else self._shared, tensor, made)
            elif tensor._base is None:
                self._unindexed.append(made)

    def maker_of(self, tensor: torch.Tensor) -> Made | None:
        """Return the op's output that a tensor is, or is a view or an alias of; None for all other tensors.

        A view that shares a storage with a view that a skipped op returned may be a view of that: it counts as one, so
        that it is kept.
        """
        made = self._tensors.get(id(tensor))
        if made is not None and made.tensor() is tensor:
            return made
        base = tensor._base
        if base is not None:
            if self._shared and (shared := _look_up(self._shared, tensor)) is not None:
                return shared
            made = self._tensors.get(id(base))
            if made is not None and made.tensor() is base:
                return made
        if not self._storages and not self._unindexed:
            return None
        for made in self._unindexed:
            output = made.tensor()
            if output is not None:
                _index(self._storages, output, made)
        self._unindexed.clear()
        return _look_up(self._storages, tensor)


def _index(storages: dict[int, tuple[StorageWeakRef, Made]], tensor: torch.Tensor, made: Made) -> None:
    storage = tensor.untyped_storage()
    storages[storage._cdata] = (StorageWeakRef(storage), made)


def _look_up(storages: dict[int, tuple[StorageWeakRef, Made]], tensor: torch.Tensor) -> Made | None:
    reference, made = storages.get(tensor.untyped_storage()._cdata, (None, None))
    return made if reference is not None and not reference.expired() else None
