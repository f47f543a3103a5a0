"""The aten ops of an intercepted stretch of code: what forward noted of each, and how replay answers it.

In: in forward each op's result; in replay the same op again. Kept: metadata and plain values; a tensor only where no
placeholder could stand for it (sparse layouts, subclasses). Out: placeholders, recorded values, real views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, strided
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import set_conj, set_neg, shares_storage, storage_key
from torch_remat.dispatch.check.mismatch import mismatched
from torch_remat.dispatch.placeholder import (
    Geometry,
    Placeholder,
    Source,
    geometry_of,
    new_tuple,
    placeholder_at,
    reshape,
)
from torch_remat.dispatch.schema import Effects, argument, effects_of

if TYPE_CHECKING:
    from torch_remat.dispatch.region.region import Region
    from torch_remat.errors import MismatchError


class Meta(NamedTuple):
    """What replay must know of a tensor to stand something in for it.

    Attributes:
        geometry: Where it lies in its storage.
        dtype: Its dtype.
        device: Its device.
        alias: Whether it shares the storage of its op's first argument though the schema does not say so.
        like: Whether it is a lazy conjugate, and a lazy negative.
    """

    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    alias: bool
    like: tuple[bool, bool]

    def describes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor in the same storage is the whole result, and no view of it that shows something else."""
        if (tensor.shape, tensor.stride()) != self.geometry[:2]:
            return False
        return tensor.dtype is self.dtype and (tensor.is_conj(), tensor.is_neg()) == self.like


class Raised(NamedTuple):
    """What an op raised instead of returning; made anew in replay, since a traceback would keep frames alive."""

    kind: type[Exception]
    args: tuple[Any, ...]


class Given(NamedTuple):
    """A result that is an argument, though the op's schema does not say so.

    Attributes:
        place: Which of the tensors among the arguments it is.
    """

    place: int


class Call:
    """One op of forward.

    Attributes:
        op: The op.
        count: How many ops of its name came before it.
        results: What it returned: a `Meta` for a tensor, a list for several results, `Raised`, or a plain value.
    """

    __slots__ = ("count", "op", "results")

    def __init__(self, op: Any, count: int, results: Any) -> None:
        self.op = op
        self.count = count
        self.results = results

    def label(self, place: int) -> str:
        """Return the automatic name of one of the results, such as ``mm_2_0``."""
        return f"{effects_of(self.op).name}_{self.count}_{place}"


class NativeCall(Call):
    """One op of a native region.

    Attributes:
        outside: Which of its arguments are tensors from outside that are no parameters, and their shapes.
        returned: Which of the region's results its result is, if that is kept as it was made; -1 if not.
    """

    __slots__ = ("outside", "returned")

    def __init__(self, op: Any, count: int, results: Any) -> None:
        self.op = op
        self.count = count
        self.results = results
        self.outside: Sequence[tuple[int, torch.Size]] = ()
        self.returned = -1


def is_kept_out(effects: Effects, args: Sequence[Any]) -> bool:
    """Whether an op is none of the sequence: bookkeeping, or a cast of a parameter, which autocast may have kept."""
    if effects.ignored:
        return True
    first = args[0] if effects.cast else None
    return isinstance(first, torch.Tensor) and first.is_leaf and first.requires_grad


def described(result: Any, first: Any, given: Sequence[torch.Tensor] = ()) -> Any:
    """Return what replay must know of an op's result.

    Args:
        result: What the op returned.
        first: Its first argument.
        given: The tensors among its arguments, if its schema cannot be trusted to tell which of them it returns.
    """
    if given and isinstance(result, torch.Tensor):
        for place, tensor in enumerate(given):
            if tensor is result:
                return Given(place)
    if isinstance(result, torch.Tensor):
        if type(result) not in _PLAIN or result.layout is not torch.strided:
            return result
        alias = type(first) in _PLAIN and shares_storage(first, result)
        lazy = (result.is_conj(), result.is_neg()) if result.dtype.is_complex else NOT_LAZY
        return new_tuple(Meta, (geometry_of(result), result.dtype, result.device, alias, lazy))
    if type(result) in (tuple, list):
        return [described(item, first, given) for item in result]
    return result


