"""Which nodes read which in the graph of a region at the end of its forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.autograd.graph import Node

from torch_remat._compat import node_number

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
