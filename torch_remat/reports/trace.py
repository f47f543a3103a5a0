"""`trace`: what regions and ops do over a step, with times and bytes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

from torch_remat._compat import ProfilerRange, any_profiler_runs, eager_only
from torch_remat.errors import UsageError
from torch_remat.reports.html import trace_as_html
from torch_remat.reports.observer import observed_by
from torch_remat.reports.pictures import plot_trace
from torch_remat.reports.profile import spans_and_samples
from torch_remat.reports.recorder import MARK, Recorder
from torch_remat.reports.spans import Timeline
from torch_remat.reports.text import format_trace, headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PROCESS = 1
_SHOWN = ["call", "kept_bytes", "offloaded_bytes", "allocated_bytes", "freed_bytes", "live_bytes", "peak_bytes"]


class Trace(Timeline):
    """What `torch_remat.trace` has recorded. It is empty until the ``with`` block has been left.

    Attributes:
        spans: Phases of regions and ops, in the order in which they began.
        samples: Live bytes, in order.
        given_up: What budgets gave up, in order.
        budgets: How budgets stood at the end.
        duration_us: How long the trace took.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as dicts, lists, strings and numbers."""
        self.checked()
        return {
            "duration_us": self.duration_us,
            "spans": [asdict(span) for span in self.spans],
            "samples": [asdict(sample) for sample in self.samples],
            "given_up": [asdict(one) for one in self.given_up],
            "budgets": [asdict(one) for one in self.budgets],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict` as JSON.

        Args:
            indent: Spaces for each level, or None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write a file that Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open: spans, and live bytes as a curve.

        Args:
            path: Where to; the usual ending is ``.json``.
        """
        Path(path).write_text(json.dumps({"traceEvents": _chrome_events(self.checked()), "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        """Return a table: a line for each region, and each op in it, with times and bytes."""
        return format_trace(self.checked())

    def __repr__(self) -> str:
        """Return the line above the table; it may be asked for while the trace still records."""
        return f"<remat trace: {headline(self) if self._over else 'it still records'}>"

    def _repr_html_(self) -> str:
        return trace_as_html(self) if self._over else "<p>it still records</p>"

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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    result.fill(*spans_and_samples(events, recorder.marks, recorder.given), recorder.budgets())


def _chrome_events(trace: Timeline) -> list[dict[str, Any]]:
    """Return a trace's events: spans, changes of live bytes, what budgets gave up, and names."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": "torch_remat"}}
    ]
    for span in trace.spans:
        args = {name: getattr(span, name) for name in _SHOWN}
        times = {"ts": span.start_us, "dur": span.duration_us}
        what = {"ph": "X", "name": f"{span.name} [{span.phase}]", "cat": span.phase}
        events.append({**what, "pid": _PROCESS, "tid": span.thread, **times, "args": args})
    events += [
        {"ph": "C", "name": "live bytes", "pid": _PROCESS, "tid": 0, "ts": sample.time_us, "args": sample.live_bytes}
        for sample in trace.samples
    ]
    for one in trace.given_up:
        args = {"bytes": one.bytes, "offloaded_bytes": one.offloaded_bytes, "kept_bytes": one.kept_bytes}
        what = {"ph": "i", "name": f"{one.region} [given up]", "s": "p"}
        events.append({**what, "pid": _PROCESS, "tid": 0, "ts": one.time_us, "args": args})
    return events
