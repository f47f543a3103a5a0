"""`memory_report`: all that is kept for backward; and what the region that runs now keeps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TextIO
from weakref import ref

import torch
from torch.autograd.graph import Node

from torch_remat._compat import eager_only, node_number
from torch_remat._kept import Kind, parameters_of
from torch_remat._util.text import format_bytes, plural, unit_of
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.region.region import Region, live_regions
from torch_remat.errors import UsageError
from torch_remat.reports.data import (
    Counted,
    KeptTensor,
    NodeReport,
    ParameterReport,
    RegionReport,
    Sums,
    report_of,
)
from torch_remat.reports.fold import fold
from torch_remat.reports.graph import (
    checkpoints_below,
    collect_nodes,
    nodes_below,
    parameters_below,
    regions_below,
    saved_in,
)
from torch_remat.reports.pictures import GREY, INK, LIGHT, new_figure
from torch_remat.reports.report import Block, Pictured, Report, as_text, format_sum, sum_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MemoryReport(Report, Pictured, Sums):
    """What is kept for backward.

    Attributes:
        regions: The regions that keep something, oldest first.
        outside: What is saved outside of regions, by node type, the largest first.
        parameters: Parameters, in no sum: those that regions and graph refer to, and those of the modules given.
        buffers: Buffers of the modules given, in no sum.
        budgets: A line for each budget that regions are in.
        older: Regions that are alive and in no graph that was given, apart; in no sum.
        why_nothing: Why nothing is kept, but for leaves, if that is so and known; else empty.
    """

    also: ClassVar[Sequence[str]] = (*Sums.also, "bytes_by_device")
    regions: tuple[RegionReport, ...]
    outside: tuple[NodeReport, ...]
    parameters: ParameterReport
    buffers: ParameterReport = field(default_factory=ParameterReport)
    budgets: tuple[str, ...] = ()
    older: tuple[RegionReport, ...] = ()
    why_nothing: str = ""

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

    def blocks(self) -> list[Block]:
        """Return what the report shows."""
        lines = [f"kept for backward: {sum_of([self])}{self.why_nothing and f' ({self.why_nothing})'}"]
        if len(self.bytes_by_device) > 1:
            parts = (f"{device} {format_bytes(count)}" for device, count in self.bytes_by_device.items())
            lines.append(f"  by device: {', '.join(parts)}")
        for name, existing in (("parameters", self.parameters), ("buffers", self.buffers)):
            if existing.count:
                held = plural(existing.count, "tensor")
                lines.append(f"not counted: {name}, {format_bytes(existing.bytes)} in {held}")
        if self.older:
            alive = f"{sum_of(self.older)} in {plural(len(self.older), 'region')}"
            lines.append(f"older graphs that are alive: {alive}")
        lines += self.budgets
        if self.regions:
            lines += ["", f"in {plural(len(self.regions), 'region')}: {sum_of(self.regions)}"]
        blocks = [Block(lines), *(_region_block(*group, indent=2) for group in fold(self.regions))]
        if self.outside:
            head = ["", f"outside of regions: {sum_of(self.outside)}"]
            blocks.append(Block(head, [_node_cells(node) for node in self.outside], indent=2))
        return blocks

    def draw(self) -> Figure:
        """Draw a bar for each group of regions that are alike, and one for each type of node outside."""
        bars = _bars(self)
        labels = [label for label, _ in bars]
        width = 6.0 + 0.085 * max(map(len, labels), default=0)  # long names leave the bars their room
        title = f"Kept for backward: {sum_of([self]).replace(' + ', ' and ')}"
        figure = new_figure(max(8.0, width), 1.6 + 0.32 * max(3, len(bars)), title)
        axes = figure.add_subplot()
        unit, name = unit_of(max((sum(parts.values()) for _, parts in bars), default=0))
        left = [0.0] * len(bars)
        for part, fill, hatch, _ in _PARTS:
            widths = [parts[part] / unit for _, parts in bars]
            if any(widths):
                look: dict[str, Any] = {"color": fill, "hatch": hatch, "edgecolor": INK, "linewidth": 0.8}
                axes.barh(range(len(bars)), widths, left=left, label=part, **look)
                left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, (_, parts) in enumerate(bars):
            away = parts["offloaded"]
            text = f" {format_sum(parts.total() - away, away)}"
            axes.annotate(text, (left[place], place), va="center", annotation_clip=False)
        axes.set_yticks(range(len(bars)), labels, parse_math=False)  # a name may have dollar signs
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, 1.02 * max(left, default=0.0) or 1.0)
        axes.set_xlabel(f"{name}; each storage counted once")
        if bars:
            figure.legend(loc="outside lower center", ncols=4, frameon=False)
        return figure


# What a bar is made of, from the left: name, fill, hatch, and the kinds of tensors that it shows. Fill and hatch are
# told apart without colour.
_PARTS: tuple[tuple[str, str, str, tuple[Kind, ...]], ...] = (
    ("inputs", LIGHT, "", ("input",)),
    ("saved by name", GREY, "", ("saved",)),
    ("kept for replay", "white", "////", ("kept for replay", "undecided")),
    ("made by replay", "white", "....", ("refilled",)),
    ("offloaded, but here too", LIGHT, "||||", ("not gone yet", "brought back")),
    ("random state", INK, "", ("random state",)),
    ("outside of regions", "white", "xxxx", ()),
    ("offloaded", "white", "----", ()),
)
_PART_OF_KIND = {kind: part for part, _, _, kinds in _PARTS for kind in kinds}
_MOST_BARS = 24


def _bars(report: MemoryReport) -> list[tuple[str, Counter[str]]]:
    """Return the label of each bar, and its parts in bytes; where there are too many, the smallest become one."""
    bars: list[tuple[str, Counter[str]]] = []
    for label, regions in fold(report.regions):
        parts: Counter[str] = Counter()
        for tensor in (one for region in regions for one in region.all_tensors()):
            parts["offloaded" if tensor.offloaded else _PART_OF_KIND[tensor.kind]] += tensor.bytes
        bars.append((f"{label} (all {len(regions)})" if len(regions) > 1 else label, parts))
    for node in report.outside:
        parts = Counter({"outside of regions": node.bytes, "offloaded": node.offloaded_bytes})
        if any(parts.values()):
            bars.append((node.node, parts))
    if len(bars) <= _MOST_BARS:
        return bars
    small = sorted(range(len(bars)), key=lambda place: -bars[place][1].total())[_MOST_BARS - 1 :]
    rest = sum((bars[place][1] for place in small), Counter[str]())
    return [*(bar for place, bar in enumerate(bars) if place not in small), (f"{len(small)} smaller", rest)]


def _region_block(label: str, regions: Sequence[RegionReport], indent: int = 0) -> Block:
    """Return regions that are alike, as one: a line for the sum, and a row for each tensor."""
    region, count = regions[0], len(regions)
    head = f"{' ' * indent}{label}: {sum_of([region])}"
    if count > 1:
        head += f" each, {sum_of(regions)} in {count}"
    shared = [tensor for tensor in region.tensors if tensor.kind == "input" and tensor.shared_with and not tensor.bytes]
    rows = [_cells(region, tensor, tensor.label) for tensor in region.tensors if tensor not in shared]
    if shared:
        place = region.tensors.index(shared[0])
        rows.insert(place, ["shared inputs", "0 B", plural(len(shared), "tensor"), "counted elsewhere"])
    for op in region.ops:
        rows += [_cells(region, tensor, f"{op.name}.{tensor.label}") for tensor in op.tensors]
        if not op.tensors:
            rows.append([op.name, "0 B", "", op.policy])
    heads = [head]
    if region.idle_policy:
        heads.append(f"{' ' * (indent + 2)}policy: {region.idle_policy}, selected nothing")
    return Block(heads, rows, indent=indent + 2)


def _cells(region: RegionReport, tensor: KeptTensor, label: str) -> list[str]:
    """Return the cells of a tensor's row; the last says why it is kept, and what shares its storage."""
    why = {"saved": "", "kept for replay": "for replay", "undecided": "the end of forward decides"}
    notes = [tensor.policy, why.get(tensor.kind, tensor.kind)]
    if tensor.aliases:
        notes.append(f"also {', '.join(tensor.aliases)}")
    if tensor.shared_with is not None:
        notes.append(f"counted as {tensor.shared_with.removeprefix(f'{region.name}::')}")
    if tensor.offloaded:
        notes.append("offloaded")
    if tensor.shard:
        notes.append("local shard")
    what = f"{tensor.dtype}{list(tensor.shape)} {tensor.device}"
    return [label, format_bytes(tensor.bytes), what, ", ".join(note for note in notes if note)]


