"""`trace`: what regions and ops do over a step, with times and bytes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_remat._compat import eager_only
from torch_remat._util.text import format_bytes, unit_of
from torch_remat.errors import UsageError
from torch_remat.reports.fold import fold_series
from torch_remat.reports.pictures import GREY, INK, LIGHT, new_figure
from torch_remat.reports.report import Block, Pictured, Report
from torch_remat.reports.timeline import (
    BudgetState,
    GivenUp,
    Phase,
    Recorder,
    Sample,
    Span,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES: tuple[Phase, ...] = ("forward", "replay", "backward")
_TIMES = [f"{phase} ms" for phase in _PHASES]
_TRACE_HEAD = ["", "calls", *_TIMES, "kept", "evicted", "offloaded", "freed", "live", "peak"]
_MOST_GIVEN = 12
"""How many lines show what budgets evicted."""
_LEGEND = "means of the calls; freed: in backward; live: at most after forward; peak: at most at any moment"


_RECORDS = "it still records"
# The width of a letter in a lane, as a share of the whole.
_LETTER = 0.0075
_LANES: dict[Phase, tuple[str, str]] = {"forward": (LIGHT, ""), "replay": ("white", "////"), "backward": (GREY, "")}


@dataclass(eq=False, repr=False)
class Trace(Report, Pictured):
    """What `torch_remat.trace` has recorded. It is empty until the ``with`` block has been left.

    Attributes:
        duration_us: How long the trace took.
        spans: Phases of regions and ops, in the order in which they began.
        samples: Live bytes, in order.
        given_up: What budgets evicted in the middle of steps, in order.
        phases: When autograd's engine ran (``"backward"``) and optimizers did, with begin and end in microseconds; the
            rest is forward.
        budgets: The state of budgets at the end.
        has_compiled: Whether compiled code ran, which torch 2.13 and newer say: then bytes on the CPU are not complete.
    """

    duration_us: float = 0.0
    spans: Sequence[Span] = ()
    samples: Sequence[Sample] = ()
    given_up: Sequence[GivenUp] = ()
    phases: Sequence[tuple[str, float, float]] = ()
    budgets: Sequence[BudgetState] = ()
    has_compiled: bool = False

    _is_over = False  # no field

    def fill(self, *recorded: Any) -> None:
        """Take what was recorded, in the order of the fields."""
        told = (tuple(one) if isinstance(one, list) else one for one in recorded)
        self.__dict__.update(zip([field.name for field in fields(self)], told, strict=False), _is_over=True)

    def _check(self) -> None:
        if not self._is_over:
            remedy = "Leave the `with remat.trace() as trace:` block first."
            raise UsageError("the trace has not ended yet", remedy=remedy)

    @property
    def peak(self) -> Sample | None:
        """The moment at which the most bytes were alive; None if nothing was allocated."""
        self._check()
        return max(self.samples, key=lambda sample: sample.total_bytes, default=None)

    def spans_at(self, time_us: float) -> list[Span]:
        """Return the spans that ran at a moment, the innermost last.

        Args:
            time_us: Microseconds since the trace began.

        Raises:
            UsageError: It still records; so do all others but ``repr``.
        """
        self._check()
        running = [span for span in self.spans if span.start_us <= time_us <= span.end_us]
        return sorted(running, key=lambda span: -span.duration_us)

    def at(self, time_us: float) -> str:
        """Return what ran at a moment: ``the replay of layers.7::attention``; outside of regions ``forward``."""
        if running := self.spans_at(time_us):
            return f"the {running[-1].phase} of {running[-1].name}"
        return next((phase for phase, start, end in self.phases if start <= time_us <= end), "forward")

    def _headline(self) -> str:
        """Return how long it took, when the most bytes were alive, and how many were in the end."""
        text = f"{self.duration_us / 1000:.1f} ms"
        if (peak := self.peak) is None:
            return f"{text}, nothing allocated"
        most = f"peak {format_bytes(peak.total_bytes)} at {peak.time_us / 1000:.1f} ms in {self.at(peak.time_us)}"
        return f"{text}, {most}, {format_bytes(self.samples[-1].total_bytes)} alive at the end"

    def blocks(self) -> list[Block]:
        """Return a line for each region, and each op in it, what budgets evicted, and their state."""
        blocks = [Block([self._headline()])]
        if rows := _table(self):
            blocks += [Block([""], rows, range(1, len(rows[0]))), Block([_LEGEND])]
        if self.budgets:
            told = [
                f"budget of {format_bytes(one.budget_bytes)}, limit {format_bytes(one.limit_bytes)}: "
                f"{format_bytes(one.kept_bytes)} kept by its regions at the end"
                for one in self.budgets
            ]
            given, rest = self.given_up[:_MOST_GIVEN], self.given_up[_MOST_GIVEN:]
            head = ["", *told, *(["evicted:"] if given else [])]
            blocks.append(Block(head, list(map(_given_cells, given)), (0, 2), 2))
            if rest:
                blocks.append(Block([f"  and {len(rest)} more times: {format_bytes(sum(one.bytes for one in rest))}"]))
        if self.has_compiled:
            blocks.append(Block(["compiled code ran: what it allocates on the CPU is not counted in full"]))
        return blocks

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as dicts, lists, strings and numbers."""
        self._check()
        return super().to_dict()

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write a file that Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open: spans, and live bytes as a curve.

        Args:
            path: Where to; the usual ending is ``.json``.
        """
        self._check()
        Path(path).write_text(json.dumps({"traceEvents": list(_chrome_events(self)), "displayTimeUnit": "ms"}))

    def __repr__(self) -> str:
        """Return the line above the table; it may be asked for while the trace still records."""
        return f"<remat trace: {self._headline() if self._is_over else _RECORDS}>"

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self._is_over else f"<p>{_RECORDS}</p>"

    def draw(self) -> Figure:
        """Draw live bytes over time, and below them when the regions ran, by phase."""
        self._check()
        figure = new_figure(10.0, 5.2, "Live bytes over one trace")
        curve, lanes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.2])
        _draw_curve(self, curve)
        _draw_lanes(self, lanes)
        lanes.set_xlim(0, self.duration_us / 1000)
        lanes.set_xlabel("milliseconds")
        if curve.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return figure


@eager_only
@contextmanager
def trace() -> Iterator[Trace]:
    """Record forward, replay and backward of each region and op inside, and the bytes alive meanwhile.

    A dispatch mode runs meanwhile, so each op takes about 10 microseconds longer. It counts the storages that ops make,
    as long as they live; those that were there before do not count. What it does not see: memory that a kernel frees
    before it returns, what compiled code and other libraries allocate, tensors that no op makes, such as random states,
    and storages that are resized, as those of FSDP are. Sums of gradients, which autograd else adds up in place, count
    as new tensors.

    With CUDA the bytes are those of its allocator, which sees all of that: from the beginning on, with what was there
    before. Its peak statistics are reset. Times are those of the host, which runs ahead of the device. Work of Python
    threads other than the caller's and autograd's is not in the trace.

    Yields:
        The trace, to be read once the block has been left, also where an error leaves it: ``print(trace)``,
        ``trace.plot("step.png")``, ``trace.to_chrome_trace("step.json")``, ``trace.spans``. It keeps no tensor.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> x = torch.randn(64, 64, requires_grad=True)
        >>> with remat.trace() as trace:
        ...     remat.checkpoint(region_name="block")(torch.sin)(x * 2).sum().backward()
        >>> [span.phase for span in trace.spans]
        ['forward', 'replay', 'backward']
    """
    result, recorder = Trace(), Recorder()
    try:
        with recorder.recording():
            yield result
    finally:
        result.fill(*recorder.recorded())


def _chrome_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield a trace's events: spans, changes of live bytes, what budgets evicted, and names."""
    yield {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "torch_remat"}}
    for span in trace.spans:
        what = {"ph": "X", "name": f"{span.name} [{span.phase}]", "cat": span.phase, "args": asdict(span)}
        yield {**what, "pid": 1, "tid": span.thread, "ts": span.start_us, "dur": span.duration_us}
    for sample in trace.samples:
        yield {"ph": "C", "name": "live bytes", "pid": 1, "tid": 0, "ts": sample.time_us, "args": sample.live_bytes}
    for one in trace.given_up:
        what = {"ph": "i", "name": f"{one.region} [evicted]", "s": "p", "args": asdict(one)}
        yield {**what, "pid": 1, "tid": 0, "ts": one.time_us}


