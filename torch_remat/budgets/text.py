"""Reports of budgets and plans as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch_remat._util.text import aligned, format_bytes, plural
from torch_remat.budgets.price import Choice
from torch_remat.budgets.steps import Row, Step, ms_per_mib

_HEAD = ["", "calls", "kept", "of", "recomputed", "ms", "replay ms", "keeps, and runs again"]
_SHOWN = 3  # names of calls in a line
_NOTHING = "nothing"


def format_steps(steps: Sequence[Step], count: int, step: Step) -> list[str]:
    """Return lines on the latest of so many steps: sums, the price, and what each kind of region keeps and runs again.

    Args:
        steps: The latest steps.
        count: How many there were in all.
        step: The last whole one.
    """
    lines = _steps(steps[-6:], count)
    if step.choice is not None:
        lines += ["", f"  {_price(step, step.choice)}"]
    elif not step.is_known and step.limit_bytes > 1:
        lines += ["", "  the first forwards of each kind of region are recorded, and keep nothing"]
    rows = [_cells(name, rows) for name, rows in _alike(step)]
    rows.append(_cells("all", step.rows, is_sum=True))
    lines += ["", *(f"  {line}".rstrip() for line in aligned([_HEAD, *rows], right=set(range(1, len(_HEAD) - 1))))]
    return lines


def _price(step: Step, choice: Choice) -> str:
    if not choice.next_bytes:
        return "all fits: nothing is recomputed"
    if step.over_bytes and step.limit_bytes > 1 and all(_keeps(row) == _NOTHING for row in step.rows):
        return f"the limit is less than what is needed: {format_bytes(int(step.over_bytes))} more spare nothing"
    more = f"{format_bytes(choice.next_bytes)} more would spare {choice.price * choice.next_bytes / 1e6:.3g} ms a step"
    return f"price: {ms_per_mib(choice.price):.3g} ms for a MiB; {more}"


def _steps(steps: Sequence[Step], last: int) -> list[str]:
    """Return a line for each of the latest steps, the last of which has this number."""
    has_peaks = any(step.peak_bytes for step in steps)
    has_more = any(step.over_bytes and step.limit_bytes > 1 for step in steps)  # "0%" asks for the least there can be
    cells = [["step", "kept at most", "recomputed", "replay ms", *["peak"] * has_peaks, *[""] * has_more]]
    for number, step in enumerate(steps, last - len(steps) + 1):
        again = format_bytes(step.sum_of("recomputed_bytes")) if step.is_known else "not known"
        replayed = step.sum_of("replay_seconds")
        row = [str(number), format_bytes(step.most_bytes), again, f"{replayed * 1e3:.1f}"]
        if has_peaks:
            row.append(format_bytes(step.peak_bytes) if step.peak_bytes else "not measured")
        if has_more:
            share = step.over_bytes / step.limit_bytes if step.limit_bytes > 1 else 0
            row.append(f"{share:.1%} over {format_bytes(int(step.limit_bytes))}".replace("%", " %") if share else "")
        cells.append(row)
    return ["", *(f"  {line}".rstrip() for line in aligned(cells, right={1, 2, 3, 4}))]


def _alike(step: Step) -> list[tuple[str, list[Row]]]:
    """Return the regions that keep the same of one ladder, in order, with their names."""
    groups: dict[Any, list[Row]] = {}
    for row in step.rows:
        key = row.name if row.part is None else (id(row.part.ladder), id(row.rung), row.part.scale)
        groups.setdefault(key, []).append(row)
    return [(_names(list(dict.fromkeys(row.name for row in rows))), rows) for rows in groups.values()]


def _names(names: Sequence[str]) -> str:
    """Return the names of regions; of many the first and the last."""
    return ", ".join(names) if len(names) < 3 else f"{names[0]} ... {names[-1]}"


def _cells(name: str, rows: Sequence[Row], is_sum: bool = False) -> list[str]:
    sums = [sum(getattr(row, field) for row in rows) for field in ("kept_bytes", "whole_bytes", "recomputed_bytes")]
    replays, seconds = sum(row.replays for row in rows), sum(row.replay_seconds for row in rows)
    ns = sum(row.rung.ns * row.part.scale for row in rows if row.rung is not None and row.part is not None)
    told = ["" if is_sum else _keeps(rows[0])]
    return [
        name,
        str(len(rows)),
        *map(format_bytes, sums),
        f"{ns / 1e6:.1f}",
        f"{seconds * 1e3:.1f}" * bool(replays),
        *told,
    ]


def _keeps(row: Row) -> str:
    """Return what a region keeps, and what runs again, the dearest first."""
    rung = row.rung
    if row.kind is None and not row.is_plain:
        return "what its policy says"
    if row.part is None and not row.is_plain:
        return "nothing yet: it is recorded"
    if rung is None or not (rung.acts or rung.is_plain):
        return _NOTHING
    if rung.is_plain:
        return "everything: it runs as plain code"
    kept = sorted(rung.kept, key=lambda one: -one[1])
    runs = sorted(rung.runs, key=lambda one: -one[1])
    told = f"{_first([name for name, _ in kept])}; again: {_first([f'{name} {ns / 1e6:.2g} ms' for name, ns in runs])}"
    return told + (f"; evicted {format_bytes(row.lowered_bytes)}" if row.lowered_bytes else "")


def _first(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return (", ".join(names[:_SHOWN]) or "nothing") + (f" and {more} more" if more > 0 else "")


def format_plan(entries: Iterable[tuple[str, Any]]) -> str:
    """Return a plan as a list of prices."""
    cells = []
    for name, entry in entries:
        what = f"keeps {format_bytes(entry.kept_bytes)}, spares {entry.spared_seconds * 1e3:.1f} ms"
        calls = sum(map(len, entry.acts.values()))
        how = "; plain code" if entry.is_plain else f"; {plural(calls, 'call')} kept or skipped" if calls else ""
        cells.append(f"{name}: {what}{how}")
    return "\n".join(cells)
