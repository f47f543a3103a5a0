"""Logs of real runs: what a block does, written down as the simulator reads it.

In: the ops that a runtime runs for the program, not those that it runs again. Kept: a name for each tensor of the
program that is alive. Out: the file, sound line by line, whatever happens in the block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from torch_remat._compat import graph_task, storage_key
from torch_remat.dtr._block_memory import BlockMemory
from torch_remat.dtr._ops import Costs, Found, Kind, leaves
from torch_remat.dtr._storage import Buffer, Handle
from torch_remat.dtr._tensor import EvictableTensor
from torch_remat.dtr.budget import Runtime, active_runtime
from torch_remat.dtr.heuristics import resolve
from torch_remat.dtr.log import LogWriter
from torch_remat.errors import UsageError


@contextmanager
def record(path: str | Path) -> Iterator[Runtime]:
    """Write the log of all that a block does with tensors, for `simulate`.

    Inside the block of a budget it writes what that block does; elsewhere it is such a block itself, without a limit.

    Args:
        path: Of the file, which is overwritten. It is sound also after an exception.

    Example:
        >>> import tempfile
        >>> import torch_remat as remat
        >>> path = tempfile.mkdtemp() + "/step.log"
        >>> with remat.dtr.record(path):
        ...     loss = (torch.ones(8, requires_grad=True) * 2).sum()
        >>> len(remat.dtr.Log.load(path).ops) > 0
        True
    """
    runtime = active_runtime()
    if runtime is not None and runtime._block.recorder is not None:
        raise UsageError("this block is being recorded already", remedy="Record it once.")
    with ExitStack() as stack:
        writer = stack.enter_context(LogWriter(path))
        if runtime is None:
            runtime = stack.enter_context(Runtime(BlockMemory(math.inf, resolve("lru"), Costs("measured"))))
        block = runtime._block
        block.recorder = Recorder(writer, seconds=runtime._memory.costs.measured)
        stack.callback(setattr, block, "recorder", None)
        stack.callback(block.forget)
        yield runtime


class Recorder:
    """Names the tensors of a block, and writes what becomes of them."""

    def __init__(self, writer: LogWriter, *, seconds: bool) -> None:
        self._writer = writer
        self._unit = 1e9 if seconds else 1.0
        self._count = 0
        self._names: dict[int, str] = {}  # by id of the handle
        self._aliases: dict[int, dict[str, None]] = {}  # by id of the buffer: the names of those alive
        self._outside: dict[tuple[int, int], str] = {}
        self._backward = False

    def ran(self, kind: Kind, found: Found, made: Any, cost: float) -> None:
        """Write that an op made tensors."""
        self._mark()
        self._call(kind, self._arguments(found), found, made, cost)

    def viewed(self, kind: Kind, base: EvictableTensor, made: Sequence[EvictableTensor]) -> None:
        """Write that tensors were made that alias another one."""
        self._mark()
        name = self._name(base._handle)
        self._writer.call(kind.name, [name], [(self._new(view._handle), 0, 0) for view in made], 0)

    def wrote(self, kind: Kind, found: Found, targets: Sequence[torch.Tensor], made: Any, cost: float) -> None:
        """Write that an op wrote to tensors, and may have made others."""
        self._mark()
        names = self._arguments(found)
        if any(type(leaf) is EvictableTensor and id(leaf._handle) not in self._names for leaf in leaves(made)):
            self._call(kind, names, found, made, cost)
            cost = 0.0
        mutated = list(dict.fromkeys(self._any_name(target) for target in targets))
        self._writer.mutate(kind.name, names, [names.index(name) for name in mutated], cost * self._unit)
        for target in targets:
            if type(target) is EvictableTensor:
                self._follow(target._handle)

    def handed(self, kind: Kind, found: Found, result: Any) -> None:
        """Write that a gradient was handed to a leaf: it stays."""
        size = result.untyped_storage().nbytes()
        names, name = self._arguments(found), self._fresh()
        self._writer.call(kind.name, names, [(name, 0, 0) if kind.view else (name, size, -1)], 0)
        self._outside[storage_key(result), size] = name

    def released(self, handle: Handle) -> None:
        """Write that the program has let go of a tensor."""
        name = self._names.pop(id(handle), None)
        if name is not None:
            self._writer.release(name)
            alive = self._aliases[id(handle.buffer)]
            del alive[name]
            if not alive:
                del self._aliases[id(handle.buffer)]

    def _mark(self) -> None:
        if not self._backward and graph_task() >= 0:
            self._backward = True
            self._writer.annotate("BACKWARD")

    def _call(self, kind: Kind, names: Sequence[str], found: Found, made: Any, cost: float) -> None:
        buffers: list[Buffer | None] = [tensor._handle.buffer for tensor in found.tensors]
        results = []
        for leaf in leaves(made):
            if type(leaf) is not EvictableTensor or id(leaf._handle) in self._names:
                continue
            buffer = leaf._handle.buffer
            alias = buffers.index(buffer) if buffer in buffers else -1
            shared = alias >= 0 or id(buffer) in self._aliases
            results.append((self._new(leaf._handle), 0 if shared else buffer.storage.size_bytes, alias))
        self._writer.call(kind.name, names, results, cost * self._unit)

    def _follow(self, handle: Handle) -> None:
        """Let the other names of a written buffer mean views of its new version."""
        name = self._name(handle)
        for other in list(self._aliases[id(handle.buffer)]):
            if other != name:
                view = self._fresh()
                self._writer.call("aten.as_strided", [name], [(view, 0, 0)], 0)
                self._writer.copy_from(other, view)
                self._writer.release(view)

    def _arguments(self, found: Found) -> list[str]:
        names = [self._name(tensor._handle) for tensor in found.tensors]
        return names + [self._any_name(const.tensor) for const in found.consts if const.tensor.device.type != "meta"]

    def _any_name(self, tensor: torch.Tensor) -> str:
        if type(tensor) is EvictableTensor:
            return self._name(tensor._handle)
        size = tensor.untyped_storage().nbytes()
        key = (storage_key(tensor), size)
        name = self._outside.get(key)
        if name is None:
            name = self._outside[key] = self._fresh()
            self._writer.constant(name, size)
        return name

    def _name(self, handle: Handle) -> str:
        name = self._names.get(id(handle))
        if name is None:  # made before the recording began, or by what is not recorded
            name = self._new(handle)
            self._writer.constant(name, handle.buffer.storage.size_bytes)
        return name

    def _new(self, handle: Handle) -> str:
        name = self._names[id(handle)] = self._fresh()
        self._aliases.setdefault(id(handle.buffer), {})[name] = None
        return name

    def _fresh(self) -> str:
        self._count += 1
        return f"t{self._count}"
