"""Regions in a budget: what the runtime asks before one begins, and what it notifies from forward to backward.

In: regions that begin in a block of `budget`, or by a plan. Kept: weak references, and what was counted for a region.
Out: what a region keeps by price, the bytes that all regions keep now, and what happened, for reports.

What the author decides stays: what is saved by name or by a policy is counted and never evicted, and what is named
RECOMPUTE is never kept. A region with a policy for its ops keeps what that saves, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, strided

from torch_remat._compat import collective_counter, graph_task
from torch_remat._util.storages import Ledger, parts_of
from torch_remat.budgets.counted import Counted, lock
from torch_remat.budgets.plain import PLAIN, PlainRegion
from torch_remat.budgets.steps import Row
from torch_remat.dispatch.call.collectives import Collectives
from torch_remat.dispatch.call.lowering import lower
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.options import Begun, Keeper, Keeping, Options, keeping
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import UsageError
from torch_remat.ladders.kinds import Kind
from torch_remat.ladders.ladder import Rung


class PlannedRegion(Protocol):
    """What a plan says of a region."""

    def rung(self) -> Rung:
        """Return what it keeps."""


class Owner(Protocol):
    """What a region asks of a budget that it is in."""

    ledger: Ledger
    limit: float
    backward: int
    decides_alone: bool

    def begin(self, asked: Asked) -> Begun:
        """Say what a region keeps that is about to begin."""

    def add(self, kept: KeptRegion) -> None:
        """Count a region that begins."""

    def add_plain(self, plain: PlainRegion, row: Row) -> None:
        """Count a region that runs as plain code."""

    def finished(self, kept: KeptRegion) -> None:
        """A region's forward is over."""

    def reached(self) -> None:
        """Backward has come to a region."""

    def forget_dead(self) -> None:
        """Take off what was counted for regions that are gone."""


def bytes_of(leaves: Sequence[Any]) -> int:
    """Return the bytes of the tensors among the leaves of a region's arguments."""
    size = 0
    for leaf in leaves:
        if type(leaf) is Tensor and leaf.layout is strided:
            size += leaf.nbytes
        elif isinstance(leaf, Tensor):
            size += sum(part.nbytes for part in parts_of(leaf))
    return size


class Asked:
    """A region that is about to begin, and what it asks.

    Attributes:
        options: Its options.
        function: What it runs.
        leaves: The leaves of its arguments.
        kind: Its kind.
        shapes: The shapes of its arguments.
        owners: The budgets around it, innermost first.
    """

    __slots__ = ("function", "kind", "leaves", "options", "owners", "shapes")

    def __init__(
        self,
        options: Options,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        kind: Kind,
        shapes: Hashable,
        owners: Sequence[Any],
    ) -> None:
        self.options, self.function, self.leaves = options, function, leaves
        self.kind, self.shapes, self.owners = kind, shapes, owners

    @property
    def name(self) -> str:
        """Its name."""
        return self.options.region_name or default_name(self.function)


class KeptRegion:
    """The keeper of one region.

    Args:
        region: The region.
        owners: The budget, and those around it; none for one that runs by a plan alone.
        row: What reports know of it.

    Attributes:
        counted: What is counted for it.
        collectives: Sees whether it communicates; None where that is allowed, or there is nobody.
    """

    __slots__ = ("__weakref__", "collectives", "counted", "owners", "region", "row")

    def __init__(self, region: Region, owners: Sequence[Owner], row: Row) -> None:
        self.region = ref(region)
        self.owners = owners
        self.row = row
        self.counted = Counted(region, [owner.ledger for owner in owners])
        assert region.inputs is not None
        row.begun, row.input_bytes = perf_counter(), bytes_of(region.inputs.given)
        self.collectives: Collectives | None = None

    # What the runtime notifies.

    def finish(self) -> None:
        """Forward is over."""
        region, row = self.region(), self.row
        assert region is not None
        if self.collectives is not None:
            found = self.collectives.found() or (region.kind.communicates if region.kind is not None else "")
            if found:
                raise _refuse(row.name, found)
        row.forward_seconds = perf_counter() - row.begun
        with lock:
            self.counted.count(region)
            row.kept_bytes = self.counted.bytes
            if row.rung is not None and row.part is not None:
                row.more_bytes = row.kept_bytes - int(row.rung.bytes * row.part.scale)
        for owner in self.owners:
            owner.finished(self)

    def reach(self) -> None:
        """Backward has come to the region."""
        self.row.reached = perf_counter()
        for owner in self.owners:
            owner.reached()

    def replay(self, replay: Callable[[], None]) -> None:
        """Run one replay, and take its time."""
        begin = perf_counter()
        try:
            replay()
        finally:
            self.row.replay_seconds += perf_counter() - begin
            self.row.replays += 1

    # What its budgets ask.

    def refresh(self) -> None:
        """Compare what is counted with what is there: nodes die, replays fill, backwards release."""
        region = self.region()
        if region is not None and (region.finished or region.inputs is None):
            self.counted.count(region)

    def slots(self) -> list[Any]:
        """Return what it holds of its calls."""
        region = self.region()
        calls = () if region is None else region.tape.functions.values()
        return [slot.kept for call in calls for slot in call.kept.values()]

    def next_rung(self) -> int:
        """Return the number of the rung below; -1 if there are no more, or backward has come."""
        region, row = self.region(), self.row
        if (
            row.part is None
            or row.rung is None
            or row.rung.away
            or row.reached
            or region is None
            or not region.finished
        ):
            return -1
        return row.part.ladder.below(row.rung)

    def lower(self, rung: int) -> bool:
        """Keep what a lower rung keeps; return whether it could be."""
        region, row = self.region(), self.row
        assert row.part is not None
        lowered = row.part.ladder.rungs[rung]
        if region is None or graph_task() >= 0 or not lower(region, lowered.acts):
            return False
        before = self.counted.bytes
        self.counted.count(region)
        row.lowered_bytes += max(before - self.counted.bytes, 0)
        row.rung, row.kept_bytes = lowered, self.counted.bytes
        return True


