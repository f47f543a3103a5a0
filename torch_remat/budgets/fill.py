"""What is not bought is offered to an offloader, as far as transfers keep up: first what is dearest to recompute.

In: what was bought for the regions of a step. Kept: how many bytes a step may send away. Out: for some regions a higher
rung, whose calls that were not bought leave the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from torch_remat.budgets.price import Part, in_order
from torch_remat.ladders.ladder import Ladder, Rung
from torch_remat.offload.sender import Offloaded

_SHARE = 8
"""Of the budget, one part in so many may be sent away in the first step, and may be on its way when backward begins."""


class Filler:
    """Chooses what one budget sends away.

    Args:
        budget_bytes: The budget.

    Attributes:
        bytes: How many may be sent away in the next step.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._least = max(budget_bytes // _SHARE, 1)
        self.bytes = self._least
        self._rungs: dict[tuple[int, int], tuple[Rung, Rung, Rung]] = {}

    def look(self, values: Iterable[Any]) -> None:
        """Look, when backward begins, whether what was sent has left: then the next step may send more, else less.

        Args:
            values: What regions hold of their calls.
        """
        away = [value for value in values if isinstance(value, Offloaded)]
        if not away:
            return
        here = sum(one.transfer.copy.bytes for one in away if isinstance(one.transfer.copy.told("still_here"), Tensor))
        self.bytes = max(self.bytes * 2, 1) if here <= self._least else max(self.bytes // 2, self._least)
        self.bytes = min(self.bytes, 4 * sum(one.transfer.copy.bytes for one in away))

    def fill(self, bought: Mapping[Any, tuple[Ladder, Rung]], parts: Sequence[Part]) -> dict[Any, tuple[Ladder, Rung]]:
        """Return the regions that get a higher rung, with it."""
        at = {key: sum(one.bytes <= rung.bytes for one in ladder.rungs) - 1 for key, (ladder, rung) in bought.items()}
        left, found = float(self.bytes), dict[Any, tuple[Ladder, Rung]]()
        keys = list(bought)
        for place, rung in in_order(parts):
            key = keys[place]
            ladder, low = bought[key]
            high = ladder.rungs[rung + 1]
            more = (high.bytes - max(low.bytes, ladder.rungs[rung].bytes)) * parts[place].scale
            if high.is_plain or at[key] != rung or more > left:
                continue
            left, at[key] = left - more, rung + 1
            found[key] = ladder, self._away(low, high)
        return found

    def _away(self, low: Rung, high: Rung) -> Rung:
        """Return a rung whose calls leave the device that a lower one does not keep; it takes the lower one's bytes."""
        known = self._rungs.get((id(low), id(high)))
        if known is None or known[0] is not low or known[1] is not high:
            away = frozenset(
                (function, number)
                for function, numbers in high.acts.items()
                for number in numbers
                if number not in low.acts.get(function, ())
            )
            known = self._rungs[id(low), id(high)] = low, high, replace(high, bytes=low.bytes, away=away)
        return known[2]
