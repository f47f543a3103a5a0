"""Which results of native regions a recomputed op reads, as far as autograd's graph shows.

In: the graph of a region at the end of its forward. Kept: nothing. Out: the results that replay must have.

A node that is connected to a result's node reads the result. A view reads nothing itself, but what is connected to
the view reads the result.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch.autograd.graph import Node

from torch_remat._compat import node_number
from torch_remat.dispatch.log.schema import effects_of

T = TypeVar("T")
Readers = Mapping[Node, Sequence[tuple[Node, int]]]


def readers_in(boundary: Sequence[Node | None], first: int) -> Readers:
    """Return the nodes that read each node of a graph, from the number ``first`` on, with which of its outputs."""
    readers: dict[Node, list[tuple[Node, int]]] = {}
    todo = [node for node in boundary if node is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        for child, place in node.next_functions:
            if child is None or node_number(child) < first:
                continue
            if child in seen:
                readers.setdefault(child, []).append((node, place))
            else:
                seen.add(child)
                todo.append(child)
                readers[child] = [(node, place)]
    return readers


def read_outputs(
    readers: Readers,
    outputs: Mapping[tuple[Node, int], T],
    stop: int,
    skipped: Sequence[tuple[int, int]],
) -> list[tuple[T, int]]:
    """Return those results that a node reads, each with the number of that node.

    Args:
        readers: The nodes that read each node.
        outputs: The results, by node and output.
        stop: The number of the first node to which no replay comes.
        skipped: The ranges of numbers of nodes that replay skips.
    """
    read: list[tuple[T, int]] = []
    starts, ends = _merged(skipped)
    for output, result in outputs.items():
        pending = [reader for reader, place in readers.get(output[0], ()) if place == output[1]]
        while pending:
            reader = pending.pop()
            number = node_number(reader)
            at = bisect_right(starts, number) - 1
            if number >= stop or (at >= 0 and number < ends[at]):
                continue
            if not is_view(reader.name()):
                read.append((result, number))
                break
            pending += [further for further, _ in readers.get(reader, ())]
    return read


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return starts and ends of ranges, in order, without those inside of others."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted(ranges):
        if ends and start < ends[-1]:
            ends[-1] = max(end, ends[-1])
        else:
            starts.append(start)
            ends.append(end)
    return starts, ends


@cache
def is_view(name: str) -> bool:
    """Whether an autograd node is that of a view op: ``TransposeBackward0`` is of ``aten::transpose``."""
    words = re.sub(r"Backward\d*$", "", name)
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()
    packet = getattr(torch.ops.aten, snake, None)
    if packet is None:
        return False
    return any(effects_of(getattr(packet, overload)).viewed is not None for overload in packet.overloads())
