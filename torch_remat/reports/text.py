"""Memory reports and traces as blocks of text: aligned columns, layers that are alike told once.

A trace has a line for each region, and below it one for each of its ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch_remat._text import format_bytes, plural
from torch_remat.reports.data import KeptForBackward, KeptTensor, NodeReport, RegionReport, Sums
from torch_remat.reports.fold import fold, fold_series
from torch_remat.reports.report import Block
from torch_remat.reports.spans import GivenUp, Phase, Span, Timeline

_PHASES: tuple[Phase, ...] = ("forward", "replay", "backward")
_TIMES = [f"{phase} ms" for phase in _PHASES]
_TRACE_HEAD = ["", "calls", *_TIMES, "kept", "given up", "offloaded", "freed in backward", "live", "peak"]
_MOST_GIVEN = 12
"""How many lines tell what budgets gave up."""
_LEGEND = "times and bytes are means of the calls; live: at most after forward; peak: at most at any moment"


def report_blocks(report: KeptForBackward) -> list[Block]:
    """Return a whole report, with layers that are alike told once."""
    lines = [f"kept for backward: {sum_of([report])}"]
    if len(report.bytes_by_device) > 1:
        parts = (f"{device} {format_bytes(count)}" for device, count in report.bytes_by_device.items())
        lines.append(f"  by device: {', '.join(parts)}")
    for name, existing in (("parameters", report.parameters), ("buffers", report.buffers)):
        if existing.count:
            lines.append(f"{name}, apart: {format_bytes(existing.bytes)} in {existing.count}")
    if report.older:
        alive = f"{sum_of(report.older)} in {plural(len(report.older), 'region')}"
        lines.append(f"older graphs that are alive: {alive}")
    lines += report.budgets
    if report.regions:
        lines += ["", f"in {plural(len(report.regions), 'region')}: {sum_of(report.regions)}"]
    blocks = [Block(lines), *(region_block(*group, indent=2) for group in fold(report.regions))]
    if report.outside:
        head = ["", f"outside of regions: {sum_of(report.outside)}"]
        blocks.append(Block(head, [_node_cells(node) for node in report.outside], indent=2))
    return blocks


def region_block(label: str, regions: Sequence[RegionReport], indent: int = 0) -> Block:
    """Return regions that are alike, as one: a line for the sum, and a row for each tensor."""
    region, count = regions[0], len(regions)
    head = f"{' ' * indent}{label}: {sum_of([region])}"
    if count > 1:
        head += f" each, {sum_of(regions)} in {count}"
    rows = [_cells(tensor, tensor.label) for tensor in region.tensors]
    for op in region.ops:
        rows += [_cells(tensor, f"{op.name}.{tensor.label}") for tensor in op.tensors]
        if not op.tensors:
            rows.append([op.name, "0 B", "", op.policy])
    return Block([head], rows, indent=indent + 2)


def _cells(tensor: KeptTensor, label: str) -> list[str]:
    """Return the cells of a tensor's row; the last tells why it is kept, and what shares its storage."""
    why = {"saved": "", "kept for replay": "for replay", "undecided": "the end of forward decides"}
    notes = [tensor.policy, why.get(tensor.kind, tensor.kind)]
    if tensor.aliases:
        notes.append(f"also {', '.join(tensor.aliases)}")
    if tensor.shared_with is not None:
        notes.append(f"counted as {tensor.shared_with}")
    if tensor.offloaded:
        notes.append("offloaded")
    what = f"{tensor.dtype}{list(tensor.shape)} {tensor.device}"
    return [label, format_bytes(tensor.bytes), what, ", ".join(note for note in notes if note)]


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


def trace_blocks(trace: Timeline) -> list[Block]:
    """Return a trace: what ran, what budgets gave up, a line each, and how they stood."""
    blocks = [Block([headline(trace)])]
    if rows := _table(trace):
        blocks += [Block([""], rows, range(1, len(rows[0]))), Block([_LEGEND])]
    if trace.budgets:
        told = [
            f"budget of {format_bytes(one.budget_bytes)}, limit {format_bytes(one.limit_bytes)}: "
            f"{format_bytes(one.kept_bytes)} kept by its regions at the end"
            for one in trace.budgets
        ]
        given, rest = trace.given_up[:_MOST_GIVEN], trace.given_up[_MOST_GIVEN:]
        blocks.append(Block(["", *told, *(["given up:"] if given else [])], list(map(_given_cells, given)), (0, 2), 2))
        if rest:
            blocks.append(Block([f"  and {len(rest)} more times: {sum_of(rest)}"]))
    return blocks


def _given_cells(one: GivenUp) -> list[str]:
    places = one.saved_tensors
    runs = [[place for _, place in run] for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])]
    ranges = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    which = f"saved tensor{'s' * (len(places) > 1)} {ranges}"
    left = f"{format_bytes(one.kept_bytes)} kept then"
    return [f"{one.time_us / 1000:.1f} ms", one.region, sum_of([one]), which, left]


def _table(trace: Timeline) -> list[list[str]]:
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


def headline(trace: Timeline) -> str:
    """Return how long a trace took, when the most bytes were alive, and how many were in the end."""
    text = f"{trace.duration_us / 1000:.1f} ms"
    if trace.peak is None:
        return f"{text}, nothing allocated"
    last = trace.samples[-1].total_bytes
    return (
        f"{text}, peak {format_bytes(trace.peak.total_bytes)} at {trace.peak.time_us / 1000:.1f} ms in "
        f"{trace.at(trace.peak.time_us)}, {format_bytes(last)} alive at the end"
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