def _node_cells(node: NodeReport) -> list[str]:
    labels = list(dict.fromkeys(tensor.label for tensor in node.tensors))
    shown = ", ".join(labels[:4]) + (", ..." if len(labels) > 4 else "")
    return [node.node, sum_of([node]), f"{plural(node.count, 'node')}: {shown}"]


@eager_only
def memory_report(*roots: torch.Tensor | torch.nn.Module) -> MemoryReport:
    """Report what is kept for backward in the graph below some tensors, or by all regions that are alive.

    Nothing is unpacked or replayed. It may be called at any time, also in the middle of forward or backward.

    Args:
        *roots: Tensors with a graph, such as the loss: the report has the regions in it, and what autograd saves
            outside of regions; regions of other graphs that are alive are one line apart. Without a tensor the report
            has all regions, and nothing else. Modules, too: what shares the memory of their parameters and
            buffers is theirs. Without a module buffers look like activations, and so do detached parameters.

    Returns:
        Plain data, in bytes of whole storages, each counted once; it keeps no tensor alive. The memory of the roots
        themselves, and of other tensors that the program holds, is not in it unless something saves them.

    Raises:
        UsageError: A root is neither a tensor nor a module.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> x = torch.randn(4, 4, requires_grad=True)
        >>> loss = remat.checkpoint(region_name="block")(torch.sin)(x).sum()
        >>> print(remat.memory_report(loss))
        kept for backward: 64 B
        <BLANKLINE>
        in 1 region: 64 B
          block: 64 B
            args[0]  64 B  float32[4, 4] cpu  input
    """
    modules = [root for root in roots if isinstance(root, torch.nn.Module)]
    for root in roots:
        if not isinstance(root, (torch.nn.Module, torch.Tensor)):
            raise UsageError(
                f"memory_report() takes tensors and modules, not a {type(root).__name__}",
                remedy="Pass the losses, and the model if it has buffers: remat.memory_report(loss, model).",
            )
    losses = [root for root in roots if isinstance(root, torch.Tensor)]
    nodes, alive = nodes_below(losses), live_regions()
    asked = regions_below(nodes) if losses else set(alive)
    checkpoints = checkpoints_below(nodes, asked)
    asked |= regions_below((), checkpoints)
    numbers = {node_number(node) for node in nodes}
    regions = [region for region in alive if region in asked or _is_in(region, numbers)]
    older = [region for region in alive if region not in regions]
    counted = Counted()
    known = chain(parameters_below(nodes, checkpoints), *map(parameters_of, alive))
    parameters = counted.add_existing(chain(*(module.parameters() for module in modules), known))
    buffers = counted.add_existing(chain(*(module.buffers() for module in modules)), "buffer")
    reports = [report_of(region, counted, momentary=True) for region in regions]
    outside = collect_nodes(nodes, checkpoints, counted)
    others = [report_of(region, counted, momentary=True) for region in older]
    reports = [report for report in reports if report.tensors or report.ops]
    budgets = (budget for region in alive if region.keeper is not None for budget in region.keeper.owners)
    return MemoryReport(
        tuple(reports),
        outside,
        parameters,
        buffers,
        tuple(line for one in dict.fromkeys(budgets) if (line := one.summary())),
        tuple(report for report in others if report.bytes or report.offloaded_bytes),
        "" if reports else _why_nothing(losses, nodes),
    )


