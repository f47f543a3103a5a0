"""The autograd graph: what it saves below some tensors, read without unpacking anything.

In: tensors with a graph. Kept: nothing. Out: saved tensors by node type, the parameters and the regions below, and what
``torch.utils.checkpoint`` keeps, beside and around our regions: its arguments and random state.

Unpacking would start replays and call users' hooks, so what stands in a node is read as it is: a tensor, or what
saved-tensor hooks made of it. Nodes are visited by hand, since a deep graph would exhaust the stack. For what its
checkpoints keep torch has no public way to ask; where their closures look otherwise, nothing is found, and nothing
fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import Node

from torch_remat._kept import Kind, held_in, in_partials, region_behind
from torch_remat._util.storages import pieces_in, tensors_in, viewed_parameter
from torch_remat.dispatch.region.region import Region
from torch_remat.reports.data import Counted, KeptTensor, NodeReport, Rows, row_of

_BEFORE_ARGUMENTS = 2  # an empty tensor and the keyword arguments


@dataclass(frozen=True)
class TorchCheckpoint:
    """One call of ``torch.utils.checkpoint``, which keeps its arguments instead of saved tensors."""

    frame: Any

    def kept(self) -> Iterator[tuple[str, Any]]:
        """Yield what the checkpoint keeps, with names: arguments, random state, what a backward has recomputed.

        A value is a tensor, something that has tensors in it, what hooks around the checkpoint made of a tensor, or,
        if that was a checkpoint, that one.
        """
        for index, argument in _arguments(self.frame):
            yield f"args[{index}]", packed_in(argument) if hasattr(type(argument), "unpack_hook") else argument
        found = _closure(getattr(self.frame, "recompute_fn", None))
        yield from in_partials(found.get("fn", found.get("function")))  # the name differs between releases
        for name, value in found.items():
            if name == "kwargs" and isinstance(value, dict):
                yield from ((f"kwargs[{key!r}]", argument) for key, argument in value.items())
            elif isinstance(value, (torch.Tensor, list, tuple)):
                yield "state", value
        for made in list(getattr(self.frame, "recomputed", {}).values()):
            yield "recomputed", list(made.data.values())

    @classmethod
    def behind(cls, hook: Any) -> TorchCheckpoint | None:
        """Return the checkpoint that an unpack hook belongs to, if any."""
        if not is_of_checkpoint(hook):
            return None
        frame = _closure(hook).get("frame")
        return None if frame is None else cls(frame)


def packed_in(saved: Any) -> Any:
    """Return what stands in a saved tensor of autograd: a tensor, or what hooks made of it; None if it is released."""
    try:
        packed = saved.data
        if packed is None or isinstance(packed, torch.Tensor):
            return packed
        return TorchCheckpoint.behind(saved.unpack_hook) or packed
    except RuntimeError:  # released meanwhile
        return None


def is_of_checkpoint(hook: Any) -> bool:
    """Whether an unpack hook is that of ``torch.utils.checkpoint``."""
    return getattr(hook, "__module__", None) == "torch.utils.checkpoint"


def _arguments(frame: Any) -> Iterator[tuple[int, Any]]:
    saved = getattr(frame, "saved_args", None)
    if isinstance(saved, list):
        yield from enumerate(saved)
        return
    # Before 2.12 torch has them saved by an autograd node, among other things.
    node: Any = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
    places = _closure(getattr(node, "get_args", None)).get("idx2saved_idx")
    with suppress(RuntimeError):  # released
        for place, at in places.items() if isinstance(places, dict) else ():
            if place >= _BEFORE_ARGUMENTS:
                yield place - _BEFORE_ARGUMENTS, node._raw_saved_tensors[at]


def _closure(function: Any) -> dict[str, Any]:
    names, cells = getattr(getattr(function, "__code__", None), "co_freevars", ()), getattr(function, "__closure__", ())
    found = {}
    for name, cell in zip(names, cells or (), strict=False):
        with suppress(ValueError):  # it is not set
            found[name] = cell.cell_contents
    return found


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
    """Return the regions of nodes or checkpoints, and those around these."""
    found: set[Region] = set()
    waiting = [packed for _, packed in chain(*map(saved_in, nodes), *(one.kept() for one in checkpoints))]
    while waiting:
        region = region_behind(waiting.pop())
        if region is not None and region not in found:
            found.add(region)
            waiting += [] if region.inputs is None else [leaf for _, leaf in region.inputs.kept()]
    return found


def checkpoints_below(nodes: Iterable[Node], regions: Iterable[Region]) -> list[TorchCheckpoint]:
    """Return the checkpoints of ``torch.utils.checkpoint`` around nodes or regions, each once."""
    found = [packed for node in nodes for _, packed in saved_in(node) if isinstance(packed, TorchCheckpoint)]
    hooks = [region.hooks[1] for region in regions if region.hooks is not None]
    found += [checkpoint for hook in hooks if (checkpoint := TorchCheckpoint.behind(hook)) is not None]
    for checkpoint in found:  # grows meanwhile: those around recompute the arguments of those inside
        found += [value for _, value in checkpoint.kept() if isinstance(value, TorchCheckpoint) and value not in found]
    return list(dict.fromkeys(found))


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

    The checkpoints are those of ``torch.utils.checkpoint`` that the nodes belong to, or that regions are in; parameters
    and regions were counted before.
    """
    kept: dict[str, list[list[KeptTensor]]] = {}
    sources = [(type(node).__name__, saved_in(node)) for node in nodes]
    sources += [(_CHECKPOINT, checkpoint.kept()) for checkpoint in checkpoints]
    for kind, saved in sources:
        found, is_checkpoint = Rows(), kind is _CHECKPOINT
        for label, packed in saved:
            why: tuple[Kind, str] = ("saved", "replay" if is_checkpoint else f"backward of {kind}")
            if is_checkpoint and label == "recomputed":
                why = ("refilled", "backward")
            for piece in pieces_in(held_in(packed)):
                counted.add(row_of(piece, f"{kind}.{label}", label, *why), piece.memory, found)
        shown = [row for row in found if row.bytes or (row.shared_with is None and not is_checkpoint)]
        kept.setdefault(kind, []).append(shown)
    reports = [
        NodeReport(kind, len(saving), tuple(chain(*saving)))
        for kind, by_node in kept.items()
        if (saving := [rows for rows in by_node if rows])
    ]
    return tuple(sorted(reports, key=lambda report: (-report.bytes - report.offloaded_bytes, report.node)))


def saved_in(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the name and the packed value of each tensor that a node saves; None if it has released them.

    Leaves other than parameters count too, as do tensors that a Function's forward has set as attributes of ``ctx``, or
    has put into containers and dataclasses there.
    """
    for attribute in _raw_attributes(type(node)):
        label = attribute.removeprefix("_raw_saved_")
        try:
            saved = getattr(node, attribute)
        except RuntimeError:  # released by an earlier backward
            yield label, None
            continue
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


@cache
def _raw_attributes(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
