"""Memory reports and traces as text, for terminals: aligned columns, layers that are alike told once.

A trace has a line for each region, and below it one for each of its ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch_remat.reports.data import KeptForBackward, KeptTensor, NodeReport, RegionReport, Sums
from torch_remat.reports.fold import fold, fold_series
from torch_remat.reports.spans import GivenUp, Phase, Span, Timeline

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_PHASES: tuple[Phase, ...] = ("forward", "replay", "backward")
_TIMES = [f"{phase} ms" for phase in _PHASES]
_TRACE_HEAD = ["", "calls", *_TIMES, "kept", "given up", "offloaded", "freed in backward", "live", "peak"]
_MOST_GIVEN = 12
"""How many lines tell what budgets gave up."""
LEGEND = "times and bytes are means of the calls; live: at most after forward; peak: at most at any moment"


def format_bytes(count: int) -> str:
    """Return bytes with a binary unit: ``512 B``, ``24.0 MiB``."""
    return _scaled(count, *unit_of(count))


def format_flops(count: int) -> str:
    """Return floating-point operations with a decimal unit: ``134.2 MFLOP``."""
    return _scaled(count, *unit_of(count, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")))


def unit_of(count: int, base: int = 1024, units: Sequence[str] = _BYTES) -> tuple[int, str]:
    """Return the unit in which a number reads best: how many of the smallest it is, and its name."""
    place = 0
    while abs(count) >= base ** (place + 1) and place < len(units) - 1:
        place += 1
    return base**place, units[place]


def _scaled(count: int, unit: int, name: str) -> str:
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} {name}"


def format_region(region: RegionReport) -> str:
    """Return one region's report."""
    return "\n".join(_group_lines(region.name, [region]))


def format_report(report: KeptForBackward) -> str:
    """Return a whole report, with layers that are alike told once."""
    lines = [f"kept for backward: {sum_of([report])}"]
    if len(report.bytes_by_device) > 1:
        parts = (f"{device} {format_bytes(count)}" for device, count in report.bytes_by_device.items())
        lines.append(f"  by device: {', '.join(parts)}")
    for name, existing in (("parameters", report.parameters), ("buffers", report.buffers)):
        if existing.count:
            lines.append(f"{name}, apart: {format_bytes(existing.bytes)} in {existing.count}")
    lines += report.budgets
    if report.regions:
        lines += ["", f"in {plural(len(report.regions), 'region')}: {sum_of(report.regions)}"]
    for group in fold(report.regions):
        lines += [f"  {line}" for line in _group_lines(*group)]
    if report.outside:
        lines += ["", f"outside of regions: {sum_of(report.outside)}"]
        lines += [f"  {line}" for line in aligned([_node_cells(node) for node in report.outside], right={1})]
    return "\n".join(lines)


def _group_lines(label: str, regions: Sequence[RegionReport]) -> list[str]:
    """Return regions that are alike, as one: a line for the sum, and one for each tensor."""
    region, count = regions[0], len(regions)
    head = f"{label}: {sum_of([region])}"
    if count > 1:
        head += f" each, {sum_of(regions)} in {count}"
    rows = [_cells(tensor, tensor.label) for tensor in region.tensors]
    for op in region.ops:
        rows += [_cells(tensor, f"{op.name}.{tensor.label}") for tensor in op.tensors]
        if not op.tensors:
            rows.append([op.name, "0 B", "", op.policy])
    return [head, *(f"  {line}" for line in aligned(rows, right={1}))]


