"""`Budget`: regions keep everything while there is room.

In: regions, whose forward runs inside of the block. Kept: weak references to what they keep, and what happened. Out:
holders emptied, where the sum would pass the limit.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import Token
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch_remat._compat import (
    accelerator_type,
    after_backward,
    graph_task,
)
from torch_remat._storages import Ledger
from torch_remat._text import format_bytes
from torch_remat.budgets.counted import Counted, lock
from torch_remat.budgets.evict import Offer, score
from torch_remat.budgets.fill import Filler
from torch_remat.budgets.kept import Inside, KeptRegion, Owner, registers_around
from torch_remat.budgets.plain import Fitting, Key, PlainBytes, PlainRegion
from torch_remat.budgets.plan import Plan, largest, plan_of
from torch_remat.budgets.reserve import Reserve
from torch_remat.budgets.steps import Eviction, Row, Step
from torch_remat.budgets.text import format_budget, format_head
from torch_remat.dispatch.options import Keeping, keeping
from torch_remat.errors import RematWarning, UsageError, user_line
from torch_remat.reports.report import Data, Pictured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS = 64
"""How many steps a budget remembers."""
_NAMES = 4096
"""Of how many regions it is known what was evicted."""
_NEARLY = 0.9
"""A region of which more than this share was evicted in two steps begins empty in the next."""
_LOOK = 32
"""One step in so many begins with nothing known."""
_QUIET = 2
"""After so many steps without an eviction, regions run without holders."""
UNLIMITED = 2**62
"""The bytes of a budget without a limit."""


class _Entry(ref[Any]):
    """A region of a budget, with holders or without; what was counted for it stays here when it is gone."""

    __slots__ = ("counted",)

    counted: Counted | PlainBytes


class Budget(Data, Pictured):
    """Bytes that regions may keep; see `budget`.

    It may be entered again, and in several threads; what it learned stays.

    Args:
        budget_bytes: The budget.
        share: The budget as a share, which is measured.
        reserve_bytes: How much of it is held in reserve; None learns that on an accelerator.
        fills: Whether what is to be evicted is offered to the offloader first.

    Attributes:
        budget_bytes: The budget; of a share, once it is measured.
        share: The budget as a share of what the steps keep without checkpointing; None if it is given in bytes.
        decides_alone: Whether it evicts by the clock of this process.
        reserve_bytes: How much of it is held in reserve now.
        limit: The most that regions are to keep: the budget less the reserve.
        ledger: What they keep.
        steps: What happened in the latest steps.
        backward: The latest backward that has come to a region, by `graph_task`.
        step_count: How many steps there were in all.
    """

    def __init__(
        self, budget_bytes: int, share: float | None = None, reserve_bytes: int | None = 0, fills: bool = False
    ) -> None:
        self.budget_bytes, self.share = budget_bytes, share
        self.decides_alone = budget_bytes < UNLIMITED or (share is not None and share < 1)
        self.ledger = Ledger(accelerator_type())
        self.steps: deque[Step] = deque(maxlen=_STEPS)
        self._regions: set[_Entry] = set()
        self._dead: deque[_Entry] = deque()
        self._filler = Filler(budget_bytes)
        self.offer: Offer | None = self._filler.offer if fills else None
        learns = reserve_bytes is None and share is None and self.ledger.device_type != "cpu"
        self._reserve = Reserve(budget_bytes) if learns else None
        self.reserve_bytes = reserve_bytes or 0
        self.limit: float = self.budget_bytes - self.reserve_bytes
        self._fitting = Fitting(_QUIET, _LOOK)
        self._plain: set[_Entry] = set()
        self._fixed_bytes = 0  # what all regions of the latest step kept in any case
        self._entered = threading.local()
        self.step_count = 0
        self.backward = -1
        self._changed = False  # whether regions have begun, ended, or were read, since it was last looked
        self._evicted: dict[tuple[str, int], tuple[int, Row]] = {}  # in how many steps nearly all was, and the latest
        self._measured = (0, 0)  # what the step that keeps most keeps without checkpointing, and with all recomputed
        self._warned = self._warned_unused = False
        self._too_much = 0

    def __repr__(self) -> str:
        return f"<{format_head(self)}>"

    # The block.

    def __enter__(self) -> Budget:
        around = [one for one in registers_around() if one is not self]
        tokens: list[Token[Keeping | None]] = self._entered.__dict__.setdefault("tokens", [])
        tokens.append(keeping.set(self.inside(around)))
        return self

    def inside(self, around: Sequence[Owner]) -> Inside:
        """Return what regions in a block ask, given the budgets around it."""
        return Inside((self, *around))

    def __exit__(self, kind: object, *_: object) -> None:
        keeping.reset(self._entered.tokens.pop())
        if kind is None and not self.step_count and not self._warned_unused:
            self._warned_unused = True
            _warn(
                "no region ran in this block, so the budget had nothing to limit: only checkpointed code counts. Wrap "
                "the model's layers first, with checkpoint_modules(model, patterns) or remat.checkpoint; in no_grad "
                "and inference_mode nothing is kept."
            )

    # What regions ask.

    def add(self, kept: KeptRegion) -> None:
        """Take a region that begins."""
        self.take(kept)
        times, row = self._evicted.get((kept.row.name, kept.row.input_bytes), (0, kept.row))
        if times > 1 and kept.keeps and len(kept.owners) == 1:
            self.make_room(row.saved_bytes)  # for its replay
            kept.begin_empty(row)
        elif self.ledger.total > self.limit:
            self.make_room()

    def take(self, kept: KeptRegion) -> None:
        """Count a region from now on."""
        entry = _Entry(kept, self._dead.append)
        entry.counted = kept.counted
        self._regions.add(entry)
        self._changed = True
        if self._is_new_step():
            self._begin_step(kept.row.input_bytes)

    def runner(self, key: Key) -> Callable[..., Any] | None:
        """Return what runs a region without holders; None if it has some. See NOTE [ Regions without holders ]."""
        with lock:
            self.forget_dead()
            if self._is_new_step():
                if (row := self._fitting.latest(key)) is None:
                    return None
                self._begin_step(row.input_bytes)
            if (row := self._fitting.like(key, self.step_count)) is None:
                return None
            size = row.fixed_bytes + row.saved_bytes
            if self.ledger.total + size + self._fixed_bytes > self.limit:
                return None
            plain = PlainRegion(self)
            entry = _Entry(plain, self._dead.append)
            entry.counted = PlainBytes(self.ledger, size)
            self._plain.add(entry)
            step = self.steps[-1]
            step.rows.append(row)
            step.note(perf_counter(), self.ledger.total)
        return plain.run

    def _is_new_step(self) -> bool:
        return not self.steps or (self.steps[-1].has_backward and graph_task() < 0)

    def _begin_step(self, scale: int) -> None:
        last = self.steps[-1] if self.steps else None
        for entry in [entry for entry in self._plain if (plain := entry()) is not None and plain.is_over]:
            self._plain.discard(entry)
            entry.counted.forget()
        self._fitting.end_step()
        self._fixed_bytes = 0 if last is None else last.sum_of("fixed_bytes")
        if self.share is not None and 0 < self.share < 1 and last is not None and self.decides_alone:
            fixed = last.sum_of("fixed_bytes")
            self._measured = most, least = max(self._measured, (fixed + last.sum_of("saved_bytes"), fixed))
            self.limit = self.budget_bytes = self._filler.budget_bytes = least + int(self.share * (most - least))
        if self._reserve is not None:
            if last is not None:
                self._reserve.end(last)
            self.reserve_bytes = self._reserve.begin(scale, last)
            self.limit = max(self.budget_bytes - self.reserve_bytes, 0)
        if last is not None:
            self._learn(last)
        self.steps.append(Step(self.limit, perf_counter()))
        self.step_count += 1

    def _learn(self, step: Step) -> None:
        """Note what was evicted of each region, so that it begins empty where it would lose all again.

        That spares filling it and evicting it. Where there is room for it now it begins full: the costliest first.
        """
        if self.step_count % _LOOK == 0 or len(self._evicted) > _NAMES:
            self._evicted.clear()
        room = self.limit - step.most_bytes
        for row in sorted(step.rows, key=lambda row: row.evicted_seconds / (row.evicted_bytes or 1), reverse=True):
            key = row.name, row.input_bytes
            is_gone = row.evicted_bytes > _NEARLY * row.saved_bytes and not row.offloaded_bytes
            if row.is_empty_from_start and row.evicted_bytes <= room:
                is_gone = False
                room -= row.evicted_bytes
            self._evicted[key] = (self._evicted.get(key, (0, row))[0] + 1 if is_gone else 0, row)

    def finished(self, kept: KeptRegion) -> None:
        """A region's forward is over."""
        with lock:
            self._changed = True
            step = self.steps[-1]
            step.rows.append(kept.row)
            if kept.key is not None:
                self._fitting.learn(kept.key, kept.row)
            if self.ledger.total > self.limit:
                self.make_room()  # what its last op had in use
            step.note(perf_counter(), self.ledger.total)
        self._warn_once()

    def reached(self) -> None:
        """Backward has come to a region."""
        with lock:
            self.forget_dead()
            step = self.steps[-1]
            if not step.has_backward:
                step.has_backward, step.forward_bytes = True, self.ledger.total
            step.note(perf_counter(), self.ledger.total)
            if graph_task() == self.backward:
                return
            self.backward = graph_task()
            if self._reserve is not None:
                after_backward(self._end_backward)

    def _end_backward(self) -> None:
        with lock:
            step = self.steps[-1]
            if self._reserve is not None:
                self._reserve.end(step)
            if step.peak_bytes > self.budget_bytes and self.limit <= step.sum_of("fixed_bytes"):
                self._too_much = step.peak_bytes - self.budget_bytes  # which the next region reports

    def make_room(self, more: int = 0) -> None:
        """Evict what is best evicted, until the sum and so many bytes are within the limit or nothing is left."""
        self.forget_dead()
        passed_over: set[KeptRegion] = set()
        while (needed := self.ledger.total + more - self.limit) > 0:
            found = self._cheapest(passed_over)
            if found is not None:
                idle = perf_counter() - found.evictable.last
                if (evicted := found.evictable.evict(self.ledger, int(needed))) is None:
                    passed_over.add(found)  # another thread has it, or something holds what it would evict
                    continue
                step, now = self.steps[-1], perf_counter()
                step.note(now, self.ledger.total)
                told = self.ledger.total, evicted.bytes, evicted.seconds, idle
                step.evictions.append(Eviction(found.row, now - step.begun, *told))
            elif self._changed:
                self._changed = False  # until the next region begins, only the one that runs can change
                self.refresh()
            else:
                break
        self.note_too_much()

    def note_too_much(self) -> None:
        """Note by how much the budget is exceeded although everything is recomputed; the next region reports it."""
        if self.ledger.total > self.limit and not self._warned and self.share is None:
            fixed = {key: self.ledger.sizes[key] for kept in self.alive() for key in kept.counted.fixed}
            self._too_much = max(self._too_much, sum(fixed.values()) - self.budget_bytes)

    def _cheapest(self, passed_over: Collection[KeptRegion]) -> KeptRegion | None:
        """Return the region whose prefix has the least score; of equal ones that which is idle for longest."""
        now, least = perf_counter(), (inf, inf)
        found: KeptRegion | None = None
        for kept in self.alive():
            if kept not in passed_over and (prefix := kept.evictable.prefix(self.ledger)) is not None:
                last = kept.evictable.last
                if (worth := (score(prefix, now - last), last)) < least:
                    least, found = worth, kept
        return found

    def _warn_once(self) -> None:
        """Warn, once, if full recomputation passes the budget, too."""
        too_much, self._too_much = self._too_much, 0
        if too_much <= 0 or self._warned:
            return
        self._warned = True
        from torch_remat.reports.memory import memory_report

        report = "\n".join(str(memory_report()).splitlines()[:12])
        _warn(
            f"the budget of {self.budget_bytes:,} B is exceeded by {too_much:,} B, although regions recompute "
            "everything: they need their inputs, what is saved by name, and in backward the tensors of one region. "
            f"Gradients are right.\n{report}"
        )

    def alive(self) -> Iterator[KeptRegion]:
        """Yield the regions."""
        for entry in list(self._regions):
            if (kept := entry()) is not None:
                yield kept

    def refresh(self) -> None:
        """Look up what regions keep now."""
        self.forget_dead()
        for kept in self.alive():
            kept.refresh()

    def forget_dead(self) -> None:
        """Take off what was counted for regions that are gone."""
        while self._dead:
            entry = self._dead.popleft()
            self._regions.discard(entry)
            self._plain.discard(entry)
            entry.counted.forget()

    # What users read.

    @property
    def kept_bytes(self) -> int:
        """Bytes that the regions keep now: inputs, saved tensors, and what replays have filled; each storage once."""
        with lock:
            self.refresh()
            return self.ledger.total

    @property
    def told(self) -> str:
        """The budget as text."""
        size = "" if self.budget_bytes == UNLIMITED else format_bytes(self.budget_bytes)
        if self.share is None:
            return size or "no limit"
        return f"{self.share:.0%} ({size or 'not measured yet'})" if 0 < self.share < 1 else f"{self.share:.0%}"

    def summary(self) -> str:
        """Return a line for reports of memory."""
        evicted = self.steps[-1].sum_of("evicted_bytes") if self.steps else 0
        kept = f"{format_bytes(self.ledger.total)} of a budget of {self.told}"
        return f"by regions: {kept}, {format_bytes(evicted)} evicted in this step"

    def state(self) -> tuple[int, int, int] | None:
        """Return the bytes kept now, the limit, and the budget, for traces; None without a limit."""
        return None if self.limit >= UNLIMITED else (self.kept_bytes, int(self.limit), self.budget_bytes)

    def report(self) -> str:
        """Return what happened, as text: the latest steps, and for the last whole one a line for each region."""
        return format_budget(self, self._last_step())

    def to_dict(self) -> dict[str, Any]:
        """Return what happened as plain data: the budget, and the latest steps with their regions."""
        return {
            "budget_bytes": self.budget_bytes,
            "share": self.share,
            "reserve_bytes": self.reserve_bytes,
            "limit_bytes": int(self.limit),
            "kept_bytes": self.kept_bytes,
            "step_count": self.step_count,
            "steps": [step.to_dict() for step in self.steps],
        }

    def draw(self) -> Figure:
        """Draw the last whole step: what regions kept, against the budget, and which was evicted when and why."""
        from torch_remat.budgets.pictures import draw_budget

        return draw_budget(self, self._last_step())

    def plan(self) -> Plan:
        """Return the decisions of a step as a plan: of the latest of those whose regions would keep most.

        Raises:
            UsageError: There was no whole step.
        """
        step = largest(list(self.steps))
        if step is None:
            raise UsageError(
                "budget.plan() needs a step", remedy="Run forward and backward of some steps in the block before."
            )
        return plan_of(step)

    def _last_step(self) -> Step | None:
        return next((step for step in reversed(self.steps) if step.has_backward), None)


def _warn(text: str) -> None:
    file, line = user_line()
    warnings.warn_explicit(text, RematWarning, file, line)
