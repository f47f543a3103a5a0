"""What replay must know of an op's results to answer the op without running it.

In: in forward each op's result. Kept: metadata and plain values, no tensor but where none can stand for it (sparse
layouts). Out: in replay placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, strided
from torch.nn import Parameter

from torch_remat._compat import is_traceable_wrapper, storage_key, without_torch_function, without_work
from torch_remat.dispatch.placeholder import (
    Geometry,
    Placeholder,
    Source,
    geometry_of,
    new_tuple,
    placeholder_at,
)

USUAL = frozenset((Tensor, Parameter))
_DENSE = frozenset((*USUAL, Placeholder))
_FLAT = frozenset((*USUAL, int, float, bool, complex, NoneType, str, torch.dtype, torch.device))  # usual arguments


class Meta(NamedTuple):
    """What replay must know of a tensor to stand something in for it.

    Attributes:
        geometry: Its place in its storage.
        dtype: Its dtype.
        device: Its device.
        alias: Whether it shares the storage of its op's first argument though the schema does not say so.
        lazy: Whether it is a lazy conjugate, and a lazy negative.
    """

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    alias: bool
    lazy: tuple[bool, bool]

    def describes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in the same storage is the whole result, and no view of it that shows something else."""
        if (tensor.shape, tensor.stride()) != self.geometry[:2]:
            return False
        return tensor.dtype is self.dtype and (tensor.is_conj(), tensor.is_neg()) == self.lazy


class WrapperMeta(NamedTuple):
    """The same for a tensor subclass that wraps other tensors, such as DTensor.

    Attributes:
        kind: The subclass.
        parts: The `Meta` or `WrapperMeta` of each tensor inside, by attribute; `Given` of one that was an argument.
        context: What the subclass needs besides to be rebuilt.
        geometry: Shape and strides of the wrapper.
        alias: As in `Meta`.
    """

    kind: Any
    parts: Mapping[str, Any]
    context: Any
    geometry: Geometry
    alias: bool

    def around(self, given: Sequence[torch.Tensor]) -> WrapperMeta:
        """Return the same with the arguments in place of what only names them: they keep their history in replay."""
        parts = {
            name: given[part.place]
            if type(part) is Given
            else part.around(given)
            if type(part) is WrapperMeta
            else part
            for name, part in self.parts.items()
        }
        return self._replace(parts=parts)


class Given(NamedTuple):
    """A result that is an argument, though the op's schema does not say so.

    Attributes:
        place: Which of the tensors among the arguments it is.
    """

    place: int


class GivenView(NamedTuple):
    """A result that shares the memory of an argument: compiled code returns such views to save them for backward.

    Attributes:
        place: Which of the tensors among the arguments it is.
        meta: The result; its place in the storage is counted from that of the argument.
    """

    place: int
    meta: Meta


class Raised(NamedTuple):
    """What an op raised instead of returning; made anew in replay, since a traceback would keep frames alive."""

    kind: type[Exception]
    args: tuple[Any, ...]


def described(result: Any, first: Any, given: Sequence[torch.Tensor] = ()) -> Any:
    """Return what replay must know of an op's result, which may be one of the tensors ``given`` to it."""
    if isinstance(result, torch.Tensor):
        for place, tensor in enumerate(given):
            if tensor is result:
                return Given(place)
        return _described_tensor(result, first, given)
    if type(result) in (tuple, list):
        return [described(item, first, given) for item in result]
    return without_work(result)


def described_higher(result: Any, given: Sequence[torch.Tensor]) -> Any:
    """Return what replay must know of a higher-order op's result, which may have views of any tensor given to it."""
    leaves = result if isinstance(result, (tuple, list)) else (result,)
    keys = [key_of(tensor) if type(tensor) in _DENSE else None for tensor in given]
    found = []
    for leaf in leaves:
        meta: Any = described(leaf, None, given)
        if type(meta) is Meta and (key := key_of(leaf)) in keys and given[place := keys.index(key)].dtype is leaf.dtype:
            shape, stride, offset = meta.geometry
            geometry: Geometry = shape, stride, offset - int(given[place].storage_offset())
            meta = GivenView(place, meta._replace(geometry=geometry))
        found.append(meta)
    return found if leaves is result else found[0]


