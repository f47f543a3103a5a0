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
from torch import UntypedStorage

from torch_remat._compat import node_number
from torch_remat.dispatch.log.record import Record
from torch_remat.dispatch.placeholder import Placeholder, new_tuple
from torch_remat.policies.decision import CheckpointPolicy


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
    """The outputs of one region's ops, by tensor and by storage.

    Args:
        region: The region.
    """

    __slots__ = ("_bases", "_region", "_shared", "_storages", "_tensors", "_unindexed")

    def __init__(self, region: Any) -> None:
        self._region = region
        self._tensors: dict[int, Made] = {}
        # By the storage's address, with the storage, which tells whether another has the address now.
        self._storages: dict[int, tuple[ref[UntypedStorage], Made]] = {}
        # Outputs of skipped ops that are views of other tensors, by the storage that they share.
        self._shared: dict[int, tuple[ref[UntypedStorage], Made]] = {}
        self._bases: dict[int, ref[torch.Tensor]] = {}  # what they are views of
        # Outputs of recomputed ops that are not in `_storages` yet: few are ever looked for there.
        self._unindexed: list[Made] = []

    def __bool__(self) -> bool:
        """Whether an output of an op is known."""
        return bool(self._tensors)

    def note_recomputed(self, record: Record, outputs: tuple[torch.Tensor, ...], inputs: tuple[Any, ...]) -> None:
        """Note the outputs of a RECOMPUTE op; one that is an input, returned as it is, stays what it was."""
        for index, tensor in enumerate(outputs):
            for value in inputs:
                if value is tensor:
                    break
            else:
                made = _made(record, index, tensor)
                self._tensors[id(tensor)] = made
                if tensor._base is None:
                    self._unindexed.append(made)

    def note_skipped(self, record: Record, outputs: tuple[torch.Tensor, ...]) -> None:
        """Note the outputs of an op that replay skips; it will not have them even where they are inputs."""
        for index, tensor in enumerate(outputs):
            self._tensors[id(tensor)] = made = _made(record, index, tensor)
            base = tensor._base
            _index(self._storages if base is None else self._shared, tensor, made)
            if base is not None:
                self._bases[id(base)] = ref(base)

    def maker_of(self, tensor: torch.Tensor) -> Made | None:
        """Return the op's output that a tensor is, or is a view or an alias of; None for all other tensors.

        What shares a storage with a view that a skipped op returned may be a view or an alias of that: it counts as
        one, so that it is kept, unless it is the tensor that was viewed.
        """
        made = self._tensors.get(id(tensor))
        if made is not None and made.tensor() is tensor:
            return made
        if self._shared and (shared := _look_up(self._shared, tensor)) is not None:
            viewed = self._bases.get(id(tensor))
            if (viewed is None or viewed() is not tensor) and not self._is_older(tensor):
                return shared
        base = tensor._base
        if base is not None:
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

    def _is_older(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was there before the region: then none of its ops made it.

        In the replay of a region around this one the same tensor may be no view.
        """
        inputs, node = self._region.inputs, tensor.grad_fn
        known = inputs is not None and inputs.contains(tensor)
        return known or (node is not None and node_number(node) < self._region.first_number)


def _made(record: Record, index: int, tensor: torch.Tensor) -> Made:
    offset = tensor.storage_offset()
    if offset:
        offset *= tensor.dtype.itemsize
    try:
        version = tensor._version
    except RuntimeError:
        version = -1  # made in inference mode, where nothing is counted, and nothing saved either
    made: Made = new_tuple(Made, (record, index, version, offset, ref(tensor)))
    return made


def _index(storages: dict[int, tuple[ref[UntypedStorage], Made]], tensor: torch.Tensor, made: Made) -> None:
    if isinstance(tensor, Placeholder):
        return  # in the replay of a region around this one; it has no storage
    storage = tensor.untyped_storage()
    storages[storage._cdata] = (ref(storage), made)


def _look_up(storages: dict[int, tuple[ref[UntypedStorage], Made]], tensor: torch.Tensor) -> Made | None:
    if isinstance(tensor, Placeholder):
        return None
    storage = tensor.untyped_storage()
    known, made = storages.get(storage._cdata, (None, None))
    return made if known is not None and known() is storage else None
