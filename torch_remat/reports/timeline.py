"""What a trace records: when regions and ops ran, and the bytes alive meanwhile.

In: calls of the runtime, and the ops of the same time. Kept: names, autograd sequence numbers, weak references to
storages; no tensor and no region. Out: spans and samples.

NOTE [ What is counted ]
A dispatch mode sees each op. What is new among the storages of its results counts from the op's end on, until its weak
reference says that it is gone. With CUDA the allocator counts instead, in all that a look at its statistics after each
op shows: the bytes since the last look, and the most in between. What a mode does not see, `trace` lists for users.
Under any mode autograd adds gradients up in a new tensor, where it would else do so in place.

NOTE [ Which backward belongs to a region ]
Autograd numbers its nodes as they are made, and says which of them runs when an op does. A region's nodes are those
with the numbers that were given out during its forward. Its backward is the time from the first of their ops on, up to
the next op of another node or the next replay, which cut it into parts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, groupby
from operator import itemgetter
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_remat._compat import (
    OF_TRACES,
    CompiledCode,
    DispatchMode,
    accelerator_type,
    active_modes,
    after_backward,
    current_node,
    graph_task,
    keep_from_compiler,
    node_number,
    sequence_number,
)
from torch_remat._util.storages import storages_of
from torch_remat.dispatch.keys import key_of, keys_of, tensors_in
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.region.region import Region, keeping, live_regions
from torch_remat.errors import qualified_name
from torch_remat.reports.data import Sums, report_of
from torch_remat.reports.watch import WatchedOp, observed_by

Phase = Literal["forward", "replay", "backward"]
_LEAVES = 2**63  # from here on, autograd numbers the nodes that add up gradients of leaves, which come in between


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
        thread: The thread, as `threading.get_ident` numbers it.
        allocated_bytes: Bytes allocated meanwhile, on all devices.
        freed_bytes: Bytes freed meanwhile.
        live_bytes: Bytes alive at its end: see `torch_remat.trace`.
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
        return round(self.start_us + self.duration_us, 3)  # to the nanosecond


@dataclass(frozen=True)
class Sample:
    """The bytes alive from one allocation or release until the next.

    Attributes:
        time_us: When, in microseconds since the trace began.
        live_bytes: Bytes alive by device: on the CPU those made since the trace began, with CUDA all.
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
    """The forward of a region or op: what it keeps, and which autograd nodes are its own."""

    region: str
    op: str | None
    call: int  # the serial number of the region
    first_number: int = 0  # the sequence number of the first autograd node that was made in it
    end_number: int = 0  # the one after the last; equal to the first if none counts
    kept_bytes: int = 0  # what is kept in place after forward
    offloaded_bytes: int = 0  # what is kept elsewhere then


class Ran(NamedTuple):
    """What a thread did at a time, in nanoseconds: a phase, or, in a backward, an op of a node."""

    start: int
    end: int
    thread: int
    task: int  # the number of the backward in which it ran
    number: int = -1  # of the node; -1 where a replay begins, or the backward ends