def aligned(rows: Sequence[Sequence[str]], right: set[int] | None = None) -> list[str]:
    """Return rows as lines with columns of one width; those in ``right`` are aligned to the right."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in (right or ()) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def describe(tensor: KeptTensor) -> str:
    """Return dtype, shape and device: ``float32[4, 16] cpu``."""
    return f"{tensor.dtype}{list(tensor.shape)} {tensor.device}"


def remarks(tensor: KeptTensor) -> str:
    """Return why a tensor is kept, and with which others it shares its storage."""
    parts: list[str] = [tensor.kind if tensor.kind != "saved" else ""]
    if tensor.kind == "kept for replay":
        parts = ["for replay"]
    elif tensor.kind == "undecided":
        parts = ["the end of forward decides"]
    if tensor.aliases:
        parts.append(f"also {', '.join(tensor.aliases)}")
    if tensor.shared_with is not None:
        parts.append(f"counted as {tensor.shared_with}")
    if tensor.offloaded:
        parts.append("offloaded")
    return ", ".join(part for part in parts if part)


def _cells(tensor: KeptTensor, label: str) -> list[str]:
    note = ", ".join(part for part in (tensor.policy, remarks(tensor)) if part)
    return [label, format_bytes(tensor.bytes), describe(tensor), note]


def _node_cells(node: NodeReport) -> list[str]:
    labels = list(dict.fromkeys(tensor.label for tensor in node.tensors))
    shown = ", ".join(labels[:4]) + (", ..." if len(labels) > 4 else "")
    return [node.node, sum_of([node]), f"{plural(node.count, 'node')}: {shown}"]


def format_sum(bytes_kept: int, offloaded_bytes: int) -> str:
    """Return bytes in place and elsewhere: ``24.0 MiB + 8.0 MiB offloaded``."""
    more = f" + {format_bytes(offloaded_bytes)} offloaded" if offloaded_bytes else ""
    return f"{format_bytes(bytes_kept)}{more}"


def sum_of(parts: Sequence[Sums | GivenUp]) -> str:
    """Return the same of parts of a report, together."""
    return format_sum(sum(part.bytes for part in parts), sum(part.offloaded_bytes for part in parts))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 op``, ``2 ops``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_trace(trace: Timeline) -> str:
    """Return a trace as text; see `Trace.__str__`."""
    lines = [headline(trace)]
    if rows := table(trace):
        lines += ["", *aligned(rows, right=set(range(1, len(rows[0])))), LEGEND]
    return "\n".join([*lines, *_budget_lines(trace)])


def budgets_told(trace: Timeline) -> list[str]:
    """Return a line for each budget that regions of a trace are in."""
    return [
        f"budget of {format_bytes(one.budget_bytes)}, limit {format_bytes(one.limit_bytes)}: "
        f"{format_bytes(one.kept_bytes)} kept by its regions at the end"
        for one in trace.budgets
    ]


def _budget_lines(trace: Timeline) -> list[str]:
    """Return what budgets gave up, a line each, and how they stood."""
    lines = [f"  {line}" for line in aligned([_given_cells(one) for one in trace.given_up[:_MOST_GIVEN]], right={0, 2})]
    if len(trace.given_up) > _MOST_GIVEN:
        rest = trace.given_up[_MOST_GIVEN:]
        lines.append(f"  and {len(rest)} more times: {sum_of(rest)}")
    told = budgets_told(trace)
    return ["", *told, *(["given up:"] if lines else []), *lines] if told else []


def _given_cells(one: GivenUp) -> list[str]:
    places = one.saved_tensors
    which = f"saved tensor{'s' * (len(places) > 1)} {_ranges(places)}"
    left = f"{format_bytes(one.kept_bytes)} kept then"
    return [f"{one.time_us / 1000:.1f} ms", one.region, sum_of([one]), which, left]


def _ranges(places: Sequence[int]) -> str:
    """Return places in few words: ``0-2, 5``."""
    runs = [[place for _, place in run] for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def table(trace: Timeline) -> list[list[str]]:
    """Return the cells of a trace's table, its head first; nothing if no region ran. Ops are indented."""
    groups = _groups(trace.spans)
    if not groups:
        return []
    rows = [_TRACE_HEAD]
    for label, spans in groups:
        lines: dict[str | None, list[Span]] = {None: []}
        for span in sorted(spans, key=lambda span: span.start_us):
            lines.setdefault(span.op, []).append(span)
        calls = {span.call for span in spans}
        given = [one for one in trace.given_up if one.call in calls]
        for op, line in lines.items():
            cells = _trace_cells(line, given if op is None else [])
            rows.append([label if op is None else f"  {op}", *cells])
    offloads = any(one.offloaded_bytes for part in (trace.spans, trace.given_up) for one in part)
    is_there = {"given up": bool(trace.given_up), "offloaded": offloads}
    shown = [place for place, title in enumerate(_TRACE_HEAD) if is_there.get(title, True)]
    return [[row[place] for place in shown] for row in rows]


def where(trace: Timeline, time_us: float) -> str:
    """Return what ran at a moment: ``the replay of layers.7::attention``."""
    running = trace.spans_at(time_us)
    return f"the {running[-1].phase} of {running[-1].name}" if running else "no region"


def headline(trace: Timeline) -> str:
    """Return how long a trace took, when the most bytes were alive, and how many were in the end."""
    text = f"{trace.duration_us / 1000:.1f} ms"
    if trace.peak is None:
        return f"{text}, nothing allocated"
    last = trace.samples[-1].total_bytes
    return (
        f"{text}, peak {format_bytes(trace.peak.total_bytes)} at {trace.peak.time_us / 1000:.1f} ms in "
        f"{where(trace, trace.peak.time_us)}, {format_bytes(last)} alive at the end"
    )


def _groups(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Return spans by region, regions in a row that are alike as one, in the order of forward."""
    by_region: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.call):
        by_region.setdefault(span.region, []).append(span)
    groups = fold_series(list(by_region), lambda name: name, lambda name: _shape(by_region[name]))
    return [(label, [span for name in names for span in by_region[name]]) for label, names in groups]


def _shape(spans: Sequence[Span]) -> set[tuple[str | None, Phase, int, int]]:
    """Return what must be alike: which ops ran in which phase, and what they keep."""
    ran = [span for span in spans if span.phase != "backward"]
    return {(span.op, span.phase, span.kept_bytes, span.offloaded_bytes) for span in ran}


def _trace_cells(spans: Sequence[Span], given: Sequence[GivenUp]) -> list[str]:
    count = len({span.call for span in spans})
    of = {phase: [span for span in spans if span.phase == phase] for phase in _PHASES}
    ran, after = of["forward"], of["backward"]

    def mean(sizes: Sequence[int]) -> str:
        return format_bytes(sum(sizes) // count) if sizes else "-"

    return [
        str(count),
        *(f"{sum(one.duration_us for one in of[p]) / count / 1000:.3f}" if of[p] else "-" for p in _PHASES),
        mean([span.kept_bytes for span in ran]),
        mean([one.bytes for one in given]),
        mean([*(span.offloaded_bytes for span in ran), *(one.offloaded_bytes for one in given)]),
        mean([span.freed_bytes for span in after]),
        format_bytes(max(span.live_bytes for span in ran)) if ran else "-",
        format_bytes(max((span.peak_bytes for span in spans), default=0)),
    ]
