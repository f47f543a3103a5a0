"""Copies of tensors from outside, taken just before a region with a policy overwrites them.

In: each op of forward that is about to write. Kept: a copy of the storage of a tensor from outside, if an op has read
it that may run again in replay; past the end of forward, if it does. Out: in replay, the op's argument as it was.

The whole storage is copied: an op may have read any part of it. Only what is read before it is written in one region
costs this; a buffer that is only written, or read after, costs nothing.

An inner region's replay reads for itself: what one has read counts only if the same one writes it, and finds it again
as it was: under a policy, or where it is a buffer that its replay puts back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch

from torch_remat._compat import without_dispatch_modes
from torch_remat.dispatch.log.entry import Entry
from torch_remat.dispatch.log.meta import key_of
from torch_remat.dispatch.log.results import MakeSlot, Undecided
from torch_remat.dispatch.log.slot import COPIED_BYTES, Shapes, Slot
from torch_remat.dispatch.log.storages import Storages
from torch_remat.dispatch.placeholder import Placeholder, geometry_of
from torch_remat.offload.transfer import Placement, Span, flattened
from torch_remat.policies.decision import CheckpointPolicy


class Earlier:
    """The copies of one forward."""

    __slots__ = ("_copies", "_entries", "_inner", "_readers", "_seen", "_storages")

    def __init__(self, storages: Storages, entries: Sequence[Entry]) -> None:
        self._storages = storages
        self._entries = entries
        self._seen = 0  # how many entries are among the readers
        # By the storage from outside that it read: each entry since the last change, which of its tensors it was, and
        # the inner region in which it ran.
        self._readers: dict[int, list[tuple[Entry, int, Any]]] = {}
        self._inner: list[Any] = [None]  # the inner regions that run
        self._copies: list[tuple[torch.Tensor, list[tuple[Entry, int]], Shapes]] = []

    def enter(self, region: Any) -> None:
        """Note that an inner region begins."""
        self._note_readers()
        self._inner.append(region)

    def leave(self) -> None:
        """Note that it has ended."""
        self._note_readers()
        if (buffers := self._inner[-1].buffers) is not None and self._storages.has_writes:
            self.note_left(buffers.tensors())
        self._inner.pop()

    def note_writes(self, written: Sequence[torch.Tensor]) -> None:
        """Copy what an op is about to write, where that comes from outside and was read."""
        outside = [tensor for tensor in written if self._storages.is_foreign(key_of(tensor))]
        if not outside:
            return
        self._note_readers()
        for tensor in outside:
            read = self._readers.pop(key_of(tensor), ())
            readers = [(entry, at) for entry, at, inner in read if inner is None or self._is_right(inner, tensor)]
            if readers and _has_memory(tensor) and not (_is_large(tensor) and all(map(_is_left_out, readers))):
                # A region around this one sees the copy made, so that in its replay, too, it is of what was.
                whole = Span(0, tensor.untyped_storage().nbytes())
                shapes = [(ref(one), geometry_of(one)) for one in (tensor, tensor._base) if one is not None]
                self._copies.append((flattened(tensor, whole).clone(), readers, shapes))

    def _is_right(self, inner: Any, tensor: torch.Tensor) -> bool:
        """Whether an inner region that has read a tensor finds it again in its own replay."""
        found: bool = inner is self._inner[-1] and inner.finds_again(tensor)
        return found

    def note_left(self, buffers: Iterable[torch.Tensor]) -> None:
        """At the end of forward: copy small buffers that it has changed and then read, since they may change again."""
        changed = [buffer for buffer in buffers if self._storages.has_changed(buffer)]
        self.note_writes([buffer for buffer in changed if _has_memory(buffer) and not _is_large(buffer)])

    def _note_readers(self) -> None:
        """Note what the entries since the last call have read, all of them in the inner region that runs."""
        for entry in self._entries[self._seen :]:
            if entry.versions and not (entry.is_view() or entry.outside):
                for at, _ in entry.versions:
                    self._readers.setdefault(entry.reads[at], []).append((entry, at, self._inner[-1]))
        self._seen = len(self._entries)

    def keep(self, make_slot: MakeSlot, for_all: bool) -> None:
        """At the end of forward: keep what an entry that replay runs will read, or all, if any may run."""
        for copy, readers, shapes in self._copies:
            slot: Slot | None = None
            for entry, at in readers:
                if entry.run or for_all:
                    slot = slot or make_slot(
                        entry.group, earlier_label(entry, at), copy, CheckpointPolicy.SAVE, False, False
                    )
                    slot.shapes = shapes
                    entry.earlier = {**entry.earlier, at: slot}
        self._copies = []

    def undecided(self) -> Iterator[Undecided]:
        """Yield op, name, tensor and decision of each copy."""
        for copy, readers, _ in self._copies:
            yield readers[0][0].group, earlier_label(*readers[0]), copy, CheckpointPolicy.SAVE


def earlier_label(entry: Entry, at: int) -> str:
    """Return the name of what one of an entry's tensors was before it was changed."""
    return f"{entry.label(0)} input {at}"


def is_reshaped(tensor: torch.Tensor, slot: Slot) -> bool:
    """Whether a tensor, or what it is a view of, was given another shape in place since its storage was copied."""
    found = {id(one): geometry_of(one) for one in (tensor, tensor._base) if one is not None}
    return any(found.get(id(known()), shape) != shape for known, shape in slot.shapes)


def as_it_was(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it was when its storage was copied."""
    with without_dispatch_modes(), torch.no_grad():
        return Placement.of(tensor).seen_in(copy)


def _is_left_out(reader: tuple[Entry, int]) -> bool:
    """Whether replay leaves an entry out, as all that it returns is saved, unless it will run inside of forward."""
    entry = reader[0]
    return not entry.run and entry.saved.issuperset(range(entry.count_of_results))


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > COPIED_BYTES


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of its own to copy; wrapper subclasses have none."""
    if isinstance(tensor, Placeholder) or tensor.layout is not torch.strided:
        return False
    return tensor.numel() == 0 or tensor.data_ptr() != 0
