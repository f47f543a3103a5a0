"""The tensors in a value, what stands for the storage of each, and how often it was modified in place.

In: tensors of any kind, wrappers of others too, and placeholders. Kept: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, strided
from torch.nn import Parameter

from torch_remat._compat import storage_key, without_torch_function
from torch_remat.dispatch.placeholder import Placeholder

USUAL = frozenset((Tensor, Parameter))
DENSE = frozenset((*USUAL, Placeholder))
_FLAT = frozenset((*USUAL, int, float, bool, complex, NoneType, str, torch.dtype, torch.device))  # usual arguments
UNCOUNTED = -1
"""The version of a tensor made in inference mode, which counts no changes."""


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the innermost tensors of which a wrapper consists; the tensor itself if it is not a wrapper."""
    if type(tensor) in DENSE or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from parts_of(part)


def key_of(tensor: torch.Tensor) -> int:
    """Return what stands for a tensor's storage.

    Views share it. Sparse tensors and placeholders stand for themselves, a wrapper is known by its first part.
    """
    if type(tensor) is Tensor and tensor.layout is strided:  # which is told faster than the others
        return storage_key(tensor)
    if type(tensor) not in DENSE:
        tensor = next(parts_of(tensor), tensor)
    if isinstance(tensor, Placeholder):
        return -id(tensor.source)  # which its views and aliases share
    if tensor.layout is not strided:
        return -id(tensor if tensor._base is None else tensor._base)
    return storage_key(tensor)


def keys_of(tensor: torch.Tensor) -> Sequence[int]:
    """Return the same for all parts of a wrapper."""
    return (key_of(tensor),) if type(tensor) in DENSE else [key_of(part) for part in parts_of(tensor)]


def has_placeholder(tensor: object) -> bool:
    """Whether a value is a placeholder, or a wrapper around one."""
    if type(tensor) in USUAL or not isinstance(tensor, torch.Tensor):
        return False
    return any(isinstance(part, Placeholder) for part in parts_of(tensor))


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was modified in place; `UNCOUNTED` for one made in inference mode."""
    return UNCOUNTED if tensor.is_inference() else tensor._version


def offset_in_bytes(tensor: torch.Tensor) -> int:
    """Return the position of a tensor's first element in its storage."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an op's arguments."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if isinstance(item, torch.Tensor):
                    yield item
                elif isinstance(item, (list, tuple)):  # of collectives
                    yield from tensors_in(item, {})
        elif type(arg) is dict:  # of higher-order ops
            yield from tensors_in((), arg)


def layout_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Size, tuple[int, ...]]]:
    """Return shape and strides of the tensors among an op's arguments; none if they cannot be told.

    A placeholder cannot be resized, which ops do with an empty ``out``.
    """
    if not kwargs and _FLAT.issuperset(map(type, args)):
        return dense_layout(args)
    layout = []
    for tensor in tensors_in(args, kwargs):
        if isinstance(tensor, Placeholder) and tensor.resized:
            return []
        if tensor.layout is strided:
            layout.append((tensor.shape, tensor.stride()))
    return layout


def dense_layout(args: Sequence[Any]) -> list[tuple[torch.Size, tuple[int, ...]]]:
    """Return the same for arguments that are ordinary tensors, or placeholders, and values that are not tensors."""
    layout = []
    try:
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                layout.append((arg.shape, arg.stride()))
            elif kind is Placeholder:
                break
        else:
            return layout
    except RuntimeError:  # sparse tensors have no strides
        pass
    with without_torch_function():  # else each look at a placeholder takes as long as all of this
        return [(arg.shape, arg.stride()) for arg in args if type(arg) in DENSE and arg.layout is strided]
