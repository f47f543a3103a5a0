"""The memory of a block: what lives, what is evicted for room, and how evicted data come back.

In: storages that ops made, locks on those that a running op needs, requests for room. Kept: every storage that the
program or a recorded op can still reach. Out: evicted storages, rematerialized ones, and a `BudgetError` where nothing
is left to evict.

NOTE [The life of a storage]. It is born resident. While no running op locks it, and it can be made again, it is in
the pool, from which `reserve` takes victims. When the program lets go of the last tensor on it (`unreachable`), it is
evicted at once, or by the other rules of deallocation. When no recorded op reads it either, it dies, and the ops that
only it needed die with it, in a loop and not by recursion: chains of ops are thousands long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import storage_key
from torch_remat.dtr._costs import Costs
from torch_remat.dtr._ops import Op
from torch_remat.dtr._pool import Search, make_pool
from torch_remat.dtr._storage import Storage, copy_memory
from torch_remat.dtr.heuristics import Heuristic
from torch_remat.errors import BudgetError, UsageError

Deallocation = Literal["eager", "ignore", "banish"]


_PATIENCE = 16  # how often ops that wait for an input let go of the others, before a budget is too small


class _Frame:
    """An op that is to run again: whether it holds its inputs, and which of them are missing."""

    __slots__ = ("locked", "missing", "op")

    def __init__(self, op: Op) -> None:
        self.op = op
        self.locked = False
        self.missing: list[Storage] = []


class Memory:
    """Storages under a budget.

    Args:
        limit: Bytes that may be alive.
        heuristic: Who chooses the victims.
        costs: What ops cost.
        deallocation: What happens to a storage that the program can no longer reach.
        search: How the victim is found; None for the heuristic's best.
        seed: Of the search, where it samples.
    """

    def __init__(
        self,
        limit: float,
        heuristic: Heuristic,
        costs: Costs,
        deallocation: Deallocation,
        search: Search | None,
        seed: int,
    ) -> None:
        if deallocation not in ("eager", "ignore", "banish"):
            raise UsageError(f"deallocation={deallocation!r} is none", remedy='It is "eager", "ignore" or "banish".')
        self.limit = limit
        self.heuristic = heuristic
        self.costs = costs
        self.deallocation = deallocation
        self.pool = make_pool(heuristic, search, seed)
        self.soft = False  # whether to go past the limit rather than fail: while tensors leave the block
        self.live = 0
        self.peak = 0
        self.clock = 0.0
        self.evictions = 0
        self.rematerializations = 0
        self.time_again = 0.0
        self.again: dict[str, tuple[int, float]] = {}  # by op: how often it ran again, and what that cost
        self.storages: dict[Storage, None] = {}
        self.handed: dict[int, tuple[StorageWeakRef, Storage]] = {}  # gradients: plain, and counted while they live

    # Room

    def reserve(self, size_bytes: int, asker: str) -> None:
        """Evict until so many bytes fit in.

        Raises:
            BudgetError: Nothing is left to evict.
        """
        if self.live + size_bytes > self.limit and self.handed:
            self.poll()
        while self.live + size_bytes > self.limit:
            victim = self.pool.victim(self.clock)
            if victim is None:
                if self.soft:
                    return
                raise self._too_small(size_bytes, asker)
            self.evictions += 1
            self.evict(victim)

    def grow(self, size_bytes: int) -> None:
        """Count bytes that have come alive."""
        self.live += size_bytes
        if self.live > self.peak:
            self.peak = self.live

    def poll(self) -> None:
        """Stop counting gradients that are gone."""
        for address, (weak, storage) in list(self.handed.items()):
            if weak.expired():
                del self.handed[address]
                self.live -= storage.size_bytes

    def _too_small(self, size_bytes: int, asker: str) -> BudgetError:
        pinned = []
        for storage in self.storages:
            if storage.tensor is not None and storage.size_bytes:
                why = "needed by an op that runs" if storage.locks and not storage.pin else storage.pin
                made = f", the result of {storage.op.kind.name}" if storage.op is not None else ""
                pinned.append((storage.size_bytes, f"{why}{made}"))
        pinned += [(one.size_bytes, one.pin) for _, one in self.handed.values() if one not in self.storages]
        pinned.sort(key=lambda item: -item[0])
        return BudgetError(
            op=asker, needed_bytes=int(self.live + size_bytes), budget_bytes=int(self.limit), pinned=pinned
        )

    # Storages

    def born(self, storage: Storage) -> None:
        """Take in a new storage that holds data."""
        self.storages[storage] = None
        self.live += storage.size_bytes
        if self.live > self.peak:
            self.peak = self.live
        if storage.op is not None and storage.size_bytes:
            storage.pooled = True
            self.pool.add(storage)

    def offer(self, storage: Storage) -> None:
        """Put a storage into the pool, if it can be evicted now."""
        if (
            not storage.pooled
            and storage.op is not None
            and storage.tensor is not None
            and not storage.locks
            and storage.size_bytes
        ):
            storage.pooled = True
            self.pool.add(storage)

    def withdraw(self, storage: Storage) -> None:
        """Take a storage out of the pool, before anything about it changes."""
        if storage.pooled:
            storage.pooled = False
            self.pool.discard(storage)

    def evict(self, storage: Storage) -> None:
        """Let go of a storage's data."""
        self.withdraw(storage)
        storage.tensor = None
        storage.aliases = None
        self.live -= storage.size_bytes
        self.heuristic.evicted(storage)

    def lock(self, storage: Storage) -> None:
        """Keep a storage where it is, resident or to become so."""
        storage.locks += 1
        self.withdraw(storage)

    def unlock(self, storages: Iterable[Storage]) -> None:
        """Take one lock off each storage; those that nobody needs any more die."""
        for storage in storages:
            storage.locks -= 1
            if storage.locks:
                continue
            if storage.external or storage.users:
                self.offer(storage)
            elif storage in self.storages:
                self.die(storage)

    def unreachable(self, storage: Storage) -> None:
        """Do what deallocation says, when the program has let go of the last tensor on a storage."""
        storage.external = False
        if storage.locks:
            return
        if not storage.users:
            self.die(storage)
        elif self.deallocation == "eager":
            if storage.op is not None and storage.tensor is not None:
                self.evict(storage)
        elif self.deallocation == "banish":
            self._banish(storage)

    def _banish(self, storage: Storage) -> None:
        if any(child.tensor is None for child in storage.children):
            return  # asked for again when they are back
        for child in list(storage.children):
            self.pin(child, "what made it was banished")

    def pin(self, storage: Storage, why: str) -> None:
        """Keep a resident storage for good, and forget how it was made."""
        self.withdraw(storage)
        storage.pin = why
        for orphan in self._cut(storage):
            self.die(orphan)

    def die(self, storage: Storage) -> None:
        """Free a storage that neither the program nor a recorded op reaches, and all that only it needed."""
        todo = [storage]
        while todo:
            dead = todo.pop()
            if dead not in self.storages:
                continue
            if dead.pooled:
                dead.pooled = False
                self.pool.discard(dead)
            self.heuristic.removed(dead)
            del self.storages[dead]
            if dead.tensor is not None:
                if not self.handed or not self._is_handed(dead):
                    self.live -= dead.size_bytes
                dead.tensor = None
                dead.aliases = None
            if dead.op is not None:
                todo += self._cut(dead)

    def _cut(self, storage: Storage) -> list[Storage]:
        """Take a storage and its op apart; return storages that nobody needs now."""
        op, storage.op = storage.op, None
        if op is None:
            return []
        outputs = op.outputs
        outputs[outputs.index(storage) if len(outputs) > 1 else 0] = None
        op.alive -= 1
        for parent in op.inputs:
            parent.children.pop(storage, None)
        if op.alive:
            return []
        op.args, op.kwargs, op.gone = (), {}, True
        orphans = []
        for parent in op.inputs:
            parent.users -= 1
            if not (parent.users or parent.external or parent.locks):
                orphans.append(parent)
        return orphans

    # Gradients

    def hand_over(self, storage: Storage) -> None:
        """Give the data of a resident storage to a plain gradient, which is counted while it lives."""
        assert storage.tensor is not None
        self.pin(storage, "the gradient of a leaf")
        memory = storage.tensor.untyped_storage()
        self.handed[storage_key(storage.tensor)] = (StorageWeakRef(memory), storage)

    def count(self, tensor: torch.Tensor, why: str) -> None:
        """Count a plain tensor that the block made, while it lives."""
        storage = Storage(None, None, tensor.untyped_storage().nbytes(), 0.0, self.clock)
        storage.pin = why
        self.handed[storage_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), storage)
        self.grow(storage.size_bytes)

    def _is_handed(self, storage: Storage) -> bool:
        assert storage.tensor is not None
        entry = self.handed.get(storage_key(storage.tensor))
        return entry is not None and entry[1] is storage

    def take_back(self, address: int) -> None:
        """Copy the data of a handed-over storage that others still read, before the gradient is written."""
        entry = self.handed.get(address)
        if entry is None or entry[1] not in self.storages:
            return
        weak, storage = entry
        assert storage.tensor is not None
        self.reserve(storage.size_bytes, "a write to a gradient")
        storage.tensor, storage.aliases = copy_memory(storage.tensor), None
        self.grow(storage.size_bytes)
        stand_in = Storage(None, None, storage.size_bytes, 0.0, self.clock)
        stand_in.pin = storage.pin
        self.handed[address] = (weak, stand_in)

    # Running again

    def resident(self, storages: Iterable[Storage]) -> None:
        """Bring locked storages back."""
        for storage in storages:
            if storage.tensor is None:
                self._rematerialize(storage)

    def _rematerialize(self, storage: Storage) -> None:
        """Run what makes a locked storage again; an explicit stack, since chains of ops are thousands long.

        Each op on the stack holds its inputs until it runs. Where that leaves no room for the one that runs now, the
        others let go, and lock and look anew when it is their turn: so often at most that it comes to an end.
        """
        assert storage.op is not None
        stack = [_Frame(storage.op)]
        patience = _PATIENCE
        try:
            while stack:
                frame = stack[-1]
                if not frame.locked:
                    for one in frame.op.inputs:
                        self.lock(one)
                    frame.locked = True
                    frame.missing = [one for one in reversed(frame.op.inputs) if one.tensor is None]
                while frame.missing and frame.missing[-1].tensor is not None:
                    frame.missing.pop()
                if frame.missing:
                    above = frame.missing[-1].op
                    assert above is not None
                    stack.append(_Frame(above))
                    continue
                try:
                    self._run_again(frame.op)
                except BudgetError:
                    patience -= 1
                    if not patience or not self._let_go(stack[:-1]):
                        raise
                    continue
                stack.pop()
                frame.locked = False
                self.unlock(frame.op.inputs)
        finally:
            self._let_go(stack)

    def _let_go(self, stack: Iterable[_Frame]) -> bool:
        """Unlock the inputs of ops on the stack; return whether there were any."""
        held = [frame for frame in stack if frame.locked]
        for frame in held:
            frame.locked = False
            self.unlock(frame.op.inputs)
        return bool(held)

    def _run_again(self, op: Op) -> None:
        wanted = [one for one in op.outputs if one is not None and one.tensor is None]
        for missing in wanted:
            self.lock(missing)
        try:
            ops = op.sequence()
            first, later = ops[0], ops[1:]
            sizes = [one.size_bytes for one in op.outputs[len(op.written) :] if one is not None]
            self.reserve(max(sum(sizes), first.known.bytes), op.kind.name)
            with self.to_write(first.written, op.kind.name) as roots:
                made = first.made(first.run(roots), roots)
                for write in later:
                    assert write.through is not None
                    assert made[0] is not None
                    write.run({write.through: made[0]})
            cost = sum(one.known.cost for one in ops) if self.costs.measured else wanted[0].cost
            self._note_again(op.kind.name, cost)
            for storage, tensor in zip(op.outputs, made, strict=True):
                if storage is not None and storage.tensor is None:
                    storage.tensor = tensor
                    storage.last_access = self.clock
                    self.grow(storage.size_bytes)
                    self.heuristic.rematerialized(storage)
        finally:
            self.unlock(wanted)
        if self.deallocation == "banish":
            for parent in op.inputs:
                if not parent.external:
                    self._banish(parent)

    def _note_again(self, name: str, cost: float) -> None:
        self.clock += cost
        self.time_again += cost
        self.rematerializations += 1
        count, total = self.again.get(name, (0, 0.0))
        self.again[name] = (count + 1, total + cost)

    @contextmanager
    def to_write(self, written: Iterable[Storage], asker: str) -> Iterator[Mapping[Storage, torch.Tensor]]:
        """Give memory to write to for each locked storage that an op writes: a copy, or its own if it can come back.

        A storage that is written is superseded, so its own memory would be evicted the moment after the copy.
        """
        roots: dict[Storage, torch.Tensor] = {}
        spent = []
        try:
            for storage in written:
                assert storage.tensor is not None
                if storage.locks == 1 and storage.op is not None:
                    spent.append(storage)
                    roots[storage] = storage.tensor
                elif storage.op is None and not storage.users:
                    roots[storage] = storage.tensor  # pinned, and nobody reads the old version
                else:
                    self.reserve(storage.size_bytes, asker)
                    roots[storage] = copy_memory(storage.tensor)
            yield roots
        finally:
            for storage in spent:
                if storage.tensor is not None:
                    self.evict(storage)

    def supersede(self, storage: Storage) -> None:
        """Take out a storage whose memory and op go on as a part of its next version."""
        assert storage.tensor is not None
        storage.external = False
        self.heuristic.removed(storage)
        del self.storages[storage]
        self.live -= storage.size_bytes
        storage.tensor = storage.aliases = None
        for orphan in self._cut(storage):
            self.die(orphan)
