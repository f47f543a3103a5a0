"""Logs of real runs: what a block does, written down as the simulator reads it; see `record`.

In: the ops that a runtime runs for the program, not those that it runs again. Kept: a name for each tensor of the
program that is alive. Out: the file, sound line by line, whatever happens in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_remat._compat import graph_task, storage_key
from torch_remat.dtr._ops import Found, Kind, leaves
from torch_remat.dtr._storage import Buffer, Handle
from torch_remat.dtr._tensor import EvictableTensor
from torch_remat.dtr.log import LogWriter


class Recorder(LogWriter):
    """Names the tensors of a block, and writes what becomes of them."""

    def __init__(self, path: str | Path, *, seconds: bool) -> None:
        super().__init__(path)
        self._unit = 1e9 if seconds else 1.0
        self._count = 0
        self._names: dict[int, str] = {}  # by id of the handle
        self._aliases: dict[int, dict[str, None]] = {}  # by id of the buffer: the names of those alive
        self._outside: dict[tuple[int, int], str] = {}  # by address and size of plain tensors
        self._backward = False

    def ran(self, kind: Kind, found: Found, made: Any, cost: float = 0.0, written: Sequence[torch.Tensor] = ()) -> None:
        """Write that an op made tensors, and wrote to others."""
        if not self._backward and graph_task() >= 0:
            self._backward = True
            self.annotate("BACKWARD")
        names = [self._name(tensor) for tensor in found.tensors]
        names += [self._name(const.tensor) for const in found.consts if const.tensor.device.type != "meta"]
        results = self._results(kind, found, made)
        if results or not written:
            self.call(kind.name, names, results, cost * self._unit)
            cost = 0.0
        if written:
            mutated = dict.fromkeys(self._name(target) for target in written)
            self.mutate(kind.name, names, [names.index(name) for name in mutated], cost * self._unit)
        for target in written:
            if type(target) is EvictableTensor:
                self._follow(target)

    def released(self, handle: Handle) -> None:
        """Write that the program has let go of a tensor."""
        name = self._names.pop(id(handle), None)
        if name is not None:
            self.release(name)
            alive = self._aliases[id(handle.buffer)]
            del alive[name]
            if not alive:
                del self._aliases[id(handle.buffer)]

    def _results(self, kind: Kind, found: Found, made: Any) -> list[tuple[str, int, int]]:
        """Name the new tensors among the results of an op: those of the block, and the gradient of a leaf."""
        buffers: list[Buffer | None] = [tensor._handle.buffer for tensor in found.tensors]
        results = []
        for leaf in leaves(made):
            if type(leaf) is EvictableTensor and id(leaf._handle) not in self._names:
                buffer = leaf._handle.buffer
                alias = buffers.index(buffer) if buffer in buffers else -1
                shared = alias >= 0 or id(buffer) in self._aliases
                results.append((self._new(leaf._handle), 0 if shared else buffer.storage.size_bytes, alias))
            elif type(leaf) is torch.Tensor and leaf.layout is torch.strided and _key(leaf) not in self._outside:
                name = self._outside[_key(leaf)] = self._fresh()
                results.append((name, 0, 0) if kind.view else (name, leaf.untyped_storage().nbytes(), -1))
        return results

    def _follow(self, tensor: EvictableTensor) -> None:
        """Let the other names of a written buffer mean views of its new version."""
        name = self._name(tensor)
        for other in list(self._aliases[id(tensor._handle.buffer)]):
            if other != name:
                view = self._fresh()
                self.call("aten.as_strided", [name], [(view, 0, 0)], 0)
                self.copy_from(other, view)
                self.release(view)

    def _name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor; one without a name was made before the recording, or by what is not recorded."""
        if type(tensor) is EvictableTensor:
            name = self._names.get(id(tensor._handle))
            if name is None:
                name = self._new(tensor._handle)
                self.constant(name, tensor._handle.buffer.storage.size_bytes)
        else:
            name = self._outside.get(_key(tensor))
            if name is None:
                name = self._outside[_key(tensor)] = self._fresh()
                self.constant(name, tensor.untyped_storage().nbytes())
        return name

    def _new(self, handle: Handle) -> str:
        name = self._names[id(handle)] = self._fresh()
        self._aliases.setdefault(id(handle.buffer), {})[name] = None
        return name

    def _fresh(self) -> str:
        self._count += 1
        return f"t{self._count}"


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    return storage_key(tensor), tensor.untyped_storage().nbytes()
