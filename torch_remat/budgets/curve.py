"""`frontier`: how long a step takes with how much memory, from full recomputation to none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from torch_remat._compat import accelerator_type, eager_only
from torch_remat._util.text import format_bytes
from torch_remat.budgets.budget import Budget
from torch_remat.budgets.pictures import draw_curve
from torch_remat.budgets.price import choose, curve
from torch_remat.budgets.steps import Step
from torch_remat.errors import UsageError
from torch_remat.reports.report import Block, Pictured, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 2  # the bytes of a budget under which regions are recorded, and which buys nothing
_STEPS = 4  # so many steps at most record what regions can keep


@dataclass(frozen=True)
class Point:
    """What one budget takes, by the ladders of the regions.

    Attributes:
        kept_bytes: What regions keep.
        peak_bytes: The most that they keep, with what a replay fills.
        seconds: How long a step takes.
        replay_seconds: How much of it is recomputation.
    """

    kept_bytes: int
    peak_bytes: int
    seconds: float
    replay_seconds: float


@dataclass(frozen=True)
class Frontier(Report, Pictured):
    """What `frontier` has found, from the smallest budget to the largest.

    Attributes:
        points: A point for each budget.
    """

    points: tuple[Point, ...]

    def blocks(self) -> list[Block]:
        """Return a line for each budget, and what a GiB buys."""
        rows = [["kept", "with a replay", "step ms", "recomputed ms"]]
        for one in self.points:
            times = [f"{seconds * 1e3:.1f}" for seconds in (one.seconds, one.replay_seconds)]
            rows.append([format_bytes(one.kept_bytes), format_bytes(one.peak_bytes), *times])
        blocks = [Block((), rows, range(4))]
        least, most = self.points[0], self.points[-1]
        if (gained := most.kept_bytes - least.kept_bytes) > 0:
            spared = (least.seconds - most.seconds) / (gained / 2**30)
            blocks.append(Block([f"a GiB buys {spared * 1e3:,.1f} ms a step, on the whole way"]))
        return blocks

    def draw(self) -> Figure:
        """Draw the time of recomputation against what regions keep."""
        return draw_curve("What memory buys", [(one.kept_bytes, one.replay_seconds * 1e9) for one in self.points])


@eager_only
def frontier(function: Callable[..., Any], *args: Any, budgets: int = 6, **kwargs: Any) -> Frontier:
    """Tell what a step takes at budgets from full recomputation to none, by the ladders of its regions.

    No step is run for each budget: a few steps, which recompute everything, are recorded and timed, and what keeping
    spares is taken off.

    Args:
        function: Runs a whole step: forward, backward, and what else belongs to it. It is called up to five times.
        *args: Its positional arguments.
        budgets: How many budgets; at least 2.
        **kwargs: Its keyword arguments.

    Returns:
        A point for each budget, whose ``str`` is a table and whose ``plot(path)`` draws recomputation against memory.

    Raises:
        UsageError: No region runs in the function, or a number is too small.

    Example:
        >>> import torch, torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> x = torch.randn(4, 8)
        >>> found = remat.budgets.frontier(lambda: remat.checkpoint()(block)(x).sum().backward(), budgets=2)
        >>> [point.replay_seconds > 0 for point in found.points]
        [True, False]
    """
    if budgets < 2:
        raise UsageError("frontier() needs budgets=2 or more", remedy="Leave the default.")
    step, seconds = _recorded(function, args, kwargs)
    parts, other = step.parts(), step.other_bytes()
    points = curve(parts)
    least, most = points[0][0], max(size for size, _ in points)
    sizes = [least + (most - least) * place // (budgets - 1) for place in range(budgets)]
    found = [choose(parts, size, counts_replays=False) for size in sizes]
    base = seconds - found[0].ns / 1e9
    return Frontier(
        tuple(
            Point(one.bytes + other, one.peak_bytes + other, max(base + one.ns / 1e9, 0.0), one.ns / 1e9)
            for one in found
        )
    )


def _recorded(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Step, float]:
    """Return a step of which it is known what its regions can keep, and how long it takes if they keep nothing."""
    seconds, budget = inf, Budget(_LEAST, share=0.0)
    with budget:
        for _ in range(_STEPS + 1):
            begin = perf_counter()
            function(*args, **kwargs)
            if accelerator_type() != "cpu":
                torch.accelerator.synchronize()
            if budget.steps and budget.steps[-1].is_known:  # else it was recorded, which takes time
                seconds = min(seconds, perf_counter() - begin)
        whole = [step for step in budget.steps if step.has_backward]
        if not whole:
            raise UsageError(
                "frontier() found no region whose backward ran",
                remedy="The function runs a whole step, with regions in it: remat.checkpoint or checkpoint_modules.",
            )
    step = whole[-1]
    for row in step.rows:
        row.look_up()
    return step, seconds
