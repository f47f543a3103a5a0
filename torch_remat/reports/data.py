"""What memory reports say, as plain data: no tensor, no region, nothing that keeps memory alive.

    MemoryReport (in `memory`)
    ├── regions: RegionReport ─┬─ tensors      inputs, refilled tensors, random state
    │                          └─ ops: OpReport ── tensors
    ├── older: RegionReport                    the same of regions in no graph that was asked for; apart
    ├── outside: NodeReport ── tensors         what autograd saves outside of regions, by node type
    └── parameters, buffers: ParameterReport   apart: they exist anyway

Bytes are those of storages, whole, and each storage is counted once, where it was met first; what an offloader has
is counted as it travelled.

`report_of` counts what regions keep; `Counted` keeps, while a report is made, the storages behind it, and what stands
for those that are away, so that no address is used again. Nothing is unpacked, so nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from torch_remat._kept import Around, Kind, decisions_of, in_partials, kept_by, parameters_of
from torch_remat._util.storages import Memory, Piece, memory_of, pieces_in, tensors_in, viewed_parameter
from torch_remat.dispatch.call.result import identity_of
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.policies.nothing import selects_nothing


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
        shard: Whether it is the local shard of a DTensor: shape and bytes are those of what this process has.
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
    shard: bool = False


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
        idle_policy: The policy, as text, if it selected nothing in the first forward of this code; else empty.
    """

    name: str
    tensors: tuple[KeptTensor, ...]
    ops: tuple[OpReport, ...]
    idle_policy: str = ""

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


def row_of(piece: Piece, name: str, label: str, kind: Kind, needed_by: str, policy: str = "") -> KeptTensor:
    """Return the row for a kept tensor, before its bytes are counted."""
    look = (piece.shape, str(piece.dtype).removeprefix("torch."), piece.place)
    told = (piece.besides or kind, 0, *look, (needed_by,), (), None, piece.offloaded, policy, piece.shard)
    return KeptTensor(name, label, *told)


class Rows(list[KeptTensor]):
    """What is kept of one op, region or node, and which row stands for each memory."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[Hashable, int] = {}


class Counted:
    """Counts each storage once, and each offloaded tensor once, under the name that it was met with first."""

    def __init__(self) -> None:
        self._owners: dict[Hashable, str] = {}  # names; "parameter" or "buffer" for what exists anyway
        self._alive: list[Any] = []  # no address may be used again meanwhile

    def add_existing(self, tensors: Iterable[torch.Tensor], kind: str = "parameter") -> ParameterReport:
        """Count parameters, or buffers; what shares their storages counts as that from now on."""
        known = {id(tensor): tensor for tensor in tensors}
        memory = (one for tensor in known.values() for one in memory_of(tensor))
        return ParameterReport(len(known), sum(self._hold(one, kind) for one in memory))

    def _hold(self, memory: Memory, owner: str) -> int:
        """Count a memory for an owner; return its bytes if no other has it already."""
        if memory.key in self._owners:
            return 0
        self._owners[memory.key] = owner
        self._alive.append(memory.owner)
        return memory.bytes

    def add(self, tensor: KeptTensor, memory: Sequence[Memory], rows: Rows) -> None:
        """Count a tensor, and append it to ``rows``, unless it shares the memory of one that is there."""
        keys = [one.key for one in memory if one.key not in self._owners]
        shared = next((one.key for one in memory if one.key in self._owners), None)
        size = sum(self._hold(one, tensor.name) for one in memory)
        if shared is not None and not size:
            place = rows.places.get(shared)
            if place is not None:
                shown = rows[place]
                labels = dict.fromkeys((shown.label, *shown.aliases, tensor.label))
                needed_by = dict.fromkeys((*shown.needed_by, *tensor.needed_by))
                rows[place] = replace(shown, needed_by=tuple(needed_by), aliases=tuple(labels)[1:])
                return
            tensor = replace(tensor, shared_with=self._owners[shared])
            keys.append(shared)
        rows.places.update(dict.fromkeys(keys, len(rows)))
        rows.append(replace(tensor, bytes=size))


def report_of(
    region: Region,
    counted: Counted | None = None,
    *,
    momentary: bool = False,
    keep_empty: bool = False,
) -> RegionReport:
    """Return what a region keeps by itself, or beside what is counted already, its parameters among it.

    With ``momentary``, what is offloaded counts in place, too, while it has not left or has come back; with
    ``keep_empty``, ops that keep nothing are in it.
    """
    if counted is None:
        counted = Counted()
        counted.add_existing(parameters_of(region))
    decisions = decisions_of(region)
    own = Rows()
    by_op = {name: Rows() for name in decisions}
    for one in kept_by(region):
        if isinstance(one.value, Around):
            continue
        rows = by_op.setdefault(one.op, Rows()) if one.op else own
        name = qualified_name(region.name, one.op, one.tensor)
        policy = one.decision.value if one.decision else ""
        for piece in pieces_in(one.value, one.made_on):
            if piece.besides is None or momentary:
                tensor = row_of(piece, name, one.tensor, one.kind, one.needed_by, policy)
                counted.add(tensor, piece.memory, rows)
    for label, value in in_partials(region.function):
        for held in tensors_in(value):
            if viewed_parameter(held) is None:
                for piece in pieces_in(held):
                    row = row_of(piece, qualified_name(region.name, "", label), label, "input", "replay")
                    counted.add(row, piece.memory, own)
    ops = []
    for name, rows in by_op.items():
        if rows or keep_empty:
            policy = decisions[name].value if name in decisions else rows[0].policy
            ops.append(OpReport(name, policy, tuple(rows)))
    saves = any(row.policy == "save" for row in own)
    idle = not saves and selects_nothing(region.options.chosen, identity_of(region.function))
    return RegionReport(region.name, tuple(own), tuple(ops), repr(region.options.chosen) if idle else "")
