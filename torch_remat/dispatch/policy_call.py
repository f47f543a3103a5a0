"""One op of a region with a policy: what forward noted of it, and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat.dispatch.calls import Call, Meta
from torch_remat.dispatch.schema import Effects

if TYPE_CHECKING:
    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.record import Record, Slot

NOTHING: frozenset[int] = frozenset()
FIRST = frozenset((0,))
_NONE: Mapping[int, Any] = MappingProxyType({})
ONE, SEVERAL, VIEW = 1, 2, 3  # kinds of calls, see `PolicyCall`
WRITTEN = -1  # stands, among the places of results, for the arguments that an op writes


class PolicyCall(Call):
    """One op of a region with a policy.

    Attributes:
        path: The module in which it ran.
        native: The native region, or the op with a handle, in which it ran; empty outside of such.
        effects: What it does besides computing.
        kind: `ONE` if it made one new real tensor, `SEVERAL` if it made several, `VIEW` if it returned views of its
            first argument, in each case from plain tensors and numbers, and did nothing else; otherwise 0.
        reads: The storages of its arguments.
        layout: Shape and strides of the tensors among its arguments, if the policy saves a result.
        versions: Which of the tensors among its arguments come from outside, and their version counters.
        writes: The storages of the arguments that it writes.
        whole: Whether it writes its arguments' whole storages.
        outside: Those of them that come from outside the region.
        made: The storages of its new results, by their place, unless there is just `storage`.
        storage: That of its one new result, if its kind is `ONE`.
        saved: The places of the results that the policy keeps.
        away: Those of them that leave the device.
        always: Whether replay runs it whatever it is needed for.
        run: Whether replay runs it.
        before: The random generators before it, if replay must set them.
        kept: The results that are kept for replay, by their place.
        written: What it left in the arguments that it writes, if that is kept.
        earlier: What some of the tensors among its arguments were, by their place, that a later call has changed.
        packed: The places of the results that autograd saved.
        names: The names that were given to results by hand.
    """

    # Most calls have little to note: what stands here is not set for each of them.
    kind = 0
    native = ""
    reads: Sequence[int] = ()
    layout: Sequence[tuple[torch.Size, tuple[int, ...]]] = ()
    versions: Sequence[tuple[int, int]] = ()
    writes: Sequence[int] = ()
    outside: Sequence[StorageWeakRef] = ()
    made: Sequence[tuple[int, int]] = ()
    storage = 0
    saved: frozenset[int] = NOTHING
    away: frozenset[int] = NOTHING
    whole = True
    always = run = False
    before: RngState | None = None
    kept: Mapping[int, Slot] = _NONE
    written: Sequence[Slot] = ()
    earlier: Mapping[int, Slot] = _NONE
    packed: frozenset[int] = NOTHING
    names: Mapping[int, str] = _NONE

    def __init__(self, op: Any, count: int, results: Any, path: str, effects: Effects) -> None:
        self.op = op
        self.count = count
        self.results = results
        self.path = path
        self.effects = effects

    @property
    def count_of_results(self) -> int:
        """How many results it has."""
        return len(self.results) if type(self.results) is list else 1

    def all_places(self) -> frozenset[int]:
        """Return the places of all results and written arguments."""
        return frozenset((WRITTEN, *range(self.count_of_results)))

    def label(self, place: int) -> str:
        """Return the name of one of the results, such as ``attention.mm_2_0``."""
        if self.names and (name := self.names.get(place)) is not None:
            return name
        return f"{self.path}{self.effects.name}_{self.count}_{place if place > 0 else 0}"

    def labels(self) -> list[str]:
        """Return the automatic names of all results."""
        stem = f"{self.path}{self.effects.name}_{self.count}"
        return [f"{stem}_{place}" for place in range(self.count_of_results)]


class SkippedOp(PolicyCall):
    """An op with a handle and policy SAVE among the calls: its body is none of the sequence.

    Args:
        record: Its record, which stands for the op.
        results: What replay must know of its outputs.
        effects: Those of an op that nobody knows.
    """

    def __init__(self, record: Record, results: Any, effects: Effects) -> None:
        super().__init__(record, 0, results, "", effects)
        self.native = record.name
        self.saved = frozenset(range(len(results)))

    def label(self, place: int) -> str:
        """Return the name of an output."""
        record: Record = self.op
        return record.outputs[max(place, 0)].name


def names_of(calls: Sequence[PolicyCall]) -> Iterator[str]:
    """Yield the names of all results, those given by hand and the automatic ones."""
    for call in calls:
        yield from call.names.values()
        if type(call) is not SkippedOp and (type(call.results) is Meta or type(call.results) is list):
            yield from call.labels()