def _given_cells(one: GivenUp) -> list[str]:
    left = f"{format_bytes(one.kept_bytes)} kept then"
    return [f"{one.time_us / 1000:.1f} ms", one.region, format_bytes(one.bytes), left]


def _table(trace: Trace) -> list[list[str]]:
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
    offloads = any(one.offloaded_bytes for one in trace.spans)
    is_there = {"evicted": bool(trace.given_up), "offloaded": offloads}
    shown = [place for place, title in enumerate(_TRACE_HEAD) if is_there.get(title, True)]
    return [[row[place] for place in shown] for row in rows]


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
        mean([span.offloaded_bytes for span in ran]),
        mean([span.freed_bytes for span in after]),
        format_bytes(max(span.live_bytes for span in ran)) if ran else "-",
        format_bytes(max((span.peak_bytes for span in spans), default=0)),
    ]


def _draw_curve(trace: Trace, axes: Axes) -> None:
    peak = trace.peak
    unit, name = unit_of(peak.total_bytes if peak else 1)
    times = [0.0, *(sample.time_us / 1000 for sample in trace.samples), trace.duration_us / 1000]
    live = [0.0, *(sample.total_bytes / unit for sample in trace.samples)]
    axes.plot(times, [*live, live[-1]], drawstyle="steps-post", color=INK, linewidth=1.4)
    axes.fill_between(times, [*live, live[-1]], step="post", color="#f0f0f0")
    for span in trace.spans:
        if span.op is None and span.phase == "replay":
            start, end = span.start_us / 1000, span.end_us / 1000
            axes.axvspan(start, end, facecolor="none", hatch="////", edgecolor="#b0b0b0", linewidth=0)
    axes.set_ylabel(f"live {name}")
    marked: dict[str, Any] = {"color": GREY, "edgecolor": INK, "zorder": 3, "clip_on": False}
    if trace.given_up:
        when = [one.time_us / 1000 for one in trace.given_up]
        at = [live[bisect_right(times, time) - 1] for time in when]
        axes.scatter(when, at, label="a budget gave something up", marker="v", **marked)
    if peak is not None:
        told = f"peak {format_bytes(peak.total_bytes)}, in {trace.at(peak.time_us)}"
        axes.scatter([peak.time_us / 1000], [peak.total_bytes / unit], label="peak", marker="o", **marked)
        axes.set_title(told, loc="left", fontsize="medium", parse_math=False)  # a name may have dollar signs
        axes.set_ylim(bottom=0)


