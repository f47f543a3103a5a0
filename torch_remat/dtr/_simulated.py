"""A run of a log in simulation: storages without data, and the rules by which they come and go.

The rules, which `docs/dtr.md` tells in full:

1. The unit is the storage. Evicting it undefines its tensors; when the root is back, each view is made again by
   itself when it is next read. Its cost is the sum of the distinct ops that made its tensors.
2. To run an op: all its inputs are accessed now; the defined ones are locked; the undefined ones are made again, in
   order of the arguments, and locked; storages are evicted until all its results fit; the clock goes on by its cost;
   results made for the first time are accessed now; the inputs are unlocked. What is made again keeps the access that
   asked for it. Results that are here already take room until the op has run.
3. Constants are pinned. What the program still names at the end of the log is made again and pinned, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch_remat.dtr._pool import Pool
from torch_remat.dtr.heuristics import Heuristic
from torch_remat.dtr.log import Log, Step

Deallocation: TypeAlias = Literal["eager", "ignore", "banish"]


class _SimStorage:
    """A storage in simulation; see `heuristics.Storage`."""

    __slots__ = (
        "children",
        "cost",
        "gone",
        "last_access",
        "last_op",
        "locks",
        "names",
        "note",
        "parents",
        "pinned",
        "place",
        "resident",
        "size_bytes",
        "tensors",
        "undefined_readers",
    )

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.cost: float = 0
        self.last_access: float = 0
        self.resident = False
        self.note: Any = None
        self.place = -1
        self.parents: dict[_SimStorage, None] = {}
        self.children: dict[_SimStorage, None] = {}
        self.tensors: list[int] = []  # made so far
        self.last_op = -1  # that made one of them
        self.names = 0  # by which the program knows its tensors
        self.locks = 0  # by ops that are being run
        self.pinned = False
        self.gone = False  # banished
        self.undefined_readers = 0  # undefined tensors of other storages whose ops read this one


class _Frame:
    """An op that is being run, and the inputs that it waits for, the next one last."""

    __slots__ = ("number", "waiting")

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: list[int] = []


class _RunOutError(Exception):
    """There is no room, and nothing to evict."""


class _StopError(Exception):
    """Ops run again took too long."""


class Run:
    """One simulation.

    Attributes:
        clock: Nanoseconds of all ops run so far.
        peak_bytes: The most bytes in use so far.
        evictions: Storages evicted to make room so far.
        rematerializations: Ops run again so far.
        ran_out: Whether the run ended because there was no room and nothing to evict.
        stopped: Whether it ended because ops run again took more than ``most_again`` nanoseconds.
    """

    def __init__(
        self,
        log: Log,
        budget_bytes: float,
        heuristic: Heuristic,
        pool: Pool,
        deallocation: Deallocation,
        most_again: float,
    ) -> None:
        self._log = log
        self._pool = pool
        self._budget_bytes = budget_bytes
        self._heuristic = heuristic
        self._deallocation = deallocation
        self._most_again = most_again
        storages = [_SimStorage(size_bytes) for size_bytes in log.sizes_bytes]
        self._of = [storages[number] for number in log.storage_of]  # by tensor
        self._names = [0] * len(self._of)  # by tensor
        self._defined = bytearray(len(self._of))  # by tensor
        self._has_run = bytearray(len(log.ops))  # by op
        self.clock: float = 0
        self._again: float = 0
        self._used_bytes = 0
        self.peak_bytes = 0
        self.evictions = 0
        self.rematerializations = 0
        self.ran_out = self.stopped = False

    def run(self, progress: Callable[[int], Any] | None) -> None:
        """Run the whole log, or up to a verdict."""
        actions = {Step.CONSTANT: self._constant, Step.RUN: self._run, Step.HOLD: self._hold, Step.DROP: self._drop}
        try:
            for done, (step, number) in enumerate(self._log.steps):
                actions[step](number)
                if progress is not None and not done % 64:
                    progress(done)
            self._end()
        except _RunOutError:
            self.ran_out = True
        except _StopError:
            self.stopped = True

    # What the log says.

    def _constant(self, tensor: int) -> None:
        storage = self._of[tensor]
        self._allocate(storage.size_bytes)
        storage.resident = storage.pinned = True
        storage.last_access = self.clock
        storage.tensors.append(tensor)
        self._defined[tensor] = True
        self._hold(tensor)

    def _hold(self, tensor: int) -> None:
        self._names[tensor] += 1
        self._of[tensor].names += 1

    def _drop(self, tensor: int) -> None:
        storage = self._of[tensor]
        self._names[tensor] -= 1
        storage.names -= 1
        if storage.names:
            return
        if self._deallocation == "eager" and storage.resident and not storage.pinned:
            self._evict(storage)
        elif self._deallocation == "banish":
            self._banish(storage)

    def _end(self) -> None:
        """Make again and pin what the program still names."""
        for tensor, storage in enumerate(self._of):
            if self._names[tensor]:
                if not self._defined[tensor]:
                    self._run(self._log.op_of[tensor])
                self._pin(storage)

    # Running an op, and before it those that make what it needs.

    def _run(self, number: int) -> None:
        stack = [self._begin(number)]
        while stack:
            frame = stack[-1]
            if not frame.waiting:
                self._finish(frame)
                stack.pop()
            elif self._defined[frame.waiting[-1]]:
                self._lock(self._of[frame.waiting.pop()])
            else:
                stack.append(self._begin(self._log.op_of[frame.waiting[-1]]))

    def _begin(self, number: int) -> _Frame:
        frame = _Frame(number)
        for tensor in self._log.ops[number].inputs:
            storage = self._of[tensor]
            storage.last_access = self.clock
            if self._defined[tensor]:
                self._lock(storage)
            else:
                frame.waiting.append(tensor)
                self._pool.touch(storage)
        frame.waiting.reverse()
        return frame

    def _finish(self, frame: _Frame) -> None:
        op, first = self._log.ops[frame.number], not self._has_run[frame.number]
        view = self._log.view
        self._allocate(sum(self._of[tensor].size_bytes for tensor in op.outputs if not view[tensor]))
        self.clock += op.cost
        if first:
            self._has_run[frame.number] = True
        else:
            self.rematerializations += 1
            self._again += op.cost
        for tensor in op.outputs:
            storage = self._of[tensor]
            if first:
                self._create(tensor, frame.number)
            elif not view[tensor] and (storage.resident or storage.gone):
                self._used_bytes -= storage.size_bytes  # a second copy, or one that nobody wants
            if not storage.gone:
                self._define(tensor)
        for tensor in op.inputs:
            self._unlock(self._of[tensor])
        if self._again > self._most_again:
            raise _StopError

    def _create(self, tensor: int, number: int) -> None:
        """Enter a tensor that was made for the first time."""
        storage, op = self._of[tensor], self._log.ops[number]
        storage.tensors.append(tensor)
        storage.resident = True
        storage.last_access = self.clock
        self._defined[tensor] = True
        self._hold(tensor)
        if storage.last_op != number:
            storage.last_op = number
            storage.cost += op.cost
            for parent in self._sources(tensor):
                storage.parents[parent] = None
                parent.children[storage] = None

    def _define(self, tensor: int) -> None:
        """Note that a tensor of a storage was made, or made again."""
        storage = self._of[tensor]
        if not storage.resident:
            storage.resident = True
            self._heuristic.rematerialized(storage)
        if not self._defined[tensor]:
            self._defined[tensor] = True
            for parent in self._sources(tensor):
                parent.undefined_readers -= 1
        self._offer(storage)

    def _sources(self, tensor: int) -> dict[_SimStorage, None]:
        """Return the other storages that are read to make a tensor."""
        number, storage = self._log.op_of[tensor], self._of[tensor]
        read = dict.fromkeys(self._of[source] for source in self._log.ops[number].inputs) if number >= 0 else {}
        read.pop(storage, None)
        return read

    # What may be evicted, and eviction.

    def _lock(self, storage: _SimStorage) -> None:
        storage.locks += 1
        self._pool.discard(storage)

    def _unlock(self, storage: _SimStorage) -> None:
        storage.locks -= 1
        self._offer(storage)
        if self._deallocation == "banish" and not storage.names:
            self._banish(storage)

    def _offer(self, storage: _SimStorage) -> None:
        if storage.resident and not storage.pinned and not storage.locks and storage not in self._pool:
            self._pool.add(storage)

    def _pin(self, storage: _SimStorage) -> None:
        storage.pinned = True
        self._pool.discard(storage)

    def _allocate(self, size_bytes: int) -> None:
        """Take memory, and make room for it first."""
        while self._used_bytes + size_bytes > self._budget_bytes:
            victim = self._pool.victim(self.clock)
            if victim is None:
                raise _RunOutError
            self.evictions += 1
            self._evict(victim)
        self._used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)

    def _evict(self, storage: _SimStorage) -> None:
        self._pool.discard(storage)
        storage.resident = False
        self._used_bytes -= storage.size_bytes
        for tensor in storage.tensors:
            if self._defined[tensor]:
                self._defined[tensor] = False
                for parent in self._sources(tensor):
                    parent.undefined_readers += 1
        self._heuristic.evicted(storage)

    def _banish(self, storage: _SimStorage) -> None:
        """Remove a storage for good where nothing needs it, then those that were kept for it."""
        todo = [storage]
        while todo:
            storage = todo.pop()
            if storage.gone or storage.names or storage.locks or storage.undefined_readers:
                continue
            storage.gone = True
            self._heuristic.removed(storage)
            self._pool.discard(storage)
            if storage.resident:
                storage.resident = False
                self._used_bytes -= storage.size_bytes
            for tensor in storage.tensors:
                if not self._defined[tensor]:
                    for parent in self._sources(tensor):
                        parent.undefined_readers -= 1
            for child in storage.children:
                del child.parents[storage]
                self._pin(child)
            for parent in storage.parents:
                del parent.children[storage]
            todo += storage.parents
