"""What memory buys, drawn: the time that replays take, by what regions keep, and where a budget stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_remat._util.text import format_bytes
from torch_remat.budgets.price import curve
from torch_remat.budgets.steps import Step
from torch_remat.reports.pictures import GREY, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 2**20


def draw_budget(told: str, step: Step) -> Figure:
    """Draw what the regions of a step could keep, and what they kept, in a budget that is called so."""
    points = [(size + step.other_bytes(), ns) for size, ns in curve(step.parts())]
    figure = draw_curve(f"What memory buys: a budget of {told}", points)
    axes, kept = figure.axes[0], step.sum_of("kept_bytes")
    ns = sum((row.rung or row.part.ladder.rungs[0]).ns * row.part.scale for row in step.rows if row.part is not None)
    axes.plot([kept / _MIB], [ns / 1e6], "o", color=INK, label=f"this step: {format_bytes(kept)}, {ns / 1e6:.3g} ms")
    if step.limit_bytes <= 2 * max(kept, 1):
        axes.axvline(
            step.limit_bytes / _MIB, color=INK, linestyle=":", label=f"limit: {format_bytes(int(step.limit_bytes))}"
        )
    axes.legend(loc="upper right", frameon=False)
    return figure


def draw_curve(title: str, points: Sequence[tuple[int, float]]) -> Figure:
    """Draw nanoseconds by bytes, and beside it the same with the first n blocks recomputed: a straight line."""
    figure = new_figure(7.0, 4.0, title)
    axes = figure.add_subplot()
    sizes, times = [size / _MIB for size, _ in points], [ns / 1e6 for _, ns in points]
    axes.plot(
        [sizes[0], sizes[-1]], [times[0], times[-1]], color=GREY, linestyle="--", label="the first n blocks, if equal"
    )
    axes.plot(sizes, times, color=INK, marker=".", label="by price")
    axes.set_xlabel("kept by regions, MiB")
    axes.set_ylabel("milliseconds recomputed in a step")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", frameon=False)
    return figure
