"""Pools of evictable storages, and the search for the one to evict.

The simulator and the live runtime put a storage into a pool when it becomes evictable (resident, not pinned, not in
use by an op) and take it out before they touch it. All pools keep one rule of choice: the least score goes; of equal
scores the storage that became evictable last; where the least is 0, the one that became evictable first.

- `ScanPool` asks for every score, every time: exact, linear in the evictable storages.
- `IndexPool` is exact too, for heuristics whose score is a ratio (`RatioHeuristic`): see its note.
- `SamplePool` looks at a random sample of the size of the square root.
"""

from __future__ import annotations

import math
import random
from typing import Any, Literal, TypeAlias, get_args

from torch_remat.dtr.heuristics import Heuristic, RatioHeuristic, Storage, unknown_name
from torch_remat.errors import UsageError

Search: TypeAlias = Literal["index", "scan", "sample"]

_SMALLEST_SAMPLE = 32
_SLACK = 1e-12  # how far before a computed crossing, relative, the index stops trusting an order


def make_pool(heuristic: Heuristic, search: Search | None = None, seed: int = 0) -> ScanPool:
    """Start a run of the heuristic and return an empty pool for it.

    Args:
        heuristic: What chooses; its earlier runs are forgotten.
        search: How the victim is found; None takes the index where the heuristic is a ratio, else the scan.
        seed: Of the sample.

    Raises:
        UsageError: The search has another name, or is the index and the heuristic is no ratio.
    """
    ratio = isinstance(heuristic, RatioHeuristic)
    if search is None:
        search = "index" if ratio else "scan"
    heuristic.accesses = 0
    heuristic.changed = None
    heuristic.start()
    if search == "scan":
        return ScanPool(heuristic)
    if search == "sample":
        return SamplePool(heuristic, seed)
    if search != "index":
        raise unknown_name("search", search, get_args(Search))
    if not isinstance(heuristic, RatioHeuristic):
        raise UsageError(
            f"the index cannot order the scores of {type(heuristic).__name__}, which may change with every clock",
            remedy="Take search='scan' or 'sample', or derive the heuristic from remat.dtr.RatioHeuristic.",
        )
    return IndexPool(heuristic)


class ScanPool:
    """The evictable storages of one run; it looks at every one, oldest first.

    Attributes:
        scored: How many scores were asked for so far.
    """

    def __init__(self, heuristic: Heuristic) -> None:
        self._heuristic = heuristic
        self._storages: Any = {}
        self.scored = 0

    def add(self, storage: Storage) -> None:
        """Take in a storage that became evictable."""
        self._storages[storage] = None
        storage.place = 0

    def discard(self, storage: Storage) -> None:
        """Let go of a storage, if it is here."""
        if storage.place >= 0:
            storage.place = -1
            self._storages.pop(storage, None)

    def touch(self, storage: Storage) -> None:
        """Take note that a storage's last access has changed, if it is here; who asks for scores anew need not."""

    def victim(self, clock: float) -> Any:
        """Return the storage to evict at this clock, one of those given, which stays; or None."""
        self.scored += len(self._storages)
        chosen, least, score_of = None, math.inf, self._heuristic.score
        for storage in self._storages:
            score = score_of(storage, clock)
            if score < least or (score == least and score != 0) or chosen is None:
                chosen, least = storage, score
        return chosen


class SamplePool(ScanPool):
    """Looks at a random sample: the square root of the number of storages, at least 32."""

    def __init__(self, heuristic: Heuristic, seed: int) -> None:
        super().__init__(heuristic)
        self._draw = random.Random(seed)

    def victim(self, clock: float) -> Any:
        """Return the least of a sample."""
        storages = list(self._storages)
        wanted = max(_SMALLEST_SAMPLE, math.isqrt(len(storages)))
        if len(storages) > wanted:
            storages = self._draw.sample(storages, wanted)
        self.scored += len(storages)
        return min(storages, key=lambda storage: self._heuristic.score(storage, clock), default=None)