_REAL = frozenset((Tensor, torch.nn.Parameter))
_PLAIN = frozenset((*_REAL, Placeholder))
_NESTING = (Tensor, list, tuple)
NOT_LAZY = (False, False)


def answered(
    call: Call,
    effects: Effects,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stand_in: Callable[[int, Meta], torch.Tensor],
) -> Any:
    """Return what replay answers an op with that it does not run.

    Args:
        call: The op in forward.
        effects: Its effects.
        args: Its positional arguments in replay.
        kwargs: Its keyword arguments.
        stand_in: Makes the tensor for one of the results; takes its index and metadata.
    """
    results = call.results
    if type(results) is Raised:
        raise results.kind(*results.args)
    if effects.written and len(effects.returned) == 1 and effects.returned[0] >= 0:
        return _fitted(argument(effects.written[effects.returned[0]], args, kwargs), results)
    if effects.reshapes:
        if isinstance(args[0], Placeholder):
            return reshape(call.op, args, kwargs)
        return call.op(*args, **kwargs)
    if type(results) is Meta:
        if effects.viewed is None and not results.alias:
            return stand_in(0, results)
        base = argument(effects.viewed, args, kwargs) if effects.viewed is not None else args[0]
        return _view_of(base, stand_in(0, results)) if isinstance(base, Placeholder) else call.op(*args, **kwargs)
    if type(results) is Given:
        return list(tensors_in(args, kwargs))[results.place]
    if type(results) is not list:
        return results
    base = argument(effects.viewed, args, kwargs) if effects.viewed is not None else None
    if any(getattr(item, "alias", False) for item in results):
        base = args[0]
    if isinstance(base, torch.Tensor) and not isinstance(base, Placeholder):
        return call.op(*args, **kwargs)  # views of a real tensor
    given = list(tensors_in(args, kwargs))
    made = [
        _fitted(argument(effects.written[effects.returned[place]], args, kwargs), item)
        if place < len(effects.returned) and effects.returned[place] >= 0
        else _answered_item(item, place, given, stand_in)
        for place, item in enumerate(results)
    ]
    if isinstance(base, Placeholder):
        made = [_view_of(base, item) for item in made]
    return made if len(effects.returned) == 1 else tuple(made)


def _fitted(written: Any, meta: Any) -> Any:
    """Return a written argument in the shape that the op has given it: ``out=`` tensors are resized."""
    if type(meta) is Meta and isinstance(written, torch.Tensor) and written.shape != meta.geometry.shape:
        if isinstance(written, Placeholder):
            written.resized = True
        else:
            written.resize_(meta.geometry.shape)
    return written


def _view_of(base: Placeholder, view: Any) -> Any:
    if isinstance(view, Placeholder):
        view.source = base.source  # by which what shares a storage is known
    return view


def _answered_item(
    item: Any, place: int, given: Sequence[torch.Tensor], stand_in: Callable[[int, Meta], torch.Tensor]
) -> Any:
    if type(item) is Meta:
        return stand_in(place, item)
    if type(item) is Given:
        return given[item.place]
    if type(item) is list:
        return [_answered_item(inner, place, given, stand_in) for inner in item]
    return item


def placeholder_for(meta: Meta, source: Source) -> Placeholder:
    """Return a placeholder for one result."""
    made = placeholder_at(meta.geometry, meta.dtype, meta.device, source)
    if meta.like is not NOT_LAZY:
        set_conj(made, meta.like[0])
        set_neg(made, meta.like[1])
    return made


