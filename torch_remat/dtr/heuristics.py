"""Heuristics: which evictable storage goes first when room is needed.

A heuristic gives each evictable storage a score, and the storage with the least score is evicted. The simulator and
the live runtime use the same classes: what they show of a storage is `Storage` below.

Words: *m* is the size of a storage, *c* its cost (the ops that make it and its views), *s* its staleness (clock less
last access). The *evicted neighbourhood* e* of a storage is what would have to be computed again with it: evicted
storages that are reached from it through evicted storages only, upwards (it is computed from them) or downwards
(they are computed from it).
"""

from __future__ import annotations

import difflib
import inspect
import math
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

from torch_remat.errors import UsageError, shown


class Storage:
    """A piece of memory. Heuristics read the first seven attributes; the others are the memory's.

    `cost` and `last_access` change only while the storage is not evictable, so that an index of scores stays right.

    Attributes:
        size_bytes: Its size, whatever part of it is viewed.
        cost: Time that the distinct ops take that make it and its views: nanoseconds in a log, else seconds.
        last_access: The clock at the last op that read or made it.
        resident: Whether it holds data now.
        parents: Storages that its ops read, each once, without itself.
        children: Storages whose ops read this one, each once, without itself.
        note: The heuristic's own: None at first, free for use, dropped with the storage.
        place: The pool's own: where the storage is among those that can be evicted, -1 outside.
        op: What makes it (again).
        views: Its views that are made by ops of their own.
        names: How many ways the program has to reach it.
        locks: How many running ops need it where it is.
        pin: Why it is never evicted, empty where it can be.
    """

    # The usual, so that a storage sets only what is its own.
    locks = 0
    names = 1
    note: Any = None
    op: Any = None
    parents: Any = ()
    pin = ""
    place = -1
    resident = False
    views: Sequence[Any] = ()

    def __init__(self, size_bytes: int, cost: float = 0, clock: float = 0) -> None:
        self.size_bytes = size_bytes
        self.cost = cost
        self.last_access = clock
        self.children: dict[Any, None] = {}

    @property
    def storage(self) -> Any:
        """The storage of the tensor for which it stands."""
        return self

    @property
    def is_read(self) -> bool:
        """Whether an op that can run again reads it."""
        return bool(self.children)

    def fill(self, data: Any) -> None:
        """Hold data."""
        self.resident = True

    def drop(self) -> None:
        """Hold no data."""
        self.resident = False

    def misses(self, parent: Storage) -> bool:
        """Whether making it whole takes another storage."""
        return not self.resident or any(
            not view.resident and any(tensor.storage is parent for tensor in view.op.inputs) for view in self.views
        )


class Heuristic:
    """Base of all heuristics: subclass it and write `score`.

    Example:
        >>> class Biggest(Heuristic):
        ...     def score(self, storage, clock):
        ...         return -storage.size_bytes
    """

    accesses: int = 0
    """Storages whose metadata the heuristic looked at in the present run, besides those that it was asked to score."""
    changed: set[int] | None = None
    """Places of evictable storages whose score has changed though they were not touched; a set while an index wants
    to know, else None."""

    def score(self, storage: Storage, clock: float) -> float:
        """Return how much the storage is worth keeping; the least is evicted.

        Args:
            storage: An evictable storage.
            clock: Time in ops so far, rematerialized ones included, in the unit of `Storage.cost`.

        Raises:
            NotImplementedError: The subclass has not written it.
        """
        raise NotImplementedError(f"{type(self).__name__} is a heuristic without score(storage, clock): write it")

    def start(self) -> None:
        """Forget earlier runs: called once before each run that uses this instance."""

    def evicted(self, storage: Storage) -> None:
        """Take note that a storage was evicted; its `resident` is False already."""

    def rematerialized(self, storage: Storage) -> None:
        """Take note that an evicted storage is back; its `resident` is True already."""

    def removed(self, storage: Storage) -> None:
        """Take note that a storage is gone for good, before it loses its parents and children."""
        if not storage.resident:
            self.rematerialized(storage)


