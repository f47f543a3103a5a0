"""The memory of a block: it computes what it rematerializes, and counts the plain tensors that the block made.

It also knows which recorded ops have read tensors created outside the block. Before such a tensor is written, these ops
get a copy of what it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import storage_key
from torch_remat.dtr._memory import Deallocation, Memory
from torch_remat.dtr._ops import Const, Costs, Op
from torch_remat.dtr._pool import Search
from torch_remat.dtr._storage import Version, copy_memory, derive, place_of
from torch_remat.dtr.heuristics import Heuristic
from torch_remat.errors import BudgetError

_PRUNE = 64  # readers of a tensor after which those that are gone are forgotten


class Plain(NamedTuple):
    """A plain tensor that the block made, such as the gradient of a leaf."""

    memory: StorageWeakRef
    size_bytes: int
    why: str


class BlockMemory(Memory):
    """Storages with data.

    Args:
        costs: What ops cost.

    Attributes:
        soft: Whether to go past the limit rather than fail: while tensors leave the block.
        again: By op: how often it ran again, and what that cost.
        plain: By address: plain tensors that the block made, which are counted while they live.
        readers: By address of a tensor that the block did not make: the recorded ops that read it.
    """

    def __init__(
        self,
        limit: float,
        heuristic: Heuristic,
        costs: Costs,
        deallocation: Deallocation = "eager",
        search: Search | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(limit, heuristic, deallocation, search, seed)
        self.costs = costs
        self.soft = False
        self.again: dict[str, tuple[int, float]] = {}
        self.plain: dict[int, Plain] = {}
        self.readers: dict[int, list[Op]] = {}

    # Room

    def reserve(self, size_bytes: int, asker: str) -> None:
        """Evict until so many bytes fit in.

        Raises:
            BudgetError: Nothing is left to evict.
        """
        if self.live + size_bytes > self.limit and self.plain:
            self.poll()
        super().reserve(size_bytes, asker)

    def poll(self) -> None:
        """Stop counting gradients that are gone."""
        for address, plain in list(self.plain.items()):
            if plain.memory.expired():
                del self.plain[address]
                self.live -= plain.size_bytes

    def no_room(self, size_bytes: int, asker: str) -> None:
        """Say what is pinned, and why."""
        if self.soft:
            return
        pinned = []
        for storage in self.storages:
            if storage.resident and storage.size_bytes:
                why = "needed by an op that runs" if storage.locks and not storage.pin else storage.pin
                made = f", the result of {storage.op.name}" if storage.op is not None else ""
                pinned.append((storage.size_bytes, f"{why}{made}"))
        pinned += [(plain.size_bytes, plain.why) for plain in self.plain.values()]
        pinned.sort(key=lambda item: -item[0])
        raise BudgetError(
            op=asker, needed_bytes=int(self.live + size_bytes), budget_bytes=int(self.limit), pinned=pinned
        )

    # Storages

    def born(self, storage: Version) -> None:
        """Take in a new storage that holds data."""
        self.storages[storage] = None
        self.live += storage.size_bytes
        if self.live > self.peak:
            self.peak = self.live
        if not storage.pin:
            self.pool.add(storage)

    def link(self, op: Op, storage: Version) -> None:
        """Record that an op made a storage."""
        storage.op = op
        storage.parents = op.inputs
        op.outputs.append(storage)
        for parent in op.inputs:
            parent.children[storage] = None

    def cut(self, storage: Version, parent: Version | None = None) -> Collection[Version]:
        """Forget the op that made a storage; return what no op reads now."""
        op, storage.op = storage.op, None
        storage.parents = ()
        if op is None:
            return ()
        op.outputs[op.outputs.index(storage) if len(op.outputs) > 1 else 0] = None
        for one in op.inputs:
            one.children.pop(storage, None)
        if not op.alive:
            op.args, op.kwargs, op.consts = [], {}, ()
        return [one for one in op.inputs if not one.is_read]

    def pin(self, storage: Version, why: str) -> None:
        """Keep a resident storage for good, and forget how it was made."""
        super().pin(storage, why)
        self.remove([*self.cut(storage)])

    def count(self, tensor: torch.Tensor, why: str) -> None:
        """Count a plain tensor that the block made, while it lives."""
        memory, address = tensor.untyped_storage(), storage_key(tensor)
        if (before := self.plain.pop(address, None)) is not None:  # the same memory, or gone
            self.live -= before.size_bytes
        self.reserve(memory.nbytes(), why)
        self.plain[address] = Plain(StorageWeakRef(memory), memory.nbytes(), why)
        self.grow(memory.nbytes())

    # Running again

    def run(self, op: Op) -> tuple[Sequence[Any], float]:
        """Run an op again."""
        ops = op.sequence()
        first, later = ops[0], ops[1:]
        with self.to_write(first.written, op.name) as roots:
            made = first.made(first.run(roots), roots)
            for write in later:
                assert write.through is not None
                assert made[0] is not None
                write.run({write.through: made[0]})
        if self.costs.measured:
            return made, sum(one.known.cost for one in ops)
        return made, next(one.cost for one in op.outputs if one is not None and not one.resident)

    def note_again(self, op: Op, cost: float) -> None:
        """Count an op that ran again."""
        super().note_again(op, cost)
        count, total = self.again.get(op.name, (0, 0.0))
        self.again[op.name] = (count + 1, total + cost)

    @contextmanager
    def to_write(self, written: Iterable[Version], asker: str) -> Iterator[Mapping[Version, torch.Tensor]]:
        """Give memory to write to for each locked storage that an op writes: a copy, or its own if it can come back.

        A storage that is written is superseded, so its own memory would be evicted the moment after the copy.
        """
        roots: dict[Version, torch.Tensor] = {}
        spent = []
        try:
            for storage in written:
                data = storage.data()
                if storage.locks == 1 and not storage.pin:
                    spent.append(storage)
                    roots[storage] = data
                elif storage.pin and not storage.is_read:
                    roots[storage] = data  # nothing reads the old version
                else:
                    self.reserve(storage.size_bytes, asker)
                    roots[storage] = copy_memory(data)
            yield roots
        finally:
            for storage in spent:
                if storage.resident:
                    self.evict(storage)

    # Tensors created outside

    def watch(self, op: Op) -> None:
        """Note which tensors created outside the block a recorded op read."""
        for const in op.consts:
            readers = self.readers.setdefault(const.address, [])
            readers.append(op)
            if len(readers) % _PRUNE == 0:
                readers[:] = [reader for reader in readers if reader.alive]

    def before_write(self, target: torch.Tensor) -> None:
        """Let the ops that have read a tensor created outside read a copy, before it is written."""
        address = storage_key(target)
        readers = [op for op in self.readers.pop(address, ()) if op.alive]
        if readers:
            self.reserve(target.untyped_storage().nbytes(), "a copy of a tensor created outside the block")
            copied = copy_memory(target)
            self.count(copied, "what a tensor created outside the block was before it was modified")
            for op in readers:
                _redirect(op, address, copied)


def _redirect(op: Op, address: int, copied: torch.Tensor) -> None:
    """Let a recorded op read a copy of a tensor created outside."""

    def visit(value: Any) -> None:
        if type(value) is Const and value.address == address:
            value.__init__(derive(copied, place_of(value.tensor)))  # type: ignore[misc]
        elif isinstance(value, (list, tuple)):
            for part in value:
                visit(part)

    for one in op.sequence():
        visit([*one.args, *one.kwargs.values()])
