"""What happened in a budget, step by step: plain data, for reports, plots and plans.

A step begins with the first forward of a region after a backward has come to one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch_remat.budgets.price import Choice, Part
from torch_remat.ladders.kinds import Kind
from torch_remat.ladders.ladder import Rung
from torch_remat.policies.policy import KeptFunctions


class Row:
    """What one region did in one step.

    Attributes:
        name: The region's name.
        kind: Its kind; None for one that does not go by price.
        number: How many regions of this kind came before in the step.
        part: What it can keep; None if that is not known yet, or it does not go by price.
        rung: What it keeps; None as `part`.
        shapes: The shapes of its arguments.
        fixed: What its policy says of functions.
        input_bytes: Bytes of its arguments.
        kept_bytes: What it kept when its forward was over, that nothing before it keeps.
        more_bytes: How many of these its rung does not count: what its author saves, or what the ladder does not know.
        lowered_bytes: How many were evicted in the middle of the step, where memory was short.
        begun: When its forward began, by `time.perf_counter`.
        reached: When backward came to it; 0 if it has not.
        forward_seconds: How long its forward took.
        replay_seconds: How long its replays took.
        replays: How many there were.
    """

    __slots__ = (
        "begun", "fixed", "forward_seconds", "input_bytes", "kept_bytes", "kind", "lowered_bytes", "more_bytes",
        "name", "number", "part", "reached", "replay_seconds", "replays", "rung", "shapes",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        kind: Kind | None = None,
        number: int = 0,
        shapes: Hashable = None,
        fixed: KeptFunctions | None = None,
    ) -> None:
        self.name, self.kind, self.number, self.shapes, self.fixed = name, kind, number, shapes, fixed
        self.part: Part | None = None
        self.rung: Rung | None = None
        self.input_bytes = self.kept_bytes = self.more_bytes = self.lowered_bytes = self.replays = 0
        self.begun = self.reached = self.forward_seconds = self.replay_seconds = 0.0

    def look_up(self) -> None:
        """Find what it can keep, if that is known by now; in proportion to its arguments if such were not recorded."""
        if self.part is None and self.kind is not None:
            fixed = ((), ()) if self.fixed is None else (self.fixed.decisions, self.fixed.left_out)
            if (ladder := self.kind.ladder(self.shapes, *fixed)) is not None:
                is_known = self.kind.knows(self.shapes) or not self.input_bytes
                self.part = Part(ladder, 1.0 if is_known else self.input_bytes / (ladder.input_bytes or 1))

    def learn(self) -> None:
        """Find what it can keep, and if it was recorded, and kept nothing, what its author has saved."""
        if self.rung is None:
            self.look_up()
            if self.part is not None:
                self.more_bytes = self.kept_bytes - int(self.part.bytes_at(0))

    @property
    def is_plain(self) -> bool:
        """Whether it ran as plain code."""
        return self.rung is not None and self.rung.is_plain

    @property
    def whole_bytes(self) -> int:
        """What it would keep as plain code; what it has kept if that is not known."""
        return self.kept_bytes if self.part is None else int(self.part.ladder.whole_bytes * self.part.scale)

    @property
    def recomputed_bytes(self) -> int:
        """What its replay recomputes."""
        return 0 if self.is_plain else max(self.whole_bytes - self.kept_bytes, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "region": self.name,
            "kept_bytes": self.kept_bytes,
            "recomputed_bytes": self.recomputed_bytes,
            "lowered_bytes": self.lowered_bytes,
            "is_plain": self.is_plain,
            "kept": [] if self.rung is None else [list(one) for one in self.rung.kept],
            "runs_again": [] if self.rung is None else [[name, ns / 1e9] for name, ns in self.rung.runs],
            "forward_seconds": self.forward_seconds,
            "replay_seconds": self.replay_seconds,
            "replays": self.replays,
        }


@dataclass
class Step:
    """What happened in one step.

    Attributes:
        limit_bytes: The most that regions were to keep.
        choice: What was bought; None as long as nothing is known.
        rows: Its regions, in order.
        most_bytes: The most that they kept.
        forward_bytes: What they kept when backward came to the first of them.
        peak_bytes: The most that was allocated at once above what was there at the step's start; 0 if not measured.
        has_backward: Whether backward has come to a region.
    """

    limit_bytes: float
    choice: Choice | None = None
    rows: list[Row] = field(default_factory=list)
    most_bytes: int = 0
    forward_bytes: int = 0
    peak_bytes: int = 0
    has_backward: bool = False

    def note(self, kept: int) -> None:
        """Note what the regions keep now."""
        self.most_bytes = max(self.most_bytes, kept)

    def sum_of(self, name: str) -> Any:
        """Return the sum of an attribute over the regions."""
        return sum(getattr(row, name) for row in self.rows)

    @property
    def over_bytes(self) -> int:
        """By how much the regions passed the limit at some moment."""
        return int(max(self.most_bytes - self.limit_bytes, 0))

    @property
    def is_known(self) -> bool:
        """Whether it is known what each of its regions that go by price can keep."""
        return all(row.part is not None for row in self.rows if row.kind is not None)

    def parts(self) -> list[Part]:
        """Return what its regions can keep that go by price."""
        return [row.part._replace(more_bytes=row.more_bytes) for row in self.rows if row.part is not None]

    def other_bytes(self) -> int:
        """Return what the regions kept that do not go by price."""
        return sum(row.kept_bytes for row in self.rows if row.part is None)

    def most_in_backward(self) -> int:
        """Return the most that regions kept in backward: what replays fill, less what backward has freed before."""
        most, freed = self.forward_bytes, 0
        for row in reversed(self.rows):
            if row.replays:
                most = max(most, self.forward_bytes - freed + row.recomputed_bytes)
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
            "recomputed_bytes": self.sum_of("recomputed_bytes"),
            "lowered_bytes": self.sum_of("lowered_bytes"),
            "replay_seconds": self.sum_of("replay_seconds"),
            "price_ms_per_mib": None if self.choice is None else ms_per_mib(self.choice.price),
            "next_bytes": None if self.choice is None else self.choice.next_bytes,
            "regions": [row.to_dict() for row in self.rows],
        }


def ms_per_mib(ns_per_byte: float) -> float:
    """Return a price in nanoseconds for a byte as milliseconds for a MiB."""
    return ns_per_byte * 2**20 / 1e6
