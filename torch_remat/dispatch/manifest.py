"""What a region sent, and what backward will need next.

In: parcels, in the order of forward. Kept: weak references to them. Out: prefetches, in the order in which backward
will reach the tensors, within a bound of bytes.

Backward reaches a thread's regions in reverse. Of each it first needs what replay starts from, in the order of forward,
then the residuals, in reverse.
"""

from __future__ import annotations

import threading
from weakref import ref

from torch_remat._compat import graph_task
from torch_remat.dispatch.parcel import Parcel, Trip
from torch_remat.dispatch.port import Port
from torch_remat.offload.protocol import Offloader

PREFETCH_BYTES = 256 << 20


class Manifest:
    """What one region sent to one offloader.

    Args:
        route: The route of the thread that runs the region.

    Attributes:
        inputs: What replay needs, region inputs and slots, in the order of forward.
        residuals: What backward needs, in the order of forward.
        before: The manifest of the region before.
    """

    __slots__ = ("__weakref__", "before", "inputs", "residuals", "route")

    def __init__(self, route: Route) -> None:
        self.route = route
        self.inputs: list[ref[Parcel]] = []
        self.residuals: list[ref[Parcel]] = []
        self.before = route.latest
        route.latest = ref(self)

    def step_of(self, kind: str, place: int) -> int:
        """Return the place of a tensor in the order of backward."""
        return place if kind == "input" else len(self.inputs) + len(self.residuals) - 1 - place

    def at(self, step: int) -> Parcel | None:
        """Return the parcel at a place in the order of backward, if it is still there."""
        count = len(self.inputs)
        return self.inputs[step]() if step < count else self.residuals[count - step - 1]()

    def __len__(self) -> int:
        return len(self.inputs) + len(self.residuals)

    def offloaded_bytes(self) -> int:
        """Return the bytes that the region has away now."""
        trips = {parcel.trip for known in (*self.inputs, *self.residuals) if (parcel := known()) is not None}
        return sum(trip.bytes for trip in trips if not trip.stays())


class Route:
    """The regions that one thread ran with one offloader, as backward will come back along them.

    Attributes:
        latest: The manifest of the latest region.
        asked: What was asked for ahead and not read yet: the parcel, and the backward that asked.
    """

    __slots__ = ("_lock", "_next", "asked", "latest")

    def __init__(self) -> None:
        self.latest: ref[Manifest] | None = None
        self.asked: dict[Trip, tuple[ref[Parcel], int]] = {}
        self._lock = threading.Lock()
        self._next: tuple[ref[Manifest] | None, int] = (None, 0)

    def reached(self, manifest: Manifest, kind: str, place: int, parcel: Parcel, missing: bool) -> None:
        """Note that backward has read a tensor, and ask for the next ones."""
        trip = parcel.trip
        foreseen = self.asked.pop(trip, None) is not None
        limit = getattr(trip.offloader, "prefetch_bytes", PREFETCH_BYTES)
        if limit <= 0 or not self._lock.acquire(blocking=False):
            return
        try:
            if missing and not foreseen:
                self._drop_stale()
                self._next = (ref(manifest), manifest.step_of(kind, place) + 1)
            self._ask(limit)
        finally:
            self._lock.release()

    def _ask(self, limit: int) -> None:
        while (parcel := self._ahead()) is not None:
            trip = parcel.trip
            if parcel.value is None and trip not in self.asked:
                waiting = sum(asked.bytes for asked in list(self.asked))
                if waiting and waiting + trip.bytes > limit:
                    return
                if parcel.ask_ahead():
                    trip.asked_on = self.asked
                    self.asked[trip] = (ref(parcel), graph_task())
            known, step = self._next
            self._next = (known, step + 1)

    def _ahead(self) -> Parcel | None:
        """Return the next parcel that is still there, with `_next` standing on it."""
        known, step = self._next
        while known is not None and (manifest := known()) is not None:
            while step < len(manifest):
                parcel = manifest.at(step)
                if parcel is not None:
                    self._next = (known, step)
                    return parcel
                step += 1
            known, step = manifest.before, 0
        self._next = (None, 0)
        return None

    def _drop_stale(self) -> None:
        """Give back what an earlier backward asked for and never read."""
        now = graph_task()
        for trip, (known, task) in list(self.asked.items()):
            if task != now:
                self.asked.pop(trip, None)
                parcel = known()
                if parcel is not None:
                    parcel.drop_asked()


def route_of(offloader: Offloader, port: Port) -> Route:
    """Return this thread's route with an offloader."""
    route: Route | None = getattr(port.local, "route", None)
    if route is None:
        route = port.local.route = Route()
    return route
