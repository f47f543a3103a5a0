"""Reads a profile: times of the spans that a recorder marked, backward's nodes, and each allocation.

In: the events of ``export_chrome_trace``, a public format, and the recorder's marks. Out: spans and samples. All three
have one clock, so nothing has to be aligned.

NOTE [ Which backward belongs to a region ]
Autograd numbers its nodes as they are made, and the profiler tells the number of each node that the engine runs. A
region's nodes are those with the numbers that were given out during its forward. What the engine does for a node, hooks
and the replay that a hook starts included, is one event; the replay is taken out of it. Where a hook has run ops, that
event lacks the number, and the node's own event inside it has it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from typing import Any

from torch_remat.reports.recorder import GIVEN, GONE, MARK, SENT, Mark
from torch_remat.reports.spans import GivenUp, Phase, Sample, Span

_ENGINE = "autograd::engine::evaluate_function: "
_DEVICES = {0: "cpu", 1: "cuda", 6: "hip", 12: "xpu", 20: "privateuseone"}

Event = Mapping[str, Any]
Interval = tuple[float, float]


class Memory:
    """Allocations and releases, in order, of what was allocated since the profile began."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._changes: list[tuple[float, str, int]] = []  # times, devices and bytes
        self._alive: dict[tuple[str, int], tuple[int, int]] = {}  # by device and address: number and bytes
        kinds: set[str] = set()
        sent: dict[str, tuple[tuple[str, int], int]] = {}  # by the tensor's number: the block, and its number
        relevant = [event for event in events if event.get("name", "").startswith(("[memory]", SENT, GONE))]
        for event in sorted(relevant, key=itemgetter("ts")):  # stable: events of one time are listed in order
            name, time = event["name"], event["ts"]
            if name == "[memory]":
                args = event["args"]
                kinds.add(device := _device(args))
                self._change((device, args["Addr"]), args["Bytes"], time)
            elif name.startswith(SENT):
                number, address = name.removeprefix(SENT).split(" ")
                for block in {(device, int(address)) for device in kinds}:
                    if block in self._alive:
                        sent[number] = block, self._alive[block][0]
            elif (block_sent := sent.pop(name.removeprefix(GONE), None)) is not None:
                block, count = block_sent
                if self._alive.get(block, (-1, 0))[0] == count:
                    self._free(block, time)
        self._live = [0, *accumulate(change for _, _, change in self._changes)]

    def _change(self, block: tuple[str, int], size: int, time: float) -> None:
        if block in self._alive:
            self._free(block, time)  # also if it is allocated again: then a thread that is not in the profile freed it
        if size >= 0:
            self._alive[block] = len(self._changes), size
            self._changes.append((time, block[0], size))

    def _free(self, block: tuple[str, int], time: float) -> None:
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


def spans_and_samples(
    events: Sequence[Event], marks: Sequence[Mark], given: Sequence[GivenUp] = ()
) -> tuple[list[Span], list[Sample], float, list[GivenUp]]:
    """Return spans, samples, the whole duration in microseconds, and what budgets gave up."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    whole = next(event for event in timed if event["name"] == f"{MARK}all")
    start = whole["ts"]
    memory = Memory(events)
    found: list[tuple[Mark, Phase, Interval, int]] = []
    replays: dict[int, list[Interval]] = {}
    for event in timed:
        number = event["name"].removeprefix(MARK)
        if event["name"].startswith(MARK) and number != "all":
            mark = marks[int(number)]
            found.append((mark, mark.phase, _interval(event), event["tid"]))
            if mark.phase == "replay" and mark.op is None:
                replays.setdefault(mark.call, []).append(_interval(event))
    engine = _numbered(sorted(timed, key=itemgetter("ts")), [one for all_ in replays.values() for one in all_])
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
    for event in timed:
        if event["name"].startswith(GIVEN):
            one = given[int(event["name"].removeprefix(GIVEN))]
            given_up.append(replace(one, call=calls[one.call], time_us=event["ts"] - start))
    return spans, memory.samples(start), whole["dur"], sorted(given_up, key=lambda one: one.time_us)


def _numbered(timed: Sequence[Event], replays: Sequence[Interval]) -> list[tuple[int, Event]]:
    """Return what the engine ran, with the numbers of the nodes; leaves, which accumulate gradients, have none."""
    found = []
    open_ones: dict[tuple[int, str], Event] = {}  # by thread and node, the engine's latest event without a number
    for event in timed:
        number = event["args"].get("Sequence number") if "args" in event else None
        name: str = event["name"]
        if name.startswith(_ENGINE):
            if number is not None:
                found.append((number, event))
            else:
                open_ones[event["tid"], name.removeprefix(_ENGINE)] = event
        elif number is not None and (outer := open_ones.get((event["tid"], name))) is not None:
            begin, end = _interval(event)
            inside_replay = any(start <= begin and end <= stop for start, stop in replays if outer["ts"] <= start)
            if end <= outer["ts"] + outer["dur"] and not inside_replay:
                found.append((number, open_ones.pop((event["tid"], name))))
    return sorted(found, key=lambda pair: pair[1]["ts"])


def _backward_of(
    mark: Mark, engine: Sequence[tuple[int, Event]], replays: Sequence[Interval]
) -> list[tuple[int, Interval]]:
    """Return the stretches in which the engine ran a mark's nodes; other nodes end a stretch."""
    stretches: list[tuple[int, Interval]] = []
    going_on = False
    for number, event in engine:
        if not mark.first_number <= number < mark.end_number:
            going_on = False
            continue
        begin, end = _interval(event)
        # Replays come first, in a hook or at the first read.
        start = max((stop for at, stop in replays if begin <= at and stop <= end), default=begin)
        if going_on and stretches[-1][0] == event["tid"] and start == begin:
            stretches[-1] = (event["tid"], (stretches[-1][1][0], end))
        else:
            stretches.append((event["tid"], (start, end)))
        going_on = True
    return stretches


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _device(args: Mapping[str, Any]) -> str:
    kind = _DEVICES.get(args["Device Type"], f"device type {args['Device Type']}")
    return kind if args["Device Id"] < 0 else f"{kind}:{args['Device Id']}"
