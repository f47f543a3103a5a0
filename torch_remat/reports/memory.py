"""`memory_report`: all that is kept for backward; and what the region that runs now keeps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any, TextIO

import torch

from torch_remat._compat import eager_only
from torch_remat.dispatch.kept import parameters_of
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.region.region import Region, live_regions
from torch_remat.errors import UsageError
from torch_remat.reports.collect import Annotate, collect_region, report_of
from torch_remat.reports.data import RegionReport
from torch_remat.reports.graph import checkpoints_below, collect_nodes, nodes_below, parameters_below
from torch_remat.reports.ledger import BUFFER, PARAMETER, Ledger
from torch_remat.reports.model import MemoryReport
from torch_remat.reports.text import format_region


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
    return annotated_report(roots)


def annotated_report(roots: Sequence[torch.Tensor | torch.nn.Module], annotate: Annotate | None = None) -> MemoryReport:
    """Return what `memory_report` returns, with what a function says of each tensor that a region keeps."""
    for root in roots:
        if not isinstance(root, (torch.Tensor, torch.nn.Module)):
            raise UsageError(
                f"memory_report() takes tensors and modules, not a {type(root).__name__}",
                remedy="Pass the losses, and the model if it has buffers: remat.memory_report(loss, model).",
            )
    ledger = Ledger()
    nodes = nodes_below(root for root in roots if isinstance(root, torch.Tensor))
    regions = live_regions()
    checkpoints = checkpoints_below(nodes, regions)
    for root in roots:
        if isinstance(root, torch.nn.Module):
            ledger.add_module(root)
    for parameter in chain(parameters_below(nodes, checkpoints), *map(parameters_of, regions)):
        ledger.add_parameter(parameter)
    reports = [collect_region(region, ledger, annotate=annotate) for region in regions]
    return MemoryReport(
        tuple(report for report in reports if report.tensors or report.ops),
        collect_nodes(nodes, checkpoints, ledger),
        ledger.existing(PARAMETER),
        ledger.existing(BUFFER),
        tuple(line for one in _budgets_of(regions) if (line := one.summary())),
    )


def _budgets_of(regions: Sequence[Region]) -> list[Any]:
    """Return the budgets that regions are in, each once."""
    keepers = (region.keeper for region in regions)
    return list({id(one): one for keeper in keepers if keeper is not None for one in keeper.owners}.values())


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
    return format_region(current_report("format_current_memory_report"))


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
    text = format_region(current_report("print_current_memory_report"))
    (sys.stdout if file is None else file).write(text + "\n")


def current_report(function: str, annotate: Annotate | None = None) -> RegionReport:
    """Return the report of the region that runs now, asked for by a function of this name."""
    mode = current_mode()
    if mode is None:
        raise UsageError(
            f"{function}() was called outside of any region",
            remedy="Call it in the function that remat.checkpoint runs, or use remat.memory_report(loss) elsewhere. "
            "Under torch.no_grad() and torch.compile there are no regions.",
        )
    return report_of(mode.region, momentary=True, keep_empty=True, annotate=annotate)
