"""What a trace says, as plain data: spans of regions and ops, and the bytes alive over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_remat.errors import qualified_name

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


@dataclass(frozen=True)
class GivenUp:
    """What a budget evicted of one region in the middle of a step; see `torch_remat.budget`.

    Attributes:
        region: The region's name.
        call: Which call of a region it was, as in `Span`.
        time_us: When, in microseconds since the trace began.
        bytes: How many were freed, which replay recomputes.
        kept_bytes: What the budget's regions kept from then on.
    """

    region: str
    call: int
    time_us: float
    bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class BudgetState:
    """How a budget stood when the trace ended.

    Attributes:
        kept_bytes: What its regions kept.
        limit_bytes: The most that they were to keep: the budget less its reserve.
        budget_bytes: The budget.
    """

    kept_bytes: int
    limit_bytes: int
    budget_bytes: int
