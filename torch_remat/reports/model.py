"""What a memory report says, as plain data: no tensor, no region, nothing that keeps memory alive.

    MemoryReport
    ├── regions: RegionReport ─┬─ tensors      inputs, refilled tensors, random state
    │                          └─ ops: OpReport ── tensors
    ├── outside: NodeReport ── tensors         what autograd saves outside of regions, by node type
    └── parameters, buffers: ParameterReport   apart: they exist anyway

Bytes are those of storages, whole, and each storage is counted once, where it was met first; what an offloader has
is counted as it travelled.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal[
    "input",
    "saved",
    "kept for replay",
    "undecided",
    "refilled",
    "random state",
    "determinism check",
    "not gone yet",
    "brought back",
]
"""Why a tensor is there: replay starts from it; backward needs it; replay needs it; a policy for ops holds it until the
end of forward tells whether anything needs it; a replay has just made it; what replay does starts from these random
numbers; replay's value is compared with it; it is offloaded and is there as well: since it has not left, or since it
has come back for a backward that goes on."""


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
        needed_by: What needs it: ``"backward"``, ``"replay"``, or the name of the op that reads it in replay.
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


class _Sums(ABC):
    """Sums over the tensors of a part of a report."""

    @abstractmethod
    def all_tensors(self) -> Iterator[KeptTensor]:
        """Return the tensors of the part."""

    @property
    def bytes(self) -> int:
        """Bytes kept in place, each storage once."""
        return sum(tensor.bytes for tensor in self.all_tensors() if not tensor.offloaded)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes kept elsewhere, each storage once."""
        return sum(tensor.bytes for tensor in self.all_tensors() if tensor.offloaded)


@dataclass(frozen=True)
class OpReport(_Sums):
    """What is kept of one op.

    Attributes:
        name: Its name, with its scopes.
        policy: Its policy: ``"save"``, ``"recompute"``, ...
        tensors: What is kept, in the order in which it was saved.
    """

    name: str
    policy: str
    tensors: tuple[KeptTensor, ...]

    def all_tensors(self) -> Iterator[KeptTensor]:
        """Yield the tensors."""
        return iter(self.tensors)


@dataclass(frozen=True)
class RegionReport(_Sums):
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
class NodeReport(_Sums):
    """What autograd saves outside of regions for one type of node.

    Attributes:
        node: The type's name, such as ``"MmBackward0"``.
        count: How many such nodes save something.
        tensors: What they save.
    """

    node: str
    count: int
    tensors: tuple[KeptTensor, ...]

    def all_tensors(self) -> Iterator[KeptTensor]:
        """Yield the tensors."""
        return iter(self.tensors)


@dataclass(frozen=True)
class ParameterReport:
    """Parameters, or buffers, which exist anyway and are in no total.

    Attributes:
        count: How many.
        bytes: Their bytes, each storage once.
    """

    count: int
    bytes: int


@dataclass(frozen=True)
class MemoryReport(_Sums):
    """What is kept for backward.

    Attributes:
        regions: The regions that keep something, oldest first.
        outside: What is saved outside of regions, by node type, the largest first.
        parameters: Parameters, apart: those that regions and graph refer to, and those of the modules given.
        buffers: Buffers of the modules given, apart.
    """

    regions: tuple[RegionReport, ...]
    outside: tuple[NodeReport, ...]
    parameters: ParameterReport
    buffers: ParameterReport = ParameterReport(0, 0)

    def all_tensors(self) -> Iterator[KeptTensor]:
        """Yield all tensors that are kept."""
        for part in (*self.regions, *self.outside):
            yield from part.all_tensors()

    @property
    def bytes_by_device(self) -> dict[str, int]:
        """Bytes kept, by the device or offloader that has them."""
        sums: Counter[str] = Counter()
        for tensor in self.all_tensors():
            sums[tensor.device] += tensor.bytes
        return dict(sorted(sums.items()))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, with the sums beside the parts."""
        return {
            "bytes": self.bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "bytes_by_device": self.bytes_by_device,
            "regions": [
                {**asdict(region), "bytes": region.bytes, "offloaded_bytes": region.offloaded_bytes}
                for region in self.regions
            ],
            "outside": [
                {**asdict(node), "bytes": node.bytes, "offloaded_bytes": node.offloaded_bytes} for node in self.outside
            ],
            "parameters": asdict(self.parameters),
            "buffers": asdict(self.buffers),
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON.

        Args:
            indent: Spaces for each level, or None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """Return the report as text, with layers that are alike told once."""
        from torch_remat.reports.text import format_report

        return format_report(self)

    def _repr_html_(self) -> str:
        from torch_remat.reports.html import report_as_html

        return report_as_html(self)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw a bar for each region, or for each group of regions that are alike, and one for what is saved outside.

        Args:
            path: Where to write the picture; the ending tells the format. None writes nothing.

        Returns:
            The matplotlib figure; it is not shown.

        Raises:
            UsageError: matplotlib is not installed.
        """
        from torch_remat.reports.plots import plot_report

        return plot_report(self, path)