def leaves_of_result(result: Any) -> tuple[Any, Any]:
    """Return what a higher-order op returned as a tensor or a flat sequence, and its form, if it had one."""
    if type(result) is not tuple:
        is_flat = result is None or isinstance(result, torch.Tensor)
    else:
        is_flat = not any(isinstance(item, (tuple, list, dict)) for item in result)
    if is_flat:
        return result, None
    leaves, form = optree.tree_flatten(result)
    return leaves, form


def view_of(given: torch.Tensor, meta: Meta) -> torch.Tensor:
    """Return a view of an argument, or a placeholder for one; see `GivenView`."""
    shape, stride, offset = meta.geometry
    offset += int(given.storage_offset())
    if isinstance(given, Placeholder):
        return placeholder_at((shape, stride, offset), meta.dtype, meta.device, given.source, meta.lazy)
    return given.as_strided(shape, stride, offset)


def unboxed(args: Sequence[Any]) -> Sequence[Any]:
    """Return an op's arguments with a copy of each list among them: compiled code empties the list that it gets."""
    return [list(arg) if type(arg) is list else arg for arg in args]


def _described_tensor(tensor: torch.Tensor, first: Any, given: Sequence[torch.Tensor] = ()) -> Any:
    kind = type(tensor)
    if kind in _DENSE and tensor.layout is strided:
        lazy = tensor.is_conj(), tensor.is_neg()  # the imaginary part of a conjugate is a negative, too
        return new_tuple(Meta, (geometry_of(tensor), tensor.dtype, tensor.device, _is_alias(tensor, first), lazy))
    if kind not in _DENSE and is_traceable_wrapper(tensor):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        values = {name: getattr(tensor, name) for name in names}  # of DTensor also its mesh, which is no tensor
        parts = {
            name: described(part, None, given) if isinstance(part, torch.Tensor) else part
            for name, part in values.items()
        }
        return WrapperMeta(kind, parts, context, geometry_of(tensor), _is_alias(tensor, first))
    return tensor.detach()  # its own graph would own it


def _is_alias(tensor: torch.Tensor, first: Any) -> bool:
    return isinstance(first, torch.Tensor) and key_of(first) == key_of(tensor)


def stand_in(meta: Any, source: Source) -> torch.Tensor:
    """Return a placeholder for one result, or a wrapper around placeholders."""
    if type(meta) is WrapperMeta:
        parts = {
            name: stand_in(part, source) if type(part) in (Meta, WrapperMeta) else part
            for name, part in meta.parts.items()
        }
        shape, stride, _ = meta.geometry
        made: torch.Tensor = meta.kind.__tensor_unflatten__(parts, meta.context, shape, stride)
        return made
    geometry, dtype, device, _, lazy = meta
    return placeholder_at(geometry, dtype, device, source, lazy)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the innermost tensors of which a wrapper consists; the tensor itself if it is not a wrapper."""
    if type(tensor) in _DENSE or not hasattr(tensor, "__tensor_flatten__"):
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
    if type(tensor) not in _DENSE:
        tensor = next(parts_of(tensor), tensor)
    if isinstance(tensor, Placeholder):
        return -id(tensor.source)  # which its views and aliases share
    if tensor.layout is not strided:
        return -id(tensor if tensor._base is None else tensor._base)
    return storage_key(tensor)


def keys_of(tensor: torch.Tensor) -> Sequence[int]:
    """Return the same for all parts of a wrapper."""
    return (key_of(tensor),) if type(tensor) in _DENSE else [key_of(part) for part in parts_of(tensor)]


def has_placeholder(tensor: object) -> bool:
    """Whether a value is a placeholder, or a wrapper around one."""
    if type(tensor) in USUAL or not isinstance(tensor, torch.Tensor):
        return False
    return any(isinstance(part, Placeholder) for part in parts_of(tensor))


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


def without_lists(args: Sequence[Any]) -> list[Any]:
    """Return an op's positional arguments with what is in lists among them in place of the lists."""
    return [item for arg in args for item in (arg if type(arg) is list else (arg,))]


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
        return [(arg.shape, arg.stride()) for arg in args if type(arg) in _DENSE and arg.layout is strided]
