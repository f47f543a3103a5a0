"""What the regions of a step keep at one price: each what is worth it, as far as the bytes go.

In: for each region of a step its ladder. Kept: nothing. Out: a rung for each, and the price of a byte: the nanoseconds
that the next one would spare.

Rungs are on lower hulls, so that to buy always the step that spares most time for a byte is the optimum of the linear
program, but for the last step, which does not fit as a whole: what is left over goes to any rung that it pays for. Of
equal steps the later region buys first: its replay would come when the others still hold everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from torch_remat.ladders.ladder import Ladder, Rung, gain

_WORTH = 20  # what is left over has to spare one part in so many of what a region costs


class Part(NamedTuple):
    """One region of a step.

    Attributes:
        ladder: What it can keep.
        scale: Its bytes, and its time, are so many times those of the ladder.
        more_bytes: What it keeps besides, whatever the rung.
    """

    ladder: Ladder
    scale: float = 1.0
    more_bytes: int = 0

    def bytes_of(self, rung: Rung) -> float:
        """Return what it keeps on a rung."""
        return rung.bytes * self.scale + self.more_bytes

    def bytes_at(self, rung: int) -> float:
        """Return what it keeps on the rung of a number."""
        return self.bytes_of(self.ladder.rungs[rung])

    def filled_by(self, rung: Rung) -> float:
        """Return what its replay makes besides what it keeps on a rung."""
        return 0.0 if rung.is_plain else max(self.ladder.whole_bytes - rung.bytes, 0) * self.scale


class Choice(NamedTuple):
    """What the regions of a step keep.

    Attributes:
        rungs: For each region its rung.
        bytes: What they keep together.
        peak_bytes: What they keep and a replay fills, at most.
        ns: What it costs.
        price: Nanoseconds that a byte of the best step spares that was not bought; 0 if everything was.
        next_bytes: The bytes of that step.
    """

    rungs: Sequence[Rung]
    bytes: int
    peak_bytes: int
    ns: float
    price: float
    next_bytes: int


def choose(parts: Sequence[Part], limit: float, counts_replays: bool) -> Choice:
    """Return what is bought within a number of bytes.

    Args:
        parts: The regions, in the order of forward.
        limit: What they may keep together.
        counts_replays: Whether also what a replay fills is to be within the limit, at any moment of backward, or within
            what is needed there if nothing is kept.
    """
    at, rungs = [0] * len(parts), [part.ladder.rungs[0] for part in parts]
    most = max(limit, peak(parts, rungs)) if counts_replays else inf
    total = sum(part.bytes_at(0) for part in parts)
    refused = (0.0, 0)
    for place, rung in in_order(parts):
        if at[place] != rung:
            continue  # what comes later on a ladder is worth less than what was refused
        part, low, high = parts[place], *parts[place].ladder.rungs[rung : rung + 2]
        more = part.bytes_of(high) - part.bytes_of(low)
        if total + more <= limit and _fits(parts, rungs, place, high, most):
            total, at[place], rungs[place] = total + more, rung + 1, high
        elif not refused[1]:
            refused = gain(low, high), int(more)
    if refused[1]:
        total = _spend_rest(parts, rungs, total, limit, most)
    ns = sum(rung.ns * part.scale for part, rung in zip(parts, rungs, strict=True))
    return Choice(rungs, int(total), int(peak(parts, rungs)), ns, *refused)


def _spend_rest(parts: Sequence[Part], rungs: list[Rung], total: float, limit: float, most: float) -> float:
    """Raise regions to any rung that the bytes left over pay for, first to that which spares most; return the sum."""
    while True:
        best: tuple[float, int, Rung, float] | None = None
        for place in reversed(range(len(parts))):  # of equal ones the last
            part, now = parts[place], rungs[place]
            for rung in (*part.ladder.between, *part.ladder.rungs):
                spared, more = (now.ns - rung.ns) * part.scale, (rung.bytes - now.bytes) * part.scale
                least = best[0] if best else now.ns * part.scale / _WORTH
                is_better = spared > least and total + more <= limit
                if is_better and _fits(parts, rungs, place, rung, most):
                    best = spared, place, rung, more
        if best is None:
            return total
        _, place, rungs[place], more = best
        total += more


def _fits(parts: Sequence[Part], rungs: Sequence[Rung], place: int, rung: Rung, most: float) -> bool:
    """Whether the peak stays within a number of bytes if one region has another rung."""
    return most == inf or peak(parts, [*rungs[:place], rung, *rungs[place + 1 :]]) <= most


def peak(parts: Sequence[Part], rungs: Sequence[Rung]) -> float:
    """Return the most that regions hold at any moment: after forward, or while one of them is replayed."""
    sums = accumulate(part.bytes_of(rung) for part, rung in zip(parts, rungs, strict=True))
    filled = (part.filled_by(rung) for part, rung in zip(parts, rungs, strict=True))
    return max(map(float.__add__, map(float, sums), filled), default=0.0)


def ends(parts: Sequence[Part]) -> tuple[float, float]:
    """Return what regions keep without checkpointing, and with all recomputed."""
    most = sum(part.ladder.whole_bytes * part.scale + part.more_bytes for part in parts)
    return most, sum(part.bytes_at(0) for part in parts)


def curve(parts: Sequence[Part]) -> list[tuple[int, float]]:
    """Return what all steps keep and cost, from nothing kept to all, as bytes and nanoseconds."""
    total = sum(part.bytes_at(0) for part in parts)
    ns = sum(part.ladder.rungs[0].ns * part.scale for part in parts)
    points = [(int(total), ns)]
    for place, rung in in_order(parts):
        part, low, high = parts[place], *parts[place].ladder.rungs[rung : rung + 2]
        total += part.bytes_of(high) - part.bytes_of(low)
        ns -= (low.ns - high.ns) * part.scale
        points.append((int(total), ns))
    return points


def in_order(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return all steps from a rung to the next, as a region and the number of the rung, the dearest first."""
    steps = [
        (-gain(*rungs), -place, at)
        for place, part in enumerate(parts)
        for at, rungs in enumerate(pairwise(part.ladder.rungs))
    ]
    return [(-place, at) for _, place, at in sorted(steps)]


def rung_at(ladder: Ladder, price: float) -> tuple[Rung, int]:
    """Return the highest rung that is worth a price in nanoseconds for a byte, and its number."""
    at = 0
    while at + 1 < len(ladder.rungs) and gain(ladder.rungs[at], ladder.rungs[at + 1]) >= price:
        at += 1
    return ladder.rungs[at], at
