"""`budget`: regions that keep everything while there is room.

In: regions, whose forward runs inside of the block. Kept: weak references to what they keep, and what happened. Out:
holders emptied, where the sum would pass the limit.
"""

from __future__ import annotations

import json
import threading
import warnings
from _thread import RLock
from collections import deque
from collections.abc import Collection, Iterator
from contextvars import Token
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

import torch

from torch_remat._bytes import parse_bytes
from torch_remat._compat import graph_task
from torch_remat.budgets.kept import KeptRegion
from torch_remat.budgets.ledger import Ledger
from torch_remat.budgets.steps import Step
from torch_remat.dispatch.keeping import Keeper, Keeping, keeping
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import RematWarning, UsageError, user_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS = 64
"""How many steps a budget remembers."""

# One for all budgets: regions of one may count towards others. Forward takes it for each saved tensor; nothing else is
# waited for inside.
_lock = RLock()


class _Entry(ref[KeptRegion]):
    """A region of a budget; what was counted for it stays here when it is gone."""

    __slots__ = ("fixed", "keys")

    keys: list[tuple[int, ...]]
    fixed: list[int]


class Budget:
    """Bytes that regions may keep; see `budget`.

    Attributes:
        limit: The most that regions are to keep: the budget less the reserve.
        ledger: What they keep.
        steps: What happened in the latest steps.
    """

    def __init__(
        self, limit: str | float, *, reserve: str | float = "auto", offload: Literal["fill"] | None = None
    ) -> None:
        self.budget_bytes = parse_bytes(limit)
        self.ledger = Ledger(_device_type())
        self.steps: deque[Step] = deque(maxlen=_STEPS)
        self.reserve_bytes = 0
        self.limit: float = self.budget_bytes
        self._regions: set[_Entry] = set()
        self._dead: deque[_Entry] = deque()
        self._entered = threading.local()
        self._step_count = 0
        self._changed = False  # whether regions have begun, ended, or were read, since it was last looked
        self._warned = False
        self._too_much: int = 0

    # The block.

    def __enter__(self) -> Budget:
        outer = keeping.get()
        around = outer.budgets if isinstance(outer, _Inside) else ()
        inside = _Inside((self, *(one for one in around if one is not self)))
        tokens: list[Token[Keeping | None]] = self._entered.__dict__.setdefault("tokens", [])
        tokens.append(keeping.set(inside))
        return self

    def __exit__(self, *exception: object) -> None:
        keeping.reset(self._entered.tokens.pop())

    # What regions ask.

    def add(self, kept: KeptRegion) -> None:
        """Take a region that begins."""
        self._forget_dead()
        self._changed = True
        if (not self.steps or self.steps[-1].has_backward) and graph_task() < 0:
            self.steps.append(Step(int(self.limit), perf_counter()))
            self._step_count += 1
        entry = _Entry(kept, self._dead.append)
        entry.keys, entry.fixed = kept.keys, kept.fixed
        self._regions.add(entry)
        if self.ledger.total > self.limit:
            self.make_room()

    def finished(self, kept: KeptRegion) -> None:
        """A region's forward is over."""
        with _lock:
            self._changed = True
            step = self.steps[-1]
            step.rows.append(kept.row)
            self._note(step.kept)
            too_much, self._too_much = self._too_much, 0
        if too_much and not self._warned:
            self._warned = True
            self._warn(too_much)

    def reached(self, kept: KeptRegion) -> None:
        """Backward has come to a region."""
        with _lock:
            self._forget_dead()
            step = self.steps[-1]
            step.has_backward = True
            self._note(step.kept)

    def make_room(self) -> None:
        """Give up what is best given up, until the sum is within the limit or nothing is left."""
        self._forget_dead()
        passed_over: set[KeptRegion] = set()
        while self.ledger.total > self.limit:
            found = self._cheapest(passed_over)
            if found is not None:
                kept, cut = found
                if kept.give_up(self.ledger, cut):
                    self._note(self.steps[-1].given)
                else:
                    passed_over.add(kept)  # another thread has it, or something holds what it would give up
            elif self._changed:
                self._changed = False  # until the next region begins, only the one that runs can change
                self.refresh()
            else:
                break
        if self.ledger.total > self.limit and not self._warned:
            needed = sum({key: self.ledger.sizes[key] for entry in self._regions for key in entry.fixed}.values())
            if needed > self.budget_bytes:
                self._too_much = max(self._too_much, needed - self.budget_bytes)

    def _cheapest(self, passed_over: Collection[KeptRegion]) -> tuple[KeptRegion, int] | None:
        """Return the region whose prefix has the least score, seconds over bytes and staleness, and the prefix."""
        now, least, found = perf_counter(), inf, None
        for entry in self._regions:
            kept = entry()
            if kept is None or kept in passed_over:
                continue
            if (prefix := kept.prefix(self.ledger)) is not None:
                score = prefix.seconds / (prefix.bytes * max(now - kept.last, 1e-6))
                if score < least or (score == least and found is not None and kept.last < found[0].last):
                    least, found = score, (kept, prefix.cut)
        return found

    def refresh(self) -> None:
        """Look up what regions keep now."""
        self._forget_dead()
        for kept in self._alive():
            kept.refresh()

    def _alive(self) -> Iterator[KeptRegion]:
        for entry in list(self._regions):
            if (kept := entry()) is not None:
                yield kept

    def _forget_dead(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            self._regions.discard(entry)
            for keys in (*entry.keys, entry.fixed):
                for key in keys:
                    self.ledger.remove(key)

    def _note(self, events: list[tuple[float, int]]) -> None:
        step, total = self.steps[-1], self.ledger.total
        events.append((perf_counter() - step.begun, total))
        step.most_bytes = max(step.most_bytes, total)

    def _warn(self, too_much: int) -> None:
        """Warn once that the inputs of regions, and what their authors keep, pass the budget by themselves."""
        from torch_remat.reports.memory import memory_report

        shown = "\n".join(str(memory_report()).splitlines()[:12])
        file, line = user_line()
        warnings.warn_explicit(
            f"the budget of {self.budget_bytes:,} B is too small by {too_much:,} B even where regions recompute "
            f"everything: their inputs, and what is saved by name, are kept in any case. Nothing fails: the budget is "
            f"passed.\n{shown}",
            RematWarning,
            file,
            line,
        )

    # What users read.

    @property
    def kept_bytes(self) -> int:
        """Bytes that the regions keep now: inputs, saved tensors, and what replays have filled; each storage once."""
        with _lock:
            self.refresh()
            return self.ledger.total


class _Inside:
    """What regions ask inside of a block: the innermost budget, and those around it."""

    __slots__ = ("budgets",)

    def __init__(self, budgets: tuple[Budget, ...]) -> None:
        self.budgets = budgets

    def begin(self, region: Region) -> Keeper:
        """Return what keeps a region's saved tensors."""
        with _lock:
            kept = KeptRegion(region, self.budgets, _lock)
            for budget in self.budgets:
                budget.add(kept)
        return kept


def _device_type() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


def budget(limit: str | float, *, reserve: str | float = "auto", offload: Literal["fill"] | None = None) -> Budget:
    """Return a budget."""
    return Budget(limit, reserve=reserve, offload=offload)
