"""The ladder of a kind of region: minimum cuts of a graph of calls and storages, from the fewest bytes to no replay.

In: the record of a forward. Kept: its rungs. Out: for each rung bytes, nanoseconds, and what replay does with each call
of a function.

NOTE [ The cut ]
A rung is the cheapest choice of calls that run and units that are kept, at one exchange of bytes for time: a minimum
cut of

    source    -> need(u)       infinite     if autograd saves u
    need(u)   -> run(maker)    bytes(u)     if autograd saves u, which can be kept then; else infinite
    run(s)    -> need(u)       infinite     for each u that s reads
    run(s)    -> run(writer)   infinite     where s reads u as it was before a later write
    run(s)    -> state(p)      infinite     if s draws random numbers and p has drawn before it
    state(p)  -> run(p)        the bytes of a generator's state
    run(s)    -> sink          time(s)
    source    -> run(s)        infinite     if replay has to run it: it writes what others have made, returns a
                                            number, or more than its results comes of it

Steps that write one unit are one node, and replay has to run it. The region's arguments are held in any case, and what
comes from outside is there. What runs is a superset of what runs on the next rung, so that a bisection finds all rungs
(Gallo, Grigoriadis, Tarjan 1989, "A fast parametric maximum flow algorithm": only the capacities to the sink change).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch

from torch_remat.ladders.record import Record

# Nanoseconds that a call costs besides its kernels: one that runs in replay; one that is kept or skipped, in both
# phases (30,000 where code is hot, but between kernels of a millisecond it is cold); each, where a mode sees functions.
_RUN_NS, _ACT_NS, _SEEN_NS = 4_000, 150_000, 2_500
_REGION_NS = 400_000  # what a region that is not plain code costs in both phases: 200,000 hot, to 800,000
_STATE_BYTES = torch.get_rng_state().numel()

Numbers = Mapping[int, Sequence[int]]  # by the number of a call, which of its results are kept


@dataclass(frozen=True)
class Rung:
    """What a region keeps at one price.

    Attributes:
        bytes: What it keeps, with its arguments.
        ns: Nanoseconds that it costs, in both phases.
        acts: For each function, by the number of a call, which of its results are kept; replay runs all other calls.
        is_plain: Whether the region is to be plain code, which keeps everything.
        names: The names of these calls, by function and number.
        away: Those calls whose tensors leave the device, by function and number.
        kept: What it keeps, in order: names of calls, each with the bytes of its results and of what it saves.
        runs: What replay runs, in order: names of calls, with their nanoseconds. One that only enters is omitted.
    """

    bytes: int
    ns: int
    acts: Mapping[Any, Numbers] = field(default_factory=dict)
    is_plain: bool = False
    names: Mapping[tuple[Any, int], str] = field(default_factory=dict)
    away: frozenset[tuple[Any, int]] = frozenset()
    kept: Sequence[tuple[str, int]] = ()
    runs: Sequence[tuple[str, int]] = ()


class Ladder:
    """The rungs of one kind of region.

    Args:
        record: One forward.
        selected: Functions that a policy keeps in any case.
        left_out: Patterns on the names of calls that are never kept.

    Attributes:
        rungs: From the fewest bytes to the least time; those on the lower hull. The first keeps nothing, the last is
            plain code, unless the author or the policy excludes that.
        between: Further cuts, which no exchange of bytes for time buys: for bytes that are left over.
        by_policy: What the policy keeps, if nothing is kept by price.
        record: The forward.
        input_bytes: The bytes of the region's arguments, which all rungs but plain code hold.
        whole_bytes: What it keeps as plain code.
    """

    def __init__(self, record: Record, selected: Collection[Any] = (), left_out: Sequence[str] = ()) -> None:
        self.record = record
        self._node = _nodes(record)
        self._selected = frozenset(
            at for at, step in enumerate(record.steps) if step.function in selected and step.results is not None
        )
        self._barred = frozenset(
            at for at, step in enumerate(record.steps) if any(fnmatchcase(step.name, pattern) for pattern in left_out)
        )
        self._ns: dict[int, int] = {}
        for at, step in enumerate(record.steps):
            node = self._node[at]
            spared = _ACT_NS if at == node and at not in self._selected else 0
            self._ns[node] = max(self._ns.get(node, 0) + step.ns + _RUN_NS - spared, 0)
        self._maker = {unit: self._node[at[0]] for unit, at in enumerate(record.writers) if at}
        self._groups = {node for at, node in enumerate(self._node) if at != node}
        self.input_bytes = sum(record.sizes[unit] for unit in record.inputs)
        run_ns = record.whole_ns if record.is_hidden else sum(step.ns + _RUN_NS for step in record.steps)
        all_ns = run_ns + _REGION_NS
        nothing = Rung(self.input_bytes, all_ns, runs=[(step.name, step.ns) for step in record.steps if step.ns])
        everything = [] if record.is_named or left_out else [Rung(record.whole_bytes, 0, is_plain=True)]
        self.whole_bytes = record.whole_bytes
        cuts = [] if record.is_hidden else self._cuts()
        self.by_policy = cuts[0] if self._selected and cuts else nothing
        found = [nothing, *cuts, *everything]
        self.rungs = _lower_hull(found)
        self.between = [rung for rung in found if not any(rung is one for one in self.rungs)]

    def at_share(self, share: float) -> Rung:
        """Return the rung of the least time that keeps at most a share of the way from first to last."""
        least, most = self.rungs[0].bytes, self.rungs[-1].bytes
        limit = least + share * (most - least)
        return min((rung for rung in (*self.rungs, *self.between) if rung.bytes <= limit), key=lambda rung: rung.ns)

    def as_region(self) -> Rung | None:
        """Return the highest rung that is not plain code; None if plain code keeps no more than any other."""
        return next((rung for rung in reversed(self.rungs) if not rung.is_plain), None)

    def below(self, rung: Rung) -> int:
        """Return the number of the next rung that keeps fewer bytes; -1 if no rung does."""
        return sum(one.bytes < rung.bytes for one in self.rungs) - 1

    def _cuts(self) -> list[Rung]:
        least, most = self._cut(0, 1), self._cut(1, 0)
        found = [least, *self._between(least, most), most]
        return [self._rung(runs, kept) for runs, kept, _, _ in found]

    def _between(self, low: _Cut, high: _Cut) -> list[_Cut]:
        """Return the cuts between two: bytes rise and time falls along them."""
        price, weight = high[2] - low[2], low[3] - high[3]
        if price <= 0 or weight <= 0:
            return []
        cut = self._cut(price, weight)
        if cut[2] * weight + cut[3] * price >= low[2] * weight + low[3] * price:
            return []
        return [*self._between(low, cut), cut, *self._between(cut, high)]

    def _cut(self, price: int, weight: int) -> _Cut:
        """Return the cut of the least ``weight * bytes + price * ns``; where one is 0 it still breaks ties."""
        import networkx  # which torch brings, and does not load either

        record, node, graph = self.record, self._node, networkx.DiGraph()
        if not weight:
            price, weight = 1 + sum(record.sizes) + _STATE_BYTES * len(record.steps), 1
        elif not price:
            price, weight = 1, 1 + sum(self._ns.values())
        graph.add_nodes_from(("source", "sink"))
        for at, step in enumerate(record.steps):
            own = ("run", node[at])
            graph.add_edge(own, "sink", capacity=self._ns[node[at]] * price)
            if step.results is None or node[at] in self._groups:
                graph.add_edge("source", own)
            for unit, before in step.reads:
                if (maker := self._maker.get(unit)) is not None and maker != node[at]:
                    is_last = before == len(record.writers[unit])
                    graph.add_edge(own, ("need", unit) if is_last else ("run", maker))
        for unit, maker in self._maker.items():
            size = record.sizes[unit] * weight
            if maker in self._selected:
                graph.add_edge(("need", unit), ("run", maker), capacity=0)
            elif unit in record.saved and maker not in self._barred:
                graph.add_edge(("need", unit), ("run", maker), capacity=size)
            else:
                graph.add_edge(("need", unit), ("run", maker))
            if unit in record.saved:
                graph.add_edge("source", ("need", unit))
        draws = [node[at] for at, step in enumerate(record.steps) if step.random]
        for before, after in pairwise(draws):
            if before != after:
                graph.add_edge(("run", after), ("state", before))
                graph.add_edge(("state", before), ("run", before), capacity=_STATE_BYTES * weight)
        _, (side, _) = networkx.minimum_cut(graph, "source", "sink", flow_func=networkx.algorithms.flow.preflow_push)
        runs = frozenset(one[1] for one in side if one[0] == "run")
        read = {unit for at, step in enumerate(record.steps) if node[at] in runs for unit, _ in step.reads}
        needed = {one[1] for one in side if one[0] == "need" and (one[1] in record.saved or one[1] in read)}
        kept = frozenset(unit for unit in needed if self._maker[unit] not in runs)
        states = sum(after in runs and before not in runs for before, after in pairwise(draws))
        size = sum(record.sizes[unit] for unit in kept) + states * _STATE_BYTES
        return runs, kept, size, sum(self._ns[one] for one in runs)

    def _rung(self, runs: frozenset[int], kept: frozenset[int]) -> Rung:
        """Return a cut as what replay does with each call, at what it costs in truth."""
        record, there = self.record, set[int]()
        acts: dict[Any, dict[int, tuple[int, ...]]] = {}
        ns, ran, kept_by, names = _REGION_NS + record.calls * _SEEN_NS, [], [], dict[tuple[Any, int], str]()
        for at, step in enumerate(record.steps):
            made = [unit for unit in step.writes if unit in kept]
            is_run = self._node[at] in runs or (
                # One that nobody needs and that costs less than to skip it, as what it reads is there.
                not made and step.ns + _RUN_NS < _ACT_NS and all(self._is_there(unit, there) for unit, _ in step.reads)
            )
            if is_run or step.results is None:
                ns += step.ns + _RUN_NS
                if step.ns:
                    ran.append((step.name, step.ns))
                there.update(step.writes)
                continue
            ns += _ACT_NS
            there.update(made)
            if made:
                kept_by.append((step.name, sum(record.sizes[unit] for unit in made)))
            if at not in self._selected:
                places = tuple(place for place, unit in enumerate(step.results) if unit in kept)
                acts.setdefault(step.function, {})[step.number] = places
                names[step.function, step.number] = step.name
        size = self.input_bytes + sum(record.sizes[unit] for unit in kept)
        return Rung(size, ns, acts, names=names, kept=kept_by, runs=ran)

    def _is_there(self, unit: int, there: Collection[int]) -> bool:
        """Whether replay has a unit without a call that makes it, or has been given it."""
        return unit in there or unit not in self._maker


_Cut = tuple[frozenset[int], frozenset[int], int, int]  # what runs, what is kept; bytes and nanoseconds


def _nodes(record: Record) -> list[int]:
    """Return for each step the first of those that write a unit with it, and so on."""
    first = list(range(len(record.steps)))

    def root(at: int) -> int:
        while first[at] != at:
            at = first[at]
        return at

    for writers in record.writers:
        for at in writers[1:]:
            one, other = root(writers[0]), root(at)
            first[max(one, other)] = min(one, other)
    return [root(at) for at in range(len(first))]


def _lower_hull(rungs: Sequence[Rung]) -> list[Rung]:
    """Return the rungs that some exchange of bytes for time buys, from the fewest bytes to the least time."""
    hull: list[Rung] = []
    for rung in sorted(rungs, key=lambda rung: (rung.bytes, rung.ns)):
        if hull and rung.ns >= hull[-1].ns:
            continue
        while len(hull) > 1 and gain(hull[-2], hull[-1]) <= gain(hull[-1], rung):
            hull.pop()
        hull.append(rung)
    return hull


def gain(low: Rung, high: Rung) -> float:
    """Return the nanoseconds that a byte spares between two rungs."""
    return (low.ns - high.ns) / max(high.bytes - low.bytes, 1)
