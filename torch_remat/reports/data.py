"""What memory reports say, as plain data: no tensor, no region, nothing that keeps memory alive.

    MemoryReport (in `memory`)
    ├── regions: RegionReport ─┬─ tensors      inputs, refilled tensors, random state
    │                          └─ ops: OpReport ── tensors
    ├── older: RegionReport                    the same of regions in no graph that was asked for; apart
    ├── outside: NodeReport ── tensors         what autograd saves outside of regions, by node type
    └── parameters, buffers: ParameterReport   apart: they exist anyway

Bytes are those of storages, whole, and each storage is counted once, where it was met first; what an offloader has
is counted as it travelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch_remat._kept import Kind


@dataclass(frozen=True)
class KeptTensor:
    """One tensor that is kept.

    Attributes:
        name: Its full name, ``region::scope/op.tensor``; outside of regions ``Node.attribute``.
        label: The last part of it.
        kind: Why it is kept.
        bytes: The bytes of its storage that are counted here; 0 if they are counted elsewhere.
        shape: Its shape.
        dtype: Its dtype, without ``torch.``.
        device: Where it is; of an offloaded tensor the name of the offloader's class, or the device it was moved to.
        needed_by: What needs it: ``"replay"``, ``"backward"``, or ``"backward of attention"``, that of an op.
        aliases: Labels of further tensors of the same op or region that share its storage.
        shared_with: Where the storage is counted, if not here: a name, or ``"parameter"`` or ``"buffer"``.
        offloaded: Whether it lies elsewhere than on the device where it was made.
        policy: The policy of what it belongs to, ``"save"``, ``"offload"`` or ``"recompute"``; empty without one.
    """

    name: str
    label: str
    kind: Kind
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    needed_by: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    shared_with: str | None = None
    offloaded: bool = False
    policy: str = ""


class Sums:
    """Sums over the tensors of a part of a report."""

    also: ClassVar[Sequence[str]] = ("bytes", "offloaded_bytes")
    tensors: tuple[KeptTensor, ...]

    def all_tensors(self) -> Iterator[KeptTensor]:
        """Yield all tensors of the part."""
        return iter(self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes kept in place, each storage once."""
        return sum(tensor.bytes for tensor in self.all_tensors() if not tensor.offloaded)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes kept elsewhere, each storage once."""
        return sum(tensor.bytes for tensor in self.all_tensors() if tensor.offloaded)


@dataclass(frozen=True)
class OpReport(Sums):
    """What is kept of one op.

    Attributes:
        name: Its name, with its scopes.
        policy: Its policy: ``"save"``, ``"recompute"``, ...
        tensors: What is kept, in the order in which it was saved.
    """

    name: str
    policy: str
    tensors: tuple[KeptTensor, ...]


@dataclass(frozen=True)
class RegionReport(Sums):
    """What one region keeps.

    Attributes:
        name: Its name.
        tensors: What is kept of no op: inputs, tensors that a replay has made, random state.
        ops: Its ops, in the order of forward.
    """

    name: str
    tensors: tuple[KeptTensor, ...]
    ops: tuple[OpReport, ...]

    def all_tensors(self) -> Iterator[KeptTensor]:
        """Yield the tensors of the region and of its ops."""
        yield from self.tensors
        for op in self.ops:
            yield from op.tensors


@dataclass(frozen=True)
class NodeReport(Sums):
    """What autograd saves outside of regions for one type of node.

    Attributes:
        node: The type's name, such as ``"MmBackward0"``.
        count: How many such nodes save something.
        tensors: What they save.
    """

    node: str
    count: int
    tensors: tuple[KeptTensor, ...]


@dataclass(frozen=True)
class ParameterReport:
    """Parameters, or buffers, which exist anyway and are in no total.

    Attributes:
        count: How many.
        bytes: Their bytes, each storage once.
    """

    count: int = 0
    bytes: int = 0
