"""A region's outputs: the tensors in whatever its function returned.

In: any value, since a region may return all that a plain function may. Kept: nothing. Out: the tensors in it, and their
autograd nodes, for regions that keep something or are watched. A tensor that is hidden deeper than the walk looks (in a
generator, or behind slots) is not found: the replay starts when autograd unpacks the first empty holder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import optree
import torch
from torch.nn import Module

from torch_remat._compat import PYTREE_NAMESPACE, adopt_pytree_node

_NOT_LOOKED_INTO = (Module, type, FunctionType, ModuleType)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a region's output, each as often as it occurs outside of containers that occur twice."""
    if isinstance(output, torch.Tensor):
        return [output]
    tensors = []
    todo, seen = [output], set()
    for value in todo:  # grows meanwhile
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            todo += _parts_of(value)
    return tensors


def _parts_of(value: Any) -> Iterable[Any]:
    """Return what a value consists of; nothing if it is no container and no object with attributes."""
    kind = type(value)
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if dataclasses.is_dataclass(kind):
        return [getattr(value, field.name) for field in dataclasses.fields(kind) if hasattr(value, field.name)]
    if optree.register_pytree_node.get(kind, namespace=PYTREE_NAMESPACE) is not None or adopt_pytree_node(kind):
        children: Iterable[Any] = optree.tree_flatten_one_level(value, namespace=PYTREE_NAMESPACE)[0]
        return children
    if isinstance(value, _NOT_LOOKED_INTO):
        return ()
    attributes: Mapping[str, Any] = getattr(value, "__dict__", {})
    return attributes.values()


def boundary_nodes(tensors: list[torch.Tensor]) -> list[torch.autograd.graph.Node]:
    """Return the autograd nodes of the outputs, each once."""
    return list(dict.fromkeys(node for tensor in tensors if (node := node_of(tensor)) is not None))


def node_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the autograd node of an output, or of what it is a view of.

    A view whose base was changed in place gets a new node when it is next asked for. Asked here, the node would be
    older than in plain autograd, and backward would add up gradients in another order.
    """
    base = tensor._base
    if base is None or tensor.is_inference() or not tensor._version:
        return tensor.grad_fn
    return base.grad_fn
