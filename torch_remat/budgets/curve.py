"""`frontier`: how long a step takes with how much memory, from full recomputation to none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from torch_remat._compat import accelerator_type, eager_only
from torch_remat._text import format_bytes
from torch_remat.budgets.budget import UNLIMITED, Budget
from torch_remat.errors import UsageError
from torch_remat.reports.pictures import INK, new_figure
from torch_remat.reports.report import Block, Pictured, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """What one budget took.

    Attributes:
        budget_bytes: What regions were to keep at most.
        kept_bytes: What they kept at most.
        peak_bytes: The most that an accelerator's allocator gave above what was there before the step; 0 on the CPU.
        seconds: The median of the steps.
        replay_seconds: How much of it replays took, in the last of them.
    """

    budget_bytes: int
    kept_bytes: int
    peak_bytes: int
    seconds: float
    replay_seconds: float


@dataclass(frozen=True)
class Frontier(Report, Pictured):
    """What `frontier` has measured, from the smallest budget to the largest.

    Attributes:
        points: A point for each budget.
    """

    points: tuple[Point, ...]

    def blocks(self) -> list[Block]:
        """Return a line for each budget, and what a GiB buys."""
        rows = [["kept", "peak", "step ms", "replay ms"]]
        for one in self.points:
            peak = format_bytes(one.peak_bytes) if one.peak_bytes else "not measured"
            times = [f"{seconds * 1e3:.1f}" for seconds in (one.seconds, one.replay_seconds)]
            rows.append([format_bytes(one.kept_bytes), peak, *times])
        blocks = [Block((), rows, range(4))]
        least, most = self.points[0], self.points[-1]
        if (gained := most.kept_bytes - least.kept_bytes) > 0:
            spared = (least.seconds - most.seconds) / (gained / 2**30)
            blocks.append(Block([f"a GiB buys {spared * 1e3:,.1f} ms a step, on the whole way"]))
        return blocks

    def draw(self) -> Figure:
        """Draw step time against the peak, or against what regions keep where no peak is known."""
        measured = all(point.peak_bytes for point in self.points)
        figure = new_figure(7.0, 4.0, "What memory buys")
        axes = figure.add_subplot()
        sizes = [point.peak_bytes if measured else point.kept_bytes for point in self.points]
        axes.plot([size / 2**20 for size in sizes], [one.seconds * 1e3 for one in self.points], color=INK, marker="o")
        axes.set_xlabel("peak of the step, MiB" if measured else "kept by regions, MiB")
        axes.set_ylabel("milliseconds a step")
        axes.set_ylim(bottom=0)
        return figure


@eager_only
def frontier(function: Callable[..., Any], *args: Any, budgets: int = 6, steps: int = 3, **kwargs: Any) -> Frontier:
    """Run a step at budgets from full recomputation to none; measure its time, what it keeps, and its peak.

    Args:
        function: Runs a whole step: forward, backward, and what else belongs to it. It is called
            ``1 + budgets * (steps + 1)`` times, on an accelerator once more for each budget.
        *args: Its positional arguments.
        budgets: How many budgets; at least 2.
        steps: How many steps are timed at each.
        **kwargs: Its keyword arguments.

    Returns:
        A point for each budget, whose ``str`` is a table and whose ``plot(path)`` draws step time against memory.

    Raises:
        UsageError: No region runs in the function, or a number is too small.

    Example:
        >>> import torch, torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> x = torch.randn(4, 8)
        >>> measured = remat.budgets.frontier(lambda: remat.checkpoint()(block)(x).sum().backward(), budgets=2)
        >>> [point.replay_seconds > 0 for point in measured.points]
        [True, False]
    """
    if budgets < 2 or steps < 1:
        raise UsageError("frontier() needs budgets=2 or more, and steps=1 or more", remedy="Leave the defaults.")
    with Budget(UNLIMITED) as budget:
        function(*args, **kwargs)
        if not any(step.has_backward for step in budget.steps):
            raise UsageError(
                "frontier() found no region whose backward ran",
                remedy="The function runs a whole step, with regions in it: remat.checkpoint or checkpoint_modules.",
            )
    most = max(step.most_bytes for step in budget.steps)
    least = max(step.sum_of("fixed_bytes") for step in budget.steps)
    sizes = [least + (most - least) * place // (budgets - 1) for place in range(budgets)]
    return Frontier(tuple(_measure(function, args, kwargs, max(size, 1), steps) for size in sizes))


def _measure(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], size: int, steps: int) -> Point:
    on_accelerator = accelerator_type() != "cpu"
    with Budget(size) as budget:
        function(*args, **kwargs)  # the first step sees how long regions take
        times = []
        for _ in range(steps):
            begin = perf_counter()
            function(*args, **kwargs)
            if on_accelerator:
                torch.accelerator.synchronize()
            times.append(perf_counter() - begin)
        replayed = budget.steps[-1].sum_of("replay_seconds")
        kept = max(step.most_bytes for step in budget.steps)
        peak = 0
        if on_accelerator:
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            function(*args, **kwargs)
            peak = int(torch.accelerator.max_memory_allocated()) - before
    return Point(size, kept, peak, median(times), replayed)
