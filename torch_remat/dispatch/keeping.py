"""What regions ask of a budget, which keeps saved tensors in their holders; see `torch_remat.budgets`.

In: a region that begins inside of a budget. Kept: nothing here. Out: its *keeper*, which fills holders as they are made
and may empty them again at any time: a replay fills what is empty. A region outside of a budget has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import ref

import torch


class Keeper(Protocol):
    """What one region asks.

    Attributes:
        owners: The budgets that the region is in.
        keeps: Whether it fills holders; if not, the region's forward runs as outside of a budget.
    """

    owners: Sequence[Any]
    keeps: bool

    def keep(self, holder: Any, entry: ref[Any], value: torch.Tensor, ops: Any) -> None:
        """Give a holder its value, unless it is to be empty.

        Args:
            holder: The holder.
            entry: The tape's weak reference to it.
            value: The saved tensor, detached.
            ops: The region's calls and ops, if it has any so far.
        """

    def end(self) -> None:
        """The function has ended: mark the evicted holders whose tensors were modified in place."""

    def let_go(self) -> None:
        """Empty what was kept since the last time: a backward inside of forward reads it, and finds it as outside."""

    def set_aside(self) -> AbstractContextManager[None]:
        """Have all holders empty for a moment, as they are outside of a budget."""

    def finish(self) -> None:
        """Forward is over: count what the region keeps besides."""

    def reach(self) -> None:
        """Backward has come to the region, and asks next what is empty."""

    def replay(self, replay: Callable[[], None]) -> None:
        """Run one replay, and take its time."""


class Keeping(Protocol):
    """What gives regions their keepers.

    Attributes:
        registers: The budgets, innermost first.
    """

    registers: Sequence[Any]

    def begin(self, region: Any) -> Keeper | None:
        """Return the keeper of a region whose forward begins."""


# What the regions of this thread ask; None outside of budgets.
keeping: ContextVar[Keeping | None] = ContextVar("torch_remat_keeping", default=None)