class IndexPool(ScanPool):
    """Keeps a tournament of all scores that stays right while the clock goes on.

    NOTE [A tournament with staleness]. A score ``n / (d (clock - access))`` changes with every clock, but of two
    storages it is known when their order next changes: their inverse scores are straight lines in the clock, which
    cross once. Each match of the tournament notes its winner and the clock up to which it and all matches below it
    stand; only matches past that clock are played again. So a search plays O(log n) matches for each storage that
    came, went or was reported in `Heuristic.changed` since the last search, and those matches whose time is up. The
    winner is the storage that a scan would find.

    Adding and removing only notes the place, so that a run without pressure pays nothing for the order.
    """

    def __init__(self, heuristic: RatioHeuristic) -> None:
        super().__init__(heuristic)
        self._ratio, self._decays = heuristic.ratio, heuristic.decays
        self._number = 0
        self._changed: set[int] = set()  # places whose match is to be played again
        heuristic.changed = self._changed
        self._size = 0  # places; a power of two
        self._free: list[int] = []
        self._storages = []
        self._numbers: list[int] = []  # by place: in which order the storages came
        self._keys: list[tuple[float, float, float]] = []  # by place: numerator, denominator, last access
        self._winners: list[int] = []  # by match: the place that wins, or -1; match k is between 2k and 2k + 1
        self._until: list[float] = []  # by match: the last clock at which the winner is sure
        self._grow()

    def add(self, storage: Storage) -> None:
        """Give the storage a place."""
        if not self._free:
            self._grow()
        place = storage.place = self._free.pop()
        self._storages[place] = storage
        self._number += 1
        self._numbers[place] = self._number
        self._changed.add(place)

    def discard(self, storage: Storage) -> None:
        """Free the storage's place."""
        place = storage.place
        if place >= 0:
            storage.place = -1
            self._storages[place] = None
            self._free.append(place)
            self._changed.add(place)

    def touch(self, storage: Storage) -> None:
        """Ask for the score again at the next search."""
        if storage.place >= 0:
            self._changed.add(storage.place)

    def victim(self, clock: float) -> Any:
        """Return the winner at this clock."""
        if self._changed:
            self._enter(clock)
        if self._until[1] < clock:
            self._play_expired(clock)
        winner = self._winners[1]
        return None if winner < 0 else self._storages[winner]

    def _grow(self) -> None:
        self._size = max(64, 2 * self._size)
        room = self._size - len(self._storages)
        self._free = list(range(self._size - 1, len(self._storages) - 1, -1))
        self._storages += [None] * room
        self._numbers += [0] * room
        self._keys += [(0, 0, 0)] * room
        self._winners = [-1] * (2 * self._size)
        self._until = [math.inf] * (2 * self._size)
        self._changed.update(place for place, storage in enumerate(self._storages) if storage is not None)

    def _enter(self, clock: float) -> None:
        """Ask for the scores that have changed, and play the matches above them."""
        matches = set()
        changed = list(self._changed)
        self._changed.clear()  # before the scores are asked for: a heuristic watches from then on
        for place in changed:
            if place < 0:
                continue
            storage = self._storages[place]
            if storage is not None:
                self.scored += 1
                self._keys[place] = (*self._ratio(storage), storage.last_access)
            self._winners[self._size + place] = -1 if storage is None else place
            matches.add((self._size + place) >> 1)
        while matches:
            for match in matches:
                self._play(match, clock)
            matches = {match >> 1 for match in matches if match > 1}

    def _play_expired(self, clock: float) -> None:
        todo, expired, until = [1], [], self._until
        while todo:
            match = todo.pop()
            expired.append(match)
            todo += [below for below in (2 * match, 2 * match + 1) if until[below] < clock]
        for match in reversed(expired):  # those below come before those above
            self._play(match, clock)

    def _play(self, match: int, clock: float) -> None:
        below, winners = 2 * match, self._winners
        first, second = winners[below], winners[below + 1]
        until, other = self._until[below], self._until[below + 1]
        if other < until:
            until = other
        if first < 0:
            winners[match] = second
        elif second < 0:
            winners[match] = first
        else:
            winners[match], sure = self._duel(first, second, clock)
            if sure < until:
                until = sure
        self._until[match] = until

    def _duel(self, first: int, second: int, clock: float) -> tuple[int, float]:
        """Return which of two places goes first at this clock, and up to which clock that is sure."""
        numerator1, denominator1, access1 = self._keys[first]
        numerator2, denominator2, access2 = self._keys[second]
        sure = math.inf
        if self._decays:
            stale1, stale2 = clock - access1, clock - access2
            if not stale1 or not stale2:
                sure = clock
            elif denominator1 and denominator2:
                sure = _crossing(numerator1 * denominator2, access1, numerator2 * denominator1, access2, clock)
            denominator1, denominator2 = denominator1 * stale1, denominator2 * stale2
        score1 = numerator1 / denominator1 if denominator1 else math.inf
        score2 = numerator2 / denominator2 if denominator2 else math.inf
        if score1 == score2:
            first_came_last = self._numbers[first] > self._numbers[second]
            return (first if first_came_last == bool(score1) else second), sure
        return (first if score1 < score2 else second), sure


def _crossing(slope1: float, access1: float, slope2: float, access2: float, clock: float) -> float:
    """Return until when ``slope1 (t - access2)`` and ``slope2 (t - access1)`` surely keep their order."""
    if slope1 == slope2:
        return math.inf
    apart, steepest = (slope1 - slope2, slope1) if slope1 > slope2 else (slope2 - slope1, slope2)
    after = slope2 * (access2 - access1) / (slope1 - slope2)
    doubt = _SLACK * (abs(after) + access2) * (1 + 1e-3 * steepest / apart)
    crossing = access2 + after
    if crossing + doubt < clock:
        return math.inf
    surely = crossing - doubt
    return surely if surely > clock else clock
