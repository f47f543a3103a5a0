"""The autograd graph: what it saves below some tensors, read without unpacking anything.

In: tensors with a graph. Kept: nothing. Out: saved tensors by node type, the parameters and the regions below.

Unpacking would start replays and call users' hooks, so what stands in a node is read as it is: a tensor, or what
saved-tensor hooks made of it. Nodes are visited by hand, since a deep graph would exhaust the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import Node

from torch_remat._kept import Kind, held_in, region_behind
from torch_remat._storages import pieces_in, tensors_in, viewed_parameter
from torch_remat.dispatch.region.region import Region
from torch_remat.reports.count import Counted, Rows, row_of
from torch_remat.reports.data import KeptTensor, NodeReport
from torch_remat.reports.torch_checkpoint import TorchCheckpoint, packed_in

_CHECKPOINT = "torch.utils.checkpoint"


def nodes_below(roots: Iterable[torch.Tensor]) -> list[Node]:
    """Return the nodes of the graph below tensors, each once; they live as long as the list does."""
    waiting = [root.grad_fn for root in roots][::-1]
    visited: dict[Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited[node] = None
            waiting += [following for following, _ in node.next_functions[::-1]]
    return list(visited)


def regions_below(nodes: Iterable[Node], checkpoints: Iterable[TorchCheckpoint] = ()) -> set[Region]:
    """Return the regions that nodes or checkpoints lie in, and those around these."""
    found: set[Region] = set()
    waiting = [packed for _, packed in chain(*map(saved_in, nodes), *(one.kept() for one in checkpoints))]
    while waiting:
        region = region_behind(waiting.pop())
        if region is not None and region not in found:
            found.add(region)
            waiting += [] if region.inputs is None else [leaf for _, leaf in region.inputs.kept()]
    return found


def checkpoints_below(nodes: Iterable[Node], regions: Iterable[Region]) -> list[TorchCheckpoint]:
    """Return the checkpoints of ``torch.utils.checkpoint`` that nodes or regions lie in, each once."""
    found = [packed for node in nodes for _, packed in saved_in(node) if isinstance(packed, TorchCheckpoint)]
    hooks = [region.hooks[1] for region in regions if region.hooks is not None]
    found += [checkpoint for hook in hooks if (checkpoint := TorchCheckpoint.behind(hook)) is not None]
    return TorchCheckpoint.with_those_around(found)


def parameters_below(nodes: Sequence[Node], checkpoints: Iterable[TorchCheckpoint]) -> Iterator[torch.Tensor]:
    """Yield the parameters whose gradients nodes accumulate, and those that are saved, whole or as views."""
    for node in nodes:
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.nn.Parameter):
            yield variable
    for _, packed in chain(*map(saved_in, nodes), *(checkpoint.kept() for checkpoint in checkpoints)):
        for tensor in tensors_in(held_in(packed)):
            if (parameter := viewed_parameter(tensor)) is not None:
                yield parameter


def collect_nodes(
    nodes: Iterable[Node], checkpoints: Iterable[TorchCheckpoint], counted: Counted
) -> tuple[NodeReport, ...]:
    """Return what nodes save outside of regions, by type, the largest first.

    The checkpoints are those of ``torch.utils.checkpoint`` that the nodes belong to, or that regions lie in; parameters
    and regions were counted before.
    """
    kept: dict[str, list[list[KeptTensor]]] = {}
    for node in nodes:
        kind = type(node).__name__
        found = Rows()
        for attribute, packed in saved_in(node):
            for piece in pieces_in(held_in(packed)):
                saved = row_of(piece, f"{kind}.{attribute}", attribute, "saved", f"backward of {kind}")
                counted.add(saved, piece.memory, found)
        kept.setdefault(kind, []).append([row for row in found if row.bytes or row.shared_with is None])
    for checkpoint in checkpoints:
        found = Rows()
        for label, packed in checkpoint.kept():
            why: tuple[Kind, str] = ("refilled", "backward") if label == "recomputed" else ("saved", "replay")
            for piece in pieces_in(held_in(packed)):
                counted.add(row_of(piece, f"{_CHECKPOINT}.{label}", label, *why), piece.memory, found)
        kept.setdefault(_CHECKPOINT, []).append([row for row in found if row.bytes])
    reports = [
        NodeReport(kind, len(saving), tuple(chain(*saving)))
        for kind, by_node in kept.items()
        if (saving := [rows for rows in by_node if rows])
    ]
    return tuple(sorted(reports, key=lambda report: (-report.bytes - report.offloaded_bytes, report.node)))


def saved_in(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the name and the packed value of each tensor that a node saves; nothing if it has released them.

    Leaves other than parameters count too, as do tensors that a Function's forward has set as attributes of ``ctx``, or
    has put into containers and dataclasses there.
    """
    for attribute in _raw_attributes(type(node)):
        try:
            saved = getattr(node, attribute)
        except RuntimeError:  # released by an earlier backward
            continue
        label = attribute.removeprefix("_raw_saved_")
        if isinstance(saved, tuple):
            for index, one in enumerate(saved):
                yield (str(index) if label == "tensors" else f"{label}.{index}"), packed_in(one)
        else:
            yield label, packed_in(saved)
    variable = getattr(node, "variable", None)
    if isinstance(variable, torch.Tensor) and not isinstance(variable, torch.nn.Parameter):
        yield "variable", variable  # a leaf: the graph owns it, to give it its gradient
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        for attribute, value in vars(node).items():
            for tensor in tensors_in(value):
                yield attribute, tensor


def is_released(node: Node) -> bool:
    """Whether a backward has released what a node saves, so that no other can run through it."""
    try:
        for attribute in _raw_attributes(type(node)):
            saved = getattr(node, attribute)
            if not isinstance(saved, tuple) and saved.data is None and saved.unpack_hook is None:
                getattr(node, attribute.removeprefix("_raw"))  # nothing to unpack: it is None, or raises
    except RuntimeError:
        return True
    return False


@cache
def _raw_attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
