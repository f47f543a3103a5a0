"""Results that a decision saves, until the end of forward tells which of them are needed.

In: what saved entries returned and wrote. Kept, until forward ends: these tensors, and their version counters once
their op was over. Out: slots for those that replay reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from torch_remat._compat import without_dispatch_modes
from torch_remat.dispatch.log.entry import CALL, ONE, WRITTEN, Entry
from torch_remat.dispatch.log.meta import Meta
from torch_remat.dispatch.log.slot import UNCOUNTED, Slot, version_of
from torch_remat.dispatch.log.storages import Storages
from torch_remat.dispatch.views import in_same_storage
from torch_remat.policies.decision import CheckpointPolicy

Undecided = tuple[str, str, torch.Tensor, CheckpointPolicy]  # op, name, tensor and decision
MakeSlot = Callable[[str, str, torch.Tensor, CheckpointPolicy, bool, bool], Slot]


class _Held:
    """The results of one entry.

    Attributes:
        tensors: The results by place.
        versions: Their version counters when the op was over.
        written: The arguments that it wrote.
        written_versions: Their version counters likewise.
    """

    __slots__ = ("tensors", "versions", "written", "written_versions")

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.versions: dict[int, int] = {}
        self.written: list[torch.Tensor] = []
        self.written_versions: list[int] = []


class Results:
    """The saved results of one forward.

    Args:
        storages: The storages of the forward.
        make_slot: Makes the slot for a result: ``make_slot(op, name, tensor, decision, requires_grad, unchecked)``.
        nested: Whether there are saved-tensor hooks around the region.
        allow_mutation: Whether a kept tensor may be changed in place.

    Attributes:
        unread: Entries whose changes autograd counts only once they are over.
    """

    __slots__ = (
        "_aliases", "_allow_mutation", "_held", "_make_slot", "_nested", "_ones", "_reshaped", "_storages", "unread"
    )  # fmt: skip

    def __init__(self, storages: Storages, make_slot: MakeSlot, nested: bool, allow_mutation: bool) -> None:
        self.unread: list[Entry] = []
        self._storages = storages
        self._make_slot = make_slot
        self._nested = nested
        self._allow_mutation = allow_mutation
        self._ones: dict[Entry, tuple[torch.Tensor, int]] = {}  # those of kind ONE, what most are
        self._held: dict[Entry, _Held] = {}
        self._reshaped = False  # whether one of them may have been reshaped since its op was over
        self._aliases: dict[Entry, torch.Tensor] = {}  # of results that autograd has saved, without their history

    def note_one(self, entry: Entry, result: torch.Tensor) -> None:
        """Note the result of an entry of kind `ONE`."""
        self._ones[entry] = result, UNCOUNTED if result.is_inference() else result._version

    def note(self, entry: Entry, result: Any, written: Sequence[torch.Tensor] = ()) -> None:
        """Note what any other entry returned, and the arguments that it wrote."""
        held = self._held[entry] = _Held()
        results = result if isinstance(result, (list, tuple)) else (result,)
        for place, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor) and place in entry.saved:
                held.tensors[place] = tensor
        held.written += written
        if entry.kind == CALL:
            held.versions = {place: version_of(tensor) for place, tensor in held.tensors.items()}
        else:
            self.unread.append(entry)

    def note_named(self, entry: Entry, place: int, tensor: torch.Tensor) -> None:
        """Note one result that is saved because of the name that it was given."""
        if entry in self._ones:
            return
        held = self._held.setdefault(entry, _Held())
        if place == WRITTEN:
            if not held.written:
                held.written, held.written_versions = [tensor], [version_of(tensor)]
        else:
            held.tensors[place] = tensor
            held.versions[place] = version_of(tensor)

    def note_alias(self, entry: Entry, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """Note an alias that autograd keeps of the result of an entry: the slot may keep the same."""
        one = self._ones.get(entry)
        if one is not None and one[0] is tensor:
            self._aliases[entry] = alias

    def read_versions(self) -> None:
        """Read the version counters, now that the ops are over."""
        for entry in self.unread:
            if (one := self._ones.get(entry)) is not None:
                self._ones[entry] = one[0], version_of(one[0])
                self._reshaped = True
            elif (held := self._held.get(entry)) is not None:
                held.versions = {place: version_of(tensor) for place, tensor in held.tensors.items()}
                held.written_versions = [version_of(tensor) for tensor in held.written]
        self.unread = []

    def let_go_of_graph(self) -> None:
        """At the end of forward: hold results without their history, since what only they reach needs no replay."""
        for entry, (tensor, version) in self._ones.items():
            alias = self._aliases.get(entry)
            self._ones[entry] = tensor.detach() if alias is None else alias, version
        for held in self._held.values():
            held.tensors = {place: tensor.detach() for place, tensor in held.tensors.items()}
            held.written = [tensor.detach() for tensor in held.written]
        self._aliases = {}
        self._storages.let_go_of_graph()

    def can_keep(self, entry: Entry, place: int) -> bool:
        """Whether a result is there, as the entry left it."""
        if self._allow_mutation:
            return entry in self._ones or entry in self._held
        if (one := self._ones.get(entry)) is not None:
            tensor, version = one
            return version_of(tensor) == version and not self._storages.is_changed(entry, tensor)
        held = self._held.get(entry)
        if held is None:
            return False
        if place == WRITTEN:
            return bool(held.written) and all(map(self._is_as(entry), held.written, held.written_versions))
        return place in held.tensors and self._is_as(entry)(held.tensors[place], held.versions.get(place, 0))

    def is_written(self, entry: Entry, place: int) -> bool:
        """Whether a result was changed in place since: a change that autograd counted."""
        if (one := self._ones.get(entry)) is not None:
            return version_of(one[0]) != one[1]
        held = self._held.get(entry)
        if held is None or place not in held.tensors:
            return False
        return version_of(held.tensors[place]) != held.versions.get(place, 0)

    def _is_as(self, entry: Entry) -> Callable[[torch.Tensor, int], bool]:
        def is_as(tensor: torch.Tensor, version: int) -> bool:
            return version_of(tensor) == version and not self._storages.is_changed(entry, tensor)

        return is_as

    def drop(self, entries: Iterable[Entry], kept: Sequence[tuple[Entry, Collection[int]]]) -> None:
        """Let go of all that some entries hold but what is named."""
        places_of = dict(kept)
        for entry in entries:
            places = places_of.get(entry, ())
            if not places:
                self._ones.pop(entry, None)
            if (held := self._held.get(entry)) is not None:
                held.tensors = {place: tensor for place, tensor in held.tensors.items() if place in places}
                if WRITTEN not in places:
                    held.written = []
                if not (held.tensors or held.written):
                    del self._held[entry]

    def undecided(self) -> Iterator[Undecided]:
        """Yield op, name, tensor and decision of each result."""
        for entry, (tensor, _) in list(self._ones.items()):
            yield entry.group, entry.label(0), tensor, decision_on(entry, 0)
        for entry, held in list(self._held.items()):
            for place, tensor in held.tensors.items():
                yield entry.group, entry.label(place), tensor, decision_on(entry, place)

    def keep(self, entry: Entry, places: Collection[int]) -> None:
        """Keep results of an entry, and what it wrote, in slots."""
        if (one := self._ones.get(entry)) is not None:
            usual = not (self._nested or self._allow_mutation or self._reshaped or entry.away)
            if usual and entry.kind == ONE and not self._storages.aliases_of(one[0]):
                slot = Slot.of_alias(one[0])
            else:
                slot = self._slot(entry, 0, one[0])
            entry.kept = {0: slot}
            return
        held = self._held[entry]
        kept = dict(entry.kept)
        for place in places:
            if place == WRITTEN:
                entry.written = [self._slot(entry, WRITTEN, tensor) for tensor in held.written]
            else:
                kept[place] = self._slot(entry, place, held.tensors[place])
        entry.kept = kept

    def keep_views(self, entry: Entry) -> None:
        """Keep the outputs of an op with a handle that are views: replay would pass placeholders in their place."""
        made = {place for place, _ in entry.made}
        for place, tensor in self._held[entry].tensors.items():
            if place not in made:
                entry.kept = {**entry.kept, place: self._slot(entry, place, tensor)}

    def _slot(self, entry: Entry, place: int, tensor: torch.Tensor) -> Slot:
        # What was given a name may be another view of what was written.
        meta = entry.meta(place) if place != WRITTEN else entry.results if entry.effects.returned == (0,) else None
        aliases = self._storages.aliases_of(tensor)
        if type(meta) is Meta and not meta.describes(tensor):
            # It was reshaped since, or it is a view that was given a name: the name is that of the whole.
            with without_dispatch_modes(), torch.no_grad():
                tensor = in_same_storage(tensor.detach(), meta.geometry, meta.dtype, *meta.lazy)
        decision = decision_on(entry, place)
        slot = self._make_slot(entry.group, entry.label(place), tensor, decision, False, self._allow_mutation)
        if aliases and not (self._nested or self._allow_mutation):
            slot.watch(aliases)
        return slot


def decision_on(entry: Entry, place: int) -> CheckpointPolicy:
    """Return where a saved result is kept."""
    return CheckpointPolicy.OFFLOAD if place in entry.away else CheckpointPolicy.SAVE
