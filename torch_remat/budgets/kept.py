"""Regions in a budget: what the runtime asks of each of them, from forward to backward, and how they get there.

In: regions whose forward begins in a block of `budget`, or by a plan; each of their saved tensors. Kept: weak
references, and what was counted for a region, so that it is taken off when that is gone; holders own their values. Out:
full holders, the bytes that all regions keep now, and what happened, for reports.

What the author decides stays: what is saved by name or by a policy is counted and never evicted, and what is named
RECOMPUTE is never kept. A region with a policy for its ops keeps what that saves, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol
from weakref import ref

from torch import Tensor

from torch_remat._compat import collective_counter, sequence_number
from torch_remat._storages import Ledger
from torch_remat.budgets.collectives import Collectives
from torch_remat.budgets.counted import Counted, lock
from torch_remat.budgets.evict import Evictable, Offer
from torch_remat.budgets.plain import Key, key_of, key_of_call
from torch_remat.budgets.steps import Planned, Row
from torch_remat.dispatch.holder import Holder
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.options import Keeper, Keeping, Options, keeping
from torch_remat.dispatch.region.forward import Recording
from torch_remat.dispatch.region.region import Region
from torch_remat.policies.decision import CheckpointPolicy


class Owner(Protocol):
    """What a region asks of a budget that it is in."""

    ledger: Ledger
    limit: float
    offer: Offer | None
    decides_alone: bool

    def runner(self, key: Key) -> Callable[..., Any] | None:
        """Return what runs a region without holders; None if it has some."""

    def add(self, kept: KeptRegion) -> None:
        """Take a region that begins."""

    def make_room(self) -> None:
        """The sum has passed the limit."""

    def finished(self, kept: KeptRegion) -> None:
        """A region's forward is over."""

    def reached(self) -> None:
        """Backward has come to a region."""

    def forget_dead(self) -> None:
        """Take off what was counted for regions that are gone."""


class KeptRegion:
    """The keeper of one region.

    Args:
        region: The region.
        owners: The budget, and those around it; none for one that runs by a plan alone.
        always_empty: How many of its first saved tensors are never kept.

    Attributes:
        keeps: Whether it fills holders.
        counted: What is counted for it.
        evictable: What may be evicted of it.
        row: What reports know of it.
        key: What is equal for regions that keep the same; None if it cannot be without holders.
        collectives: Sees whether it communicates; None where that is allowed, or there is nobody.
    """

    __slots__ = ("__weakref__", "_always_empty", "_empty", "_like", "_measures", "_recomputed", "collectives",
                 "counted", "evictable", "keeps", "key", "owners", "region", "row")  # fmt: skip

    def __init__(self, region: Region, owners: Sequence[Owner], always_empty: int) -> None:
        self.region = ref(region)
        self.owners = owners
        self.keeps = region.options.chosen is None and not _is_watched()
        self.counted = Counted(region, [owner.ledger for owner in owners], self.keeps)
        self.row = Row(region.name, self.counted.input_bytes)
        self.evictable = Evictable(region, self.counted, self.row, owners[0].offer if owners else None)
        self._always_empty = always_empty
        self._empty: set[int] = set()  # the places of saved tensors that are never kept
        self._like: Row | None = None
        self._measures = False
        self._recomputed = _Recomputed()
        self.collectives: Collectives | None = None
        self.key: Key | None = None
        if self.keeps and len(owners) == 1 and not always_empty and current_mode() is None:
            assert region.inputs is not None
            self.key = key_of(region.name, region.function, region.inputs.given)

    def begin_empty(self, like: Row | None) -> None:
        """Keep nothing, as outside of a budget, like the region with this row; None has its replays measured."""
        self._measures = self.keeps and like is None
        self.keeps = self.counted.fills = False
        self.key = None
        self._like = like

    # What the runtime asks.

    def note(self, ops: Any) -> None:
        """Take note of a saved tensor, and when it was made."""
        stamps = self.evictable.stamps
        if len(stamps) < self._always_empty or (ops is not None and self._recomputed.saves(ops)):
            self._empty.add(len(stamps))
        stamps.append(perf_counter())

    def keep(self, entry: ref[Holder], value: Tensor | None) -> None:
        """Give a holder its value, unless it is to be empty."""
        counted = self.counted
        if self.collectives is not None and value is not None and type(value) is not Tensor:
            self.collectives.saw(type(value))
        with lock:
            holder = entry()
            if holder is None or value is None or len(counted.refs) in self._empty:
                counted.add_empty(entry)
                return
            holder.value = value
            self.row.saved_bytes += counted.add(holder, entry, value)
            for owner in self.owners:
                if owner.ledger.total > owner.limit:
                    owner.make_room()

    def finish(self) -> None:
        """Forward is over."""
        region, row, evictable = self.region(), self.row, self.evictable
        assert region is not None
        if self.collectives is not None:
            self.collectives.raise_if_any()
        with lock:
            self.counted.end(region)
            row.fixed_bytes = self.counted.fixed_bytes
            row.tensors = len(self.counted.keys)
            if region.tape.records:
                self.key = None
            if self._like is not None:
                row.again(self._like)
            evictable.look_anew()
            evictable.last = perf_counter()
        row.begun, row.forward_seconds = evictable.begun, evictable.last - evictable.begun
        for owner in self.owners:
            owner.finished(self)

    def reach(self) -> None:
        """Backward has come to the region: what an offloader has is needed now, and the rest is replayed."""
        self.row.reached = self.evictable.last = perf_counter()
        self.evictable.bring_back()
        for owner in self.owners:
            owner.reached()

    def replay(self, replay: Callable[[], None]) -> None:
        """Run one replay, and take its time."""
        begin = perf_counter()
        try:
            replay()
        finally:
            self.evictable.last = perf_counter()
            self.row.replay_seconds += self.evictable.last - begin
            self.row.replays += 1
        if self._measures and (region := self.region()) is not None:
            self.row.filled(*self.counted.filled(region))

    # What its budgets ask.

    def refresh(self) -> None:
        """Compare what is counted with what is there."""
        self.counted.refresh(self.region())
        self.evictable.look_anew()


