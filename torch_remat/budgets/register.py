"""Which regions are in a budget, and how regions get there.

In: regions whose forward begins in a block of `budget`, or by a plan. Kept: weak references to what they keep, and what
was counted for them, so that it is taken off when they are gone. Out: the bytes that they keep now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Protocol
from weakref import ref

from torch_remat._compat import accelerator_type
from torch_remat.budgets.counted import Counted, lock
from torch_remat.budgets.evict import Offer
from torch_remat.budgets.kept import KeptRegion
from torch_remat.budgets.ledger import Ledger
from torch_remat.dispatch.keeping import Keeper, Keeping, keeping
from torch_remat.dispatch.region.region import Region


class _Entry(ref[KeptRegion]):
    """A region of a budget; what was counted for it stays here when it is gone."""

    __slots__ = ("counted",)

    counted: Counted


class Register:
    """The regions of one budget; by itself, without a limit.

    Attributes:
        limit: The most that they are to keep.
        offer: Takes tensors off the device that are about to be evicted.
        ledger: What they keep.
    """

    limit: float = inf
    offer: Offer | None = None

    def __init__(self) -> None:
        self.ledger = Ledger(accelerator_type())
        self._regions: set[_Entry] = set()
        self._dead: deque[_Entry] = deque()

    def add(self, kept: KeptRegion) -> None:
        """Take a region that begins."""
        entry = _Entry(kept, self._dead.append)
        entry.counted = kept.counted
        self._regions.add(entry)

    def make_room(self) -> None:
        """The sum has passed the limit."""

    def finished(self, kept: KeptRegion) -> None:
        """A region's forward is over."""

    def reached(self) -> None:
        """Backward has come to a region."""

    def summary(self) -> str:
        """Return a line for reports of memory; empty where there is nothing to tell."""
        return ""

    def state(self) -> tuple[int, int, int] | None:
        """Return the bytes kept now, the limit, and the budget, for traces; None without a limit."""
        return None

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
            entry.counted.forget()

    @property
    def kept_bytes(self) -> int:
        """Bytes that the regions keep now: inputs, saved tensors, and what replays have filled; each storage once."""
        with lock:
            self.refresh()
            return self.ledger.total


class Decided(Protocol):
    """What a plan says of a region."""

    @property
    def evicted_tensors(self) -> int:
        """How many of its first saved tensors are evicted."""


class Inside:
    """What regions ask inside of blocks: the innermost budget, those around it, and plans.

    Args:
        registers: The budgets.
        plan: The plan by which they run; only those that it names, where there is no budget.
    """

    __slots__ = ("plan", "registers")

    def __init__(self, registers: Sequence[Register], plan: Mapping[str, Decided] | None = None) -> None:
        self.registers = registers
        self.plan = plan

    def begin(self, region: Region) -> Keeper | None:
        """Return what keeps a region's saved tensors; None for one that neither a plan nor a budget knows."""
        planned = None if self.plan is None else self.plan.get(region.name)
        registers = self.registers
        if not registers:
            if planned is None:
                return None
            registers = (_unlimited,)
        with lock:
            for one in registers:
                one.forget_dead()  # the inputs may be where something was that is gone
            kept = KeptRegion(region, registers, 0 if planned is None else planned.evicted_tensors, registers[0].offer)
            for one in registers:
                one.add(kept)
        return kept


def registers_around() -> Sequence[Register]:
    """Return the budgets whose blocks this thread is in, innermost first."""
    around: Keeping | None = keeping.get()
    return around.registers if isinstance(around, Inside) else ()


def run_planned(plan: Mapping[str, Decided], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose regions keep what a plan says."""

    def planned(*args: Any, **kwargs: Any) -> Any:
        token = keeping.set(Inside(registers_around(), plan))
        try:
            return run(*args, **kwargs)
        finally:
            keeping.reset(token)

    return planned


_unlimited = Register()
