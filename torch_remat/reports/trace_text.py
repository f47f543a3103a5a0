"""A trace as a table: a line for each region, and below it one for each of its ops; layers that are alike as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_remat.reports.fold import fold_series
from torch_remat.reports.spans import Phase, Span, Timeline
from torch_remat.reports.text import aligned, format_bytes

_PHASES: tuple[Phase, ...] = ("forward", "replay", "backward")
_HEAD = [
    "",
    "calls",
    "forward ms",
    "replay ms",
    "backward ms",
    "kept",
    "offloaded",
    "freed in backward",
    "live",
    "peak",
]
_OFFLOADED = _HEAD.index("offloaded")
LEGEND = "times and bytes are means of the calls; live: at most after forward; peak: at most at any moment"


@dataclass
class _Line:
    """What a line of the table sums over."""

    calls: set[int] = field(default_factory=set)
    us: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    freed_bytes: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0

    def add(self, span: Span) -> None:
        self.calls.add(span.call)
        self.us[span.phase] += span.duration_us
        self.kept_bytes += span.kept_bytes
        self.offloaded_bytes += span.offloaded_bytes
        self.peak_bytes = max(self.peak_bytes, span.peak_bytes)
        if span.phase == "forward":
            self.live_bytes = max(self.live_bytes, span.live_bytes)
        if span.phase == "backward":
            self.freed_bytes += span.freed_bytes

    def cells(self) -> list[str]:
        count = len(self.calls)
        times = [f"{self.us[phase] / count / 1000:.3f}" if self.us[phase] else "-" for phase in _PHASES]
        ran, freed = self.us["forward"], self.us["backward"]
        sums = ((self.kept_bytes, ran), (self.offloaded_bytes, ran), (self.freed_bytes, freed))
        cells = [format_bytes(value // count) if known else "-" for value, known in sums]
        live = format_bytes(self.live_bytes) if ran else "-"
        return [str(count), *times, *cells, live, format_bytes(self.peak_bytes)]


def format_trace(trace: Timeline) -> str:
    """Return a trace as text; see `Trace.__str__`."""
    lines = [headline(trace)]
    if rows := table(trace):
        lines += ["", *aligned(rows, right=set(range(1, len(rows[0])))), LEGEND]
    return "\n".join(lines)


def table(trace: Timeline) -> list[list[str]]:
    """Return the cells of a trace's table, its head first; nothing if no region ran. Ops are indented."""
    groups = _groups(trace.spans)
    if not groups:
        return []
    rows = [_HEAD]
    for label, spans in groups:
        rows += _rows(label, spans)
    if not any(span.offloaded_bytes for span in trace.spans):
        rows = [[*row[:_OFFLOADED], *row[_OFFLOADED + 1 :]] for row in rows]
    return rows


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


def _shape(spans: Sequence[Span]) -> list[tuple[str, str, int, int]]:
    """Return what must be alike: which ops ran in which phase, and what they keep."""
    return sorted(
        {
            (span.op or "", span.phase, span.kept_bytes, span.offloaded_bytes)
            for span in spans
            if span.phase != "backward"
        }
    )


def _rows(label: str, spans: Sequence[Span]) -> list[list[str]]:
    lines: dict[str | None, _Line] = {None: _Line()}
    for span in sorted(spans, key=lambda span: span.start_us):
        lines.setdefault(span.op, _Line()).add(span)
    return [[label if op is None else f"  {op}", *line.cells()] for op, line in lines.items()]
