"""What a trace records: when regions and ops ran, and the bytes alive meanwhile.

In: calls of the runtime, and the profile of the same time. Kept: names, autograd sequence numbers and bytes; no tensor
and no region. Out: spans and samples.

NOTE [ Why the profiler ]
Its memory events are the only ones that have all allocations: those inside of kernels, of compiled code and of storages
that are resized, which neither weak references to storages nor a dispatch mode would see. Its public events add bytes
up by op, without addresses: they would lose the peak, and what is alive of what was allocated since the trace began.
So the event tree is read, which has each block. What the recorder notes is a range in the profile, whose name has the
number of the note: all have one clock, and nothing has to be aligned.

NOTE [ Which backward belongs to a region ]
Autograd numbers its nodes as they are made, and the profiler shows the number of each node that the engine runs. A
region's nodes are those with the numbers that were given out during its forward. What the engine does for a node, hooks
and the replay that a hook starts included, is one event; the replay is taken out of it. Where a hook has run ops, that
event lacks the number, and the node's own event inside it has it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import attrgetter, itemgetter
from threading import Lock, get_ident
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import ProfilerRange, profiler_runs, sequence_number
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.region.region import Region, keeping, live_regions
from torch_remat.errors import qualified_name
from torch_remat.reports.data import Sums, report_of
from torch_remat.reports.watch import WatchedOp

MARK = "torch_remat.trace "
"""What the ranges are named that stand for notes in the profile, before the number of the note."""

_ENGINE = "autograd::engine::evaluate_function: "
_OPTIMIZER = "Optimizer.step#"

Phase = Literal["forward", "replay", "backward"]
Interval = tuple[float, float]
Block = tuple[str, int]  # the device and the address


@dataclass(frozen=True)
class Span:
    """One phase of a region or of an op in it, or a part of a phase that other work has cut in two.

    Attributes:
        region: The region's name.
        op: The op's name; None for the region itself.
        phase: ``"forward"``, ``"replay"`` or ``"backward"``.
        call: Which call of a region it belongs to; calls count from 0, in the order of forward.
        start_us: When it began, in microseconds since the trace began.
        duration_us: How long it took. Spans of ops lie within that of their region.
        thread: The thread's number in the system.
        allocated_bytes: Bytes allocated meanwhile, on all devices.
        freed_bytes: Bytes freed meanwhile, of those allocated since the trace began.
        live_bytes: Bytes alive at its end, of those allocated since the trace began.
        peak_bytes: The most alive at any moment in it.
        kept_bytes: After forward, what the region or op keeps in place for backward, as in `memory_report`; else 0. A
            storage that two regions keep counts for both.
        offloaded_bytes: After forward, what it keeps elsewhere; else 0.
    """

    region: str
    op: str | None
    phase: Phase
    call: int
    start_us: float
    duration_us: float
    thread: int
    allocated_bytes: int
    freed_bytes: int
    live_bytes: int
    peak_bytes: int
    kept_bytes: int
    offloaded_bytes: int = 0

    @property
    def name(self) -> str:
        """``region::op``, or the region alone."""
        return qualified_name(self.region, self.op)

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Sample:
    """The bytes alive from one allocation or release until the next.

    Attributes:
        time_us: When, in microseconds since the trace began.
        live_bytes: Bytes alive by device, of those allocated since the trace began.
    """

    time_us: float
    live_bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes alive on all devices."""
        return sum(self.live_bytes.values())


@dataclass(frozen=True)
class GivenUp:
    """What a budget evicted of one region in the middle of a step; see `torch_remat.budget`.

    Attributes:
        region: The region's name.
        call: Which call of a region it was, as in `Span`.
        time_us: When, in microseconds since the trace began.
        bytes: How many were freed, which replay recomputes.
        kept_bytes: What the budget's regions kept from then on.
    """

    region: str
    call: int
    time_us: float
    bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class BudgetState:
    """How a budget stood when the trace ended.

    Attributes:
        kept_bytes: What its regions kept.
        limit_bytes: The most that they were to keep: the budget less its reserve.
        budget_bytes: The budget.
    """

    kept_bytes: int
    limit_bytes: int
    budget_bytes: int


@dataclass
class Mark:
    """One phase of a region or op, before its times are known."""

    region: str
    op: str | None
    phase: Phase
    call: int  # the serial number of the region
    first_number: int = 0  # the sequence number of the first autograd node that was made in it
    end_number: int = 0  # the one after the last; equal to the first if none counts
    kept_bytes: int = 0  # what is kept in place after forward
    offloaded_bytes: int = 0  # what is kept elsewhere then


class Sent:
    """A storage that an offloader has taken: its thread may free it, which no profiler sees."""

    block: Block = ("", 0)  # where it is
    number = -1  # which change of the memory made it

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = StorageWeakRef(storage)
        self.address = storage.data_ptr()

    def is_in(self, alive: Mapping[Block, tuple[int, int]]) -> bool:
        """Whether its block is alive, by the numbers and bytes of those that are, and not used again."""
        return self.block in alive and alive[self.block][0] == self.number


class Gone(NamedTuple):
    """That storage is freed by now."""

    sent: Sent


