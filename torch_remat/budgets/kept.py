"""One region of a budget: its holders have their values from the start, and some are emptied when room is needed.

In: each saved tensor, as forward makes it. Kept: weak references to the holders, and when each was made; of inputs and
of what the author saves, addresses. Out: the prefix that is best given up, and what it costs.

NOTE [ What is given up ]
1. A replay runs from the region's start to the last holder that is empty. So what is given up is a prefix: it costs the
   time from the region's start to its last tensor, and frees what was saved before.
2. A storage that something else holds, too, is not given up: another region, a later holder of this one, the user, the
   running code. Use counts tell: those of the storage against those of the ledger.
3. A holder that forward gives up leaves the version counter of its tensor here, so that a later change in place is
   noticed at the end of forward; one that is given up later is compared with its counter at once.
4. Once backward has come without ``retain_graph`` the region drops its inputs, and nothing of it is given up any more.
   So the region's own lock is held while holders are emptied; who cannot have it at once takes another region.
5. The region that runs may keep as many bytes as there is room for before anyone asks it; see `packing`. It is asked
   before anything else is counted or given up, and at its end.
6. A region that is full when a backward begins that will come to it needs its inputs no more, and lets them go: plain
   autograd might never have kept them. It is then what it is once backward has come.
7. What the author decides stays: what is saved by name or by a policy is counted and never given up, and what is named
   RECOMPUTE is never kept. A region with a policy for its ops keeps what that saves, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import NoneType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Module

from torch_remat._compat import (
    graph_task,
    keep_from_compiler,
    sequence_number,
    storage_key,
    without_dispatch_modes,
)
from torch_remat._kept import kept_by
from torch_remat._storages import Keys, Ledger, each, parts_of
from torch_remat.budgets.packing import pack_hook
from torch_remat.budgets.repeats import Place
from torch_remat.budgets.steps import Row
from torch_remat.dispatch.holder import Holder, mark_changed
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.options import observers
from torch_remat.dispatch.reach import reach
from torch_remat.dispatch.region.forward import Recording
from torch_remat.dispatch.region.region import Region
from torch_remat.policies.decision import CheckpointPolicy

REPLAY_SECONDS = 1e-4
"""What a replay costs besides the ops that it runs."""
LEAST_SECONDS = 1e-6
"""The least staleness: that of the region that runs."""

_OWN = ("saved", "slot", "result")
"""What a region keeps for its author."""

_NOTHING = torch.empty(0)


class Owner(Protocol):
    """What a region asks of the budget that it is in."""

    ledger: Ledger
    limit: float

    def make_room(self) -> None:
        """The sum has passed the limit."""

    def reached(self) -> None:
        """Backward has come to a region."""

    def finished(self, kept: KeptRegion) -> None:
        """A region's forward is over."""


class Away(Protocol):
    """What stands for a tensor that an offloader has."""

    def load(self) -> Tensor:
        """Return the tensor."""


# Takes a saved tensor, by its region and place; None if it stays.
Offer = Callable[[Region, int, Tensor], Away | None]


class Prefix(NamedTuple):
    """What may be given up next of one region: its first ``cut`` saved tensors."""

    seconds: float
    bytes: int
    cut: int


