"""What happened in a budget, step by step: plain data, for reports, plots and plans.

A step begins with the first forward of a region after a backward has come to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class Row:
    """What one region did in one step.

    Attributes:
        name: The region's name; empty while its first forward runs.
        fixed_bytes: Bytes of its inputs, and of what its author saves, that nothing before it keeps.
        saved_bytes: Bytes of what it would keep without a budget, besides.
        given_bytes: How many of these were given up.
        offloaded_bytes: How many of these were sent to an offloader instead.
        cut: How many of its saved tensors come before the last that was given up, that included.
        tensors: How many tensors it has saved.
        forward_seconds: How long its forward took.
        spared_seconds: How long a replay would take up to its last saved tensor.
        given_seconds: How long one takes up to the last that was given up.
        replay_seconds: How long its replays took.
        replays: How many there were.
        prices: For each saved tensor, in order: seconds from the region's start, and bytes that nothing before keeps.
    """

    __slots__ = (
        "cut", "fixed_bytes", "forward_seconds", "given_bytes", "given_seconds", "name", "offloaded_bytes",
        "replay_seconds", "replays", "saved_bytes", "spared_seconds", "tensors",
    )  # fmt: skip

    def __init__(self) -> None:
        self.name = ""
        self.fixed_bytes = self.saved_bytes = self.given_bytes = self.offloaded_bytes = 0
        self.cut = self.tensors = self.replays = 0
        self.forward_seconds = self.spared_seconds = self.given_seconds = self.replay_seconds = 0.0

    def again(self, row: Row) -> None:
        """Note that all was given up, as in another step."""
        self.tensors = self.cut = row.tensors
        self.saved_bytes = self.given_bytes = row.saved_bytes
        self.given_seconds = row.given_seconds

    def given_up(self, place: int, freed: int, seconds: float) -> None:
        """Note that a saved tensor was given up."""
        self.given_bytes += freed
        self.cut = max(self.cut, place + 1)
        self.given_seconds = seconds

    @property
    def kept_bytes(self) -> int:
        """What it kept from forward to backward."""
        return self.fixed_bytes + self.saved_bytes - self.given_bytes - self.offloaded_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "region": self.name,
            "kept_bytes": self.kept_bytes,
            "given_up_bytes": self.given_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "forward_seconds": self.forward_seconds,
            "replay_seconds": self.replay_seconds,
            "replays": self.replays,
            "saved_tensors": self.tensors,
            "given_up_tensors": self.cut,
        }


@dataclass
class Step:
    """What happened in one step.

    Attributes:
        limit_bytes: The most that the regions were to keep: the budget less the reserve.
        begun: When it began, by `time.perf_counter`.
        rows: The regions, in the order in which their forwards ended.
        kept: What they kept, over the seconds of the step.
        given: When something was given up: seconds, and the bytes kept after it.
        most_bytes: The most that they kept at once.
        forward_bytes: What they kept when backward came to the first of them.
        peak_bytes: The most that was allocated at once above what was there at the step's start; 0 if not measured.
        has_backward: Whether backward has come to a region.
    """

    limit_bytes: int
    begun: float
    rows: list[Row] = field(default_factory=list)
    kept: list[tuple[float, int]] = field(default_factory=list)
    given: list[tuple[float, int]] = field(default_factory=list)
    most_bytes: int = 0
    forward_bytes: int = 0
    peak_bytes: int = 0
    has_backward: bool = False

    def most_in_backward(self) -> int:
        """Return the most that regions kept in backward: what replays fill, less what backward has freed before."""
        most, freed = self.forward_bytes, 0
        for row in reversed(self.rows):
            if row.replays:
                most = max(most, self.forward_bytes - freed + row.given_bytes)
            freed += row.kept_bytes
        return most

    def largest(self) -> int:
        """Return what the largest region saves."""
        return max((row.saved_bytes for row in self.rows), default=0)

    def fits(self, limit: int) -> bool:
        """Whether each region would be within a limit, full, if all before it were given up."""
        before = 0
        for row in self.rows:
            if before + row.fixed_bytes + row.saved_bytes > limit:
                return False
            before += row.fixed_bytes
        return True

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
            "given_up_bytes": sum(row.given_bytes for row in self.rows),
            "replay_seconds": sum(row.replay_seconds for row in self.rows),
            "regions": [row.to_dict() for row in self.rows],
        }
