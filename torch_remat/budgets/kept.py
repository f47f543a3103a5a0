"""Regions in a budget: what the runtime asks before one begins, and what it notifies from forward to backward.

In: regions that begin in a block of `budget`, or by a plan. Kept: weak references, and what was counted for a region.
Out: what a region keeps by price, the bytes that all regions keep now, and what happened, for reports.

What the author decides stays: what is saved by name or by a policy is counted and never evicted, and what is named
RECOMPUTE is never kept. A region with a policy for its ops keeps what that saves, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol
from weakref import ref

from torch import Tensor, strided

from torch_remat._compat import collective_counter, graph_is_kept, graph_task, node_number, sequence_number
from torch_remat._util.storages import Ledger, parts_of
from torch_remat.budgets.counted import Counted, lock
from torch_remat.budgets.steps import Row
from torch_remat.dispatch.call.collectives import Collectives
from torch_remat.dispatch.call.lowering import lower
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.options import Begun, Keeper, Options
from torch_remat.dispatch.reach import boundary_nodes
from torch_remat.dispatch.region.region import Keeping, Region, keeping
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

    def expect(self, region: Region) -> None:
        """A region begins that does not go by price."""

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


class Asked(NamedTuple):
    """A region that is about to begin, and what it asks.

    Attributes:
        options: Its options.
        function: What it runs.
        leaves: The leaves of its arguments.
        kind: Its kind.
        shapes: The shapes of its arguments.
        owners: The budgets around it, innermost first.
    """

    options: Options
    function: Callable[..., Any]
    leaves: Sequence[Any]
    kind: Kind
    shapes: Hashable
    owners: Sequence[Owner]

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
                return Begun(kind, shapes, rung, run=PlainRegion(self.registers, row).run)
        if kind.communicates and options.functions is not None:
            return Begun(kind, shapes)  # by its policy alone: a forward that is recorded here would keep nothing
        if kind.communicates and self._count is not None:
            raise _refuse(asked.name, kind.communicates)
        return self.registers[0].begin(asked) if self.registers else Begun(kind, shapes)

    def keeper(self, region: Region, begun: Begun | None) -> Keeper | None:
        """Return what counts a region; None for one outside of budgets."""
        if not self.registers:
            return None
        row = None if begun is None else begun.entry
        if row is None:
            self.registers[0].expect(region)
        with lock:
            for one in self.registers:
                one.forget_dead()  # the inputs may be where something was that is gone
            row = Row(region.name) if row is None else row
            kept = KeptRegion(region, self.registers, row)
            if self._count is not None and region.options.chosen is None:
                kept.collectives = Collectives(self._count, region.function)
            for one in self.registers:
                one.add(kept)
        return kept


class PlainRegion:
    """One region that runs as plain code, as long as its graph lives: all that it keeps fits.

    It has no holders: a hook runs when backward comes.

    Args:
        owners: The budgets that count it.
        row: What reports know of it.

    Attributes:
        is_over: Whether a backward has come to it that frees its graph.
    """

    __slots__ = ("__weakref__", "_owners", "is_over")

    def __init__(self, owners: Sequence[Owner], row: Row) -> None:
        self._owners = owners
        self.is_over = False
        row.begun = perf_counter()
        for owner in owners:
            owner.add_plain(self, row)

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call its function and return the output, whose graph holds this from now on."""
        first_number = sequence_number()
        output = run_plain(function, args, kwargs)
        for node in boundary_nodes(output):
            if node_number(node) >= first_number:
                node.register_prehook(self._reach)
        return output

    def _reach(self, _grad_outputs: object) -> None:
        self.is_over = not graph_is_kept()
        for owner in self._owners:
            if graph_task() != owner.backward:
                owner.reached()


class _InsidePlain:
    """What regions ask inside of one that is plain code: they are, too."""

    registers: Sequence[Owner] = ()

    def begin(
        self, options: Options, function: Callable[..., Any], leaves: Sequence[Any], kind: Kind, shapes: Hashable
    ) -> Begun:
        return Begun(kind, shapes, run=lambda function, args, kwargs: function(*args, **kwargs))

    def keeper(self, region: Region, begun: Begun | None) -> None:
        return None


_INSIDE_PLAIN: Keeping = _InsidePlain()


def run_plain(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a region as plain code, and those in it."""
    token = keeping.set(_INSIDE_PLAIN)
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
