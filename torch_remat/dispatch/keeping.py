"""What regions ask of a budget, which keeps saved tensors in their holders; see `torch_remat.budgets`.

In: a region that begins inside of a budget. Kept: nothing here. Out: its *keeper*, which fills holders as they are made
and may empty them again at any time: a replay fills what is empty. A region outside of a budget has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import ref

import torch


class Keeper(Protocol):
    """What one region asks.

    Attributes:
        owners: The budgets that the region is in.
        keep: Gives a holder its value, unless it is to be empty, and looks for later changes in place; None where no
            holder is kept. The arguments: the holder, the tape's weak reference to it, the value, the region's ops.
    """

    owners: Sequence[Any]
    keep: Callable[[Any, ref[Any], torch.Tensor, Any], None] | None

    def pack_hook(self, mode: Any, general: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Return, for a forward and its pack hook, one that does itself what is usual."""

    def end(self) -> None:
        """The function has ended: mark those holders whose tensors were changed in place and are given up."""

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

    def runner(
        self, options: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """Return what runs a function as it is, with its arguments; None for one that runs as a region."""

    def begin(self, region: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Keeper | None:
        """Return the keeper of a region whose forward begins, with the arguments as they were given."""


# What the regions of this thread ask; None outside of budgets.
keeping: ContextVar[Keeping | None] = ContextVar("torch_remat_keeping", default=None)