class Inside:
    """What regions ask inside of blocks: the innermost budget, those around it, and plans.

    Args:
        registers: The budgets.
        plan: The plan by which they run; only those that it names, where there is no budget.
    """

    __slots__ = ("_count", "plan", "registers")

    def __init__(self, registers: Sequence[Owner], plan: Mapping[str, PlannedRegion] | None = None) -> None:
        self.registers = registers
        self.plan = plan
        self._count = collective_counter() if any(one.decides_alone for one in registers) else None

    def begin(
        self, options: Options, function: Callable[..., Any], leaves: Sequence[Any], kind: Kind, shapes: Hashable
    ) -> Begun:
        """Say what a region keeps that is about to begin."""
        asked = Asked(options, function, leaves, kind, shapes, self.registers)
        planned = None if self.plan is None else self.plan.get(asked.name)
        if planned is not None:
            rung = planned.rung()
            if not rung.is_plain:
                return Begun(kind, shapes, rung)
            if not self.registers:
                return Begun(kind, shapes, rung, run=run_plain)
            row = Row(asked.name)
            row.rung, row.kept_bytes = rung, int(rung.bytes)
            with lock:
                return Begun(kind, shapes, rung, run=plain_region(self.registers, row).run)
        if kind.communicates and options.functions is not None:
            return Begun(kind, shapes)  # by its policy alone: a forward that is recorded here would keep nothing
        if kind.communicates and self._count is not None:
            raise _refuse(asked.name, kind.communicates)
        return self.registers[0].begin(asked) if self.registers else Begun(kind, shapes)

    def keeper(self, region: Region, begun: Begun | None) -> Keeper | None:
        """Return what counts a region; None for one outside of budgets."""
        if not self.registers:
            return None
        with lock:
            for one in self.registers:
                one.forget_dead()  # the inputs may be where something was that is gone
            row = begun.entry if begun is not None and begun.entry is not None else Row(region.name)
            kept = KeptRegion(region, self.registers, row)
            if self._count is not None and region.options.chosen is None:
                kept.collectives = Collectives(self._count, region.function)
            for one in self.registers:
                one.add(kept)
        return kept


def plain_region(owners: Sequence[Any], row: Row) -> PlainRegion:
    """Count a region that is to run as plain code in its budgets."""
    row.begun = perf_counter()
    plain = PlainRegion(owners)
    for owner in owners:
        owner.add_plain(plain, row)
    return plain


def run_plain(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a region as plain code, and those in it."""
    token = keeping.set(PLAIN)
    try:
        return function(*args, **kwargs)
    finally:
        keeping.reset(token)


def registers_around() -> Sequence[Owner]:
    """Return the budgets whose blocks this thread is in, innermost first."""
    around: Keeping | None = keeping.get()
    return around.registers if isinstance(around, Inside) else ()


def _refuse(region_name: str, what: str) -> UsageError:
    """Return the error of a region that communicates, in a budget that decides by this rank's clock."""
    return UsageError(
        f"this region {what}, and under a budget each rank decides by its own clock what it replays: one rank would "
        "wait for ever for others that do not replay the same",
        region=region_name,
        remedy="Let the ranks agree: remat.budget(limit, group=...), with the group or the mesh of those that share "
        "collectives inside regions. Or give each rank the same plan: checkpoint_modules(model, patterns, plan=plan).",
    )
