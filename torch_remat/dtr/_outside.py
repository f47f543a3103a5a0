"""Tensors that a block did not make: who has read them, and what happens before one is written.

In: recorded ops, and tensors about to be written. Kept: by address, the ops that read. Out: copies of what a tensor
was, for those ops; or their results, pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_remat._compat import storage_key
from torch_remat.dtr._block_memory import BlockMemory
from torch_remat.dtr._ops import Const, Op
from torch_remat.dtr._storage import Version, copy_memory, derive, place_of

_PRUNE = 64  # readers of a tensor after which those that are gone are forgotten


class Outside:
    """Who has read the tensors from outside."""

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory
        self.readers: dict[int, list[Op]] = {}  # by address
        self.most_readers = 1000

    def watch(self, op: Op) -> None:
        """Take note of which tensors from outside a recorded op read."""
        for const in op.consts:
            readers = self.readers.setdefault(const.address, [])
            readers.append(op)
            if len(readers) % _PRUNE == 0:
                readers[:] = [reader for reader in readers if not reader.gone]
        if len(self.readers) > self.most_readers:
            self.readers = {
                address: alive
                for address, readers in self.readers.items()
                if (alive := [reader for reader in readers if not reader.gone])
            }
            self.most_readers = 2 * len(self.readers) + 1000

    def before_write(self, target: torch.Tensor) -> None:
        """See to it that no op that read a tensor from outside will read what is to be written to it."""
        address = storage_key(target)
        memory = self.memory
        memory.take_back(address)
        readers = [op for op in self.readers.pop(address, ()) if not op.gone]
        if not readers:
            return
        dependents = _reachable(readers)
        size = target.untyped_storage().nbytes()
        if sum(one.size_bytes for one in dependents) <= size:
            for one in dependents:
                memory.lock(one)
                try:
                    memory.resident([one])
                    memory.pin(one, "computed from a tensor from outside that was written since")
                finally:
                    memory.unlock([one])
            readers = [op for op in readers if not op.gone]
        if readers:
            memory.reserve(size, "a copy of a tensor from outside that is written")
            copied = copy_memory(target)
            memory.count(copied, "what a tensor from outside was before it was written")
            for op in readers:
                _redirect(op, address, copied)


def _reachable(ops: Sequence[Op]) -> list[Version]:
    """Return the storages that depend on some ops and that the program, or an op that runs, can reach."""
    todo = [one for op in ops for one in op.outputs if one is not None]
    seen = dict.fromkeys(todo)
    for one in todo:
        for child in one.children:
            if child not in seen:
                seen[child] = None
                todo.append(child)
    return [one for one in seen if one.names or one.locks]


def _redirect(op: Op, address: int, copied: torch.Tensor) -> None:
    """Let a recorded op read a copy of a tensor from outside."""

    def visit(value: Any) -> None:
        if type(value) is Const and value.address == address:
            value.__init__(derive(copied, place_of(value.tensor)))  # type: ignore[misc]
        elif isinstance(value, (list, tuple)):
            for part in value:
                visit(part)

    for one in op.sequence():
        visit([*one.args, *one.kwargs.values()])