def _draw_lanes(trace: Trace, axes: Axes) -> None:
    """Draw a lane for each phase; spans inside others are lower, and those with none inside have names that fit."""
    whole = trace.duration_us or 1.0
    short = _short_names({span.region for span in trace.spans})
    for place, (phase, (fill, hatch)) in enumerate(_LANES.items()):
        spans = [span for span in trace.spans if span.op is None and span.phase == phase]
        for span in spans:
            inside = [one for one in spans if span.start_us <= one.start_us and one.end_us <= span.end_us]
            depth = sum(one.start_us <= span.start_us and span.end_us <= one.end_us for one in spans) - 1
            bar: dict[str, Any] = {"color": fill, "hatch": hatch, "edgecolor": INK, "linewidth": 0.7}
            start, width = span.start_us / 1000, span.duration_us / 1000
            axes.barh(place, width, left=start, height=0.7 ** (depth + 1), **bar)
            names = (span.region, short[span.region], span.region.rpartition(".")[2])
            label = next((one for one in names if span.duration_us / whole > _LETTER * (len(one) + 1)), None)
            if label is not None and len(inside) == 1:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if hatch else None
                look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box, "parse_math": False}
                axes.text(start + width / 2, place, label, **look)
    axes.set_yticks(range(len(_LANES)), list(_LANES))
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _short_names(names: Collection[str]) -> dict[str, str]:
    """Return names without the parts that all begin or end with: ``layers.0.attention`` becomes ``0``."""
    parts = {name: name.split(".") for name in names}
    for end in (0, -1):
        while len({one[end] for one in parts.values()}) == 1 and min(map(len, parts.values())) > 1:
            for one in parts.values():
                del one[end]
    return {name: ".".join(one) for name, one in parts.items()}
