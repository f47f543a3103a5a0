"""What backward will need next, and asking for it ahead, within a bound of bytes.

Backward reaches a thread's regions in reverse. Of each it first needs what replay starts from, in the order of forward,
then the residuals, in reverse.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary, ref

from torch_remat._compat import graph_task
from torch_remat.offload.protocol import Kind
from torch_remat.offload.transfer import StoredCopy, Transfer

PREFETCH_BYTES = 256 << 20


class RegionTransfers:
    """What one region sent to one offloader; ``before`` is what the thread's region before sent."""

    __slots__ = ("__weakref__", "_inputs", "_residuals", "before", "prefetcher")

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.prefetcher = prefetcher
        self.before = prefetcher.latest
        prefetcher.latest = ref(self)
        self._inputs: list[ref[Transfer]] = []  # what replay needs, with slots, in the order of forward
        self._residuals: list[ref[Transfer]] = []  # what backward needs, in the order of forward

    def add(self, transfer: Transfer, kind: Kind) -> int:
        """Note a transfer; return its place, from the start or, if it is negative, from the end of backward."""
        transfers = self._inputs if kind == "input" else self._residuals
        transfers.append(ref(transfer))
        return len(transfers) - 1 if kind == "input" else -len(transfers)

    def at(self, step: int) -> Transfer | None:
        """Return the transfer at a place in the order of backward, if it is still there."""
        count = len(self._inputs)
        return self._inputs[step]() if step < count else self._residuals[count - step - 1]()

    def __len__(self) -> int:
        return len(self._inputs) + len(self._residuals)


class Prefetcher:
    """Asks one offloader ahead for what one thread's regions, up to the ``latest``, sent to it."""

    __slots__ = ("_asked", "_lock", "_next", "latest")

    def __init__(self) -> None:
        self.latest: ref[RegionTransfers] | None = None
        # What was asked for ahead and not read yet, with the backward that asked.
        self._asked: WeakKeyDictionary[StoredCopy, int] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._next: tuple[ref[RegionTransfers] | None, int] = (None, 0)

    def reached(self, region: RegionTransfers, place: int, transfer: Transfer, missing: bool) -> None:
        """Note that backward has read a region's tensor, which had to be brought back if it was ``missing``.

        Then ask for the next ones.
        """
        foreseen = self._asked.pop(transfer.copy, None) is not None
        limit = getattr(transfer.copy.offloader, "prefetch_bytes", PREFETCH_BYTES)
        if limit <= 0 or not self._lock.acquire(blocking=False):
            return
        try:
            if missing and not foreseen:
                self._drop_stale()
                self._next = (ref(region), (place if place >= 0 else len(region) + place) + 1)
            self._ask(limit)
        finally:
            self._lock.release()

    def _ask(self, limit: int) -> None:
        while (transfer := self._ahead()) is not None:
            copy = transfer.copy
            if transfer.value is None and copy not in self._asked:
                waiting = sum(asked.bytes for asked in list(self._asked))
                if waiting and waiting + copy.bytes > limit:
                    return
                if copy.unless_read(copy.offloader.prefetch):
                    self._asked[copy] = graph_task()
            region, step = self._next
            self._next = (region, step + 1)

    def _ahead(self) -> Transfer | None:
        """Return the next transfer that is still there, with `_next` standing on it."""
        known, step = self._next
        while known is not None and (region := known()) is not None:
            while step < len(region):
                transfer = region.at(step)
                if transfer is not None:
                    self._next = (known, step)
                    return transfer
                step += 1
            known, step = region.before, 0
        self._next = (None, 0)
        return None

    def _drop_stale(self) -> None:
        """Give back what an earlier backward asked for and never read."""
        now = graph_task()
        for copy, task in list(self._asked.items()):
            if task != now:
                self._asked.pop(copy, None)
                copy.unless_read(copy.offloader.onload)