def key_of(tensor: torch.Tensor) -> int:
    """Return what stands for a tensor's storage; sparse tensors, wrappers and placeholders stand for themselves."""
    if type(tensor) is Tensor and tensor.layout is strided:  # which is told faster than the others
        return storage_key(tensor)
    if isinstance(tensor, Placeholder):
        return -id(tensor.source)  # which its views and aliases share
    if tensor.layout is not torch.strided:
        return -id(tensor if tensor._base is None else tensor._base)
    return storage_key(tensor)


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among an op's arguments."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if isinstance(item, torch.Tensor):
                    yield item


def changed_arguments(
    call: Call, effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that an op of a call writes, also those that it returns without a word in its schema."""
    found = written_arguments(effects, args, kwargs) if effects.written else []
    if effects.namespace != "aten" and (places := _given_in(call.results)):
        given = list(tensors_in(args, kwargs))
        found += [given[place] for place in places if not any(given[place] is tensor for tensor in found)]
    return found


def layout_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Size, tuple[int, ...]]]:
    """Return shape and strides of the tensors among an op's arguments; none if they cannot be told.

    A placeholder cannot be resized, which ops do with an empty ``out``.
    """
    if not kwargs and not any(isinstance(arg, _NESTING) and type(arg) not in _REAL for arg in args):
        return plain_layout(args)
    layout = []
    for tensor in tensors_in(args, kwargs):
        if isinstance(tensor, Placeholder) and tensor.resized:
            return []
        if tensor.layout is strided:
            layout.append((tensor.shape, tensor.stride()))
    return layout


def plain_layout(args: Sequence[Any]) -> list[tuple[torch.Size, tuple[int, ...]]]:
    """Return the same for arguments that are plain tensors, or placeholders, and values that are none."""
    return [(arg.shape, arg.stride()) for arg in args if type(arg) in _PLAIN and arg.layout is strided]


def _given_in(results: Any) -> list[int]:
    if type(results) is Given:
        return [results.place]
    return [place for item in results for place in _given_in(item)] if type(results) is list else []


def written_arguments(effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an op writes."""
    found: list[torch.Tensor] = []
    for where in effects.written:
        value = argument(where, args, kwargs)
        found += [item for item in (value if isinstance(value, (list, tuple)) else [value])
                  if isinstance(item, torch.Tensor)]  # fmt: skip
    return found


def still_there(storages: Iterable[StorageWeakRef]) -> set[int]:
    """Return what `key_of` gives for tensors in those storages that still exist."""
    return {storage.cdata for storage in storages if not storage.expired()}


_SAME_CALLS = (
    "What is intercepted must run the same ops in both phases: look for state that changed in between and for branches "
    "on is_recomputing() or on data that torch cannot see."
)


def another_call(region: Region, op: str | None, at: int, calls: Sequence[Call], ran: Any) -> MismatchError:
    """Return the error about an op that is not the one that forward ran at its place."""
    expected = str(calls[at].op) if at < len(calls) else "no further op"
    found = "ran no further op" if ran is None else f"ran {ran}"
    return mismatched(
        region, f"the ops differ from op {at} on: forward ran {expected}, replay {found}", _SAME_CALLS, op=op
    )


def another_shape(region: Region, op: str, at: int, call: Call, shape: torch.Size, found: torch.Size) -> MismatchError:
    """Return the error about an op of a native region that gets a tensor of another shape than in forward."""
    what = f"op {at} of forward, {call.op}, got a tensor of shape {tuple(shape)} there and of {tuple(found)} in replay"
    return mismatched(region, what, _SAME_CALLS, tensor=call.label(0), op=op)


def other_arguments(
    region: Region, op: str, at: int, call: Call, forward: Sequence[Any], replay: Sequence[Any]
) -> MismatchError:
    """Return the error about an op that gets other tensors than in forward."""
    shown = [
        ", ".join(f"{tuple(shape)} with strides {strides}" for shape, strides in side) for side in (forward, replay)
    ]
    return mismatched(
        region,
        f"op {at} of forward, {call.op}, got tensors of {shown[0]} there and of {shown[1]} in replay",
        _SAME_CALLS,
        tensor=call.label(0),
        op=op,
    )
