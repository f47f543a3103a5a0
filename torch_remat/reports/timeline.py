"""The trace that users get: its data, and every form in which it is shown."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_remat.reports.html import trace_as_html
from torch_remat.reports.pictures import plot_trace
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


def _chrome_events(trace: Timeline) -> list[dict[str, Any]]:
    """Return a trace's events: spans, changes of live bytes, what budgets gave up, and names."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": "torch_remat"}}
    ]
    events += [
        {
            "ph": "X",
            "name": f"{span.name} [{span.phase}]",
            "cat": span.phase,
            "pid": _PROCESS,
            "tid": span.thread,
            "ts": span.start_us,
            "dur": span.duration_us,
            "args": {name: getattr(span, name) for name in _SHOWN},
        }
        for span in trace.spans
    ]
    events += [
        {"ph": "C", "name": "live bytes", "pid": _PROCESS, "tid": 0, "ts": sample.time_us, "args": sample.live_bytes}
        for sample in trace.samples
    ]
    events += [
        {
            "ph": "i",
            "name": f"{one.region} [given up]",
            "s": "p",
            "pid": _PROCESS,
            "tid": 0,
            "ts": one.time_us,
            "args": {"bytes": one.bytes, "offloaded_bytes": one.offloaded_bytes, "kept_bytes": one.kept_bytes},
        }
        for one in trace.given_up
    ]
    return events
