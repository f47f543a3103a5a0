"""Reads a profile: times of the spans that a recorder marked, backward's nodes, and each allocation.

In: the profiler's event tree and the recorder's marks. Out: spans and samples. All three have one clock, so nothing has
to be aligned. The public events of ``torch.profiler`` add bytes up by op and have no addresses: they would lose the
peak, and what is alive of what was allocated since the trace began. The tree has each block.

NOTE [ Which backward belongs to a region ]
Autograd numbers its nodes as they are made, and the profiler shows the number of each node that the engine runs. A
region's nodes are those with the numbers that were given out during its forward. What the engine does for a node, hooks
and the replay that a hook starts included, is one event; the replay is taken out of it. Where a hook has run ops, that
event lacks the number, and the node's own event inside it has it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from torch_remat.reports.recorder import GIVEN, GONE, MARK, SENT, Mark
from torch_remat.reports.spans import GivenUp, Phase, Sample, Span

_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER = "Optimizer.step#"

Interval = tuple[float, float]
Block = tuple[str, int]  # the device and the address


class Event(NamedTuple):
    """One event of a profile; times are in microseconds."""

    name: str
    start: float
    end: float
    thread: int = 0
    block: Block | None = None  # of an allocation or a release where that is
    bytes: int = 0  # its size, negative if it is released
    number: int = -1  # of an autograd node that the engine runs its sequence number
    is_outermost: bool = False  # whether nothing but the trace itself is around it


def events_in(roots: Iterable[Any]) -> list[Event]:
    """Return the events of a tree, as ``experimental_event_tree`` gives it, as they began."""
    found = []
    waiting = [(node, True) for node in roots]
    while waiting:
        node, is_outermost = waiting.pop()
        told, name = node.extra_fields, node.name
        start, end = node.start_time_ns / 1000, node.end_time_ns / 1000
        block, size, number = None, 0, -1
        if name == "[memory]":
            block, size = (str(told.device), told.ptr), told.alloc_size
        elif name.startswith(_ENGINE):
            own = [one for one in node.children if one.name == name.removeprefix(_ENGINE)]
            numbers = (getattr(one.extra_fields, "sequence_number", -1) for one in (node, *own))
            number = next((one for one in numbers if one >= 0), -1)
        found.append(Event(name, start, end, node.start_tid, block, size, number, is_outermost))
        waiting += [(child, is_outermost and name == f"{MARK}all") for child in node.children]
    return sorted(found, key=attrgetter("start"))


class Memory:
    """Allocations and releases, in order, of what was allocated since the profile began."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._changes: list[tuple[float, str, int]] = []  # times, devices and bytes
        self._alive: dict[Block, tuple[int, int]] = {}  # numbers and bytes
        sent: dict[str, tuple[Block, int]] = {}  # by the tensor's number: the block, and its number
        for name, time, _, _, block, size, *_ in events:
            if block is not None:
                self._change(block, size, time)
            elif name.startswith(SENT):
                number, address = name.removeprefix(SENT).split(" ")
                for one in [one for one in self._alive if one[1] == int(address)]:
                    sent[number] = one, self._alive[one][0]
            elif name.startswith(GONE) and (block_sent := sent.pop(name.removeprefix(GONE), None)) is not None:
                block, count = block_sent
                if self._alive.get(block, (-1, 0))[0] == count:
                    self._free(block, time)
        self._live = [0, *accumulate(change for _, _, change in self._changes)]

    def _change(self, block: Block, size: int, time: float) -> None:
        if block in self._alive:
            self._free(block, time)  # also if it is allocated again: then a thread that is not in the profile freed it
        if size >= 0:
            self._alive[block] = len(self._changes), size
            self._changes.append((time, block[0], size))

    def _free(self, block: Block, time: float) -> None:
        self._changes.append((time, block[0], -self._alive.pop(block)[1]))

    def samples(self, start: float) -> list[Sample]:
        """Return what was alive after each change; a time of ``start`` is 0."""
        live: dict[str, int] = {}
        found = []
        for time, device, change in self._changes:
            live[device] = live.get(device, 0) + change
            found.append(Sample(time - start, dict(live)))
        return found

    def within(self, start: float, end: float) -> tuple[int, int, int, int]:
        """Return the bytes allocated and freed from one time to another, those alive at its end, and the peak."""
        when = itemgetter(0)
        first, last = bisect_left(self._changes, start, key=when), bisect_right(self._changes, end, key=when)
        changes = [change for _, _, change in self._changes[first:last]]
        allocated = sum(change for change in changes if change > 0)
        return allocated, allocated - sum(changes), self._live[last], max(self._live[first : last + 1])


