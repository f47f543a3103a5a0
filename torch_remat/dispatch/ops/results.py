"""Results that a decision saves, until the end of forward decides which of them are needed.

In: what saved entries returned and wrote. Kept, until forward ends: slots with these tensors themselves, and their
version counters once their op was over. Out: slots with aliases of those that replay reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from torch_remat._compat import without_dispatch_modes
from torch_remat.dispatch.keys import UNCOUNTED, version_of
from torch_remat.dispatch.ops.entry import ONE, SEVERAL, WRITTEN, Entry
from torch_remat.dispatch.ops.meta import Meta
from torch_remat.dispatch.ops.storages import Storages, let_go
from torch_remat.dispatch.slot import Slot, placement_in
from torch_remat.policies.decision import CheckpointPolicy

# Makes the slot for a result, of op, name, tensor, decision, whether it requires a gradient, and goes unchecked.
MakeSlot = Callable[[str, str, torch.Tensor, CheckpointPolicy, bool, bool], Slot]


class Results:
    """The saved results of one forward.

    Attributes:
        unread: Entries whose changes autograd counts only once they are over.
        held: The ops with results in slots. A call has kept what it returned in aliases, from the start.
        keeps_aliases: Whether what is kept is an alias of the tensor, unless it leaves the device.
    """

    def __init__(self, storages: Storages, make_slot: MakeSlot, nested: bool, allow_mutation: bool) -> None:
        self.unread: list[Entry] = []
        self.held: list[Entry] = []
        self._storages = storages
        self._make_slot = make_slot
        self._allow_mutation = allow_mutation
        self.keeps_aliases = not (nested or allow_mutation)
        self._reshaped = False  # whether a result may have been reshaped since its op was over

    def note_one(self, entry: Entry, result: torch.Tensor) -> None:
        """Note the result of an entry of kind `ONE`."""
        entry.kept = {0: Slot.holding(result if torch.is_grad_enabled() else let_go(result))}
        self.held.append(entry)

    def note(self, entry: Entry, result: Any, written: Sequence[torch.Tensor] = ()) -> None:
        """Note what any other entry returned, and the arguments that it wrote."""
        results = result if isinstance(result, (list, tuple)) else (result,)
        is_gradient = not torch.is_grad_enabled()
        kept = {
            place: Slot.holding(let_go(tensor) if is_gradient else tensor)
            for place, tensor in enumerate(results)
            if isinstance(tensor, torch.Tensor) and place in entry.saved
        }
        entry.kept = kept | {WRITTEN - at: Slot.holding(tensor) for at, tensor in enumerate(written)}
        self.held.append(entry)
        if entry.kind != SEVERAL:
            self.unread.append(entry)

    def note_named(self, entry: Entry, place: int, tensor: torch.Tensor) -> None:
        """Note one result that is saved because of the name that it was given; a call has kept its results."""
        if entry.is_call:
            return
        if not entry.kept:
            self.held.append(entry)
        if place not in entry.kept:
            entry.kept = {**entry.kept, place: Slot.holding(tensor)}
        self._reshaped = True  # the tensor may be a view of the result

    def read_versions(self) -> None:
        """Read the version counters, now that the ops are over."""
        for entry in self.unread:
            self._storages.count_anew(entry)
            if not entry.is_call and entry.kept:
                for slot in entry.kept.values():
                    slot.version = version_of(slot.kept)
                self._reshaped = self._reshaped or entry.kind == ONE
        self.unread.clear()

    def let_go_of_graph(self) -> None:
        """At the end of forward: hold results without their `grad_fn`, since what only they reach needs no replay."""
        for entry in self.held:
            for slot in entry.kept.values():
                slot.kept = slot.kept.detach()
        self._storages.let_go_of_graph()

    def can_keep(self, entry: Entry, place: int) -> bool:
        """Whether a result is there, as the entry left it."""
        if place == WRITTEN:
            written = [slot for at, slot in entry.kept.items() if at < 0]
            return bool(written) and all(self._is_unchanged(entry, slot) for slot in written)
        slot = entry.kept.get(place)
        if slot is None or self._storages.has_writes or self._storages.aliases or slot.version == UNCOUNTED:
            return slot is not None and self._is_unchanged(entry, slot)
        return slot.kept._version == slot.version or self._allow_mutation  # what most are

    def _is_unchanged(self, entry: Entry, slot: Slot) -> bool:
        if self._allow_mutation:
            return True
        if slot.is_changed or self._storages.is_changed_by_alias(slot.kept):
            return False
        return not (self._storages.has_writes and self._storages.is_changed(entry, slot.kept))

    def is_written(self, entry: Entry, place: int) -> bool:
        """Whether a result was modified in place since: a change that autograd counted."""
        slot = entry.kept.get(place)
        return slot is not None and (slot.is_changed or self._storages.is_changed_by_alias(slot.kept))

    def undecided(self) -> Iterator[tuple[str, str, torch.Tensor, CheckpointPolicy]]:
        """Yield op, name, tensor and decision of each result, of which the end of forward decides what is needed."""
        for entry in list(self.held):
            for place, slot in entry.kept.items():
                if place >= 0:
                    yield entry.group, entry.label(place), slot.kept, decision_on(entry, place)

    def keep(self, entry: Entry, places: Collection[int]) -> None:
        """Keep these results of an entry, and what it wrote; no others."""
        slots = entry.kept.items()
        is_plain = self.keeps_aliases and not (self._storages.aliases or self._reshaped or entry.away)
        if is_plain and entry.kind == ONE and places and entry.kept[0].version != UNCOUNTED:
            return  # what most are
        entry.kept = {at: self._kept_of(entry, at, slot) for at, slot in slots if max(at, WRITTEN) in places}

    def _kept_of(self, entry: Entry, place: int, slot: Slot) -> Slot:
        tensor: torch.Tensor = slot.kept
        if (self._reshaped or entry.kind != ONE) and not entry.is_call:
            # What was given a name may be another view of what was written.
            is_written = entry.effects.returned == (0,)
            meta = entry.meta(place) if place >= 0 else entry.results if is_written else None
            if type(meta) is Meta and not meta.describes(tensor):
                # It was reshaped since, or it is a view that was given a name: the name is that of the whole.
                with without_dispatch_modes(), torch.no_grad():
                    slot.kept = tensor = placement_in(meta).seen_in(tensor)
        if not self.keeps_aliases or entry.away or (slot.version == UNCOUNTED and not entry.is_call):
            decision, label = decision_on(entry, place), entry.label(max(place, WRITTEN))
            slot = self._make_slot(entry.group, label, tensor, decision, False, self._allow_mutation)
        if self.keeps_aliases and (aliases := self._storages.aliases_of(tensor)):
            slot.watch(aliases)
        return slot


def decision_on(entry: Entry, place: int) -> CheckpointPolicy:
    """Return where a saved result is kept."""
    return CheckpointPolicy.OFFLOAD if max(place, WRITTEN) in entry.away else CheckpointPolicy.SAVE
