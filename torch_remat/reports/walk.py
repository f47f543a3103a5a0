"""The values in what users make: containers of any type, dataclasses, what is registered with torch's pytrees.

In: a value. Kept: nothing. Out: what lies in it. Objects of other classes are not entered: their attributes may lead
anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import optree
import torch

from torch_remat._compat import PYTREE_NAMESPACE, adopt_pytree_node

_SIMPLE = (torch.Tensor, str, bytes, int, float, complex, type(None), type)


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield the values in a value that have no parts; the value itself if it is one. Each container is entered once."""
    waiting, entered = [value], {}
    while waiting:
        one = waiting.pop()
        parts = _parts(one)
        if parts is None:
            yield one
        elif id(one) not in entered:
            entered[id(one)] = one
            waiting += parts[::-1]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, torch.Tensor))


def _parts(value: Any) -> Sequence[Any] | None:
    if isinstance(value, _SIMPLE):
        return None
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, Set, deque)):
        return list(value)
    if isinstance(value, SimpleNamespace):
        return list(vars(value).values())
    if is_dataclass(value):
        return [getattr(value, field.name, None) for field in fields(value)]
    adopt_pytree_node(type(value))
    found, spec = optree.tree_flatten(value, namespace=PYTREE_NAMESPACE)
    return None if spec.is_leaf() else found
