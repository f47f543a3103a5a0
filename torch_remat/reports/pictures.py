"""The pictures of memory reports and traces, for which matplotlib is loaded; they survive black-and-white print.

A memory report: a bar for each region, or group of regions that are alike. A trace: live bytes over time, and below
them when regions ran, a lane for each phase.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_remat._text import format_bytes, unit_of
from torch_remat.errors import UsageError
from torch_remat.reports.data import KeptForBackward, Kind
from torch_remat.reports.fold import fold
from torch_remat.reports.spans import Phase, Span, Timeline
from torch_remat.reports.text import format_sum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Fill and hatch of a bar's parts: told apart without colour.
INK, GREY, _LIGHT = "#222222", "#9a9a9a", "#e6e6e6"

# What a bar is made of, from the left: name, fill, hatch, and the kinds of tensors that it shows.
_PARTS: tuple[tuple[str, str, str, tuple[Kind, ...]], ...] = (
    ("inputs", _LIGHT, "", ("input",)),
    ("saved by name", GREY, "", ("saved",)),
    ("kept for replay", "white", "////", ("kept for replay", "undecided", "determinism check")),
    ("made by replay", "white", "....", ("refilled",)),
    ("offloaded, but here too", _LIGHT, "||||", ("not gone yet", "brought back")),
    ("random state", INK, "", ("random state",)),
    ("outside of regions", "white", "xxxx", ()),
    ("offloaded", "white", "----", ()),
)
_PART_OF_KIND = {kind: part for part, _, _, kinds in _PARTS for kind in kinds}
_MOST_BARS = 24
_BARS_INCHES = 5.5
_LETTER_INCHES = 0.085

# The width of a letter in a lane, as a share of the whole.
_LETTER = 0.0075
_LANES: dict[Phase, tuple[str, str]] = {"forward": (_LIGHT, ""), "replay": ("white", "////"), "backward": (GREY, "")}


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure; it is in no window and no global list, so nothing has to close it.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib, which is not installed", remedy="Install it: pip install matplotlib."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontweight="bold")
    return figure


def finished(figure: Figure, path: str | Path | None) -> Figure:
    """Take away the lines above and beside the axes, write the figure, if there is a path, and return it."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def plot_report(report: KeptForBackward, path: str | Path | None) -> Figure:
    """Draw a memory report; see `MemoryReport.plot`."""
    bars = _bars(report)
    title = f"Kept for backward: {format_bytes(report.bytes)}"
    if report.offloaded_bytes:
        title += f" and {format_bytes(report.offloaded_bytes)} offloaded"
    labels = [label for label, _ in bars]
    # Long names widen the picture, so that the bars keep their room.
    width = _BARS_INCHES + _LETTER_INCHES * max([len(label) for label in labels], default=0)
    figure = new_figure(max(8.0, width), 1.6 + 0.32 * max(3, len(bars)), title)
    axes = figure.add_subplot()
    most = max([sum(parts.values()) for _, parts in bars], default=0)
    unit, name = unit_of(most)
    left = [0.0] * len(bars)
    for part, fill, hatch, _ in _PARTS:
        widths = [parts.get(part, 0) / unit for _, parts in bars]
        if any(widths):
            look: dict[str, Any] = {"color": fill, "hatch": hatch, "edgecolor": INK, "linewidth": 0.8}
            axes.barh(range(len(bars)), widths, left=left, label=part, **look)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    whole = most / unit or 1.0
    for place, (end, (_, parts)) in enumerate(zip(left, bars, strict=True)):
        away = parts.get("offloaded", 0)
        text = format_sum(sum(parts.values()) - away, away)
        whole = max(whole, end / (1 - _LETTER_INCHES * (len(text) + 1) / _BARS_INCHES))
        axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(bars)), labels, parse_math=False)  # a name may have dollar signs
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, whole)
    axes.set_xlabel(f"{name}; each storage counted once")
    if bars:
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return finished(figure, path)


def _bars(report: KeptForBackward) -> list[tuple[str, dict[str, int]]]:
    """Return the label of each bar, and its parts in bytes; where there are too many, the smallest become one."""
    bars = []
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
        return [*bars]
    places = sorted(range(len(bars)), key=lambda place: -bars[place][1].total())
    small = sorted(places[_MOST_BARS - 1 :])
    rest = sum((bars[place][1] for place in small), Counter[str]())
    return [*(bar for place, bar in enumerate(bars) if place not in small), (f"{len(small)} smaller", rest)]


