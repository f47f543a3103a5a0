"""A region's outputs: their contract, and the hook on each that starts the replay.

In: what the region's function returned. Kept: nothing. Out: the tensors in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch_remat.errors import OutputError


def tensors_of(output: Any, region_name: str) -> list[torch.Tensor]:
    """Return the tensors of a region's output.

    Raises:
        OutputError: The output is not a tensor or an exact builtin tuple, list or dict of such, recursively.
    """
    if isinstance(output, torch.Tensor):
        return [output]
    return list(_walk(output, "output", region_name))


def _walk(value: Any, place: str, region_name: str) -> Iterator[torch.Tensor]:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield value
    elif kind is tuple or kind is list:
        for index, item in enumerate(value):
            yield from _walk(item, f"{place}[{index}]", region_name)
    elif kind is dict:
        for key, item in value.items():
            yield from _walk(item, f"{place}[{key!r}]", region_name)
    else:
        raise OutputError(
            f"the region's function returned {_type_name(kind)} at {place}",
            region=region_name,
            tensor=place,
            remedy="Return a Tensor, or builtin tuples, lists and dicts (not subclasses of them) of Tensors. Other "
            "values can leave the function through an object that it was given.",
        )


def _type_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def boundary_nodes(tensors: list[torch.Tensor]) -> list[torch.autograd.graph.Node | None]:
    """Return the autograd nodes of the outputs, each once."""
    nodes: list[torch.autograd.graph.Node | None] = []
    for tensor in tensors:
        node = node_of(tensor)
        if node is not None and node not in nodes:
            nodes.append(node)
    return nodes


def node_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the autograd node of an output, or of what it is a view of.

    A view whose base was changed in place gets a new node when it is next asked for. Asked here, the node would be
    older than in plain autograd, and backward would add up gradients in another order.
    """
    base = tensor._base
    if base is None or tensor.is_inference() or not tensor._version:
        return tensor.grad_fn
    return base.grad_fn