class _Recomputed:
    """Finds which tensors an op saves that its author named RECOMPUTE."""

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
        self._number = sequence_number() if record.start == len(tape.saved) - 1 else -1
        return self._number >= 0


def _is_watched() -> bool:
    """Whether an enclosing region compares ops: its replay would find those of another backward inside."""
    mode = current_mode()
    while mode is not None:
        if isinstance(mode, Recording) and mode.ops is not None and mode.ops.watch is not None:
            return True
        mode = mode.parent
    return False


class Inside:
    """What regions ask inside of blocks: the innermost budget, those around it, and plans.

    Args:
        registers: The budgets.
        plan: The plan by which they run; only those that it names, where there is no budget.
    """

    __slots__ = ("_count", "plan", "registers")

    def __init__(self, registers: Sequence[Owner], plan: Mapping[str, Planned] | None = None) -> None:
        self.registers = registers
        self.plan = plan
        self._count = collective_counter() if any(one.decides_alone for one in registers) else None

    def runner(
        self, options: Options, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """Return what runs a function as plain autograd; None for one that runs as a region."""
        if (
            self.plan is not None
            or len(self.registers) != 1
            or (key := key_of_call(options, function, args, kwargs)) is None
        ):
            return None
        return self.registers[0].runner(key)

    def begin(self, region: Region) -> Keeper | None:
        """Return what keeps a region's saved tensors; None for one that neither a plan nor a budget knows."""
        planned = None if self.plan is None else self.plan.get(region.name)
        if planned is None and not self.registers:
            return None
        with lock:
            for one in self.registers:
                one.forget_dead()  # the inputs may be where something was that is gone
            kept = KeptRegion(region, self.registers, 0 if planned is None else planned.evicted_tensors)
            if self._count is not None and kept.keeps:
                kept.collectives = Collectives(self._count, region.name, region.function)
            for one in self.registers:
                one.add(kept)
        return kept


def registers_around() -> Sequence[Owner]:
    """Return the budgets whose blocks this thread is in, innermost first."""
    around: Keeping | None = keeping.get()
    return around.registers if isinstance(around, Inside) else ()
