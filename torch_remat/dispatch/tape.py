"""The tape: what forward noted, in order, for replay to follow.

In: holders and parameters, as forward meets them. Kept: the holders weakly. Out: which of them are alive and empty, and
how far a replay must go.
"""

from __future__ import annotations

from weakref import ref

import torch

from torch_remat.dispatch.holder import Holder


class Tape:
    """What one region saved, in the order of forward.

    Attributes:
        saved: For each saved tensor a weak reference to its holder; for a parameter, or a view of one, the parameter.
    """

    __slots__ = ("saved",)

    def __init__(self) -> None:
        self.saved: list[ref[Holder] | torch.Tensor] = []

    def position_of(self, holder: Holder) -> int:
        """Return the place of a live holder."""
        return next(place for place, entry in enumerate(self.saved) if type(entry) is ref and entry() is holder)

    def empty(self) -> list[Holder]:
        """Return the live holders that a replay has to fill."""
        return [
            holder
            for entry in self.saved
            if type(entry) is ref and (holder := entry()) is not None and holder.value is None
        ]

    def forget_values(self) -> None:
        """Empty all holders."""
        for entry in self.saved:
            holder = entry() if type(entry) is ref else None
            if holder is not None:
                holder.value = None

    def last_needed(self) -> int:
        """Return the place of the last live holder, or of the last of the parameters that follow it directly."""
        saved = self.saved
        place = len(saved) - 1
        while place >= 0 and (type(entry := saved[place]) is not ref or entry() is None):
            place -= 1
        while place + 1 < len(saved) and type(saved[place + 1]) is not ref:
            place += 1
        return place