class Recorder(DispatchMode):
    """Takes the notes of a trace, as an `Observer`, and counts bytes, as a dispatch mode."""

    lets_compiled_code_run = True

    def __init__(self) -> None:
        super().__init__()
        self._start = self._end = perf_counter_ns()
        self._compiled = CompiledCode()
        # By the serial number of a region its own mark, then its ops'. Of one from before, backward is in the trace.
        self._marks = {
            region.serial: [Mark(region.name, None, region.serial, region.first_number, region.end_number)]
            for region in live_regions()
        }
        self._phases: list[tuple[Mark, Phase, Ran]] = []
        self._given: list[GivenUp] = []  # by the serial number of a region
        around = keeping.get()
        self._budgets: dict[Any, None] = {} if around is None else dict.fromkeys(around.registers)
        self._open: dict[int, list[tuple[Mark, int, int]]] = defaultdict(list)  # by thread; since when, in which task
        self._nodes: list[Ran] = []
        self._steps = 0  # of optimizers, counted down
        self._runs: dict[int, list[Any]] = {}  # backwards by task, and steps of optimizers: what ran, from when to when
        self._changes: list[tuple[int, str, int]] = []  # times, devices and bytes
        self._alive: dict[int, ref[torch.UntypedStorage]] = {}
        self._allocators: dict[int, int] = {}  # by device, the bytes that were alive at the last look
        if accelerator_type() == "cuda":
            for device in range(torch.cuda.device_count()):
                if device == torch.cuda.current_device() or torch.cuda.memory_reserved(device):
                    torch.cuda.reset_peak_memory_stats(device)
                    self._allocators[device] = 0
            self._look()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        begins = register_optimizer_step_pre_hook(lambda *_: self._note_step())
        ends = register_optimizer_step_post_hook(lambda *_: self._note_run(self._steps))
        try:
            with observed_by(self), self._compiled, self:
                yield
        finally:
            begins.remove()
            ends.remove()
            self._look()
            self._end = perf_counter_ns()
            self._alive.clear()

    def _note_step(self) -> None:
        self._steps -= 1
        self._note_run(self._steps, "the optimizer's step")

    def _note_run(self, key: int, what: str = "") -> None:
        """Note that the engine or an optimizer runs, from the first time on, until now."""
        now = perf_counter_ns()
        self._runs.setdefault(key, [what, now, now])[2] = now

    @keep_from_compiler
    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op, and count what it makes; what a subclass of tensors makes of it comes as ops of their own."""
        if not OF_TRACES.isdisjoint(types):  # nothing has memory
            return op(*args, **(kwargs or {}))
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        task, start = graph_task(), perf_counter_ns()
        if task >= 0 and task not in self._runs:
            self._note_run(task, "backward")
            after_backward(partial(self._note_end, task))
        result = op(*args, **(kwargs or {}))
        made = [tensor for tensor in tensors_in((result,), {}) if key_of(tensor) not in self._alive]
        known = {key for given in tensors_in(args, kwargs or {}) for key in keys_of(given)} if made else ()
        for storage in chain(*map(storages_of, made)):
            if storage._cdata not in known:
                self.count(storage)
        self._look()
        if task >= 0:
            self._note_run(task)
            phases, node = self._open[get_ident()], current_node()
            if node is None or (phases and phases[-1][2] == task):
                return result  # it is one of the phase
            if (number := node_number(node)) < _LEAVES:
                self._nodes.append(Ran(start, perf_counter_ns(), get_ident(), task, number))
        return result

    def _note_end(self, task: int) -> None:
        """Note that a backward is over."""
        self._note_run(task)
        self._cut(task)

    def _cut(self, task: int) -> int:
        """Let what ran before in a backward end now; return the time."""
        now = perf_counter_ns()
        self._nodes.append(Ran(now, now, get_ident(), task))
        return now

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now on, until it is gone."""
        device, size = storage.device, storage.nbytes()
        is_counted = (
            storage._cdata in self._alive or device.type == "meta" or (device.type == "cuda" and self._allocators)
        )
        if size and not is_counted:
            self._changes.append((perf_counter_ns(), str(device), size))
            self._alive[storage._cdata] = ref(storage, partial(self._note_gone, storage._cdata, str(device), size))

    def _note_gone(self, key: int, device: str, size: int, _: object) -> None:
        if self._alive.pop(key, None) is not None:
            self._changes.append((perf_counter_ns(), device, -size))

    def _look(self) -> None:
        """Note what CUDA's allocator has done since the last look: how far its bytes rose, and where they are."""
        for device, before in self._allocators.items():
            bytes_now = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
            most, now = bytes_now["peak"], bytes_now["current"]
            if most != before or now != before:
                time, name = perf_counter_ns(), f"cuda:{device}"
                self._changes += [(time, name, most - before), (time, name, now - most)]
                self._allocators[device] = now
                torch.cuda.reset_peak_memory_stats(device)

    def _sees(self) -> bool:
        """Whether it counts in this thread: others may run regions, too."""
        return any(mode is self for mode in active_modes())

    def begin(self, region: Region, op: WatchedOp | None, phase: Any) -> None:
        """Begin the span of an op, or of a region."""
        if not self._sees():
            return
        if op is None and region.keeper is not None:
            self._budgets.update(dict.fromkeys(region.keeper.owners))
        self._look()
        task, now = graph_task(), perf_counter_ns()
        if phase == "replay" and op is None and (node := current_node()) is not None:
            while self._nodes and self._nodes[-1].number == node_number(node):
                self._nodes.pop()  # the ops with which the node has come to the replay
            now = self._cut(task)
        mark = Mark(
            region.name, None if op is None else op.name, region.serial, region.first_number, region.first_number
        )
        self._open[get_ident()].append((mark, now, task))
        if phase == "forward" and op is None and (mode := current_mode()) is not None and not mode.recomputing:
            self._marks[region.serial] = [mark]
        elif phase == "forward" and op is not None and region.serial in self._marks:
            self._marks[region.serial].append(mark)

    def end(self, region: Region, op: WatchedOp | None, phase: Any) -> None:
        """End the span of an op, or of a region."""
        if not self._sees():
            return
        self._look()
        mark, start, task = self._open[get_ident()].pop()
        self._phases.append((mark, phase, Ran(start, perf_counter_ns(), get_ident(), task)))
        if phase == "forward" and op is not None:
            mark.first_number, mark.end_number = op.numbers

    def finish(self, region: Region) -> None:
        """Note what the region keeps, and which autograd nodes are its own."""
        if (marks := self._marks.get(region.serial)) is None:
            return
        marks[0].end_number = sequence_number()
        report = report_of(region)
        parts: dict[str | None, Sums] = {None: report, **{op.name: op for op in report.ops}}
        for mark in marks:
            if (part := parts.get(mark.op)) is not None:
                mark.kept_bytes, mark.offloaded_bytes = part.bytes, part.offloaded_bytes

    def gave_up(self, region: Region, freed: int, kept: int) -> None:
        """Note when a budget evicted something."""
        if self._sees():
            self._given.append(GivenUp(region.name, region.serial, self._us(perf_counter_ns()), freed, kept))

    def came_back(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was away: no op has made it."""
        if self._sees():
            self.count(tensor.untyped_storage())

    def _us(self, time: int) -> float:
        return (time - self._start) / 1000

    def recorded(self) -> tuple[Any, ...]:
        """Return what was recorded, in the order of a `Trace`'s fields."""
        memory, nodes = Memory(self._changes), _until_next(self._nodes)
        found = list(self._phases)
        for mark in (mark for marks in self._marks.values() for mark in marks):
            found += [(mark, "backward", ran) for ran in _backward_of(mark, nodes)]
        serials = {mark.call for mark, *_ in found} | {one.call for one in self._given}
        calls = {serial: place for place, serial in enumerate(sorted(serials))}
        spans = []
        for mark, phase, ran in found:
            kept = (mark.kept_bytes, mark.offloaded_bytes) if phase == "forward" else (0, 0)
            place = (mark.region, mark.op, phase, calls[mark.call], self._us(ran.start))
            took = (ran.end - ran.start) / 1000
            spans.append(Span(*place, took, ran.thread, *memory.within(ran.start, ran.end), *kept))
        spans.sort(key=lambda span: (span.start_us, -span.duration_us))
        samples = [Sample(self._us(time), live) for time, live in memory.samples()]
        phases = [(what, self._us(start), self._us(end)) for what, start, end in self._runs.values()]
        given = [replace(one, call=calls[one.call]) for one in self._given]
        budgets = [BudgetState(*state) for one in self._budgets if (state := one.state()) is not None]
        return self._us(self._end), spans, samples, given, phases, budgets, self._compiled.ran


class Memory:
    """What was alive when.

    Args:
        changes: Times, devices and bytes of allocations and releases; threads may have noted them in another order.
    """

    def __init__(self, changes: Sequence[tuple[int, str, int]]) -> None:
        self._changes = sorted(changes, key=itemgetter(0))
        self._live = [0, *accumulate(change for _, _, change in self._changes)]

    def samples(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield what was alive by device after each change, with its time."""
        live: dict[str, int] = {}
        for time, device, change in self._changes:
            live[device] = live.get(device, 0) + change
            yield time, dict(live)

    def within(self, start: int, end: int) -> tuple[int, int, int, int]:
        """Return the bytes allocated and freed from one time to another, those alive at its end, and the peak."""
        when = itemgetter(0)
        first, last = bisect_left(self._changes, start, key=when), bisect_right(self._changes, end, key=when)
        changes = [change for _, _, change in self._changes[first:last]]
        allocated = sum(change for change in changes if change > 0)
        return allocated, allocated - sum(changes), self._live[last], max(self._live[first : last + 1])


def _until_next(nodes: Sequence[Ran]) -> list[Ran]:
    """Return what ran in order of time, each up to the next in its thread and backward: only then its node is over."""
    found, following = [], dict[tuple[int, int], int]()
    for ran in sorted(nodes, reverse=True):
        key = ran.thread, ran.task
        found.append(ran._replace(end=following.get(key, ran.end)))
        following[key] = ran.start
    return found[::-1]


def _backward_of(mark: Mark, nodes: Sequence[Ran]) -> Iterator[Ran]:
    """Yield the stretches in which a mark's nodes ran; other nodes, and replays, end a stretch."""
    own = range(mark.first_number, mark.end_number)
    for (is_own, _), run in groupby(nodes, lambda ran: (ran.number in own, ran.thread)):
        if is_own:
            ran = list(run)
            yield ran[0]._replace(end=ran[-1].end)
