"""`memory_report`: all that is kept for backward; and what the region that runs now keeps."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from torch_remat._compat import eager_only
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.region.region import Region, live_regions
from torch_remat.errors import UsageError
from torch_remat.reports.data import KeptForBackward, NodeReport, RegionReport
from torch_remat.reports.graph import checkpoints_below, collect_nodes, nodes_below, parameters_below
from torch_remat.reports.html import report_as_html
from torch_remat.reports.kept import parameters_of
from torch_remat.reports.ledger import BUFFER, PARAMETER, Ledger, report_of
from torch_remat.reports.pictures import plot_report
from torch_remat.reports.text import format_region, format_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MemoryReport(KeptForBackward):
    """What is kept for backward.

    Attributes:
        regions: The regions that keep something, oldest first.
        outside: What is saved outside of regions, by node type, the largest first.
        parameters: Parameters, apart: those that regions and graph refer to, and those of the modules given.
        buffers: Buffers of the modules given, apart.
        budgets: A line for each budget that regions are in.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, with the sums beside the parts."""

        def with_sums(part: RegionReport | NodeReport) -> dict[str, Any]:
            return {**asdict(part), "bytes": part.bytes, "offloaded_bytes": part.offloaded_bytes}

        return {
            "bytes": self.bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "bytes_by_device": self.bytes_by_device,
            "regions": [with_sums(region) for region in self.regions],
            "outside": [with_sums(node) for node in self.outside],
            "parameters": asdict(self.parameters),
            "buffers": asdict(self.buffers),
            "budgets": list(self.budgets),
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON.

        Args:
            indent: Spaces for each level, or None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """Return the report as text, with layers that are alike told once."""
        return format_report(self)

    def _repr_html_(self) -> str:
        return report_as_html(self)

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
    """Report what is kept for backward: by all regions that are alive, and in the graph below some tensors.

    Nothing is unpacked or replayed. It may be called at any time, also in the middle of forward or backward.

    Args:
        *roots: Tensors with a graph, such as the loss. What autograd saves below them outside of regions is reported
            too; without roots, the regions alone are. Modules, too: what lies in the memory of their parameters and
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
    ledger = Ledger()
    for root in roots:
        if isinstance(root, torch.nn.Module):
            ledger.add_existing(root.parameters())
            ledger.add_existing(root.buffers(), BUFFER)
        elif not isinstance(root, torch.Tensor):
            raise UsageError(
                f"memory_report() takes tensors and modules, not a {type(root).__name__}",
                remedy="Pass the losses, and the model if it has buffers: remat.memory_report(loss, model).",
            )
    nodes = nodes_below(root for root in roots if isinstance(root, torch.Tensor))
    regions = live_regions()
    checkpoints = checkpoints_below(nodes, regions)
    ledger.add_existing(chain(parameters_below(nodes, checkpoints), *map(parameters_of, regions)))
    reports = [report_of(region, ledger, momentary=True) for region in regions]
    budgets = (budget for region in regions if region.keeper is not None for budget in region.keeper.owners)
    return MemoryReport(
        tuple(report for report in reports if report.tensors or report.ops),
        collect_nodes(nodes, checkpoints, ledger),
        ledger.existing(PARAMETER),
        ledger.existing(BUFFER),
        tuple(line for one in dict.fromkeys(budgets) if (line := one.summary())),
    )


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
    return format_region(_current_report("format_current_memory_report"))


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
    text = format_region(_current_report("print_current_memory_report"))
    (sys.stdout if file is None else file).write(text + "\n")


def _current_report(function: str) -> RegionReport:
    """Return the report of the region that runs now, asked for by a function of this name."""
    mode = current_mode()
    if mode is None:
        raise UsageError(
            f"{function}() was called outside of any region",
            remedy="Call it in the function that remat.checkpoint runs, or use remat.memory_report(loss) elsewhere. "
            "Under torch.no_grad() and torch.compile there are no regions.",
        )
    assert isinstance(mode.region, Region)
    return report_of(mode.region, momentary=True, keep_empty=True)