class RatioHeuristic(Heuristic):
    """A heuristic whose score is a fraction that the index can order without asking again at every clock.

    The score is ``numerator / denominator``, divided by the staleness too where `decays` is set; infinite where
    that divides by zero. Both numbers may change only while the storage is not evictable, or where the
    heuristic puts the storage's `place` into `changed`.
    """

    decays: ClassVar[bool] = False

    def ratio(self, storage: Storage) -> tuple[float, float]:
        """Return numerator and denominator, both at least 0."""
        raise NotImplementedError

    def score(self, storage: Storage, clock: float) -> float:
        """Return the fraction at this clock."""
        numerator, denominator = self.ratio(storage)
        freed = denominator * (clock - storage.last_access if self.decays else 1)
        return numerator / freed if freed else math.inf


class Local(RatioHeuristic):
    """``c / (m s)``: the storage alone."""

    decays = True

    def ratio(self, storage: Storage) -> tuple[float, float]:
        """Return c and m."""
        return storage.cost, storage.size_bytes


class Lru(RatioHeuristic):
    """The last access: the stalest goes first."""

    def ratio(self, storage: Storage) -> tuple[float, float]:
        """Return the clock of the last access, and 1."""
        return storage.last_access, 1


class Size(RatioHeuristic):
    """``1 / m``: the largest goes first."""

    def ratio(self, storage: Storage) -> tuple[float, float]:
        """Return 1 and m."""
        return 1, storage.size_bytes