def _why_nothing(losses: Sequence[torch.Tensor], nodes: Sequence[Node]) -> str:
    saved = [packed for node in nodes for label, packed in saved_in(node) if label != "variable"]  # but for leaves
    if saved and all(packed is None for packed in saved):
        return "backward has freed it: call memory_report before"
    if losses:
        return "" if nodes else "the tensors have no graph"
    return "no region is alive: backward frees what it has used"


def _is_in(region: Region, numbers: Collection[int]) -> bool:
    """Whether a region runs now; or is kept by hooks on nodes with these numbers alone, which nothing shows.

    One that raised in forward may live on with the traceback, and runs no more.
    """
    if not region.finished:
        mode = current_mode()
        return mode is not None and mode.is_in(region)
    held = any(isinstance(entry, ref) and entry() is not None for entry in region.tape.saved)
    its_own = range(region.first_number, region.end_number)
    return not held and any(number in its_own for number in numbers)


@eager_only
def format_current_memory_report() -> str:
    """Return, as text, what the region that runs now keeps so far: its inputs, and each op's tensors by name.

    Returns:
        One line for each tensor: name, bytes, shape, dtype, device and policy, with the sums.

    Raises:
        UsageError: No region runs here.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> def block(x):
        ...     print(remat.format_current_memory_report())
        ...     return x.sin()
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = remat.checkpoint(region_name="block", preserve_rng_state=False)(block)(x)
        block: 8 B
          args[0]  8 B  float32[2] cpu  input
    """
    return _current_report("format_current_memory_report")


@eager_only
def print_current_memory_report(file: TextIO | None = None) -> None:
    """Print what `format_current_memory_report` returns.

    Args:
        file: Where to; standard output if None.

    Raises:
        UsageError: No region runs here.

    Example:
        >>> import sys, torch
        >>> import torch_remat as remat
        >>> def block(x):
        ...     remat.print_current_memory_report(sys.stderr)
        ...     return x.sin()
        >>> y = remat.checkpoint()(block)(torch.ones(2, requires_grad=True))
    """
    text = _current_report("print_current_memory_report")
    (sys.stdout if file is None else file).write(text + "\n")


def _current_report(function: str) -> str:
    """Return the report of the region that runs now, as text, asked for by a function of this name."""
    mode = current_mode()
    if mode is None:
        raise UsageError(
            f"{function}() was called outside of any region",
            remedy="Call it in the function that remat.checkpoint runs, or use remat.memory_report(loss) elsewhere. "
            "Under torch.no_grad() and torch.compile there are no regions.",
        )
    assert isinstance(mode.region, Region)
    report = report_of(mode.region, momentary=True, keep_empty=True)
    return as_text([_region_block(report.name, [report])])
