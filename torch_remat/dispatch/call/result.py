"""The result of a call as a tree: what forward notes of it, and what replay returns in its place.

In: what a call returned. Kept: for each leaf a description if the call made the tensor, else where replay finds it; a
plain value as it is. Out: the result anew, with kept tensors or placeholders in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple, Protocol

import optree
import torch
from torch.nn import Parameter

from torch_remat._compat import adopt_pytree_node, is_refused, same_memory
from torch_remat.dispatch.check.compare import mismatched
from torch_remat.dispatch.holder import RegionLike
from torch_remat.dispatch.log.entry import Call
from torch_remat.dispatch.log.meta import Meta, WrapperMeta, stand_in
from torch_remat.dispatch.log.slot import Elided, Slot
from torch_remat.dispatch.placeholder import Placeholder, Source
from torch_remat.dispatch.region.inputs import fresh_alias
from torch_remat.dispatch.region.region import OpenRegion
from torch_remat.errors import MismatchError
from torch_remat.offload.transfer import Placement

USUAL = frozenset((torch.Tensor, Parameter, Placeholder))
_PLAIN = (
    int, float, bool, str, bytes, complex, type(None), Enum, type, slice, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_FLAT = frozenset((*USUAL, int, float, bool, str, complex, type(None)))
_NAMESPACE = "torch_remat.results"  # of optree: results are looked into further than arguments
SAME = "A region must make the same calls in both phases, on tensors that lie in memory in the same way."


class Passed(NamedTuple):
    """A tensor of a result that is an argument or a variable of the call, or a view of one.

    Attributes:
        place: Which of them.
        view: Where it lies there; None if it is the same tensor.
        has_history: Whether it needs a gradient.
        is_view: Whether it was a view of another tensor for autograd, too.
    """

    place: int
    view: Elided | None
    has_history: bool = True
    is_view: bool = True


class Again(NamedTuple):
    """A tensor that came before in the same result.

    Attributes:
        at: Where: among the leaves.
    """

    at: int


class Loading(Protocol):
    """What the result of a call asks of the log in replay; the `Answerer`."""

    region: OpenRegion

    @property
    def changes_results(self) -> bool:
        """Whether the log has changes in place, for which results need a history."""

    def load(self, slot: Slot, op: str, name: str) -> torch.Tensor:
        """Return what a slot keeps."""

    def note_loaded(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was kept, so that it has no history in replay."""


def is_flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether there are only positional arguments, and each is a leaf."""
    return not kwargs and _FLAT.issuperset(map(type, args))


def flatten(result: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a result, and its form: pytrees of optree and of torch, and dataclasses, are looked into."""
    leaves, spec = optree.tree_flatten(result, namespace=_NAMESPACE)
    for leaf in leaves:
        kind = type(leaf)
        if not isinstance(leaf, torch.Tensor) and (adopt_pytree_node(kind, _NAMESPACE) or _adopt_dataclass(kind)):
            return flatten(result)
    return leaves, spec


def _adopt_dataclass(kind: type) -> bool:
    """Make a dataclass known as a tree; return whether it is one."""
    if not dataclasses.is_dataclass(kind):
        return False
    names = tuple(field.name for field in dataclasses.fields(kind))

    def taken_apart(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        there = tuple(name for name in names if hasattr(value, name))
        return [getattr(value, name) for name in there], there

    def made(there: Any, values: Iterable[Any]) -> Any:
        value = object.__new__(kind)
        for name, part in zip(there, values, strict=True):
            object.__setattr__(value, name, part)
        return value

    with suppress(ValueError):  # another thread was faster
        optree.register_pytree_node(kind, taken_apart, made, namespace=_NAMESPACE)  # type: ignore[arg-type]
    return True


def refused(leaves: Sequence[Any]) -> str:
    """Return why a call that returned these leaves cannot be skipped; empty if it can."""
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            return f"it returned an object of type {type(leaf).__name__}, of which replay can make no other"
        if is_refused(leaf):
            return "it returned a view that was made without gradients and whose base has a grad_fn now"
    return ""


def lying_in(view: torch.Tensor, source: torch.Tensor) -> Elided:
    """Describe how a tensor lies in the storage of another, though no holder waits for it."""
    return Elided(None, 0, Placement.of(view), Placement.of(source))  # type: ignore[arg-type]


def kept_or_stand_in(replay: Loading, call: Call, place: int) -> Any:
    """Return what replay has of a tensor that a call made: what was kept of it, else a placeholder."""
    requires_grad = bool(call.gradients) and call.gradients[place]  # of a handle autograd decides
    slot = call.kept.get(place)
    has_history = requires_grad and (replay.changes_results or replay.region.inputs.keeps_histories)
    if slot is not None:
        tensor = slot.unchanged()
        if tensor is None:
            tensor = replay.load(slot, call.name, call.label(place))
        tensor = fresh_alias(tensor.data, True, True) if has_history else tensor.requires_grad_(requires_grad)
        replay.note_loaded(tensor)
        return tensor
    made = stand_in(call.meta(place), Source(replay.region.name, call.name, call.label(place), id(replay.region)))
    if has_history:
        return fresh_alias(made, True, True)
    return made.requires_grad_() if requires_grad else made


def result_of(replay: Loading, call: Call, given: Sequence[Any]) -> Any:
    """Return what a skipped call returned in forward; ``given`` are its arguments and variables in replay."""
    if not call.template:
        return _leaf_of(replay, call, 0, call.results, given, [])
    leaves: list[Any] = []
    for place, form in enumerate(call.results):
        leaves.append(_leaf_of(replay, call, place, form, given, leaves))
    return optree.tree_unflatten(call.template[0], leaves)


def _leaf_of(replay: Loading, call: Call, place: int, form: Any, given: Sequence[Any], before: Sequence[Any]) -> Any:
    kind = type(form)
    if kind is Meta or kind is WrapperMeta:
        return kept_or_stand_in(replay, call, place)
    if kind is Again:
        return before[form.at]
    if kind is Slot:  # of a layout for which no placeholder stands in
        value = replay.load(form, call.name, call.label(place))
        replay.note_loaded(value)
        return value
    return _passed(replay, call, form, given[form.place]) if kind is Passed else form


def _passed(replay: Loading, call: Call, form: Passed, source: Any) -> Any:
    """Return an argument or a variable, or a view of one."""
    if form.view is None:
        return source
    value = form.view.value(source, form.has_history) if isinstance(source, torch.Tensor) else None
    if value is None:
        raise mismatched(replay.region, "replay returned a view of a tensor that lies otherwise", SAME, op=call.name)
    if not form.is_view:  # a detached alias; or of unsafe_split, whose results may be written in place
        value = same_memory(value) if form.has_history else value.detach()
        replay.note_loaded(value)
    return value


def another_call(region: RegionLike, call: Call, same_function: bool) -> MismatchError:
    """Return the error about a call that is not that of forward."""
    how = "with tensors of other shapes or strides" if same_function else "of another function"
    return mismatched(region, f"replay made this call {how}", SAME, op=call.name)
