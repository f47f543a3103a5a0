"""What replay must know of an op's results to answer the op without running it.

In: in forward each op's result. Kept: metadata and plain values, no tensor but where none can stand for it (sparse
layouts). Out: in replay placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import strided

from torch_remat._compat import is_traceable_wrapper, optree, without_work
from torch_remat.dispatch.keys import DENSE, key_of
from torch_remat.dispatch.placeholder import (
    Geometry,
    Placeholder,
    Source,
    geometry_of,
    new_tuple,
    placeholder_at,
)


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
    keys = [key_of(tensor) if type(tensor) in DENSE else None for tensor in given]
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
    if kind in DENSE and tensor.layout is strided:
        lazy = tensor.is_conj(), tensor.is_neg()  # the imaginary part of a conjugate is a negative, too
        return new_tuple(Meta, (geometry_of(tensor), tensor.dtype, tensor.device, _is_alias(tensor, first), lazy))
    if kind not in DENSE and is_traceable_wrapper(tensor):
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
