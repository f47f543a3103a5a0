"""The pictures of budgets and frontiers, for which matplotlib is loaded; they survive black-and-white print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_remat._text import format_bytes
from torch_remat.budgets.steps import Step
from torch_remat.reports.pictures import GREY, INK, finished, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 2**20


def plot_budget(budget: Any, step: Step | None, path: str | Path | None) -> Figure:
    """Draw what regions kept over a step against the budget, and where something was given up."""
    figure = new_figure(8.0, 4.0, f"Kept by regions within {format_bytes(budget.budget_bytes)}")
    axes = figure.add_subplot()
    if step is not None:
        events = sorted([*step.kept, *step.given])
        axes.step([x * 1e3 for x, _ in events], [y / _MIB for _, y in events], where="post", color=INK, label="kept")
        if step.given:
            xs, ys = zip(*step.given, strict=True)
            dots: dict[str, Any] = {"marker": "v", "color": GREY, "edgecolor": INK, "zorder": 3}
            axes.scatter([x * 1e3 for x in xs], [y / _MIB for y in ys], label="something was given up", **dots)
        axes.axhline(step.limit_bytes / _MIB, color=INK, linestyle=":", label="the budget less the reserve")
    axes.axhline(budget.budget_bytes / _MIB, color=INK, linestyle="--", label="the budget")
    axes.set_xlabel("milliseconds of the step")
    axes.set_ylabel("MiB; each storage counted once")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return finished(figure, path)


def plot_frontier(points: Sequence[Any], path: str | Path | None) -> Figure:
    """Draw step time against the peak, or against what regions keep where no peak was measured."""
    measured = all(point.peak_bytes for point in points)
    figure = new_figure(7.0, 4.0, "What memory buys")
    axes = figure.add_subplot()
    xs = [(point.peak_bytes if measured else point.kept_bytes) / _MIB for point in points]
    axes.plot(xs, [point.seconds * 1e3 for point in points], color=INK, marker="o")
    axes.set_xlabel("peak of the step, MiB" if measured else "kept by regions, MiB")
    axes.set_ylabel("milliseconds a step")
    axes.set_ylim(bottom=0)
    return finished(figure, path)
