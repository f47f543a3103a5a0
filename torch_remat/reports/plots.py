"""The picture of a memory report: a bar for each region, or group of regions that are alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_remat.reports.drawing import GREY, INK, LIGHT, new_figure, save, unit_of
from torch_remat.reports.fold import fold
from torch_remat.reports.model import KeptTensor, MemoryReport
from torch_remat.reports.text import format_bytes, format_sum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a bar is made of, from the left: name, fill, hatch.
_PARTS: tuple[tuple[str, str, str], ...] = (
    ("inputs", LIGHT, ""),
    ("saved by name", GREY, ""),
    ("kept for replay", "white", "////"),
    ("made by replay", "white", "...."),
    ("offloaded, but here too", LIGHT, "||||"),
    ("random state", INK, ""),
    ("outside of regions", "white", "xxxx"),
    ("offloaded", "white", "----"),
)
_PART_OF_KIND = {
    "input": "inputs",
    "saved": "saved by name",
    "kept for replay": "kept for replay",
    "undecided": "kept for replay",
    "determinism check": "kept for replay",
    "refilled": "made by replay",
    "random state": "random state",
    "not gone yet": "offloaded, but here too",
    "brought back": "offloaded, but here too",
}
_MOST_BARS = 24
_BARS_INCHES = 5.5
_LETTER_INCHES = 0.085


def plot_report(report: MemoryReport, path: str | Path | None) -> Figure:
    """Draw a memory report; see `MemoryReport.plot`."""
    bars = _bars(report)
    title = f"Kept for backward: {format_bytes(report.bytes)}"
    if report.offloaded_bytes:
        title += f" and {format_bytes(report.offloaded_bytes)} offloaded"
    labels = [label for label, _ in bars]
    # Long names widen the picture, so that the bars keep their room.
    width = _BARS_INCHES + _LETTER_INCHES * max([len(label) for label in labels], default=0)
    figure, axes = new_figure(max(8.0, width), 1.6 + 0.32 * max(3, len(bars)), title)
    most = max([sum(parts.values()) for _, parts in bars], default=0)
    unit, name = unit_of(most)
    left = [0.0] * len(bars)
    for part, fill, hatch in _PARTS:
        widths = [parts.get(part, 0) / unit for _, parts in bars]
        if any(widths):
            axes.barh(
                range(len(bars)), widths, left=left, color=fill, hatch=hatch, edgecolor=INK, linewidth=0.8, label=part
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
    whole = most / unit or 1.0
    for place, (end, (_, parts)) in enumerate(zip(left, bars, strict=True)):
        away = parts.get("offloaded", 0)
        text = format_sum(sum(parts.values()) - away, away)
        whole = max(whole, end / (1 - _LETTER_INCHES * (len(text) + 1) / _BARS_INCHES))
        axes.annotate(
            text,
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(bars)), labels, parse_math=False)  # a name may have dollar signs
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, whole)
    axes.set_xlabel(f"{name}; each storage counted once")
    if bars:
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return save(figure, path)


def _bars(report: MemoryReport) -> list[tuple[str, dict[str, int]]]:
    bars = []
    for group in fold(report.regions):
        parts: dict[str, int] = {}
        for region in group.regions:
            for tensor in region.all_tensors():
                _add(parts, tensor)
        label = f"{group.label} (all {len(group.regions)})" if len(group.regions) > 1 else group.label
        bars.append((label, parts))
    for node in report.outside:
        parts = {"outside of regions": node.bytes, "offloaded": node.offloaded_bytes}
        if any(parts.values()):
            bars.append((node.node, parts))
    return _without_the_smallest(bars)


def _add(parts: dict[str, int], tensor: KeptTensor) -> None:
    part = "offloaded" if tensor.offloaded else _PART_OF_KIND[tensor.kind]
    parts[part] = parts.get(part, 0) + tensor.bytes


def _without_the_smallest(bars: list[tuple[str, dict[str, int]]]) -> list[tuple[str, dict[str, int]]]:
    """Return at most `_MOST_BARS` bars: the smallest become one."""
    if len(bars) <= _MOST_BARS:
        return bars

    def size(bar: tuple[str, dict[str, int]]) -> Any:
        return sum(bar[1].values())

    kept = sorted(bars, key=size, reverse=True)[: _MOST_BARS - 1]
    rest: dict[str, int] = {}
    small = [bar for bar in bars if bar not in kept]
    for _, parts in small:
        for part, count in parts.items():
            rest[part] = rest.get(part, 0) + count
    return [*(bar for bar in bars if bar in kept), (f"{len(small)} smaller", rest)]
