"""`budget`: regions that keep everything while there is room.

In: regions, whose forward runs inside of the block. Kept: weak references to what they keep, and what happened. Out:
holders emptied, where the sum would pass the limit.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import Token
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from torch_remat._bytes import parse_bytes
from torch_remat._compat import (
    after_backward,
    eager_only,
    graph_is_kept,
    graph_task,
    numbers_to_come,
    sequence_number,
    top_saved_tensors_hooks,
)
from torch_remat._score import eviction_score
from torch_remat._storages import Keys
from torch_remat._text import format_bytes
from torch_remat.budgets.fill import Filler
from torch_remat.budgets.kept import LEAST_SECONDS, KeptRegion
from torch_remat.budgets.plan import Plan, largest, plan_of
from torch_remat.budgets.register import Inside, Register, lock, registers_around
from torch_remat.budgets.repeats import Place, Repeats, what_is_given
from torch_remat.budgets.reserve import Reserve
from torch_remat.budgets.steps import Step
from torch_remat.budgets.text import format_budget
from torch_remat.budgets.without_holders import WithoutHolders
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.options import DEFAULTS, Keeping, Options, keeping, observers
from torch_remat.dispatch.reach import tensors_of
from torch_remat.errors import RematWarning, UsageError, user_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS = 64
"""How many steps a budget remembers."""

_NAMES = 4096
"""Of how many regions the time of the fastest forward is known."""


class Budget(Register):
    """Bytes that regions may keep; see `budget`.

    It may be entered again, and in several threads; what it learned stays.

    Attributes:
        budget_bytes: The budget.
        reserve_bytes: How much of it is held in reserve now.
        limit: The most that regions are to keep: the budget less the reserve.
        ledger: What they keep.
        steps: What happened in the latest steps.
        step_count: How many steps there were in all.
    """

    def __init__(
        self, limit: str | float, *, reserve: str | float = "auto", offload: Literal["fill"] | None = None
    ) -> None:
        self.budget_bytes = parse_bytes(limit)
        super().__init__()
        self.steps: deque[Step] = deque(maxlen=_STEPS)
        if offload not in (None, "fill"):
            raise UsageError(f"budget(offload={offload!r}) is not possible", remedy='It is None or "fill".')
        self.offer = Filler(self.budget_bytes).offer if offload == "fill" else None
        self._reserve = Reserve(self.ledger.device_type, self.budget_bytes) if reserve == "auto" else None
        self.reserve_bytes = 0 if reserve == "auto" or reserve == 0 else parse_bytes(reserve)
        if self.reserve_bytes >= self.budget_bytes:
            raise UsageError(
                f"a reserve of {self.reserve_bytes:,} B leaves nothing of a budget of {self.budget_bytes:,} B",
                remedy="The reserve is a part of the budget: give less of it, or a larger budget.",
            )
        self.limit: float = self.budget_bytes - self.reserve_bytes
        self._entered = threading.local()
        self.step_count = 0
        self._repeats = Repeats()
        self._backward = -1  # the latest that has come to a region
        self._changed = False  # whether regions have begun, ended, or were read, since it was last looked
        self._fastest: dict[tuple[str, int, int], float] = {}  # forwards of the same name and size, latest last
        self._warned = False
        self._too_much: int = 0

    # The block.

    def __enter__(self) -> Budget:
        inside = Inside((self, *(one for one in registers_around() if one is not self)))
        tokens: list[Token[Keeping | None]] = self._entered.__dict__.setdefault("tokens", [])
        tokens.append(keeping.set(inside))
        return self

    def __exit__(self, *exception: object) -> None:
        keeping.reset(self._entered.tokens.pop())
        self._end_step()

    # What regions ask.

    def add(self, kept: KeptRegion, given: Sequence[Any]) -> None:
        """Take a region that begins, with the values that it was given."""
        super().add(kept, given)
        self._changed = True
        if self._is_new_step():
            self._begin_step(kept.row.fixed_bytes, given)
        if len(kept.owners) == 1 and (region := kept.region()) is not None:
            is_simple = kept.keep is not None and self._may_lack_holders(region.options)
            known = what_is_given(region.name, given) if is_simple else None
            kept.place, like = self._repeats.add(known, self.ledger.total, kept.row)
            if like is not None:
                kept.begin_empty(like)
        if self.ledger.total > self.limit:
            self.make_room()

    def runner(
        self, options: Options, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """Return what runs a region that may run without holders; None if it has some."""
        if not self._repeats.may_expect(self._is_new_step()) or not self._may_lack_holders(options):
            return None
        values = (*args, *kwargs.values())
        given = what_is_given(options.region_name or default_name(function), values)
        with lock:
            self.forget_dead()
            if self._is_new_step():
                self._repeats.end_step()
                if (first := self._repeats.starts_with(given)) is None:
                    return None
                self._begin_step(first.fixed_bytes, values)
            place = self._repeats.expects(given, self.ledger.settled())
            if place is None:
                return None
            if self.ledger.total + place.alone > self.limit:
                self.make_room(place.alone)
                if self.ledger.total + place.alone > self.limit:
                    return None
            self._repeats.add_without(place)
            region = WithoutHolders(self, place, self.ledger.add_bytes(place.alone))
            self.without_holders.add(self._entry(region, region.keys, []))
        return region.run

    def ran(self, place: Place, nodes: int) -> None:
        """A region without holders has run, and made so many autograd nodes."""
        with lock:
            self._repeats.ran(place, nodes)
            step = self.steps[-1]
            step.rows.append(place.row)
            self._note(step.kept)

    def _may_lack_holders(self, options: Options) -> bool:
        """Whether a region that begins may be without holders, as far as its options and what is around it go."""
        return (
            options[2:] == DEFAULTS[2:]  # it may have a name, and draws no number twice
            and top_saved_tensors_hooks() is None
            and not observers
        )

    def _is_new_step(self) -> bool:
        return not self.steps or (self.steps[-1].has_backward and graph_task() < 0)

    def _begin_step(self, scale: int, given: Sequence[Any]) -> None:
        self._end_step()
        if self._reserve is not None:
            if self._reserve.wants(scale):
                self._reserve.begin(self.ledger.total + _saved_below(given))
            self.reserve_bytes = self._reserve.bytes_for(scale, self.steps[-1] if self.steps else None)
            self.limit = max(self.budget_bytes - self.reserve_bytes, 0)
        measures = self._reserve is not None and self._reserve.measurement.runs
        self._repeats.begin_step(self.limit, not measures)
        self.steps.append(Step(int(self.limit), perf_counter()))
        self.step_count += 1

    def _end_step(self) -> None:
        if self._reserve is not None and self._reserve.measurement.runs_here:
            with lock:
                step = self.steps[-1]
                step.peak_bytes = peak = self._reserve.end(step)
                if peak > self.budget_bytes and step.limit_bytes <= sum(row.fixed_bytes for row in step.rows):
                    self._too_much = peak - self.budget_bytes
            self._warn_once()

    def finished(self, kept: KeptRegion) -> None:
        """A region's forward is over."""
        with lock:
            self._changed = True
            row = kept.row
            usual = row.name, row.tensors, row.saved_bytes
            fastest = self._fastest[usual] = min(row.forward_seconds, self._fastest.pop(usual, inf))
            if len(self._fastest) > _NAMES:
                del self._fastest[next(iter(self._fastest))]
            kept.pace = fastest / row.forward_seconds
            step = self.steps[-1]
            step.rows.append(kept.row)
            self._take_place(kept)
            if self.ledger.total > self.limit:
                self.make_room()  # what its last op had in use
            self._note(step.kept)
        self._warn_once()

    def _take_place(self, kept: KeptRegion) -> None:
        """Note what a region has done, if one like it may run without holders."""
        region, place = kept.region(), kept.place
        if region is not None and place is not None and place.given is not None and self._repeats.is_last(place):
            tape = region.tape
            if not (tape.records or tape.calls or tape.holders):
                place.finish(sequence_number() - region.first_number, *kept.saved_bytes())

    def reached(self, keys: list[Keys] | None = None) -> None:
        """Backward has come to a region; to one without holders, which is counted by these keys."""
        with lock:
            self.forget_dead()
            step = self.steps[-1]
            if not step.has_backward:
                step.has_backward, step.forward_bytes = True, self.ledger.total
            if keys and not graph_is_kept():
                self.ledger.remove_all(keys)
                keys.clear()
            self._note(step.kept)
            if graph_task() != self._backward:
                self._backward = graph_task()
                if not graph_is_kept() and (full := self._with_needless_inputs()):
                    to_come = numbers_to_come()
                    for one in full:
                        one.let_inputs_go(to_come)
                if self._reserve is not None and self._reserve.measurement.runs_here:
                    after_backward(self._end_step)

    def _with_needless_inputs(self) -> list[KeptRegion]:
        return [kept for kept in self.alive() if kept.has_needless_inputs(self.ledger)]

    def make_room(self, more: int = 0) -> None:
        """Give up what is best given up, until the sum and so many bytes are within the limit or nothing is left."""
        self.forget_dead()
        self.ledger.settled()
        passed_over: set[KeptRegion] = set()
        while self.ledger.total + more > self.limit:
            found = self._cheapest(passed_over)
            if found is not None:
                cut = found.shortest(self.ledger, self.ledger.total + more - int(self.limit))
                if found.give_up(self.ledger, cut):
                    self._note(self.steps[-1].given)
                else:
                    passed_over.add(found)  # another thread has it, or something holds what it would give up
            elif self._changed:
                self._changed = False  # until the next region begins, only the one that runs can change
                self.refresh()
            else:
                break
        if self.ledger.total > self.limit and not self._warned:
            needed = sum({key: self.ledger.sizes[key] for entry in self.regions for key in entry.fixed}.values())
            if needed > self.budget_bytes:
                self._too_much = max(self._too_much, needed - self.budget_bytes)

    def _cheapest(self, passed_over: Collection[KeptRegion]) -> KeptRegion | None:
        """Return the region whose prefix has the least score: seconds over bytes and staleness."""
        now, least = perf_counter(), inf
        found: KeptRegion | None = None
        for entry in self.regions:
            kept = entry()
            if kept is None or kept in passed_over:
                continue
            if (prefix := kept.prefix(self.ledger)) is not None:
                last = kept.last
                score = eviction_score(prefix.seconds, prefix.bytes, max(now - last, LEAST_SECONDS))
                if score < least or (score == least and found is not None and last < found.last):
                    least, found = score, kept
        return found

    def _note(self, events: list[tuple[float, int]]) -> None:
        step, total = self.steps[-1], self.ledger.total
        events.append((perf_counter() - step.begun, total))
        step.most_bytes = max(step.most_bytes, total)

    def _warn_once(self) -> None:
        """Warn, once, if full recomputation passes the budget, too."""
        too_much, self._too_much = self._too_much, 0
        if not too_much or self._warned:
            return
        self._warned = True
        from torch_remat.reports.memory import memory_report

        shown = "\n".join(str(memory_report()).splitlines()[:12])
        file, line = user_line()
        warnings.warn_explicit(
            f"the budget of {self.budget_bytes:,} B is passed by {too_much:,} B although regions recompute everything: "
            "what they need in any case are their inputs, what is saved by name, and in backward the tensors of one of "
            f"them. Nothing else comes of it.\n{shown}",
            RematWarning,
            file,
            line,
        )

    # What users read.

    def summary(self) -> str:
        """Return a line for reports of memory."""
        given = sum(row.given_bytes for row in self.steps[-1].rows) if self.steps else 0
        kept = f"{format_bytes(self.ledger.total)} of a budget of {format_bytes(self.budget_bytes)}"
        return f"by regions: {kept}, {format_bytes(given)} given up in this step"

    def state(self) -> tuple[int, int, int]:
        """Return the bytes kept now, the limit, and the budget, for traces."""
        return self.kept_bytes, int(self.limit), self.budget_bytes

    def report(self) -> str:
        """Return what happened, as text: the latest steps, and for the last whole one a line for each region."""
        return format_budget(self, self._last_step())

    def to_dict(self) -> dict[str, Any]:
        """Return what happened as plain data: the budget, and the latest steps with their regions."""
        return {
            "budget_bytes": self.budget_bytes,
            "reserve_bytes": self.reserve_bytes,
            "limit_bytes": int(self.limit),
            "kept_bytes": self.kept_bytes,
            "step_count": self.step_count,
            "steps": [step.to_dict() for step in self.steps],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw what regions kept over the last whole step, against the budget, and where something was given up.

        Args:
            path: Where to write the picture; the ending tells the format. None writes nothing.

        Returns:
            The matplotlib figure; it is not shown.

        Raises:
            UsageError: matplotlib is not installed.
        """
        from torch_remat.budgets.pictures import plot_budget

        return plot_budget(self, self._last_step(), path)

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


def _saved_below(given: Sequence[Any]) -> int:
    """Return the bytes that autograd has saved, outside of regions, below what a region was given."""
    from torch_remat.reports.memory import memory_report

    report = memory_report(*tensors_of(list(given)))
    return sum(node.bytes for node in report.outside)


@eager_only
def budget(limit: str | float, *, reserve: str | float = "auto", offload: Literal["fill"] | None = None) -> Budget:
    """Return a memory budget for regions: inside of its block they keep everything, and give up just enough.

    A region in the block starts with all that autograd saves, so that backward recomputes nothing. When the sum over
    all regions would pass the limit, some is given up: the start of a region, which its replay makes again. The choice
    is that of dynamic rematerialization: what costs least time for its bytes and was not used for longest. Gradients
    are those of the same code without a budget, bit for bit. Outside of the block regions recompute everything; a graph
    that was made inside stays counted until it is freed.

    Args:
        limit: Bytes; a text with a unit (``"6 GiB"``); or a float up to 1, a share of the device's memory, of the
            machine's on the CPU.
        reserve: How much of it is left for what backward needs besides: bytes, or ``"auto"``, which measures the first
            steps, so that from the second step on the peak stays within the budget. The peak is the most bytes
            above those at the step's start.
        offload: ``"fill"`` offers what is to be given up to the offloader first, as long as it keeps up.

    Returns:
        A context manager, which tells what it did: ``kept_bytes``, ``report()``, ``plot(path)``, ``to_dict()``,
        ``plan()``.

    Raises:
        UsageError: A limit or a reserve is zero, negative or nonsense, or ``offload`` is unknown.

    Warns:
        RematWarning: Once, where the budget is passed although everything is recomputed.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> with remat.budget("1 MiB", reserve=0) as budget:
        ...     y = remat.checkpoint(region_name="block")(block)(torch.randn(4, 8))
        ...     print(budget.kept_bytes)
        1152
        >>> y.sum().backward()
        >>> budget.kept_bytes
        0
    """
    return Budget(limit, reserve=reserve, offload=offload)
