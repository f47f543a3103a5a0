"""A trace in the format that Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

from typing import Any

from torch_remat.reports.timeline import Trace

_PROCESS = 1


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """Return a trace's events: one for each span, one for each change of live bytes, and names."""
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
            "args": {
                "call": span.call,
                "kept_bytes": span.kept_bytes,
                "offloaded_bytes": span.offloaded_bytes,
                "allocated_bytes": span.allocated_bytes,
                "freed_bytes": span.freed_bytes,
                "live_bytes": span.live_bytes,
                "peak_bytes": span.peak_bytes,
            },
        }
        for span in trace.spans
    ]
    events += [
        {"ph": "C", "name": "live bytes", "pid": _PROCESS, "tid": 0, "ts": sample.time_us, "args": sample.live_bytes}
        for sample in trace.samples
    ]
    return events
