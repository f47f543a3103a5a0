"""The memory of a run: which storages hold data, which are evicted for room, and how evicted data come back.

A block and the simulator share it. This class only counts, as the simulator does; a block's subclass
computes.

In: ops and the storages that they read and make, requests for room. Kept: each storage that the program or an op can
still reach. Out: evicted storages, rematerialized ones, and an error where nothing is left to evict.

NOTE [The life of a storage]. It is born resident. While no running op locks it, and it can be recomputed, it is in
the pool, from which `reserve` takes victims. When the program releases the last tensor on it, deallocation decides:
it is evicted at once, left to the heuristic, or banished, which pins what was made from it. When no op reads it either,
it is removed, and so are the storages that only it needed, in a loop and not by recursion: chains of ops are thousands
long.

NOTE [Running an op]
1. All its inputs are accessed now. Those that hold data are locked; the others are rematerialized, in order, and
   locked. Storages are evicted until all results fit, the clock moves on by the op's cost, and the inputs are unlocked.
2. What is rematerialized keeps the access that asked for it. Results that are resident already take room twice until
   the op has run.
3. The storage stands for the tensor that made it. A view can be an op of its own, as it is in logs: evicting the
   storage undefines its views, and each is recomputed when it is next read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch_remat.dtr._pool import Search, make_pool
from torch_remat.dtr.heuristics import Heuristic, Storage, unknown_name

Deallocation: TypeAlias = Literal["eager", "ignore", "banish"]


class RunOutError(Exception):
    """There is no room, and nothing to evict."""


@dataclass(eq=False, slots=True)
class View:
    """A view of a storage that is made by an op of its own."""

    storage: Storage
    op: Any = None
    resident: bool = False

    def fill(self, data: Any) -> None:
        """Be there."""
        self.resident = True


class Memory:
    """Storages under a budget.

    Args:
        limit: Bytes that may be alive.
        heuristic: What chooses the victims.
        deallocation: What happens to a storage that the program can no longer reach.
        search: How the victim is found; None for the heuristic's best.
        seed: Of the search, where it samples.
    """

    def __init__(
        self, limit: float, heuristic: Heuristic, deallocation: Deallocation, search: Search | None, seed: int
    ) -> None:
        if deallocation not in get_args(Deallocation):
            raise unknown_name("deallocation", deallocation, get_args(Deallocation))
        self.limit = limit
        self.heuristic = heuristic
        self.deallocation = deallocation
        self.pool = make_pool(heuristic, search, seed)
        self.live = 0
        self.peak = 0
        self.clock: float = 0
        self.evictions = 0
        self.rematerializations = 0
        self.time_again: float = 0
        self.storages: dict[Any, None] = {}

    # What a block does otherwise

    def run(self, op: Any) -> tuple[Sequence[Any], float]:
        """Run an op on resident inputs; return data for each of its outputs, and its cost."""
        return op.outputs, op.cost

    def record(self, op: Any) -> None:
        """Connect the storages that an op has made for the first time with those that it read."""
        op.has_run = True
        read = {tensor.storage: None for tensor in op.inputs}
        made = {tensor.storage: None for tensor in op.outputs}
        for tensor in op.outputs:
            storage = tensor.storage
            storage.names += 1
            if tensor is storage:
                self.storages[storage] = None
            else:
                storage.views = (*storage.views, tensor)
        for storage in made:
            storage.cost += op.cost
            storage.last_access = self.clock
            for parent in read:
                if parent is not storage:
                    storage.parents[parent] = None
                    parent.children[storage] = None

    def cut(self, storage: Any, parent: Any = None) -> Collection[Any]:
        """Forget how a storage was made, as far as a parent is needed for it; return what may be needless now."""
        if parent is not None:
            del storage.parents[parent]
            return ()
        for one in storage.parents:
            del one.children[storage]
        parents: Collection[Any] = storage.parents
        return parents

    def no_room(self, size_bytes: int, asker: str) -> None:
        """Raise because nothing is left to evict, or return to go past the limit."""
        raise RunOutError

    # Room

    def reserve(self, size_bytes: int, asker: str) -> None:
        """Evict until so many bytes fit in."""
        while self.live + size_bytes > self.limit:
            victim = self.pool.victim(self.clock)
            if victim is None:
                self.no_room(size_bytes, asker)
                return
            self.evictions += 1
            self.evict(victim)

    def grow(self, size_bytes: int) -> None:
        """Count bytes that have come alive."""
        self.live += size_bytes
        if self.live > self.peak:
            self.peak = self.live

    # What can be evicted

    def offer(self, storage: Any) -> None:
        """Put a storage into the pool, if it can be evicted now."""
        if storage.place < 0 and storage.resident and not (storage.locks or storage.pin):
            self.pool.add(storage)

    def lock(self, storage: Any) -> None:
        """Keep a storage where it is, resident or to become so."""
        storage.locks += 1
        self.pool.discard(storage)

    def unlock(self, tensors: Iterable[Any]) -> None:
        """Take one lock off the storage of each tensor; what nothing needs is removed."""
        for tensor in tensors:
            storage = tensor.storage
            storage.locks -= 1
            if not storage.locks:
                self.offer(storage)
                if not (storage.names or storage.is_read):
                    self.remove([storage])

    def pin(self, storage: Any, why: str) -> None:
        """Keep a resident storage for good."""
        self.pool.discard(storage)
        storage.pin = why

    def evict(self, storage: Any) -> None:
        """Drop the data of a storage that can be recomputed."""
        self.pool.discard(storage)
        self.live -= storage.size_bytes
        storage.drop()
        for view in storage.views:
            view.resident = False
        self.heuristic.evicted(storage)

    # What nothing needs

    def release(self, storage: Any) -> None:
        """Do what deallocation says, where the program can no longer reach a storage."""
        if storage.names or storage.locks:
            return
        if not storage.is_read or self.deallocation == "banish":
            self.remove([storage])
        elif self.deallocation == "eager" and storage.resident and not storage.pin:
            self.evict(storage)

    def remove(self, todo: list[Any]) -> None:
        """Remove those storages of a list for good that nothing needs, and those that only they needed."""
        banishes = self.deallocation == "banish"
        while todo:
            one = todo.pop()
            if one.names or one.locks or one not in self.storages:
                continue
            if one.is_read and not (banishes and not any(child.misses(one) for child in one.children)):
                continue
            del self.storages[one]
            self.pool.discard(one)
            self.heuristic.removed(one)
            if one.resident:
                self.live -= one.size_bytes
                one.drop()
            if one.children:
                for child in tuple(one.children):
                    self.pool.discard(child)
                    child.pin = "what made it was banished"
                    todo += self.cut(child, one)
            todo += self.cut(one)

    # Running ops

    def resident(self, storages: Iterable[Any]) -> None:
        """Rematerialize those locked storages that hold no data."""
        for storage in storages:
            if not storage.resident:
                self.perform(storage.op)

    @contextmanager
    def held(self, storages: Iterable[Any]) -> Iterator[None]:
        """Have storages resident and locked."""
        for storage in storages:
            self.lock(storage)
        try:
            self.resident(storages)
            yield
        finally:
            self.unlock(storages)

    def perform(self, op: Any) -> None:
        """Run an op, and before it those that make its missing inputs; see NOTE [Running an op].

        Each op on the stack holds its inputs until it has run.
        """
        stack = [(op, self._begin(op))]
        try:
            while stack:
                op, missing = stack[-1]
                while missing and missing[-1].resident:
                    self.lock(missing.pop().storage)
                if missing:
                    stack.append((missing[-1].op, self._begin(missing[-1].op)))
                    continue
                self._run(op)
                stack.pop()
                self.unlock(op.inputs)
                if self.deallocation == "banish":
                    self.remove([tensor.storage for tensor in reversed(op.inputs)])
        finally:
            for op, missing in stack:
                self.unlock([tensor for tensor in op.inputs if tensor not in missing])

    def _begin(self, op: Any) -> list[Any]:
        """Lock the inputs of an op that hold data, and return the others, the next one last."""
        missing = []
        for tensor in op.inputs:
            storage = tensor.storage
            storage.last_access = self.clock
            if tensor.resident:
                self.lock(storage)
            else:
                missing.append(tensor)
                self.pool.touch(storage)
        missing.reverse()
        return missing

    def _run(self, op: Any) -> None:
        """Run an op whose inputs are here and locked."""
        spare = op.size_bytes
        if self.live + spare > self.limit:
            self.reserve(spare, op.name)
        self.grow(spare)
        try:
            made, cost = self.run(op)
            self.clock += cost
            again = op.has_run
            if not again:
                self.record(op)
            for tensor, data in zip(op.outputs, made, strict=True):
                if tensor is None or (storage := tensor.storage) not in self.storages:
                    continue
                if not tensor.resident:
                    tensor.fill(data)
                    if tensor is storage:
                        spare -= storage.size_bytes
                        if again:
                            self.heuristic.rematerialized(storage)
                self.offer(storage)
        finally:
            if spare:
                self.grow(-spare)
        if again:
            self.note_again(op, cost)

    def note_again(self, op: Any, cost: float) -> None:
        """Count an op that ran again."""
        self.rematerializations += 1
        self.time_again += cost
