"""Formats results as aligned markdown tables; writes into documents, and prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .bars import TimeVerdict, Verdict, us_per_saved_tensor
from .contenders import FLOOR, NONE, OURS, before
from .measure import Result, quartiles

MARKS = ("<!-- figures -->", "<!-- end of figures -->")
"""Between these lines of a document figures are written."""


def write_between(document: Path, texts: Sequence[str]) -> None:
    """Put texts between the two marks in a document."""
    text = document.read_text()
    start, end = (text.find(mark) for mark in MARKS)
    if not 0 <= start < end:
        raise SystemExit(f"{document} has no lines {MARKS[0]} and {MARKS[1]} to write between")
    before, after = text[: start + len(MARKS[0])], text[end:]
    document.write_text("\n\n".join([before, *texts, after]))


def contenders_table(result: Result) -> str:
    """Return one workload's table: a row for each contender."""
    ours = result.ours
    ratio = f"{ours} / it"
    header = ["contender", "us/step", "quartiles", ratio, "quartiles", "over floor, us", "retained B", "peak B"]
    rows = []
    for name, measurement in result.measurements.items():
        low, high = quartiles(list(measurement.samples_us))
        ratio_low, ratio_high = result.ratio_quartiles(ours, name)
        rows.append(
            [
                name,
                f"{measurement.median_us:,.1f}",
                f"{low:,.1f} - {high:,.1f}",
                f"{result.ratio(ours, name):.3f}",
                f"{ratio_low:.3f} - {ratio_high:.3f}",
                f"{result.over_floor_us(name):,.1f}",
                f"{measurement.retained_bytes:,}",
                f"{measurement.peak_bytes:,}",
            ]
        )
    workload = result.workload
    ideal = workload.ideal_retained_bytes
    about = workload.about if ideal is None else f"{workload.about}; ideal retained: {ideal:,} B"
    missing = "".join(f"\n\n{name} could not run: {reason}" for name, reason in result.failed.items())
    return f"### {workload.name}\n\n{about}\n\n{markdown(header, rows)}{missing}"


def replayed_table(result: Result) -> str | None:
    """Return how often replay runs each op, by contender, or None if that was not counted."""
    if not result.replayed:
        return None
    ops = sorted({op for counts in result.replayed.values() for op in counts})
    rows = [
        [name, *(str(counts.get(op, 0)) for op in ops), str(sum(counts.values()))]
        for name, counts in result.replayed.items()
    ]
    return f"ops that replay runs:\n\n{markdown(['contender', *ops, 'sum'], rows)}"


def saved_tensors_table(results: Mapping[str, Result]) -> str | None:
    """Return the cost of a saved tensor by their number, or None if fewer than two sizes were measured.

    The last two columns split the cost into a region's and a tensor's share, from the smallest and largest size.
    """
    counts = list(us_per_saved_tensor(results, OURS))
    if len(counts) < 2:
        return None
    header = ["us over floor / tensor", *(f"{count:,}" for count in counts), "us/region", "us/tensor"]
    few, many = counts[0], counts[-1]
    rows = []
    contenders = next(result.measurements for result in results.values() if result.workload.saved_tensors)
    for name in contenders:
        if name in (NONE, FLOOR):
            continue
        costs = us_per_saved_tensor(results, name)
        each = (costs[many] * many - costs[few] * few) / (many - few)
        fixed = (costs[few] - each) * few
        rows.append([name, *(f"{cost:.2f}" for cost in costs.values()), f"{fixed:.1f}", f"{each:.2f}"])
    return f"### saved tensors in one region\n\n{markdown(header, rows)}"


def times_table(verdicts: Sequence[TimeVerdict]) -> str:
    """Return all ratios that there is a bar for: what they must be, what they should, and whether they are."""
    header = ["", "ours", "to", "ratio", "quartiles", "must", "aim"]
    rows = []
    for each in verdicts:
        ratio, low, high = each.ratio or (0.0, 0.0, 0.0)
        measured = [f"{ratio:.3f}", f"{low:.3f} - {high:.3f}"] if each.ratio else ["", ""]
        limits = [_limit(limit) for limit in (each.bar.must, each.bar.aim)]
        rows.append([each.status, each.label, each.peer, *measured, *limits])
    reasons = [f"{each.label} could not run: {each.failed}" for each in verdicts if each.failed]
    return "\n\n".join(["### ratios of times", markdown(header, rows, left=3), *reasons])


def _limit(limit: float | None) -> str:
    """Return a limit with two digits, or as many as it has."""
    return "" if limit is None else max(f"{limit:.2f}", f"{limit}", key=len)


def verdicts_table(verdicts: Sequence[Verdict], *, only_failed: bool) -> str:
    """Return the other bars, each with what was measured, or only how many pass and those that do not."""
    shown = [verdict for verdict in verdicts if not (only_failed and verdict.passed)]
    passed = sum(verdict.passed for verdict in verdicts)
    rows = [["pass" if verdict.passed else "FAIL", verdict.bar, verdict.measured] for verdict in shown]
    table = f"\n\n{markdown(['', 'bar', 'measured'], rows, left=3)}" if rows else ""
    return f"### bytes, ops in replay, time that does not grow: {passed} of {len(verdicts)} bars pass{table}"


def before_table(results: Mapping[str, Result]) -> str | None:
    """Return how much of its own time before each of ours takes, or None where no other checkout took part."""
    rows = []
    for name, result in results.items():
        for ours in result.measurements:
            if before(ours) != ours and before(ours) in result.measurements:
                low, high = result.ratio_quartiles(ours, before(ours))
                now, then = result.measurements[ours], result.measurements[before(ours)]
                rows.append([
                    name, ours, f"{result.ratio(ours, before(ours)):.3f}", f"{low:.3f} - {high:.3f}",
                    f"{now.retained_bytes:,}", f"{then.retained_bytes:,}",
                    f"{now.peak_bytes:,}", f"{then.peak_bytes:,}",
                ])  # fmt: skip
    header = ["workload", "", "now / before", "quartiles", "retained B", "before", "peak B", "before"]
    return f"### now and before\n\n{markdown(header, rows, left=2)}" if rows else None


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table, aligned in plain text too: the first ``left`` columns to the left, others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths) if width]
    return "\n".join([line(header), f"| {' | '.join(rule)} |", *map(line, rows)])
