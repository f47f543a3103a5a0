"""The tape: what forward noted, in order, for replay to follow.

In: holders, as forward makes them. Kept: weak references only. Out: which of them are alive and empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import ref

from torch_remat.dispatch.holder import Holder


class Tape:
    """The holders of one region in the order in which forward made them."""

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders: list[ref[Holder]] = []

    def __len__(self) -> int:
        return len(self.holders)

    def position_of(self, holder: Holder) -> int:
        """Return the place of a live holder."""
        return next(place for place, reference in enumerate(self.holders) if reference() is holder)

    def alive(self) -> Iterator[Holder]:
        """Yield the holders whose nodes autograd has not released."""
        for reference in self.holders:
            holder = reference()
            if holder is not None:
                yield holder

    def empty(self) -> list[Holder]:
        """Return the live holders that a replay has to fill."""
        return [holder for holder in self.alive() if holder.value is None]

    def last_alive(self) -> int:
        """Return the place of the last live holder, or -1."""
        for place in range(len(self.holders) - 1, -1, -1):
            if self.holders[place]() is not None:
                return place
        return -1

    def has_empty(self) -> bool:
        """Whether any live holder is empty; looks from the end, where early stop leaves them."""
        for reference in reversed(self.holders):
            holder = reference()
            if holder is not None and holder.value is None:
                return True
        return False
