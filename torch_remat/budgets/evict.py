"""The saved tensors of one region that may be evicted: which of them cost least, and how they go.

In: when each was made. Kept: what has left for an offloader. Out: empty holders, which a replay fills.

NOTE [ What is evicted ]
1. A replay runs from the region's start to the last holder that is empty. So what is evicted is a prefix: it costs the
   time from the region's start to its last tensor, and frees what was saved before it.
2. A storage that something else holds, too, is not evicted: another region, a later holder of this one, the user, the
   running code. Use counts tell: those of the storage against those of the ledger.
3. Holders are filled when forward ends. One that is evicted is compared with its version counter at once.
4. Once backward has come without ``retain_graph`` the region drops its inputs, and is not evicted after that.
   So the region's own lock is held while holders are emptied; who cannot have it at once takes another region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import NamedTuple
from weakref import ref

from torch import Tensor

from torch_remat._compat import graph_task
from torch_remat._score import eviction_score
from torch_remat._storages import Ledger, each
from torch_remat.budgets.counted import Counted
from torch_remat.budgets.steps import Row
from torch_remat.dispatch.holder import mark_changed
from torch_remat.dispatch.options import observers
from torch_remat.dispatch.region.region import Region
from torch_remat.offload.sender import Offloaded

REPLAY_SECONDS = 1e-4
"""What a replay costs besides the ops that it runs."""
_LEAST_SECONDS = 1e-6
"""The least staleness: that of the region that runs."""


# Sends a saved tensor away, given its region and place; None if it stays.
Offer = Callable[[Region, int, Tensor], Offloaded | None]


class Prefix(NamedTuple):
    """What may be evicted next of one region: its first ``cut`` saved tensors."""

    seconds: float
    bytes: int
    cut: int


_NONE = Prefix(0.0, 0, 0)


def score(prefix: Prefix, idle_seconds: float) -> float:
    """Return what a prefix is worth: seconds over bytes and staleness. The least is evicted."""
    return eviction_score(prefix.seconds, prefix.bytes, max(idle_seconds, _LEAST_SECONDS))


class Evictable:
    """The holders of one region that a budget has filled.

    Args:
        region: The region.
        counted: What is counted for it.
        row: What reports know of it.
        offer: Takes a tensor that is about to be evicted off the device; None where nothing does.

    Attributes:
        stamps: When each of its saved tensors was made.
        begun: When forward began.
        last: When values were made or read last.
    """

    __slots__ = ("_away", "_best", "_counted", "_first", "_offer", "_paid", "_region", "_row", "begun",
                 "last", "stamps")  # fmt: skip

    def __init__(self, region: Region, counted: Counted, row: Row, offer: Offer | None) -> None:
        self._region = ref(region)
        self._counted = counted
        self._row = row
        self._offer = offer
        self._away: dict[int, Offloaded] = {}
        self._best: Prefix | None = None
        self._paid = 0.0  # how long a replay takes in any case, by what is evicted already
        self._first = 0  # all before this place are empty
        self.stamps: list[float] = []
        self.last = self.begun = perf_counter()

    def prefix(self, ledger: Ledger) -> Prefix | None:
        """Return the prefix that costs least for its bytes, None where nothing is left to evict."""
        region = self._region()
        if region is None or region.inputs is None or region.filling:
            return None
        if region.replayed_in >= 0 and graph_task() >= 0:
            return None  # the backward that runs may read it; in a checkpoint of torch's a region is replayed but once
        if not region.finished:
            self.last = self.stamps[-1] if self.stamps else self.begun
        if self._best is None or not region.finished:
            prefixes = (prefix for prefix, _ in self._prefixes(ledger))
            self._best = min(prefixes, key=lambda one: one.seconds / one.bytes, default=_NONE)
        return self._best if self._best.bytes else None

    def look_anew(self) -> None:
        """Look for the best prefix anew, at all holders: what else holds their storages may have changed."""
        self._best, self._first = None, 0

    def _prefixes(self, ledger: Ledger) -> Iterator[tuple[Prefix, list[int]]]:
        """Yield the prefixes that free something, shortest first, with the places in them that can be emptied."""
        keys, refs, freed = self._counted.keys, self._counted.refs, 0
        while self._first < len(keys) and not keys[self._first]:
            self._first += 1
        met: dict[int, list[int]] = {}  # places by storage
        free: list[int] = []
        spent, fixed = self.begun + self._paid, 0.0 if self._paid else REPLAY_SECONDS
        for place in range(self._first, len(keys)):
            if not keys[place] or (holder := refs[place]()) is None or holder.value is None:
                continue  # dead: `refresh` finds out
            found = 0
            for key in each(keys[place]):
                places = met.setdefault(key, [])
                places.append(place)
                if ledger.is_held_by(key, len(places)):
                    found += ledger.sizes[key]
                    free += places
            if found:
                freed += found
                yield Prefix(max(self.stamps[place] - spent, 0.0) + fixed, freed, place + 1), free

    def evict(self, ledger: Ledger, needed: int) -> Prefix | None:
        """Evict the best prefix, or as much of it as frees so many bytes; return what that was, if anything."""
        region = self._region()
        if region is None or not region.lock.acquire(blocking=False):
            return None
        try:
            if region.inputs is None or region.filling or (best := self.prefix(ledger)) is None:
                return None
            chosen, free = next(
                found for found in self._prefixes(ledger) if found[0].bytes >= needed or found[0].cut >= best.cut
            )
            free = sorted(set(free))
            before = self._row.evicted_bytes, self._row.offloaded_bytes
            freed = sum([self._empty(region, place) for place in free])
            gone = self._row.evicted_bytes - before[0], self._row.offloaded_bytes - before[1]
            if observers:
                holders = [holder for place in free if (holder := self._counted.refs[place]()) is not None]
                for observer in tuple(observers):
                    observer.gave_up(region, [*map(region.tape.position_of, holders)], *gone, ledger.total)
            return chosen._replace(bytes=freed) if freed else None
        finally:
            self._best = None
            region.lock.release()

    def _empty(self, region: Region, place: int) -> int:
        holder = self._counted.refs[place]()
        if holder is None or (value := holder.value) is None:
            return 0
        if value._version != holder.metadata[0]:
            mark_changed(holder)
        away = None if self._offer is None or region.hooks is not None else self._offer(region, place, value)
        holder.value = None
        del value
        freed = self._counted.remove(place)
        if away is not None:
            self._away[place] = away
            self._row.offloaded_bytes += freed
        else:
            self._paid = max(self._paid, self.stamps[place] - self.begun)
            self._row.evicted(place, freed, self._paid)
        return freed

    def bring_back(self) -> None:
        """Load what an offloader has: it is needed now."""
        away, self._away = self._away, {}
        for place, one in away.items():
            holder = self._counted.refs[place]()
            if holder is not None and holder.value is None:
                value = one.load()
                holder.expect_version_of(value)
                holder.value = value
