"""The simulator: what a heuristic would cost on a log, at a budget.

It runs the log's ops in order in a memory of so many bytes. Nothing is computed; time is the log's nanoseconds. The
rules are those of `_memory`, and of a log:

1. Evictable is what is resident, not locked and not pinned. Of equal scores the storage that became evictable last is
   evicted; where the least score is 0, the one that became evictable first.
2. A result that is made for the first time is accessed when its op has run.
3. Constants count and are pinned, after their release too, except under banishing. What the program still names at the
   end of the log is rematerialized and pinned, in the order in which it was first made.
4. An in-place write is an op that reads its arguments and makes new storages of the full size, of views too. The names
   that were written mean the new tensors, and the old versions are released.

A block recomputes by the same rules, but a view takes no op, a storage that no op reads is forgotten, and what
was there before the block is not counted.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_remat.dtr._memory import Deallocation, Memory, RunOutError, View
from torch_remat.dtr._pool import Search
from torch_remat.dtr.heuristics import Heuristic, Storage, resolve
from torch_remat.dtr.log import Log, Step
from torch_remat.errors import UsageError, shown


@dataclass(frozen=True)
class Simulation:
    """What came out of `simulate`.

    Attributes:
        base_compute: Nanoseconds that the ops of the whole log take, each once.
        total_compute: Nanoseconds of all ops that were run, up to where the run ended.
        overhead: Total by base compute; 1 where the log takes no time.
        evictions: Storages evicted to make room.
        rematerializations: Ops run again.
        peak_bytes: The most bytes in use at once.
        metadata_accesses: Storages that were looked at to choose what to evict.
        ran_out: Whether there was no room and nothing more to evict.
        stopped: Whether ops run again took more than ``(max_overhead - 1) * base_compute``.
    """

    base_compute: float
    total_compute: float
    overhead: float
    evictions: int
    rematerializations: int
    peak_bytes: int
    metadata_accesses: int
    ran_out: bool
    stopped: bool


def simulate(
    log: Log,
    budget_bytes: float,
    heuristic: str | type[Heuristic] | Heuristic,
    deallocation: Deallocation = "eager",
    *,
    max_overhead: float = 2.0,
    search: Search | None = None,
    seed: int = 0,
) -> Simulation:
    """Run a log under a budget.

    Args:
        log: What the program did.
        budget_bytes: Most bytes in use at once, constants included; `Log.peak_bytes` is the natural unit.
        heuristic: What is evicted: a name, a class or an instance.
        deallocation: What happens when the program drops its last name of a storage. ``"eager"``: it is evicted at
            once. ``"ignore"``: nothing. ``"banish"``: it is removed for good once nothing evicted depends on it;
            what was made from it is pinned, since it can no longer be recomputed.
        max_overhead: The run stops when ops run again take more than this less 1 times the log's compute.
        search: How the victim is found: ``"index"``, ``"scan"`` or ``"sample"``; None takes the index where the
            heuristic has one.
        seed: Of the sample.

    Raises:
        UsageError: The heuristic, the kind of deallocation or the budget is not known.

    Example:
        >>> log = Log.parse([])
        >>> simulate(log, 100, "dtr_eq").overhead
        1.0
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, numbers.Real) or not budget_bytes >= 0:
        raise UsageError(f"budget_bytes is a number of bytes, not {shown(budget_bytes)}")
    base = log.base_compute
    memory = _LogMemory(budget_bytes, resolve(heuristic), deallocation, search, seed)
    memory.most_again = (max_overhead - 1) * base
    verdict: type[Exception] | None = None
    try:
        memory.run_log(log)
    except (RunOutError, _StopError) as error:
        verdict = type(error)
    return Simulation(
        base_compute=base,
        total_compute=memory.clock,
        overhead=memory.clock / base if base else 1.0,
        evictions=memory.evictions,
        rematerializations=memory.rematerializations,
        peak_bytes=memory.peak,
        metadata_accesses=memory.heuristic.accesses + memory.pool.scored,
        ran_out=verdict is RunOutError,
        stopped=verdict is _StopError,
    )


class _StopError(Exception):
    """Ops run again took too long."""


class _LogStorage(Storage):
    """A storage of a log."""

    names = 0
    storage: Any = None  # itself: looked up often
    is_read = True  # a log's op can run again until the log ends

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.storage = self
        self.parents: dict[_LogStorage, None] = {}


@dataclass(eq=False, slots=True)
class _LogOp:
    """An op of a log, with its tensors."""

    name: str
    cost: float
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    size_bytes: int
    has_run: bool = False


class _LogMemory(Memory):
    """A memory that counts and computes nothing."""

    most_again: float = 0

    def run_log(self, log: Log) -> None:
        """Run a whole log."""
        tensors, ops = _objects(log)
        run, constant, drop = Step.RUN, Step.CONSTANT, Step.DROP
        for step, number in log.steps:
            if step is run:
                self.perform(ops[number])
            elif step is drop:
                storage = tensors[number].storage
                storage.names -= 1
                self.release(storage)
            else:
                storage = tensors[number].storage
                storage.names += 1
                if step is constant:
                    self._begin_constant(storage)
        for number in log.named:
            tensor = tensors[number]
            if not tensor.resident:
                self.perform(tensor.op)
            self.pin(tensor.storage, "named at the end")

    def _begin_constant(self, storage: _LogStorage) -> None:
        self.reserve(storage.size_bytes, "a constant")
        self.grow(storage.size_bytes)
        storage.pin = "a constant"
        storage.last_access = self.clock
        storage.fill(None)
        self.storages[storage] = None

    def note_again(self, op: _LogOp, cost: float) -> None:
        """Count an op that ran again, and end the run where that takes too long."""
        super().note_again(op, cost)
        if self.time_again > self.most_again:
            raise _StopError


def _objects(log: Log) -> tuple[list[Any], list[_LogOp]]:
    """Return an object for each tensor and op of a log; the storage stands for the tensor that makes it."""
    storages = [_LogStorage(size_bytes) for size_bytes in log.sizes_bytes]
    tensors: list[Any] = [
        View(storages[storage]) if view else storages[storage]
        for storage, view in zip(log.storage_of, log.view, strict=True)
    ]
    ops = []
    for op in log.ops:
        outputs = [tensors[tensor] for tensor in op.outputs]
        size_bytes = sum(log.sizes_bytes[log.storage_of[tensor]] for tensor in op.outputs if not log.view[tensor])
        ops.append(_LogOp(op.name, op.cost, [tensors[tensor] for tensor in op.inputs], outputs, size_bytes))
        for tensor in outputs:
            tensor.op = ops[-1]
    return tensors, ops
