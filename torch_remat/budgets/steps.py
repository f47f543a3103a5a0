"""What happened in a budget, step by step: plain data, for reports, plots and plans.

A step begins with the first forward of a region after a backward has come to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Row:
    """What one region did in one step.

    Attributes:
        name: The region's name.
        input_bytes: Bytes of its inputs, also if others hold them.
        fixed_bytes: Bytes of its inputs, and of what its author saves, that nothing before it keeps.
        saved_bytes: Bytes of what it would keep without a budget, besides.
        evicted_bytes: How many of these were evicted.
        offloaded_bytes: How many of these were sent to an offloader instead.
        cut: How many of its saved tensors come before the last that was evicted, that included.
        tensors: How many tensors it has saved.
        is_empty_from_start: Whether it kept nothing, since all of such regions was evicted in earlier steps.
        begun: When its forward began, by `time.perf_counter`.
        reached: When backward came to it; 0 if it has not.
        forward_seconds: How long its forward took.
        evicted_seconds: How long a replay takes up to the last that was evicted.
        replay_seconds: How long its replays took.
        replays: How many there were.
    """

    __slots__ = (
        "begun", "cut", "evicted_bytes", "evicted_seconds", "fixed_bytes", "forward_seconds", "input_bytes",
        "is_empty_from_start", "name", "offloaded_bytes", "reached", "replay_seconds", "replays", "saved_bytes",
        "tensors",
    )  # fmt: skip

    def __init__(self, name: str, input_bytes: int) -> None:
        self.name, self.input_bytes = name, input_bytes
        self.fixed_bytes = self.saved_bytes = self.evicted_bytes = self.offloaded_bytes = 0
        self.cut = self.tensors = self.replays = 0
        self.begun = self.reached = self.forward_seconds = self.replay_seconds = self.evicted_seconds = 0.0
        self.is_empty_from_start = False

    def again(self, row: Row) -> None:
        """Note that all was evicted, as in another step."""
        self.tensors = self.cut = row.tensors
        self.saved_bytes = self.evicted_bytes = row.saved_bytes
        self.evicted_seconds = row.evicted_seconds
        self.is_empty_from_start = True

    def filled(self, tensors: int, size: int) -> None:
        """Note that a replay has filled all: so much was not kept."""
        self.is_empty_from_start = True
        self.tensors = self.cut = max(self.tensors, tensors)
        self.saved_bytes = self.evicted_bytes = max(self.saved_bytes, size)

    def evicted(self, place: int, freed: int, seconds: float) -> None:
        """Note that a saved tensor was evicted."""
        self.evicted_bytes += freed
        self.cut = max(self.cut, place + 1)
        self.evicted_seconds = seconds

    @property
    def kept_bytes(self) -> int:
        """What it kept from forward to backward."""
        return self.fixed_bytes + self.saved_bytes - self.evicted_bytes - self.offloaded_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "region": self.name,
            "kept_bytes": self.kept_bytes,
            "evicted_bytes": self.evicted_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "forward_seconds": self.forward_seconds,
            "replay_seconds": self.replay_seconds,
            "replays": self.replays,
            "saved_tensors": self.tensors,
            "evicted_tensors": self.cut,
        }


class Eviction(NamedTuple):
    """One eviction: which region, when, and why that one.

    Attributes:
        row: What reports know of the region.
        seconds: When, from the step's begin.
        kept_bytes: What all regions kept after it.
        freed_bytes: What it has freed.
        replay_seconds: What its replay was expected to take more by it.
        idle_seconds: How long its values were neither made nor read.
    """

    row: Row
    seconds: float
    kept_bytes: int
    freed_bytes: int
    replay_seconds: float
    idle_seconds: float


@dataclass
class Step:
    """What happened in one step.

    Attributes:
        limit_bytes: The most that the regions were to keep: the budget less the reserve; infinite without one.
        begun: When it began, by `time.perf_counter`.
        rows: The regions, in the order in which their forwards ended.
        kept: What they kept, over the seconds of the step.
        evictions: What was evicted, in order.
        most_bytes: The most that they kept at once.
        forward_bytes: What they kept when backward came to the first of them.
        peak_bytes: The most that was allocated at once above what was there at the step's start; 0 if not measured.
        has_backward: Whether backward has come to a region.
    """

    limit_bytes: float
    begun: float
    rows: list[Row] = field(default_factory=list)
    kept: list[tuple[float, int]] = field(default_factory=list)
    evictions: list[Eviction] = field(default_factory=list)
    most_bytes: int = 0
    forward_bytes: int = 0
    peak_bytes: int = 0
    has_backward: bool = False

    def note(self, now: float, kept: int) -> None:
        """Note what the regions keep now."""
        self.kept.append((now - self.begun, kept))
        self.most_bytes = max(self.most_bytes, kept)

    def sum_of(self, name: str) -> Any:
        """Return the sum of an attribute over the regions."""
        return sum(getattr(row, name) for row in self.rows)

    @property
    def over_bytes(self) -> int:
        """By how much the regions passed the limit at some moment."""
        return int(max(self.most_bytes - self.limit_bytes, 0))

    def most_in_backward(self) -> int:
        """Return the most that regions kept in backward: what replays fill, less what backward has freed before."""
        most, freed = self.forward_bytes, 0
        for row in reversed(self.rows):
            if row.replays:
                most = max(most, self.forward_bytes - freed + row.evicted_bytes)
            freed += row.kept_bytes
        return most

    def by_name(self) -> Iterator[tuple[str, list[Row]]]:
        """Yield the regions' names in order, each with all of its calls."""
        names: dict[str, list[Row]] = {}
        for row in self.rows:
            names.setdefault(row.name, []).append(row)
        yield from names.items()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "limit_bytes": self.limit_bytes,
            "most_kept_bytes": self.most_bytes,
            "peak_bytes": self.peak_bytes,
            "evicted_bytes": self.sum_of("evicted_bytes"),
            "replay_seconds": self.sum_of("replay_seconds"),
            "regions": [row.to_dict() for row in self.rows],
        }


@dataclass(frozen=True)
class Planned:
    """What a region keeps.

    Attributes:
        evicted_tensors: How many of its saved tensors, in the order of forward, are evicted: replay recomputes them.
        saved_tensors: How many it saves.
        kept_bytes: What it keeps, its inputs apart.
        spared_seconds: What its backward need not recompute therefore.
    """

    evicted_tensors: int
    saved_tensors: int
    kept_bytes: int
    spared_seconds: float
