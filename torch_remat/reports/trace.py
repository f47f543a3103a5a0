"""`trace`: what regions and ops do over a step, with times and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

from torch_remat._compat import ProfilerRange, any_profiler_runs, eager_only
from torch_remat.dispatch.observe import observed_by
from torch_remat.errors import UsageError
from torch_remat.reports.pictures import plot_trace
from torch_remat.reports.profile import events_in, timeline_of
from torch_remat.reports.recorder import MARK, Recorder
from torch_remat.reports.report import Block, Report
from torch_remat.reports.spans import Timeline
from torch_remat.reports.text import headline, trace_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RECORDS = "it still records"


@dataclass(eq=False, repr=False)
class Trace(Timeline, Report):
    """What `torch_remat.trace` has recorded. It is empty until the ``with`` block has been left.

    Attributes:
        duration_us: How long the trace took.
        spans: Phases of regions and ops, in the order in which they began.
        samples: Live bytes, in order.
        given_up: What budgets gave up, in order.
        budgets: How budgets stood at the end.
        phases: When autograd's engine ran (``"backward"``) and optimizers did, with begin and end in microseconds; the
            rest is forward.
    """

    def fill(self, recorded: Timeline) -> None:
        """Take what was recorded."""
        self.__dict__.update(recorded.__dict__, _is_over=True)

    def checked(self) -> Timeline:
        """Return the trace itself, if it is over.

        Raises:
            UsageError: It still records.
        """
        if not hasattr(self, "_is_over"):
            raise UsageError(
                "the trace has not ended yet", remedy="Leave the `with remat.trace() as trace:` block first."
            )
        return self

    def blocks(self) -> list[Block]:
        """Return a table: a line for each region, and each op in it, with times and bytes."""
        return trace_blocks(self.checked())

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as dicts, lists, strings and numbers."""
        self.checked()
        return super().to_dict()

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write a file that Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open: spans, and live bytes as a curve.

        Args:
            path: Where to; the usual ending is ``.json``.
        """
        self.checked()
        Path(path).write_text(json.dumps({"traceEvents": list(_chrome_events(self)), "displayTimeUnit": "ms"}))

    def __repr__(self) -> str:
        """Return the line above the table; it may be asked for while the trace still records."""
        return f"<remat trace: {headline(self) if hasattr(self, '_is_over') else _RECORDS}>"

    def _repr_html_(self) -> str:
        return super()._repr_html_() if hasattr(self, "_is_over") else f"<p>{_RECORDS}</p>"

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw live bytes over time, and below them when the regions ran, by phase.

        Args:
            path: Where to write the picture; the ending tells the format. None writes nothing.

        Returns:
            The matplotlib figure; it is not shown.

        Raises:
            UsageError: matplotlib is not installed.
        """
        return plot_trace(self.checked(), path)


@eager_only
@contextmanager
def trace() -> Iterator[Trace]:
    """Record forward, replay and backward of each region and op inside, with every allocation.

    `torch.profiler` runs meanwhile, so each op takes some microseconds longer, and no other profiler may run. Bytes are
    exact: the allocators of all devices report each block. Blocks that were there before do not count. On an
    accelerator, times are those of the host, which runs ahead of the device. Work of Python threads other than the
    caller's and autograd's is not in the trace.

    Yields:
        The trace, to be read once the block has been left, also where an error leaves it: ``print(trace)``,
        ``trace.plot("step.png")``, ``trace.to_chrome_trace("step.json")``, ``trace.spans``. It keeps no tensor.

    Raises:
        UsageError: A profiler runs already. Its profile has the ranges of regions and ops in any case.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> x = torch.randn(64, 64, requires_grad=True)
        >>> with remat.trace() as trace:
        ...     remat.checkpoint(region_name="block")(torch.sin)(x * 2).sum().backward()
        >>> [span.phase for span in trace.spans]
        ['forward', 'replay', 'backward']
    """
    if any_profiler_runs():
        raise UsageError(
            "trace() needs torch.profiler, and a profiler runs already",
            remedy="Use one of them: a profile has ranges of regions and ops (`remat::region::op [replay]`) as well.",
        )
    result, recorder = Trace(), Recorder()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    try:
        with profiler, observed_by(recorder), ProfilerRange(f"{MARK}all"):
            try:
                yield result
            finally:
                recorder.look_for_gone()
    except BaseException:
        with suppress(Exception):  # what happened up to the error; the error itself must pass
            _read(profiler, recorder, result)
        raise
    _read(profiler, recorder, result)


def _read(profiler: profile, recorder: Recorder, result: Trace) -> None:
    profiled: Any = profiler.profiler
    events = events_in(profiled.kineto_results.experimental_event_tree())
    recorded = timeline_of(events, recorder.marks, recorder.given)
    recorded.budgets = recorder.budgets()
    result.fill(recorded)


def _chrome_events(trace: Timeline) -> Iterator[dict[str, Any]]:
    """Yield a trace's events: spans, changes of live bytes, what budgets gave up, and names."""
    yield {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "torch_remat"}}
    for span in trace.spans:
        what = {"ph": "X", "name": f"{span.name} [{span.phase}]", "cat": span.phase, "args": asdict(span)}
        yield {**what, "pid": 1, "tid": span.thread, "ts": span.start_us, "dur": span.duration_us}
    for sample in trace.samples:
        yield {"ph": "C", "name": "live bytes", "pid": 1, "tid": 0, "ts": sample.time_us, "args": sample.live_bytes}
    for one in trace.given_up:
        what = {"ph": "i", "name": f"{one.region} [given up]", "s": "p", "args": asdict(one)}
        yield {**what, "pid": 1, "tid": 0, "ts": one.time_us}
