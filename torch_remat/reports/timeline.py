"""What a trace says, as plain data: spans of regions and ops, and the bytes alive over time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch_remat.errors import UsageError, qualified_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Phase = Literal["forward", "replay", "backward"]


@dataclass(frozen=True)
class Span:
    """One phase of a region or of an op in it, or a part of a phase that other work has cut in two.

    Attributes:
        region: The region's name.
        op: The op's name; None for the region itself.
        phase: ``"forward"``, ``"replay"`` or ``"backward"``.
        call: Which call of a region it belongs to; calls count from 0, in the order of forward.
        start_us: When it began, in microseconds since the trace began.
        duration_us: How long it took. Spans of ops lie within that of their region.
        thread: The thread's number in the system.
        allocated_bytes: Bytes allocated meanwhile, on all devices.
        freed_bytes: Bytes freed meanwhile, of those allocated since the trace began.
        live_bytes: Bytes alive at its end, of those allocated since the trace began.
        peak_bytes: The most alive at any moment in it.
        kept_bytes: After forward, what the region or op keeps in place for backward, as in `memory_report`; else 0. A
            storage that two regions keep counts for both.
        offloaded_bytes: After forward, what it keeps elsewhere; else 0.
    """

    region: str
    op: str | None
    phase: Phase
    call: int
    start_us: float
    duration_us: float
    thread: int
    allocated_bytes: int
    freed_bytes: int
    live_bytes: int
    peak_bytes: int
    kept_bytes: int
    offloaded_bytes: int = 0

    @property
    def name(self) -> str:
        """``region::op``, or the region alone."""
        return qualified_name(self.region, self.op)

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Sample:
    """The bytes alive from one allocation or release until the next.

    Attributes:
        time_us: When, in microseconds since the trace began.
        live_bytes: Bytes alive by device, of those allocated since the trace began.
    """

    time_us: float
    live_bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes alive on all devices."""
        return sum(self.live_bytes.values())


class Trace:
    """What `torch_remat.trace` has recorded. It is empty until the ``with`` block has been left.

    Attributes:
        spans: Phases of regions and ops, in the order in which they began.
        samples: Live bytes, in order.
        duration_us: How long the trace took.
    """

    def __init__(self) -> None:
        self.spans: tuple[Span, ...] = ()
        self.samples: tuple[Sample, ...] = ()
        self.duration_us = 0.0
        self._over = False

    def fill(self, spans: Sequence[Span], samples: Sequence[Sample], duration_us: float) -> None:
        """Take what was recorded."""
        self.spans, self.samples, self.duration_us = tuple(spans), tuple(samples), duration_us
        self._over = True

    def checked(self) -> Trace:
        """Return the trace itself, if it is over.

        Raises:
            UsageError: It still records.
        """
        if not self._over:
            raise UsageError(
                "the trace has not ended yet", remedy="Leave the `with remat.trace() as trace:` block first."
            )
        return self

    @property
    def peak(self) -> Sample | None:
        """The moment at which the most bytes were alive; None if nothing was allocated."""
        return max(self.checked().samples, key=lambda sample: sample.total_bytes, default=None)

    def spans_at(self, time_us: float) -> list[Span]:
        """Return the spans that ran at a moment, the innermost last.

        Args:
            time_us: Microseconds since the trace began.
        """
        running = [span for span in self.checked().spans if span.start_us <= time_us <= span.end_us]
        return sorted(running, key=lambda span: -span.duration_us)

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as dicts, lists, strings and numbers."""
        self.checked()
        return {
            "duration_us": self.duration_us,
            "spans": [asdict(span) for span in self.spans],
            "samples": [asdict(sample) for sample in self.samples],
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
        from torch_remat.reports.chrome import chrome_events

        Path(path).write_text(json.dumps({"traceEvents": chrome_events(self.checked()), "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        """Return a table: a line for each region, and each op in it, with times and bytes."""
        from torch_remat.reports.trace_text import format_trace

        return format_trace(self.checked())

    def __repr__(self) -> str:
        """Return the line above the table; it may be asked for while the trace still records."""
        from torch_remat.reports.trace_text import headline

        return f"<remat trace: {headline(self) if self._over else 'it still records'}>"

    def _repr_html_(self) -> str:
        from torch_remat.reports.html import trace_as_html

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
        from torch_remat.reports.trace_plot import plot_trace

        return plot_trace(self.checked(), path)