class KeptRegion:
    """One region in a budget.

    Args:
        region: The region.
        owners: The budget, and those around it.
        lock: That of all budgets.
        always_empty: How many of its first saved tensors are never kept.
        offer: Takes a tensor that is about to be given up off the device; None where nothing does.

    Attributes:
        keep: What fills a holder; None for a region with a policy of its own.
        keys: For each saved tensor, in the order of forward, the addresses of the storages that are counted for it.
        fixed: Those of inputs, and of what the author saves.
        last: When values were made or read last.
        refs: The tape's weak references to its holders.
        stamps: When each was made.
        taken: In a list, how many bytes were kept, each storage as often as it is saved, by `packing`.
        allowed: In a list, how many may be before somebody is asked.
        pace: How long the fastest forward of such a region took, as a share of this one: what else the machine does
            slows some down.
        row: What reports know of the region.
        place: Where it comes in its step.
    """

    __slots__ = (
        "__weakref__",
        "_away",
        "_begun",
        "_best",
        "_counters",
        "_existing",
        "_full",
        "_inputs",
        "_is_usual",
        "_let_go",
        "_like",
        "_lock",
        "_offer",
        "_paid",
        "_seen",
        "allowed",
        "fixed",
        "keep",
        "keys",
        "last",
        "owners",
        "pace",
        "place",
        "refs",
        "region",
        "row",
        "stamps",
        "taken",
    )  # fmt: skip

    def __init__(
        self, region: Region, owners: Sequence[Owner], lock: Any, always_empty: int = 0, offer: Offer | None = None
    ) -> None:
        self.region = ref(region)
        self.owners = owners
        self.row = Row()
        self.place: Place | None = None
        self._like: Row | None = None
        self.keys: list[Keys] = []
        self.fixed: list[int] = []
        self._lock = lock
        self.refs: list[ref[Holder]] = []
        self._full: list[int] = []  # of the first so many, the places of those whose storages are counted
        self._seen = 0
        self._let_go = 0  # how many saved tensors a backward inside of forward has found empty
        self.stamps: list[float] = []
        self._counters: list[tuple[ref[Holder], Tensor]] = []
        self._best: Prefix | None = None
        self._paid = 0.0
        self.pace = 1.0
        self._offer = offer
        self._away: dict[int, Away] = {}
        self._existing = _Existing(region)
        self._is_usual = len(owners) == 1 and owners[0].ledger.device_type == "cpu"
        self.taken = [0]
        self.allowed = [-1.0]
        assert region.inputs is not None
        self._fix(region.inputs.held())
        self._inputs = len(self.fixed)
        own = region.options.policy is not None or _is_watched()
        self.keep = None if own else self._keep_function(region, always_empty)
        self.last = self._begun = perf_counter()

    def _fix(self, tensors: Iterator[Tensor]) -> None:
        with self._lock:
            for owner in self.owners:
                owner.ledger.settled()
            for tensor in tensors:
                keys, size = add(self.owners, tensor)
                self.fixed += each(keys)
                self.row.fixed_bytes += size

    # Forward.

    def _keep_function(self, region: Region, always_empty: int) -> Callable[[Holder, ref[Holder], Tensor, Any], None]:
        """Return what fills a holder: a closure, which the graph keeps."""
        owners, lock, counters = self.owners, self._lock, self._counters
        refs, recomputed = self.refs, _Recomputed()
        may_keep = self._is_usual and not always_empty
        me = ref(self)

        def keep(holder: Holder, entry: ref[Holder], value: Tensor, ops: Any) -> None:
            kept = me()
            assert kept is not None
            with lock:
                for one in owners:
                    one.ledger.settled()
                kept.stamps.append(perf_counter())
                refs.append(entry)
                if (ops is not None and recomputed.saves(ops)) or len(refs) <= always_empty:
                    kept._count()
                    counters.append((entry, counter_of(value)))
                    return
                holder.value = value
                kept._count()
                for one in owners:
                    if one.ledger.total > one.limit:
                        one.make_room()
                if may_keep:
                    kept._may_keep(owners[0])

        return keep

    def begin_empty(self, like: Row) -> None:
        """Keep nothing: a region like it, with this row, has given up all."""
        self.keep, self._like = None, like

    def pack_hook(self, mode: Any, general: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return a pack hook that does itself what is usual; where values are compared, the one that is given."""
        return general if mode.region.values is not None else pack_hook(self, mode, general)

    def _may_keep(self, owner: Owner) -> None:
        """Have the region keep as much as there is room for without asking."""
        self.allowed[0] = self.taken[0] + owner.limit - owner.ledger.total
        me = ref(self)

        def settle() -> None:
            if (kept := me()) is not None:
                kept.allowed[0] = -1
                kept._count()

        owner.ledger.settle = settle

    def _count(self) -> None:
        """Count what was kept since this was done last."""
        refs, note, owners, existing = self.refs, self.keys.append, self.owners, self._existing
        ledger, saved_bytes = owners[0].ledger, 0
        counts, sizes = ledger.counts, ledger.sizes
        usual = Tensor if self._is_usual else None
        for entry in refs[len(self.keys) :]:
            holder = entry()
            value = None if holder is None else holder.value
            if holder is None or value is None:
                note(0)
                continue
            try:
                key = storage_key(value) if type(value) is usual else 0
            except (NotImplementedError, RuntimeError):  # inside of a transform of functions
                key = 0
            if key in counts:
                counts[key] += 1
                note(key)
                if (size := value.untyped_storage().nbytes()) != sizes[key] and value.is_cpu:
                    ledger.resize(key, size)
            elif holder.producer is NoneType and existing.has(value, key):
                note(0)
            elif key:  # what `add` does
                counts[key] = 1
                size = sizes[key] = value.untyped_storage().nbytes() if value.is_cpu else 0
                note(key)
                saved_bytes += size
                ledger.total += size
            else:
                found, size = add(owners, value)
                note(found)
                saved_bytes += size
        self.row.saved_bytes += saved_bytes

    def end(self) -> None:
        """The function has ended: mark the holders that were given up and whose tensors were changed since."""
        for entry, counter in self._counters:
            holder = entry()
            if holder is not None and counter._version != holder.metadata[0]:
                mark_changed(holder)
        self._counters.clear()

    def let_go(self) -> None:
        """Empty what was kept since the last time: a backward inside of forward reads it, and finds it as outside."""
        with self._lock:
            for owner in self.owners:
                owner.ledger.settled()
            self._count()
            for place in range(self._let_go, len(self.refs)):
                holder = self.refs[place]()
                if holder is not None and holder.value is not None:
                    holder.describe()
                    self._counters.append((self.refs[place], counter_of(holder.value)))
                    holder.value = None
                    self._remove(place)
            self._let_go = len(self.refs)
            self._full[:] = [place for place in self._full if self.keys[place]]
            self._best = None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Have all holders empty for a moment: what replay would need is what it needs outside of a budget."""
        full = []
        for entry in self.refs:
            if (holder := entry()) is not None and holder.value is not None:
                holder.describe()
                full.append((holder, holder.value))
                holder.value = None
        try:
            yield
        finally:
            for holder, value in full:
                holder.value = value

    def _own(self, region: Region) -> Iterator[Tensor]:
        """Yield what a region keeps for its author, and what a replay has filled of that."""
        tape = region.tape
        if self._like is not None and region.replayed_in < 0:
            return  # it began empty, and is
        if self.keep is None or tape.records or tape.calls or tape.holders:
            for row in kept_by(region):
                own = row.what in _OWN or (row.what == "refilled" and (self.keep is None or row.op))
                if own and isinstance(row.value, Tensor):
                    yield row.value

    def finish(self) -> None:
        """Forward is over: count what the region keeps for its author."""
        region = self.region()
        assert region is not None
        row = self.row
        row.name = region.name
        if self._like is not None:
            row.again(self._like)
        else:
            self._fix(self._own(region))
            with self._lock:
                for owner in self.owners:
                    owner.ledger.settled()
                self._count()  # what was being kept while another thread had it counted
            row.tensors = len(self.keys)
        self.last = perf_counter()
        row.forward_seconds = self.last - self._begun
        for owner in self.owners:
            owner.finished(self)

    def saved_bytes(self) -> tuple[int, int]:
        """Return the bytes of all that is saved, and of what of it nobody has held before, at the end of forward."""
        ledger = self.owners[0].ledger
        places = {key for keys in self.keys for key in each(keys)}
        inputs = [key for key in self.fixed if key in places and ledger.counts[key] == 1 + self.keys.count(key)]
        return sum(map(ledger.sizes.__getitem__, places)), self.row.saved_bytes + sum(
            map(ledger.sizes.__getitem__, inputs)
        )

    # Room.

    def prefix(self, ledger: Ledger) -> Prefix | None:
        """Return the prefix that costs least for its bytes, None where nothing is left to give up."""
        region = self.region()
        if region is None or region.inputs is None or region.filling:
            return None
        if region.replayed_in >= 0 and graph_task() >= 0:
            return None  # the backward that runs may read it; in a checkpoint of torch's a region is replayed but once
        if not region.finished:
            self.last = self.stamps[-1] if self.stamps else self._begun
        if self._best is None or not region.finished:
            self._best = self._find(ledger)
        return self._best if self._best.bytes else None

    def forget_prefix(self) -> None:
        """Look for the best prefix anew: what else holds its storages may have changed."""
        self._best = None

    def shortest(self, ledger: Ledger, needed: int) -> int:
        """Return how many saved tensors to give up for so many bytes; as many as are best, if that is too few."""
        found = 0
        for prefix in self._prefixes(ledger):
            if prefix.bytes >= needed:
                return prefix.cut
            if self._best is None or prefix.cut <= self._best.cut:
                found = prefix.cut
        return found

    def _find(self, ledger: Ledger) -> Prefix:
        best = Prefix(0.0, 0, 0)
        for prefix in self._prefixes(ledger):
            if not best.bytes or prefix.seconds * best.bytes < best.seconds * prefix.bytes:
                best = prefix
        return best

    def _prefixes(self, ledger: Ledger) -> Iterator[Prefix]:
        """Yield the prefixes that free something, shortest first."""
        self._see()
        freed = 0
        met: dict[int, int] = {}
        sizes, stamps = ledger.sizes, self.stamps
        spent, fixed = self._begun + self._paid, 0.0 if self._paid else REPLAY_SECONDS
        for place in self._full:
            holder = self.refs[place]()
            value = None if holder is None else holder.value
            if value is None:
                continue  # dead: `refresh` finds out
            found = 0
            for key in each(self.keys[place]):
                count = met[key] = met.get(key, 0) + 1
                if ledger.is_held_by(key, count):
                    found += sizes[key]
            if found:
                freed += found
                seconds = max(stamps[place] - spent, 0.0) * self.pace + fixed
                yield Prefix(seconds, freed, place + 1)

    def _see(self) -> None:
        """Take what was saved since into the list of what is full."""
        self._full += [place for place in range(self._seen, len(self.keys)) if self.keys[place]]
        self._seen = len(self.keys)

    def give_up(self, ledger: Ledger, cut: int) -> int:
        """Empty the holders of a prefix whose storages nothing else holds; return how many bytes that frees."""
        region = self.region()
        if region is None or not region.lock.acquire(blocking=False):
            return 0
        try:
            if region.inputs is None or region.filling:
                return 0
            met: dict[int, int] = {}
            full = []
            self._see()
            for place in self._full:
                holder = self.refs[place]() if place < cut else None
                if holder is not None and holder.value is not None:
                    full.append((place, holder))
                    for key in each(self.keys[place]):
                        met[key] = met.get(key, 0) + 1
            free = {key for key, count in met.items() if ledger.is_held_by(key, count)}
            given = [(place, holder) for place, holder in full if free.issuperset(each(self.keys[place]))]
            row = self.row
            before = row.given_bytes, row.offloaded_bytes
            freed = sum([self._empty(region, place, holder) for place, holder in given])
            if given and observers:
                places = [region.tape.position_of(holder) for _, holder in given]
                gone = row.given_bytes - before[0], row.offloaded_bytes - before[1]
                for observer in tuple(observers):
                    observer.gave_up(region, places, *gone, ledger.total)
            self._full[:] = [place for place in self._full if self.keys[place]]
            return freed
        finally:
            self._best = None
            region.lock.release()

    def _empty(self, region: Region, place: int, holder: Holder) -> int:
        value = holder.value
        assert value is not None
        holder.describe()
        if not region.finished:
            self._counters.append((self.refs[place], counter_of(value)))
        elif value._version != holder.metadata[0]:
            mark_changed(holder)
        if self._offer is not None and region.hooks is None and (away := self._offer(region, place, value)) is not None:
            self._away[place] = away
            holder.value = None
            freed = self._remove(place)
            self.row.offloaded_bytes += freed
            return freed
        holder.value = None
        self._paid = max(self._paid, self.stamps[place] - self._begun)
        freed = self._remove(place)
        self.row.given_up(place, freed, self._paid)
        return freed

    def _remove(self, place: int) -> int:
        keys, self.keys[place] = self.keys[place], 0
        freed = 0
        for key in each(keys):
            first, *others = [owner.ledger for owner in self.owners]
            freed += first.remove(key)
            for ledger in others:
                ledger.remove(key)
        return freed

    def refresh(self) -> None:
        """Compare what is counted with what is there: nodes die, replays fill, backwards release."""
        region = self.region()
        self._count()
        for place in range(len(self.keys)):  # another thread may be keeping one more
            holder = self.refs[place]()
            value = None if holder is None else holder.value
            keys = self.keys[place]
            if value is None:
                if keys:
                    self._remove(place)
            elif not keys or (type(keys) is int and storage_key(value) != keys):
                self._remove(place)
                self.keys[place] = 0 if region is None or _Existing(region).has(value) else add(self.owners, value)[0]
        self._refix(region)
        self._full[:] = [place for place, keys in enumerate(self.keys) if keys]
        self._seen = len(self.keys)
        self._best = None

    def _refix(self, region: Region | None) -> None:
        """Compare what is counted for inputs, and for what the author saves, with what is there."""
        if region is None or region.inputs is None:
            self._unfix(0, self._inputs)
            self._inputs = 0
        own = [] if region is None or not region.finished else list(self._own(region))
        if [key for tensor in own for key in map(storage_key, parts_of(tensor))] != self.fixed[self._inputs :]:
            self._unfix(self._inputs, len(self.fixed))
            for tensor in own:
                self.fixed += each(add(self.owners, tensor)[0])

    def _unfix(self, first: int, end: int) -> None:
        for key in self.fixed[first:end]:
            for owner in self.owners:
                owner.ledger.remove(key)
        del self.fixed[first:end]

    def _forget_fixed(self) -> None:
        self._unfix(0, len(self.fixed))
        self._inputs = 0

    # Backward.

    def reach(self) -> None:
        """Backward has come to the region: what an offloader has is needed now, and the rest is replayed."""
        self.last = perf_counter()
        away, self._away = self._away, {}
        for place, one in away.items():
            holder = self.refs[place]()
            if holder is not None and holder.value is None:
                value = one.load()
                holder.expect_version_of(value)
                holder.value = value
        for owner in self.owners:
            owner.reached()

    def has_needless_inputs(self, ledger: Ledger) -> bool:
        """Whether its forward is over, it may be full, and it alone holds some of its inputs."""
        region = self.region()
        if region is None or region.inputs is None or not region.finished:
            return False
        tape = region.tape
        if tape.records or tape.calls or tape.holders:
            return False  # what is kept for its author is counted as its inputs are
        return any(ledger.is_held_by(key, self.fixed.count(key)) for key in self.fixed)

    def let_inputs_go(self, to_come: Collection[int]) -> None:
        """Release the region, if it is full and its last node is one of those to which this backward comes."""
        region = self.region()
        if region is not None and region.last_number in to_come and region.lock.acquire(blocking=False):
            try:
                if region.inputs is not None and not region.filling and region.tape.last_needed() < 0:
                    region.release()
                    self._forget_fixed()
            finally:
                region.lock.release()

    def replay(self, replay: Callable[[], None]) -> None:
        """Run one replay, and take its time."""
        begin = perf_counter()
        try:
            replay()
        finally:
            self.last = perf_counter()
            self.row.replay_seconds += self.last - begin
            self.row.replays += 1


def add(owners: Sequence[Owner], tensor: Tensor) -> tuple[Keys, int]:
    """Count a tensor's storages in all budgets; return their addresses, and the bytes that are new to the first."""
    parts = parts_of(tensor)
    keys = tuple(map(storage_key, parts))
    size = 0
    first, *others = [owner.ledger for owner in owners]
    for key, part in zip(keys, parts, strict=True):
        size += first.add(key, part)
        for ledger in others:
            ledger.add(key, part)
    if not keys:
        return 0, 0
    return keys[0] if parts[0] is tensor else keys, size


# By module, the storages of its buffers and of those in it, with one of the buffers. A module is looked through once:
# buffers that it gets later are counted as what regions save.
_buffers: WeakKeyDictionary[Module, dict[int, ref[Tensor]]] = WeakKeyDictionary()


class _Existing:
    """The storages of the buffers of a region's modules, which live anyway; looked up when it is first asked for."""

    __slots__ = ("_known", "_region")

    def __init__(self, region: Region) -> None:
        self._region = ref(region)
        self._known: list[dict[int, ref[Tensor]]] | None = None

    def has(self, tensor: Tensor, key: int = 0) -> bool:
        """Whether a tensor lies in one of them; ``key`` is its storage's address, if that is known."""
        if self._known is None:
            self._known = list(self._look_up())
        if not self._known:
            return False
        keys = (key,) if key else tuple(map(storage_key, parts_of(tensor)))
        for known in self._known:
            for one in keys:
                buffer = known[one]() if one in known else None
                if buffer is not None and any(storage_key(part) == one for part in parts_of(buffer)):
                    return True
        return False

    def _look_up(self) -> Iterator[dict[int, ref[Tensor]]]:
        region = self._region()
        if region is None or region.function is None or region.inputs is None:
            return
        for module in reach(region.function, region.inputs.modules()).modules:
            found = _buffers.get(module)
            if found is None:
                buffers = list(module.buffers(recurse=False))
                found = {storage_key(part): ref(buffer) for buffer in buffers for part in parts_of(buffer)}
                _buffers[module] = found
            if found:
                yield found


class _Recomputed:
    """Tells which tensors an op saves that its author named RECOMPUTE."""

    __slots__ = ("_number", "_record")

    def __init__(self) -> None:
        self._record: Any = None
        self._number = -1

    def saves(self, ops: Any) -> bool:
        """Whether the tensor that the tape has noted last is one of these: asked of each in a region with ops."""
        if ops.recomputing:
            return True
        tape = ops.region.tape
        record = next(reversed(tape.records.values()), None)
        if record is None or record.policy is not CheckpointPolicy.RECOMPUTE:
            return False
        if record is self._record:
            return sequence_number() == self._number
        # The body of an op with a handle saves nothing itself. What is saved first after it began is its own.
        self._record = record
        self._number = sequence_number() if record.saved_before == len(tape.saved) - 1 else -1
        return self._number >= 0


def _is_watched() -> bool:
    """Whether a region around this one compares ops: its replay would find those of another backward inside."""
    mode = current_mode()
    while mode is not None:
        if isinstance(mode, Recording) and mode.ops is not None and mode.ops.watch is not None:
            return True
        mode = mode.parent
    return False


def counter_of(value: Tensor) -> Tensor:
    """Return a tensor that shares the version counter of another, but not its data, where that can be."""
    if type(value) is not Tensor or value.layout is not torch.strided:
        return value
    with without_dispatch_modes():
        alias = value.detach()
        alias.data = _NOTHING
    return alias


keep_from_compiler(KeptRegion._keep_function)
