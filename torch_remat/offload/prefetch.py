"""What a region sent, and what backward will need next.

In: transfers, in the order of forward. Kept: weak references to them. Out: prefetches, in the order in which backward
will reach the tensors, within a bound of bytes.

Backward reaches a thread's regions in reverse. Of each it first needs what replay starts from, in the order of forward,
then the residuals, in reverse.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary, ref

from torch_remat._compat import graph_task
from torch_remat.offload.transfer import StoredCopy, Transfer

PREFETCH_BYTES = 256 << 20


class RegionTransfers:
    """What one region sent to one offloader.

    Args:
        prefetcher: That of the thread that runs the region.

    Attributes:
        inputs: What replay needs, region inputs and slots, in the order of forward.
        residuals: What backward needs, in the order of forward.
        before: What the region before sent.
    """

    __slots__ = ("__weakref__", "before", "inputs", "prefetcher", "residuals")

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.prefetcher = prefetcher
        self.inputs: list[ref[Transfer]] = []
        self.residuals: list[ref[Transfer]] = []
        self.before = prefetcher.latest
        prefetcher.latest = ref(self)

    def add(self, transfer: Transfer, kind: str) -> int:
        """Note a transfer; return its place among those of its kind."""
        transfers = self.inputs if kind == "input" else self.residuals
        transfers.append(ref(transfer))
        return len(transfers) - 1

    def step_of(self, kind: str, place: int) -> int:
        """Return the place of a tensor in the order of backward."""
        return place if kind == "input" else len(self) - 1 - place

    def at(self, step: int) -> Transfer | None:
        """Return the transfer at a place in the order of backward, if it is still there."""
        count = len(self.inputs)
        return self.inputs[step]() if step < count else self.residuals[count - step - 1]()

    def __len__(self) -> int:
        return len(self.inputs) + len(self.residuals)


class Prefetcher:
    """Asks one offloader ahead for what one thread's regions sent to it, in the order of backward.

    Attributes:
        latest: What the latest region sent.
        asked: What was asked for ahead and not read yet: the transfer, and the backward that asked.
    """

    __slots__ = ("_lock", "_next", "asked", "latest")

    def __init__(self) -> None:
        self.latest: ref[RegionTransfers] | None = None
        self.asked: WeakKeyDictionary[StoredCopy, tuple[ref[Transfer], int]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._next: tuple[ref[RegionTransfers] | None, int] = (None, 0)

    def reached(self, region: RegionTransfers, kind: str, place: int, transfer: Transfer, missing: bool) -> None:
        """Note that backward has read a tensor, and ask for the next ones.

        Args:
            region: What its region sent.
            kind: What the tensor was sent as.
            place: Its place among those of its kind.
            transfer: Its transfer.
            missing: Whether it had to be brought back for that.
        """
        foreseen = self.asked.pop(transfer.copy, None) is not None
        limit = getattr(transfer.copy.offloader, "prefetch_bytes", PREFETCH_BYTES)
        if limit <= 0 or not self._lock.acquire(blocking=False):
            return
        try:
            if missing and not foreseen:
                self._drop_stale()
                self._next = (ref(region), region.step_of(kind, place) + 1)
            self._ask(limit)
        finally:
            self._lock.release()

    def _ask(self, limit: int) -> None:
        while (transfer := self._ahead()) is not None:
            copy = transfer.copy
            if transfer.value is None and copy not in self.asked:
                waiting = sum(asked.bytes for asked in list(self.asked))
                if waiting and waiting + copy.bytes > limit:
                    return
                if transfer.unless_read(copy.offloader.prefetch):
                    self.asked[copy] = (ref(transfer), graph_task())
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
        for copy, (known, task) in list(self.asked.items()):
            if task != now:
                self.asked.pop(copy, None)
                transfer = known()
                if transfer is not None:
                    transfer.unless_read(copy.offloader.onload)
