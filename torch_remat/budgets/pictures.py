"""The picture of a budget, for which matplotlib is loaded; they survive black-and-white print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_remat._text import format_bytes
from torch_remat.budgets.steps import Eviction, Row, Step
from torch_remat.reports.pictures import GREY, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 2**20
_LANES = 16
"""How many regions have a lane: of more, those of which most was evicted."""


def draw_budget(budget: Any, step: Step | None) -> Figure:
    """Draw a step: above what regions kept, below a lane for each region, with what was evicted of it and why."""
    rows = [] if step is None else _rows(step)
    figure = new_figure(10.0, 3.4 + 0.28 * len(rows), f"Kept by regions within a budget of {budget.told}")
    heights = [3.0, 0.28 * max(len(rows), 1)]
    axes, lanes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    if step is not None:
        axes.step([x * 1e3 for x, _ in step.kept], [y / _MIB for _, y in step.kept], where="post", color=INK)
        for size, text, style in ((step.limit_bytes, "limit", ":"), (budget.budget_bytes, "budget", "--")):
            if size <= 2 * max(step.most_bytes, 1) and (text == "limit" or budget.budget_bytes != step.limit_bytes):
                axes.axhline(size / _MIB, color=INK, linestyle=style, label=f"{text}: {format_bytes(int(size))}")
                axes.legend(loc="lower center", frameon=False)
        _draw_lanes(lanes, step, rows)
    axes.set_ylabel("MiB kept")
    axes.set_ylim(bottom=0)
    lanes.set_xlabel("milliseconds of the step")
    return figure


def _rows(step: Step) -> list[Row]:
    """Return the regions that have a lane, in the order of the step."""
    most = sorted(step.rows, key=lambda row: row.evicted_bytes + row.offloaded_bytes, reverse=True)[:_LANES]
    return [row for row in step.rows if row in most]


def _draw_lanes(lanes: Axes, step: Step, rows: Sequence[Row]) -> None:
    """Draw for each region its forward, what was kept until backward, and beside it what was evicted, and why."""
    end = max([x for x, _ in step.kept] + [0.0]) * 1e3
    box: dict[str, Any] = {"height": 0.6, "edgecolor": INK}
    for lane, row in enumerate(rows):
        begun, ended = (row.begun - step.begun) * 1e3, (row.begun + row.forward_seconds - step.begun) * 1e3
        reached = (row.reached - step.begun) * 1e3 if row.reached else end
        evictions = [one for one in step.evictions if one.row is row]
        until = reached
        if row.is_empty_from_start or (evictions and row.evicted_bytes + row.offloaded_bytes >= row.saved_bytes):
            until = max([one.seconds * 1e3 for one in evictions] + [ended])
        lanes.barh(lane, ended - begun, left=begun, color=GREY, **box)
        lanes.barh(lane, until - ended, left=ended, color="white", **box)
        if row.replays:
            lanes.barh(lane, row.replay_seconds * 1e3, left=reached, color="white", hatch="////", **box)
        lanes.plot([one.seconds * 1e3 for one in evictions], [lane] * len(evictions), "v", color=INK, linestyle="none")
        beside: dict[str, Any] = {"xycoords": lanes.get_yaxis_transform(), "va": "center", "fontsize": 8}
        lanes.annotate(_why(row, evictions), (1.01, lane), **beside)
    lanes.set_yticks(range(len(rows)), [row.name for row in rows])
    lanes.set_ylim(len(rows) - 0.4, -0.6)
    parts = "grey: forward; white: kept; triangle: evicted; hatched: replay"
    lanes.set_title(parts + (f"; {len(step.rows) - len(rows)} more regions" * (len(rows) < len(step.rows))), fontsize=9)


def _why(row: Row, evictions: Sequence[Eviction]) -> str:
    """Return what was evicted of a region, and why it was that one."""
    if row.is_empty_from_start:
        return f"began empty ({format_bytes(row.saved_bytes)}): all was evicted in earlier steps"
    if not evictions:
        return f"kept {format_bytes(row.kept_bytes)}"
    freed = format_bytes(sum(one.freed_bytes for one in evictions))
    cost, idle = sum(one.replay_seconds for one in evictions), evictions[-1].idle_seconds
    return f"evicted {freed}: {cost * 1e3:.1f} ms to recompute, unused for {idle * 1e3:.1f} ms"
