"""Reports of budgets and plans as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch_remat._text import aligned, format_bytes, plural
from torch_remat.budgets.steps import Row, Step

_HEAD = ["", "calls", "kept", "evicted", "offloaded", "replays", "replay ms"]


def format_budget(budget: Any, step: Step | None) -> str:
    """Return a budget's report: sums, and a line for each region of a step."""
    lines = [format_head(budget)]
    if step is None:
        return lines[0]
    lines += _steps(list(budget.steps)[-6:], budget.step_count)
    rows = [_cells(name, rows) for name, rows in step.by_name()]
    rows.append(_cells("all", step.rows))
    lines += ["", *(f"  {line}".rstrip() for line in aligned([_HEAD, *rows], right=set(range(1, len(_HEAD)))))]
    return "\n".join(lines)


def format_head(budget: Any) -> str:
    """Return a budget in a few words."""
    reserve = f", {format_bytes(budget.reserve_bytes)} of it in reserve" if budget.reserve_bytes else ""
    return f"budget of {budget.told}{reserve}; {plural(budget.step_count, 'step')}"


def _steps(steps: Sequence[Step], last: int) -> list[str]:
    """Return a line for each of the latest steps, the last of which has this number."""
    has_peaks = any(step.peak_bytes for step in steps)
    has_more = any(step.over_bytes and step.limit_bytes > 1 for step in steps)  # "0%" asks for the least there can be
    cells = [["step", "kept at most", "evicted", "replay ms", *["peak"] * has_peaks, *[""] * has_more]]
    for number, step in enumerate(steps, last - len(steps) + 1):
        evicted, replayed = step.sum_of("evicted_bytes"), step.sum_of("replay_seconds")
        row = [str(number), format_bytes(step.most_bytes), format_bytes(evicted), f"{replayed * 1e3:.1f}"]
        if has_peaks:
            row.append(format_bytes(step.peak_bytes) if step.peak_bytes else "not measured")
        if has_more:
            share = step.over_bytes / step.limit_bytes if step.limit_bytes > 1 else 0
            row.append(f"{share:.1%} over {format_bytes(int(step.limit_bytes))}".replace("%", " %") if share else "")
        cells.append(row)
    return ["", *(f"  {line}".rstrip() for line in aligned(cells, right={1, 2, 3, 4}))]


def _cells(name: str, rows: Sequence[Row]) -> list[str]:
    sums = [sum(getattr(row, field) for row in rows) for field in ("kept_bytes", "evicted_bytes", "offloaded_bytes")]
    replays, seconds = sum(row.replays for row in rows), sum(row.replay_seconds for row in rows)
    return [name, str(len(rows)), *map(format_bytes, sums), str(replays), f"{seconds * 1e3:.1f}"]


def format_plan(entries: Iterable[tuple[str, Any]]) -> str:
    """Return a plan as a list of prices."""
    cells = []
    for name, entry in entries:
        what = f"keeps {format_bytes(entry.kept_bytes)}, spares {entry.spared_seconds * 1e3:.1f} ms"
        if entry.evicted_tensors:
            what += f"; evicts {entry.evicted_tensors} of {entry.saved_tensors} saved tensors"
        cells.append(f"{name}: {what}")
    return "\n".join(cells)
