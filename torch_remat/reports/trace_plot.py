"""The picture of a trace: live bytes over time, and below them when regions ran, a lane for each phase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_remat.reports.drawing import GREY, INK, LIGHT, new_figure, save, unit_of
from torch_remat.reports.text import format_bytes
from torch_remat.reports.timeline import Phase, Span, Trace
from torch_remat.reports.trace_text import where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The width of a letter in a lane, as a share of the whole.
_LETTER = 0.0075
_LANES: tuple[tuple[Phase, str, str], ...] = (
    ("forward", LIGHT, ""),
    ("replay", "white", "////"),
    ("backward", GREY, ""),
)


def plot_trace(trace: Trace, path: str | Path | None) -> Figure:
    """Draw a trace; see `Trace.plot`."""
    figure, axes = new_figure(10.0, 5.2, "Live bytes over one trace")
    axes.remove()
    curve, lanes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.2])
    for one in (curve, lanes):
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    _draw_curve(trace, curve)
    _draw_lanes(trace, lanes)
    lanes.set_xlim(0, trace.duration_us / 1000)
    lanes.set_xlabel("milliseconds")
    return save(figure, path)


def _draw_curve(trace: Trace, axes: Axes) -> None:
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
    if peak is not None:
        right = peak.time_us < 0.55 * trace.duration_us
        axes.set_ylim(0, 1.22 * peak.total_bytes / unit)
        axes.annotate(
            f"peak {format_bytes(peak.total_bytes)}, in {where(trace, peak.time_us)}",
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
    """Return names without the parts that all begin or end with: ``layers.0.attention`` becomes ``0``.

    Example:
        >>> _short_names({"layers.0.mlp", "layers.1.mlp"})["layers.1.mlp"]
        '1'
    """
    parts = [name.split(".") for name in names]
    common = min([len(one) for one in parts], default=1) - 1 if len(parts) > 1 else 0
    first = next((place for place in range(common) if len({one[place] for one in parts}) > 1), common)
    last = next(
        (place for place in range(common - first) if len({one[-1 - place] for one in parts}) > 1), common - first
    )
    return {name: ".".join(name.split(".")[first : len(name.split(".")) - last]) for name in names}


def _draw_lanes(trace: Trace, axes: Axes) -> None:
    whole_ms = trace.duration_us / 1000 or 1.0
    short = _short_names({span.region for span in trace.spans})
    for place, (phase, fill, hatch) in enumerate(_LANES):
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
    axes.set_yticks(range(len(_LANES)), [phase for phase, _, _ in _LANES])
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
