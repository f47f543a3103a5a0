"""`Budget`: regions keep what is dearest to recompute, as far as the bytes go.

In: regions, whose forward runs inside of the block. Kept: weak references to them, what happened, and what was bought.
Out: for each region what it keeps.

NOTE [ How a budget is spent ]
1. The first forwards of a kind of region keep nothing and are recorded: no step keeps more than full checkpointing does
   before it is known what there is to keep.
2. When a step begins, what the latest step with these shapes has shown of its regions is bought anew (`price.choose`);
   of shapes that were not there yet the latest step is asked, in proportion to the first region's arguments.
   What a region kept besides its rung, or less, since others hold its arguments, is added from the step before.
3. Where everything of a region is bought it runs as plain code, and is counted by what its ladder knows.
4. What was bought for other shapes may be too much. Then a region that begins takes a lower rung, and if that is not
   enough, of regions whose backward has not come what is cheapest to recompute is evicted.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Hashable, Iterator
from contextvars import Token
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch_remat._compat import accelerator_type, after_backward, graph_task
from torch_remat._util.storages import Ledger
from torch_remat._util.text import format_bytes
from torch_remat.budgets.counted import Counted, PlainBytes, lock
from torch_remat.budgets.fill import Filler
from torch_remat.budgets.kept import Asked, Inside, KeptRegion, PlainRegion, bytes_of, registers_around
from torch_remat.budgets.plan import Plan, largest, plan_of
from torch_remat.budgets.price import Choice, Part, choose, ends, rung_at
from torch_remat.budgets.reserve import Reserve
from torch_remat.budgets.steps import Row, Step
from torch_remat.budgets.text import format_budget, format_head
from torch_remat.dispatch.options import Begun, Keeping, keeping, observers
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import RematWarning, UsageError, user_line
from torch_remat.ladders.kinds import Kind
from torch_remat.ladders.ladder import Ladder, Rung, gain
from torch_remat.reports.report import Data, Pictured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS = 64
"""How many steps a budget remembers."""
_SHAPES = 256
"""Of so many shapes of a step's first region it is known what the step was like."""
_MORE = 2**14
"""Of so many regions it is known what they keep besides their rungs."""
UNLIMITED = 2**62
"""The bytes of a budget without a limit."""


# What steps were like, of all budgets, since many make one anew for each step: by the kind of the first region, and the
# shapes of its arguments, the latest whole step, and the bytes of these. And what a region kept besides its rung.
_known: dict[tuple[Kind, Hashable], tuple[Step, int]] = {}
_more: dict[tuple[Kind, int], int] = {}


def forget_steps() -> None:
    """Forget what steps were like; for tests."""
    _known.clear()
    _more.clear()


