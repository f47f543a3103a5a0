"""Watches regions and ops for a trace: what ran, in the order in which it began.

In: calls of the runtime. Kept: names, autograd sequence numbers and bytes; no tensor and no region. Out: one mark for
each span, which a range of the same number stands for in the profile, and which nodes belong to which span.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from threading import Lock, get_ident
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import ProfilerRange, profiler_runs, sequence_number
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.options import keeping
from torch_remat.dispatch.region.region import Region, live_regions
from torch_remat.reports.data import Sums, report_of
from torch_remat.reports.spans import BudgetState, GivenUp, Phase
from torch_remat.reports.watch import WatchedOp

MARK = "torch_remat.trace "
GIVEN = "torch_remat.given "
"""The name of a range without length, before the number of what a budget evicted then."""
SENT, GONE = "torch_remat.sent ", "torch_remat.gone "
"""Names of ranges without length, each before the number of an offloaded tensor: it leaves its address; it is gone."""


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


class Recorder:
    """Notes the spans of a trace.

    Attributes:
        marks: The spans, in the order in which they began, and one for each region from before.
        given: What budgets evicted, in order, before the times are known; ``call`` is the region's serial number.
    """

    def __init__(self) -> None:
        # Of regions from before the trace, backward alone is in it.
        self.marks: list[Mark] = [
            Mark(region.name, None, "forward", region.serial, region.first_number, region.end_number)
            for region in live_regions()
        ]
        self.given: list[GivenUp] = []
        around = keeping.get()
        self._budgets: dict[Any, None] = {} if around is None else dict.fromkeys(around.registers)
        # What has begun and not ended, by thread.
        self._open: dict[int, list[tuple[Mark, AbstractContextManager[Any]]]] = defaultdict(list)
        self._lock = Lock()
        self._forwards: dict[int, list[Mark]] = {}  # by the region's serial number: its own mark, then its ops'
        self._sent: dict[int, StorageWeakRef] = {}
        self._next_sent = count().__next__

    def begin(self, region: Region, op: WatchedOp | None, phase: Any) -> None:
        """Begin the span of an op, or of a region."""
        if op is None and region.keeper is not None:
            self._budgets.update(dict.fromkeys(region.keeper.owners))
        self.look_for_gone()
        mark = Mark(region.name, None if op is None else op.name, phase, region.serial)
        with self._lock:
            entered = ProfilerRange(f"{MARK}{len(self.marks)}")
            self.marks.append(mark)
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
        """Mark when a budget evicted something."""
        with self._lock:
            number = len(self.given)
            self.given.append(GivenUp(region.name, region.serial, 0.0, freed, kept))
        _note(f"{GIVEN}{number}")

    def budgets(self) -> list[BudgetState]:
        """Return how the budgets stand that the trace, or a region in it, is in."""
        return [BudgetState(*state) for one in self._budgets if (state := one.state()) is not None]

    def offload_began(self, tensor: torch.Tensor, key: int) -> None:
        """Mark where a tensor is that leaves: an offloader's thread may free it, which no profiler sees."""
        storage = tensor.untyped_storage()
        with self._lock:
            number = self._next_sent()
            self._sent[number] = StorageWeakRef(storage)
        _note(f"{SENT}{number} {storage.data_ptr()}")

    def look_for_gone(self) -> None:
        """Mark which of the tensors that left are freed by now."""
        if self._sent:
            with self._lock:
                for number in [number for number, storage in self._sent.items() if storage.expired()]:
                    del self._sent[number]
                    _note(f"{GONE}{number}")


def _note(what: str) -> None:
    if profiler_runs():
        with ProfilerRange(what):
            pass