class Random(Heuristic):
    """Any, each as likely as another; the same ones for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._draw = random.Random(seed)

    def start(self) -> None:
        """Begin the sequence anew."""
        self._draw = random.Random(self._seed)

    def score(self, storage: Storage, clock: float) -> float:
        """Return a number between 0 and 1."""
        return self._draw.random()


class Dtr(RatioHeuristic):
    """``(c + cost of e*) / (m s)``, with the exact neighbourhood.

    A resident storage's `note` is the cost of its neighbourhood, None until it is asked for and when it has changed:
    that is, when a storage was evicted or came back that is reached from it through evicted ones.
    """

    decays = True
    downwards: ClassVar[bool] = True

    def neighbourhood(self, storage: Storage) -> float:
        """Return the cost of the evicted storages around this one."""
        if storage.note is None:
            around = self._walk(storage, upwards=True)[0]
            if self.downwards:
                around |= self._walk(storage, upwards=False)[0]
            storage.note = math.fsum(one.cost for one in around)  # the same in any order
        cost: float = storage.note
        return cost

    def ratio(self, storage: Storage) -> tuple[float, float]:
        """Return c with its neighbourhood, and m."""
        return storage.cost + self.neighbourhood(storage), storage.size_bytes

    def evicted(self, storage: Storage) -> None:
        """Mark whose neighbourhood has changed."""
        storage.note = None
        border = self._walk(storage, upwards=False)[1]
        if self.downwards:
            border |= self._walk(storage, upwards=True)[1]
        for one in border:
            one.note = None
        if self.changed is not None:
            self.changed.update(one.place for one in border)

    rematerialized = evicted

    def _walk(self, storage: Storage, *, upwards: bool) -> tuple[set[Storage], set[Storage]]:
        """Return the evicted storages reached in one direction through evicted ones, and the residents behind them."""
        inside: set[Storage] = set()
        border: set[Storage] = set()
        todo = [storage]
        while todo:
            one = todo.pop()
            for near in one.parents if upwards else one.children:
                if near.resident:
                    border.add(near)
                elif near not in inside and near is not storage:
                    inside.add(near)
                    todo.append(near)
        self.accesses += len(inside) + len(border)
        return inside, border


class EStar(Dtr):
    """``c + cost of e*``: the reduced heuristic of the theorem, for storages of one size."""

    decays = False

    def ratio(self, storage: Storage) -> tuple[float, float]:
        """Return c with its neighbourhood, and 1."""
        return storage.cost + self.neighbourhood(storage), 1


class Msps(Dtr):
    """``(c + cost of the evicted ancestors) / m``, without staleness."""

    decays = False
    downwards = False


class _Component:
    """A node of the union-find over evicted storages; the root of a tree has the sum of its living nodes."""

    __slots__ = ("own", "parent", "total", "watchers")

    def __init__(self, own: float) -> None:
        self.own = own
        self.total = own
        self.parent: _Component | None = None
        self.watchers: set[int] = set()  # places of the residents whose score counts this component

    def root(self) -> _Component:
        """Return the root of the tree, and shorten the way to it."""
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent
            node = node.parent
        return node


class DtrEq(RatioHeuristic):
    """``(c + cost of the evicted components next to it) / (m s)``: the neighbourhood by union-find.

    Evicted storages that are neighbours are one component, whatever the direction. One that comes back is
    subtracted from its component, which is not split: the links through it stay as phantoms. An evicted storage's
    `note` is its node.
    """

    decays = True

    def ratio(self, storage: Storage) -> tuple[float, float]:
        """Return c with the distinct components next to it, and m."""
        total = storage.cost
        roots = self._roots(storage)
        for root in roots:
            total += root.total
        if self.changed is not None:
            for root in roots:
                root.watchers.add(storage.place)
        return total, storage.size_bytes

    def evicted(self, storage: Storage) -> None:
        """Make one component of the storage and those next to it."""
        made = storage.note = _Component(storage.cost)
        for root in self._roots(storage):
            root.parent = made
            made.total += root.total
            self._tell(root)
        if self.changed is not None:
            for side in (storage.parents, storage.children):
                self.changed.update(near.place for near in side if near.resident)

    def rematerialized(self, storage: Storage) -> None:
        """Subtract the storage from its component."""
        node: _Component = storage.note
        storage.note = None
        root = node.root()
        root.total = max(root.total - node.own, 0)
        self._tell(root)

    def _roots(self, storage: Storage) -> Collection[_Component]:
        roots: dict[_Component, None] = {}
        for side in (storage.parents, storage.children):
            for near in side:
                self.accesses += 1
                if not near.resident:
                    roots[near.note.root()] = None
        return roots

    def _tell(self, root: _Component) -> None:
        if self.changed is not None:
            self.changed |= root.watchers
            root.watchers.clear()


HEURISTICS: dict[str, type[Heuristic]] = {
    "dtr": Dtr,
    "dtr_eq": DtrEq,
    "dtr_local": Local,
    "lru": Lru,
    "size": Size,
    "msps": Msps,
    "random": Random,
    "e_star": EStar,
}


def resolve(heuristic: str | type[Heuristic] | Heuristic) -> Heuristic:
    """Return the heuristic that a name, a class or an instance stands for.

    Raises:
        UsageError: It is not one of these.
    """
    if isinstance(heuristic, Heuristic):
        return heuristic
    if inspect.isclass(heuristic) and issubclass(heuristic, Heuristic):
        return heuristic()
    if isinstance(heuristic, str):
        if heuristic in HEURISTICS:
            return HEURISTICS[heuristic]()
        raise unknown_name("heuristic", heuristic, HEURISTICS)
    raise UsageError(
        f"a heuristic is a name, a subclass of remat.dtr.Heuristic or an instance of one, not {shown(heuristic)}",
        remedy=f"Names are: {', '.join(HEURISTICS)}.",
    )


def unknown_name(what: str, name: object, known: Iterable[str]) -> UsageError:
    """Return the error about a name that means nothing."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=2, cutoff=0.5)
    remedy = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return UsageError(f"there is no {what} {name!r}", remedy=f"{remedy}Names are: {', '.join(known)}.")