def _learn(step: Step) -> None:
    """Note what the regions of a step can keep, and what they have kept besides."""
    for row in step.rows:
        row.learn()
        if row.kind is not None and row.part is not None and not row.is_plain:
            if len(_more) >= _MORE:
                _more.clear()
            _more[row.kind, row.number] = row.more_bytes


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
        fills: Whether what is not bought is offered to the offloader.

    Attributes:
        budget_bytes: The budget; of a share, once it is measured.
        share: The budget as a share of what the steps keep without checkpointing; None if it is given in bytes.
        decides_alone: Whether it decides by the clock of this process.
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
        self.decides_alone = budget_bytes < UNLIMITED if share is None else 0 < share < 1
        self.ledger = Ledger(accelerator_type())
        self.steps: deque[Step] = deque(maxlen=_STEPS)
        self._regions: set[_Entry] = set()
        self._dead: deque[_Entry] = deque()
        self._plain: set[_Entry] = set()
        self._filler = Filler(budget_bytes) if fills else None
        learns = reserve_bytes is None and share is None and self.ledger.device_type != "cpu"
        self._reserve = Reserve(budget_bytes) if learns else None
        self.reserve_bytes = reserve_bytes or 0
        self.limit: float = self.budget_bytes - self.reserve_bytes
        self._entered = threading.local()
        self.step_count = 0
        self.backward = -1
        self._first: tuple[Kind, Hashable, int] | None = None  # the first region of the step, with its bytes
        self._bought: dict[tuple[Kind, int], tuple[Ladder, Rung]] = {}
        self._solved: tuple[Any, Choice, dict[tuple[Kind, int], tuple[Ladder, Rung]]] | None = None
        self._rest_bytes = 0.0  # what regions keep in any case that are still to come in this step
        self._counts: dict[Kind, int] = {}  # of the regions of this step
        self._changed = False  # whether backward has come to regions since it was last looked
        self._measured = (0, 0)  # what the step that keeps most keeps without checkpointing, and with all recomputed
        self._warned = self._warned_unused = False
        self._too_much = 0

    def __repr__(self) -> str:
        return f"<{format_head(self)}>"

    # The block.

    def __enter__(self) -> Budget:
        around = [one for one in registers_around() if one is not self]
        tokens: list[Token[Keeping | None]] = self._entered.__dict__.setdefault("tokens", [])
        tokens.append(keeping.set(Inside((self, *around))))
        return self

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

    def begin(self, asked: Asked) -> Begun:
        """Say what a region keeps that is about to begin."""
        with lock:
            self.forget_dead()
            size = bytes_of(asked.leaves)
            if self._is_new_step():
                self._begin_step(asked.kind, asked.shapes, size)
            kind, shapes = asked.kind, asked.shapes
            number = self._counts[kind] = self._counts.get(kind, -1) + 1
            row = Row(asked.name, kind, number, shapes, asked.options.functions)
            row.input_bytes = size
            if self.limit > 1 and kind.is_new(shapes):
                return Begun(kind, shapes, is_new=True, entry=row)
            row.look_up()
            if row.part is None:
                return Begun(kind, shapes, entry=row)
            row.part = row.part._replace(more_bytes=_more.get((kind, number), 0))
            row.rung = self._rung_for(asked, row, row.part)
            return self._begun(asked, row, may_be_plain(asked) and not observers)  # which see regions alone

    def _begun(self, asked: Asked, row: Row, may_be_plain: bool) -> Begun:
        """Return what is said of a region that keeps a rung, given whether it may be plain code."""
        if row.is_plain:
            assert row.part is not None
            if may_be_plain:
                row.kept_bytes = row.whole_bytes + min(row.part.more_bytes, 0)
                return Begun(asked.kind, asked.shapes, row.rung, run=PlainRegion(asked.owners, row).run)
            row.rung = row.part.ladder.as_region()
        kept = row.rung if row.rung is not None and row.rung.acts else None
        return Begun(asked.kind, asked.shapes, kept, entry=row)

    def expect(self, region: Region) -> None:
        """A region begins that does not go by price."""

    def _rung_for(self, asked: Asked, row: Row, part: Part) -> Rung:
        """Return the rung that was bought for a region, or one below it that fits."""
        assert row.kind is not None
        rungs = part.ladder.rungs
        bought = self._bought.get((row.kind, row.number))
        if bought is not None and bought[0] is part.ladder:
            rung = bought[1]
        elif self.limit >= UNLIMITED and self.share in (None, 1):
            rung = rungs[-1]
        elif self.steps[-1].choice is None:  # of a share that is not measured yet, too
            rung = rungs[0]
        else:
            price = self.steps[-1].choice.price
            rung, at = rung_at(part.ladder, price)
            if rung.is_plain and at and price:  # more may come that nobody expects: this one must have what to evict
                rung = rungs[at - 1]
        if bought is not None:
            self._rest_bytes -= bought[0].rungs[0].bytes
        room = self.limit - self.ledger.total - max(self._rest_bytes, 0)
        for owner in asked.owners[1:]:
            room = min(room, owner.limit - owner.ledger.total)
        if room < UNLIMITED // 2 and not rung.away:
            while part.bytes_of(rung) > room and (at := part.ladder.below(rung)) >= 0:
                rung = rungs[at]
        return rung

    def add_plain(self, plain: PlainRegion, row: Row) -> None:
        """Count a region that runs as plain code."""
        if self._is_new_step():  # it goes by the price of an inner budget
            self._begin_step(None, None, row.input_bytes)
        entry = _Entry(plain, self._dead.append)
        entry.counted = PlainBytes(self.ledger, row.kept_bytes)
        self._plain.add(entry)
        step = self.steps[-1]
        step.rows.append(row)
        if self.ledger.total > self.limit:
            self.make_room()
        step.note(self.ledger.total)

    def add(self, kept: KeptRegion) -> None:
        """Count a region that begins."""
        entry = _Entry(kept, self._dead.append)
        entry.counted = kept.counted
        self._regions.add(entry)
        if self._is_new_step():  # it does not go by price, or goes by that of an inner budget
            self._begin_step(None, None, kept.row.input_bytes)

    def _is_new_step(self) -> bool:
        return not self.steps or (self.steps[-1].has_backward and graph_task() < 0)

    def _begin_step(self, kind: Kind | None, shapes: Hashable, size: int) -> None:
        """Begin a step, whose first region has arguments of so many bytes."""
        last = self.steps[-1] if self.steps else None
        for entry in [entry for entry in self._plain if (plain := entry()) is not None and plain.is_over]:
            self._plain.discard(entry)
            entry.counted.forget()
        self._first = None if kind is None else (kind, shapes, size)
        known, scale = self._like()
        if known is not None:
            _learn(known)
        if self.share is not None and 0 < self.share < 1 and known is not None and self.decides_alone:
            self._measure(known, scale)
        if self._reserve is not None:
            if last is not None:
                self._reserve.end(last)
            self.reserve_bytes = self._reserve.begin(size, last)
            self.limit = max(self.budget_bytes - self.reserve_bytes, 0)
        step = Step(self.limit)
        self._counts, self._bought, self._rest_bytes = {}, {}, 0.0
        if known is not None and known.is_known and self.limit < UNLIMITED:
            step.choice, self._bought = self._buy(known, scale)
            self._rest_bytes = sum(ladder.rungs[0].bytes for ladder, _ in self._bought.values())
        self.steps.append(step)
        self.step_count += 1

    def _like(self) -> tuple[Step | None, float]:
        """Return the step that this one will be like, and by how much this one is larger."""
        if self._first is None:
            return None, 1.0
        kind, shapes, size = self._first
        if (found := _known.get((kind, shapes))) is not None:
            return found[0], 1.0
        known = next((one for (other, _), one in reversed(_known.items()) if other is kind), None)
        return (None, 1.0) if known is None else (known[0], size / (known[1] or 1))

    def _measure(self, step: Step, scale: float) -> None:
        """Find the bytes of a share: of what the steps keep without checkpointing, and with all recomputed."""
        if self.share is None or not step.is_known:
            return
        most, least = (int((size + step.other_bytes()) * scale) for size in ends(step.parts()))
        self._measured = most, least = max(self._measured, (most, least))
        self.limit = self.budget_bytes = least + int(self.share * (most - least))

    def _buy(self, known: Step, scale: float) -> tuple[Choice, dict[tuple[Kind, int], tuple[Ladder, Rung]]]:
        """Buy for the regions of a step what is dearest to recompute."""
        rows = [row for row in known.rows if row.part is not None and row.kind is not None]
        parts = [
            row.part._replace(
                scale=row.part.scale * scale, more_bytes=int(_more.get((row.kind, row.number), 0) * scale)
            )
            for row in rows
            if row.part is not None and row.kind is not None
        ]
        limit = self.limit - known.other_bytes() * scale
        asked = (
            [(id(part.ladder), part.scale, part.more_bytes) for part in parts],
            limit,
            self._filler and self._filler.bytes,
        )
        if self._solved is not None and self._solved[0] == asked:
            return self._solved[1:]
        choice = choose(parts, limit, self.share is None)
        bought = {
            (row.kind, row.number): (part.ladder, rung)
            for row, part, rung in zip(rows, parts, choice.rungs, strict=True)
            if row.kind is not None
        }
        if self._filler is not None:
            bought |= self._filler.fill(bought, parts)
        self._solved = asked, choice, bought
        return choice, bought

    def finished(self, kept: KeptRegion) -> None:
        """A region's forward is over."""
        with lock:
            step = self.steps[-1]
            step.rows.append(kept.row)
            if self.ledger.total > self.limit:
                self.make_room()
            step.note(self.ledger.total)
        self._warn_once()

    def reached(self) -> None:
        """Backward has come to a region."""
        with lock:
            self.forget_dead()
            self._changed = True
            step = self.steps[-1]
            if not step.has_backward:
                step.has_backward, step.forward_bytes = True, self.ledger.total
                if self._first is not None:
                    if len(_known) >= _SHAPES:
                        _known.clear()
                    _known.pop(self._first[:2], None)  # the latest is the last
                    _known[self._first[:2]] = step, self._first[2]
            step.note(self.ledger.total)
            if graph_task() == self.backward:
                return
            self.backward = graph_task()
            if self._filler is not None:
                self._filler.look(value for kept in self.alive() for value in kept.slots())
            if self._reserve is not None:
                after_backward(self._end_backward)

    def _end_backward(self) -> None:
        with lock:
            step = self.steps[-1]
            if self._reserve is not None:
                self._reserve.end(step)
            if step.peak_bytes > self.budget_bytes and not any(row.rung and row.rung.acts for row in step.rows):
                self._too_much = step.peak_bytes - self.budget_bytes  # which the next region reports

    def make_room(self) -> None:
        """Evict what is cheapest to recompute, until the sum is within the limit or nothing is left."""
        self.forget_dead()
        passed_over: set[KeptRegion] = set()
        while self.ledger.total > self.limit:
            found = self._cheapest(passed_over)
            if found is not None:
                if not found.lower(found.next_rung()):
                    passed_over.add(found)  # backward is there
            elif self._changed:
                self._changed = False
                self.refresh()
            else:
                break
        self.note_too_much()

    def _cheapest(self, passed_over: set[KeptRegion]) -> KeptRegion | None:
        """Return the region whose next rung costs least time for its bytes; of equal ones the first."""
        least, found = 0.0, None
        for kept in self.alive():
            if kept in passed_over or (at := kept.next_rung()) < 0:
                continue
            part, rung = kept.row.part, kept.row.rung
            assert part is not None
            assert rung is not None
            worth = gain(part.ladder.rungs[at], rung)
            if found is None or (worth, kept.row.begun) < (least, found.row.begun):
                least, found = worth, kept
        return found

    def note_too_much(self) -> None:
        """Note by how much the budget is exceeded although everything is recomputed; the next region reports it."""
        if self.ledger.total > self.limit and not self._warned and self.share is None:
            self._too_much = max(self._too_much, int(self.ledger.total - self.budget_bytes))

    def _warn_once(self) -> None:
        """Warn, once, if full recomputation passes the budget, too."""
        too_much, self._too_much = self._too_much, 0
        if too_much <= 0 or self._warned:
            return
        self._warned = True
        from torch_remat.reports.memory import memory_report

        report = "\n".join(str(memory_report()).splitlines()[:12])
        _warn(
            f"the budget of {format_bytes(self.budget_bytes)} is exceeded by {format_bytes(too_much)} so far, although "
            "regions recompute everything: they need their inputs, what is saved by name, and in backward the tensors "
            'of one region. Gradients are right. A step in remat.budget("0%") shows the least that is needed '
            f"(budget.report()); offload_inputs=True makes it less.\n{report}"
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
        again = self.steps[-1].sum_of("recomputed_bytes") if self.steps else 0
        kept = f"{format_bytes(self.ledger.total)} of a budget of {self.told}"
        return f"by regions: {kept}, {format_bytes(again)} recomputed in this step"

    def report(self) -> str:
        """Return what happened, as text: the latest steps, and for the last whole one a line for each region."""
        self._look_up()
        return format_budget(self, self._last_step())

    def to_dict(self) -> dict[str, Any]:
        """Return what happened as plain data: the budget, and the latest steps with their regions."""
        self._look_up()
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
        """Draw what memory buys: the time of replays by kept bytes, with the point where this budget stands.

        Raises:
            UsageError: It is not known yet what the regions can keep.
        """
        from torch_remat.budgets.pictures import draw_budget

        step = self._last_step()
        if step is None or not step.is_known:
            raise UsageError(
                "budget.plot() needs steps", remedy="Run some steps in the block before: the first ones are recorded."
            )
        return draw_budget(self, step)

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

    def _look_up(self) -> None:
        """Find what the regions could have kept that were recorded, for reports."""
        with lock:
            for step in self.steps:
                for row in step.rows:
                    row.look_up()

    def _last_step(self) -> Step | None:
        return next((step for step in reversed(self.steps) if step.has_backward), None)


def may_be_plain(asked: Asked) -> bool:
    """Whether a region may run as plain code: its options ask for no more."""
    options = asked.options
    return not (
        options.context_fn is not None
        or options.determinism_check != "default"
        or options.debug
        or options.offload_inputs
        or (options.functions is not None and any(one.offloads for one in options.functions.decisions.values()))
    )


def _warn(text: str) -> None:
    file, line = user_line()
    warnings.warn_explicit(text, RematWarning, file, line)
