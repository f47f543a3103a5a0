"""Results that a decision saves, until the end of forward decides which of them are needed.

In: what saved entries returned and wrote. Kept, until forward ends: these tensors, and their version counters once
their op was over. Out: slots for those that replay reads.
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
        keeps_aliases: Whether what is kept is an alias of the tensor, unless it leaves the device.
    """

    def __init__(self, storages: Storages, make_slot: MakeSlot, nested: bool, allow_mutation: bool) -> None:
        self.unread: list[Entry] = []
        self._storages = storages
        self._make_slot = make_slot
        self._allow_mutation = allow_mutation
        self.keeps_aliases = not (nested or allow_mutation)
        self._reshaped = False  # whether a result may have been reshaped since its op was over
        # Of each entry the results by their places, and from -1 downwards the arguments that it wrote, each with its
        # version when the op was over.
        self._held: dict[Entry, dict[int, tuple[torch.Tensor, int]]] = {}

    def note_one(self, entry: Entry, result: torch.Tensor) -> None:
        """Note the result of an entry of kind `ONE`."""
        result = result if torch.is_grad_enabled() else let_go(result)
        self._held[entry] = {0: (result, UNCOUNTED if result.is_inference() else result._version)}

    def note(self, entry: Entry, result: Any, written: Sequence[torch.Tensor] = ()) -> None:
        """Note what any other entry returned, and the arguments that it wrote."""
        results = result if isinstance(result, (list, tuple)) else (result,)
        is_gradient = not torch.is_grad_enabled()
        held = self._held[entry] = {
            place: (let_go(tensor) if is_gradient else tensor, version_of(tensor))
            for place, tensor in enumerate(results)
            if isinstance(tensor, torch.Tensor) and place in entry.saved
        }
        for at, tensor in enumerate(written):
            held[WRITTEN - at] = tensor, version_of(tensor)
        if entry.kind != SEVERAL:
            self.unread.append(entry)

    def note_named(self, entry: Entry, place: int, tensor: torch.Tensor) -> None:
        """Note one result that is saved because of the name that it was given; a call has kept its results."""
        if entry.is_call:
            return
        self._held.setdefault(entry, {}).setdefault(place, (tensor, version_of(tensor)))
        self._reshaped = True  # the tensor may be a view of the result

    def read_versions(self) -> None:
        """Read the version counters, now that the ops are over."""
        for entry in self.unread:
            self._storages.count_anew(entry)
            if (held := self._held.get(entry)) is not None:
                self._held[entry] = {place: (tensor, version_of(tensor)) for place, (tensor, _) in held.items()}
                self._reshaped = self._reshaped or entry.kind == ONE
        self.unread.clear()

    def let_go_of_graph(self) -> None:
        """At the end of forward: hold results without their `grad_fn`, since what only they reach needs no replay."""
        for held in self._held.values():
            for place, (tensor, version) in held.items():
                held[place] = tensor.detach(), version
        self._storages.let_go_of_graph()

    def can_keep(self, entry: Entry, place: int) -> bool:
        """Whether a result is there, as the entry left it."""
        if entry.is_call:
            slot = entry.kept.get(place)
            return slot is not None and (self._allow_mutation or self._is_unchanged(entry, slot.kept, slot.version))
        held = self._held.get(entry)
        if held is None or self._allow_mutation:
            return held is not None
        if place != WRITTEN:
            if place not in held:
                return False
            tensor, version = held[place]
            if self._storages.has_writes or self._storages.aliases or version == UNCOUNTED:
                return self._is_unchanged(entry, tensor, version)
            return tensor._version == version  # what most are
        written = [one for at, one in held.items() if at < 0]
        return bool(written) and all(self._is_unchanged(entry, *one) for one in written)

    def _is_unchanged(self, entry: Entry, tensor: torch.Tensor, version: int) -> bool:
        if (version != UNCOUNTED and tensor._version != version) or self._storages.is_changed_by_alias(tensor):
            return False
        return not (self._storages.has_writes and self._storages.is_changed(entry, tensor))

    def is_written(self, entry: Entry, place: int) -> bool:
        """Whether a result was modified in place since: a change that autograd counted."""
        if entry.is_call:
            slot = entry.kept.get(place)
            return slot is not None and (slot.is_changed or self._storages.is_changed_by_alias(slot.kept))
        tensor, version = self._held.get(entry, {}).get(place, (None, 0))
        return tensor is not None and (version_of(tensor) != version or self._storages.is_changed_by_alias(tensor))

    def undecided(self) -> Iterator[tuple[str, str, torch.Tensor, CheckpointPolicy]]:
        """Yield op, name, tensor and decision of each result, of which the end of forward decides what is needed."""
        for entry, held in list(self._held.items()):
            for place, (tensor, _) in held.items():
                if place >= 0:
                    yield entry.group, entry.label(place), tensor, decision_on(entry, place)

    def keep(self, entry: Entry, places: Collection[int]) -> None:
        """Keep results of an entry, and what it wrote, in slots; of a call those that it has kept so far."""
        if entry.is_call:
            slots = entry.kept.items()
            entry.kept = {place: self._kept_of(entry, place, slot) for place, slot in slots if place in places}
            return
        held = self._held[entry]
        if entry.kind == ONE and self.keeps_aliases and not (self._reshaped or entry.away):
            alias = held[0][0]
            entry.kept = {0: Slot.of_alias(alias, self._storages.aliases_of(alias))}
            return
        kept = {place: self._slot(entry, place, one[0]) for place, one in held.items() if max(place, WRITTEN) in places}
        entry.kept = {**entry.kept, **kept}

    def _kept_of(self, call: Entry, place: int, slot: Slot) -> Slot:
        if not self.keeps_aliases or call.away:
            decision = decision_on(call, place)
            return self._make_slot(call.group, call.label(place), slot.kept, decision, False, self._allow_mutation)
        if aliases := self._storages.aliases_of(slot.kept):
            slot.watch(aliases)
        return slot

    def _slot(self, entry: Entry, place: int, tensor: torch.Tensor) -> Slot:
        tensor = tensor.detach()
        # What was given a name may be another view of what was written.
        is_written = entry.effects.returned == (0,)
        meta = entry.meta(place) if place >= 0 else entry.results if is_written else None
        if type(meta) is Meta and not meta.describes(tensor):
            # It was reshaped since, or it is a view that was given a name: the name is that of the whole.
            with without_dispatch_modes(), torch.no_grad():
                tensor = placement_in(meta).seen_in(tensor)
        label = entry.label(max(place, WRITTEN))
        slot = self._make_slot(entry.group, label, tensor, decision_on(entry, place), False, self._allow_mutation)
        if self.keeps_aliases and (aliases := self._storages.aliases_of(tensor)):
            slot.watch(aliases)
        return slot


def decision_on(entry: Entry, place: int) -> CheckpointPolicy:
    """Return where a saved result is kept."""
    return CheckpointPolicy.OFFLOAD if max(place, WRITTEN) in entry.away else CheckpointPolicy.SAVE