def timeline_of(
    events: Sequence[Event], marks: Sequence[Mark], given: Sequence[GivenUp]
) -> tuple[float, list[Span], list[Sample], list[GivenUp], list[tuple[str, float, float]]]:
    """Return what a profile and the marks in it tell, in the order of a `Trace`'s fields."""
    whole = next(event for event in events if event.name == f"{MARK}all")
    start, memory = whole.start, Memory(events)
    found: list[tuple[Mark, Phase, Interval, int]] = []
    replays: dict[int, list[Interval]] = {}
    for event in events:
        number = event.name.removeprefix(MARK)
        if event.name.startswith(MARK) and number != "all":
            mark = marks[int(number)]
            found.append((mark, mark.phase, event[1:3], event.thread))
            if mark.phase == "replay" and mark.op is None:
                replays.setdefault(mark.call, []).append(event[1:3])
    engine = [event for event in events if event.number >= 0]
    for mark in marks:
        if mark.end_number > mark.first_number:
            for thread, interval in _backward_of(mark, engine, replays.get(mark.call, [])):
                found.append((mark, "backward", interval, thread))
    serials = {mark.call for mark, *_ in found} | {one.call for one in given}
    calls = {serial: place for place, serial in enumerate(sorted(serials))}
    spans = []
    for mark, phase, (begin, end), thread in found:
        kept = (mark.kept_bytes, mark.offloaded_bytes) if phase == "forward" else (0, 0)
        place = (mark.region, mark.op, phase, calls[mark.call])
        spans.append(Span(*place, begin - start, end - begin, thread, *memory.within(begin, end), *kept))
    spans.sort(key=lambda span: (span.start_us, -span.duration_us))
    given_up = []  # without what happened where no profiler saw it
    for event in events:
        if event.name.startswith(GIVEN):
            one = given[int(event.name.removeprefix(GIVEN))]
            given_up.append(replace(one, call=calls[one.call], time_us=event.start - start))
    phases = [(phase, begin - start, end - start) for phase, begin, end in _phases_of(events)]
    return whole.end - start, spans, memory.samples(start), given_up, phases


def _phases_of(events: Sequence[Event]) -> Iterator[tuple[str, float, float]]:
    """Yield when the engine ran, whatever nodes, and when an optimizer did; forward is the rest."""
    outer = [one for one in events if one.is_outermost and one.block is None and one.name != f"{MARK}all"]
    for is_engine, found in groupby(outer, lambda event: event.name.startswith(_ENGINE)):
        if is_engine:
            run = list(found)
            yield "backward", run[0].start, run[-1].end
    for event in events:
        if event.name.startswith(_OPTIMIZER):
            yield "the optimizer's step", event.start, event.end


def _backward_of(mark: Mark, engine: Sequence[Event], replays: Sequence[Interval]) -> list[tuple[int, Interval]]:
    """Return the stretches in which the engine ran a mark's nodes; other nodes end a stretch."""
    stretches: list[tuple[int, Interval]] = []
    going_on = False
    for event in engine:
        if not mark.first_number <= event.number < mark.end_number:
            going_on = False
            continue
        begin, end = event[1:3]
        # Replays come first, in a hook or at the first read.
        start = max((stop for at, stop in replays if begin <= at and stop <= end), default=begin)
        if going_on and stretches[-1][0] == event.thread and start == begin:
            stretches[-1] = (event.thread, (stretches[-1][1][0], end))
        else:
            stretches.append((event.thread, (start, end)))
        going_on = True
    return stretches
