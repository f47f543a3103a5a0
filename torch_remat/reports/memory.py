"""`memory_report`: all that is kept for backward; and what the region that runs now keeps."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO
from weakref import ref

import torch

from torch_remat._compat import eager_only, node_number
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.region.region import Region, live_regions
from torch_remat.errors import UsageError
from torch_remat.reports.count import BUFFER, PARAMETER, Counted, report_of
from torch_remat.reports.data import KeptForBackward
from torch_remat.reports.graph import checkpoints_below, collect_nodes, nodes_below, parameters_below, regions_below
from torch_remat.reports.kept import parameters_of
from torch_remat.reports.pictures import plot_report
from torch_remat.reports.report import Block, Report, as_text
from torch_remat.reports.text import region_block, report_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MemoryReport(KeptForBackward, Report):
    """What is kept for backward.

    Attributes:
        regions: The regions that keep something, oldest first.
        outside: What is saved outside of regions, by node type, the largest first.
        parameters: Parameters, apart: those that regions and graph refer to, and those of the modules given.
        buffers: Buffers of the modules given, apart.
        budgets: A line for each budget that regions are in.
        older: Regions that are alive and lie in no graph that was given, apart; in no sum.
    """

    def blocks(self) -> list[Block]:
        """Return what the report shows."""
        return report_blocks(self)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw a bar for each region, or for each group of regions that are alike, and one for what is saved outside.

        Args:
            path: Where to write the picture; the ending tells the format. None writes nothing.

        Returns:
            The matplotlib figure; it is not shown.

        Raises:
            UsageError: matplotlib is not installed.
        """
        return plot_report(self, path)


@eager_only
def memory_report(*roots: torch.Tensor | torch.nn.Module) -> MemoryReport:
    """Report what is kept for backward in the graph below some tensors, or by all regions that are alive.

    Nothing is unpacked or replayed. It may be called at any time, also in the middle of forward or backward.

    Args:
        *roots: Tensors with a graph, such as the loss: the report has the regions in it, and what autograd saves
            outside of regions; regions of other graphs that are alive are one line apart. Without a tensor the report
            has all regions, and nothing else. Modules, too: what lies in the memory of their parameters and
            buffers is theirs. Without a module buffers look like activations, and so do detached parameters.

    Returns:
        Plain data, in bytes of whole storages, each counted once; it keeps no tensor alive. The memory of the roots
        themselves, and of other tensors that the program holds, is not in it unless something saves them.

    Raises:
        UsageError: A root is neither a tensor nor a module.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> x = torch.randn(4, 4, requires_grad=True)
        >>> loss = remat.checkpoint(region_name="block")(torch.sin)(x).sum()
        >>> print(remat.memory_report(loss))
        kept for backward: 64 B
        <BLANKLINE>
        in 1 region: 64 B
          block: 64 B
            args[0]  64 B  float32[4, 4] cpu  input
    """
    counted = Counted()
    for root in roots:
        if isinstance(root, torch.nn.Module):
            counted.add_existing(root.parameters())
            counted.add_existing(root.buffers(), BUFFER)
        elif not isinstance(root, torch.Tensor):
            raise UsageError(
                f"memory_report() takes tensors and modules, not a {type(root).__name__}",
                remedy="Pass the losses, and the model if it has buffers: remat.memory_report(loss, model).",
            )
    losses = [root for root in roots if isinstance(root, torch.Tensor)]
    nodes, alive = nodes_below(losses), live_regions()
    asked = regions_below(nodes) if losses else set(alive)
    checkpoints = checkpoints_below(nodes, asked)
    asked |= regions_below((), checkpoints)
    numbers = {node_number(node) for node in nodes}
    regions = [region for region in alive if region in asked or _is_in(region, numbers)]
    older = [region for region in alive if region not in regions]
    counted.add_existing(chain(parameters_below(nodes, checkpoints), *map(parameters_of, alive)))
    reports = [report_of(region, counted, momentary=True) for region in regions]
    outside = collect_nodes(nodes, checkpoints, counted)
    others = [report_of(region, counted, momentary=True) for region in older]
    budgets = (budget for region in alive if region.keeper is not None for budget in region.keeper.owners)
    return MemoryReport(
        tuple(report for report in reports if report.tensors or report.ops),
        outside,
        counted.existing(PARAMETER),
        counted.existing(BUFFER),
        tuple(line for one in dict.fromkeys(budgets) if (line := one.summary())),
        tuple(report for report in others if report.bytes or report.offloaded_bytes),
    )


def _is_in(region: Region, numbers: Collection[int]) -> bool:
    """Whether a region runs now; or is kept by hooks on nodes with these numbers alone, which nothing shows."""
    held = any(isinstance(entry, ref) and entry() is not None for entry in (*region.tape.saved, *region.tape.holders))
    its_own = range(region.first_number, region.end_number)
    return not region.finished or (not held and any(number in its_own for number in numbers))


@eager_only
def format_current_memory_report() -> str:
    """Return, as text, what the region that runs now keeps so far: its inputs, and each op's tensors by name.

    Returns:
        One line for each tensor: name, bytes, shape, dtype, device and policy, with the sums.

    Raises:
        UsageError: No region runs here.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> def block(x):
        ...     print(remat.format_current_memory_report())
        ...     return x.sin()
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = remat.checkpoint(region_name="block", preserve_rng_state=False)(block)(x)
        block: 8 B
          args[0]  8 B  float32[2] cpu  input
    """
    return _current_report("format_current_memory_report")


@eager_only
def print_current_memory_report(file: TextIO | None = None) -> None:
    """Print what `format_current_memory_report` returns.

    Args:
        file: Where to; standard output if None.

    Raises:
        UsageError: No region runs here.

    Example:
        >>> import sys, torch
        >>> import torch_remat as remat
        >>> def block(x):
        ...     remat.print_current_memory_report(sys.stderr)
        ...     return x.sin()
        >>> y = remat.checkpoint()(block)(torch.ones(2, requires_grad=True))
    """
    text = _current_report("print_current_memory_report")
    (sys.stdout if file is None else file).write(text + "\n")


def _current_report(function: str) -> str:
    """Return the report of the region that runs now, as text, asked for by a function of this name."""
    mode = current_mode()
    if mode is None:
        raise UsageError(
            f"{function}() was called outside of any region",
            remedy="Call it in the function that remat.checkpoint runs, or use remat.memory_report(loss) elsewhere. "
            "Under torch.no_grad() and torch.compile there are no regions.",
        )
    report = report_of(mode.region, momentary=True, keep_empty=True)
    return as_text([region_block(report.name, [report])])