class Recorder:
    """Takes the notes of a trace, as an `Observer`.

    Attributes:
        notes: What was noted, in order: first a mark for each region from before, of which backward alone is in the
            trace. Of a `GivenUp` the time is not known yet, and ``call`` is the region's serial number.
    """

    def __init__(self) -> None:
        self.notes: list[Mark | GivenUp | Sent | Gone] = [
            Mark(region.name, None, "forward", region.serial, region.first_number, region.end_number)
            for region in live_regions()
        ]
        around = keeping.get()
        self._budgets: dict[Any, None] = {} if around is None else dict.fromkeys(around.registers)
        # What has begun and not ended, by thread.
        self._open: dict[int, list[tuple[Mark, AbstractContextManager[Any]]]] = defaultdict(list)
        self._lock = Lock()
        self._forwards: dict[int, list[Mark]] = {}  # by the region's serial number: its own mark, then its ops'
        self._sent: list[Sent] = []

    def begin(self, region: Region, op: WatchedOp | None, phase: Any) -> None:
        """Begin the span of an op, or of a region."""
        if op is None and region.keeper is not None:
            self._budgets.update(dict.fromkeys(region.keeper.owners))
        self.look_for_gone()
        mark = Mark(region.name, None if op is None else op.name, phase, region.serial)
        entered = self._range_of(mark)
        if profiler_runs():
            entered.__enter__()
        self._open[get_ident()].append((mark, entered))
        mode = current_mode()
        if phase == "forward" and op is None and mode is not None and not mode.recomputing:
            mark.first_number = mark.end_number = region.first_number
            self._forwards[region.serial] = [mark]
        elif phase == "forward" and op is not None and region.serial in self._forwards:
            self._forwards[region.serial].append(mark)

    def end(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        """End the span of an op, or of a region."""
        self.look_for_gone()
        mark, entered = self._open[get_ident()].pop()
        if profiler_runs():
            entered.__exit__(None, None, None)
        if phase == "forward" and op is not None and region.serial in self._forwards:
            mark.first_number, mark.end_number = op.numbers

    def finish(self, region: Region) -> None:
        """Note what the region keeps, and which autograd nodes are its own."""
        marks = self._forwards.pop(region.serial, None)
        if marks is None:
            return
        marks[0].end_number = sequence_number()
        report = report_of(region)
        parts: dict[str | None, Sums] = {None: report, **{op.name: op for op in report.ops}}
        for mark in marks:
            if (part := parts.get(mark.op)) is not None:
                mark.kept_bytes, mark.offloaded_bytes = part.bytes, part.offloaded_bytes

    def gave_up(self, region: Region, freed: int, kept: int) -> None:
        """Note when a budget evicted something."""
        self._note(GivenUp(region.name, region.serial, 0.0, freed, kept))

    def budgets(self) -> list[BudgetState]:
        """Return how the budgets stand that the trace, or a region in it, is in."""
        return [BudgetState(*state) for one in self._budgets if (state := one.state()) is not None]

    def offload_began(self, tensor: torch.Tensor, key: int) -> None:
        """Note where a tensor is that leaves."""
        sent = Sent(tensor.untyped_storage())
        with self._lock:
            self._sent.append(sent)
        self._note(sent)

    def look_for_gone(self) -> None:
        """Note which of the tensors that left are freed by now."""
        if self._sent:
            with self._lock:
                gone = [sent for sent in self._sent if sent.storage.expired()]
                self._sent = [sent for sent in self._sent if sent not in gone]
            for sent in gone:
                self._note(Gone(sent))

    def _range_of(self, note: Mark | GivenUp | Sent | Gone) -> AbstractContextManager[Any]:
        with self._lock:
            self.notes.append(note)
            return ProfilerRange(f"{MARK}{len(self.notes) - 1}")

    def _note(self, note: GivenUp | Sent | Gone) -> None:
        if profiler_runs():
            with self._range_of(note):
                pass


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

    def noted(self, notes: Sequence[Any]) -> Any:
        """Return the note that it stands for; None if it is something else."""
        number = self.name.removeprefix(MARK)
        return None if number == self.name or number == "all" else notes[int(number)]


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

    def __init__(self, events: Sequence[Event], notes: Sequence[Any]) -> None:
        self._changes: list[tuple[float, str, int]] = []  # times, devices and bytes
        self._alive: dict[Block, tuple[int, int]] = {}  # numbers and bytes
        for event in events:
            if event.block is not None:
                self._change(event.block, event.bytes, event.start)
            elif isinstance(note := event.noted(notes), Sent):
                for block, (number, _) in self._alive.items():
                    if block[1] == note.address:
                        note.block, note.number = block, number
            elif isinstance(note, Gone) and note.sent.is_in(self._alive):
                self._free(note.sent.block, event.start)
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
    events: Sequence[Event], notes: Sequence[Any]
) -> tuple[float, list[Span], list[Sample], list[GivenUp], list[tuple[str, float, float]]]:
    """Return what a profile and the notes in it say, in the order of a `Trace`'s fields."""
    whole = next(event for event in events if event.name == f"{MARK}all")
    start, memory = whole.start, Memory(events, notes)
    found: list[tuple[Mark, Phase, Interval, int]] = []
    given: list[GivenUp] = []
    replays: dict[int, list[Interval]] = {}
    for event in events:
        note = event.noted(notes)
        if isinstance(note, GivenUp):
            given.append(replace(note, time_us=event.start - start))
        elif isinstance(note, Mark):
            found.append((note, note.phase, event[1:3], event.thread))
            if note.phase == "replay" and note.op is None:
                replays.setdefault(note.call, []).append(event[1:3])
    engine = [event for event in events if event.number >= 0]
    for mark in notes:
        if isinstance(mark, Mark) and mark.end_number > mark.first_number:
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
    given_up = [replace(one, call=calls[one.call]) for one in given]
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