def plot_trace(trace: Timeline, path: str | Path | None) -> Figure:
    """Draw a trace; see `Trace.plot`."""
    figure = new_figure(10.0, 5.2, "Live bytes over one trace")
    curve, lanes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.2])
    _draw_curve(trace, curve)
    _draw_lanes(trace, lanes)
    lanes.set_xlim(0, trace.duration_us / 1000)
    lanes.set_xlabel("milliseconds")
    return finished(figure, path)


def _draw_curve(trace: Timeline, axes: Axes) -> None:
    peak = trace.peak
    unit, name = unit_of(peak.total_bytes if peak else 1)
    times = [0.0, *(sample.time_us / 1000 for sample in trace.samples), trace.duration_us / 1000]
    live = [0.0, *(sample.total_bytes / unit for sample in trace.samples)]
    axes.plot(times, [*live, live[-1]], drawstyle="steps-post", color=INK, linewidth=1.4)
    axes.fill_between(times, [*live, live[-1]], step="post", color="#f0f0f0")
    for span in trace.spans:
        if span.op is None and span.phase == "replay":
            start, end = span.start_us / 1000, span.end_us / 1000
            axes.axvspan(start, end, facecolor="none", hatch="////", edgecolor="#b0b0b0", linewidth=0)
    axes.set_ylabel(f"live {name} (since the trace began)")
    if trace.given_up:
        when = [one.time_us / 1000 for one in trace.given_up]
        at = [live[bisect_right(times, time) - 1] for time in when]
        axes.scatter(when, at, label="a budget gave something up", marker="v", color=GREY, edgecolor=INK, zorder=3)
        axes.legend(frameon=False, loc="lower right")
    if peak is not None:
        right = peak.time_us < 0.55 * trace.duration_us
        axes.set_ylim(0, 1.22 * peak.total_bytes / unit)
        axes.annotate(
            f"peak {format_bytes(peak.total_bytes)}, in {trace.at(peak.time_us)}",
            (peak.time_us / 1000, peak.total_bytes / unit),
            xytext=(14 if right else -14, 14),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
            parse_math=False,  # a name may have dollar signs
            arrowprops={"arrowstyle": "->", "color": INK},
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )


def _nested(spans: Sequence[Span]) -> list[tuple[int, bool, Span]]:
    """Return spans, in the order in which they began, with their depth and whether no other lies in them."""
    found: list[tuple[int, bool, Span]] = []
    around: list[int] = []
    for place, span in enumerate(spans):
        while around and spans[around[-1]].end_us < span.end_us:
            around.pop()
        if around:
            depth, _, outer = found[around[-1]]
            found[around[-1]] = depth, False, outer
        found.append((len(around), True, span))
        around.append(place)
    return found


def _short_names(names: set[str]) -> dict[str, str]:
    """Return names without the parts that all begin or end with: ``layers.0.attention`` becomes ``0``."""
    parts = [name.split(".") for name in names]
    common = min(map(len, parts)) - 1 if len(parts) > 1 else 0
    first = next((place for place in range(common) if len({one[place] for one in parts}) > 1), common)
    left = common - first
    last = next((place for place in range(left) if len({one[-1 - place] for one in parts}) > 1), left)
    return {".".join(one): ".".join(one[first : len(one) - last]) for one in parts}


def _draw_lanes(trace: Timeline, axes: Axes) -> None:
    whole_ms = trace.duration_us / 1000 or 1.0
    short = _short_names({span.region for span in trace.spans})
    for place, (phase, (fill, hatch)) in enumerate(_LANES.items()):
        spans = [span for span in trace.spans if span.op is None and span.phase == phase]
        for depth, is_empty, span in _nested(spans):
            start, width = span.start_us / 1000, span.duration_us / 1000
            height = 0.7 * 0.7**depth
            axes.barh(place, width, left=start, height=height, color=fill, hatch=hatch, edgecolor=INK, linewidth=0.7)
            names = (span.region, short[span.region], span.region.rpartition(".")[2])
            label = next((one for one in names if width / whole_ms > _LETTER * (len(one) + 1)), None)
            if label is not None and is_empty:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if hatch else None
                look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box, "parse_math": False}
                axes.text(start + width / 2, place, label, **look)
    axes.set_yticks(range(len(_LANES)), list(_LANES))
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
