"""The chart of simulations: overhead by budget, one line a heuristic, beside what static schedules need on a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_remat.dtr.bounds import chen_chain, optimal_chain
from torch_remat.dtr.simulate import Simulation
from torch_remat.reports.pictures import GREY, INK, finished, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKS = "osD^vPX*"
_LONGEST_CHAIN = 512  # how overhead goes down with the share of the peak hardly depends on the length


def chain_of(ops: int) -> int:
    """Return how many layers the chain beside a log has: half its ops, within reason."""
    return max(3, min(ops // 2, _LONGEST_CHAIN))


def chain_bounds(ops: int, shares: Sequence[float]) -> dict[str, list[float | None]]:
    """Return overheads of static schedules on a chain of ops, by shares of its peak; None where one does not fit."""
    length = chain_of(ops)
    chen_budget, chen_again = chen_chain(length)
    budgets = [int(share * length + 1e-9) for share in shares]
    return {
        "optimal": [1 + optimal_chain(length, budget) / (2 * length) if budget >= 3 else None for budget in budgets],
        "chen": [1 + chen_again / (2 * length) if budget >= chen_budget else None for budget in budgets],
    }


def plot(
    title: str,
    ops: int,
    shares: Sequence[float],
    runs: Mapping[str, Sequence[Simulation]],
    path: str | Path | None = None,
) -> Figure:
    """Draw overhead by budget, a share of the log's peak, of all runs that have ended.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure = new_figure(9.0, 4.8, title)
    axes = figure.add_subplot()
    places = [100 * share for share in shares]
    for number, (name, results) in enumerate(runs.items()):
        ended = [(x, run.overhead) for x, run in zip(places, results, strict=True) if not (run.ran_out or run.stopped)]
        axes.plot(
            [x for x, _ in ended],
            [overhead for _, overhead in ended],
            marker=_MARKS[number % len(_MARKS)],
            markerfacecolor="none" if number % 2 else None,
            linewidth=1.2,
            label=name if ended else f"{name}: no run ended",
        )
    labels = {"optimal": "best schedule of a chain", "chen": "Chen's square root on a chain"}
    for (name, overheads), colour in zip(chain_bounds(ops, shares).items(), (INK, GREY), strict=True):
        fits = [(x, overhead) for x, overhead in zip(places, overheads, strict=True) if overhead is not None]
        axes.plot([x for x, _ in fits], [y for _, y in fits], color=colour, linestyle="--", label=f"{labels[name]}")
    axes.set_xlabel("budget, % of the peak without one")
    axes.set_ylabel("compute, by that without recomputation")
    figure.legend(frameon=False, loc="outside right center")
    axes.margins(y=0.08)
    return finished(figure, path)
