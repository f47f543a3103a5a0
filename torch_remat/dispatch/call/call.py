"""One call that replay skips: a function given to `remat.op`, or one of torch's own in a native region.

In: the call's arguments and variables, what autograd saves meanwhile, and the result. Kept: residents, and the call in
the log. Out: in replay the result, kept tensors or placeholders in it, and the values of arguments that were saved.

NOTE [ When a saved call runs whole ]
Replay skips a call, or runs it whole. It runs it whole, and warns once, if
1. a result of it was modified in place after it;
2. it modified an argument or a variable that the region had made, or
3. it raised an exception.
Then nothing of it is kept, as if its policy were RECOMPUTE; where only replay knows, forward's holders have what the
second run saves. Every other way in which tensors of a
skipped call reach its region is a `UsageError` in forward: a tensor that was not returned, a variable or container of
the region that holds other tensors afterwards, a result that is not a tree of tensors and plain values.
Tensors outside the region are modified once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from torch_remat._compat import (
    any_autocast_enabled,
    has_one_output,
    is_compiled,
    node_behind,
    node_number,
    sequence_number,
    storage_key,
)
from torch_remat.dispatch.call.entry import Call, Given, Waiting
from torch_remat.dispatch.call.log import Log, Running
from torch_remat.dispatch.call.result import (
    Again,
    Passed,
    State,
    flatten,
    is_changed,
    is_flat,
    refused,
    state_of,
)
from torch_remat.dispatch.keys import DENSE, USUAL, key_of, keys_of, layout_of, tensors_in, version_of
from torch_remat.dispatch.ops.meta import Meta, WrapperMeta, described
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.region.region import Region
from torch_remat.dispatch.slot import Slot
from torch_remat.errors import UsageError

_VALUES = frozenset((int, float, bool, type(None)))
_ORDINARY = DENSE | _VALUES
_FLAT = USUAL | _VALUES  # what the arguments of most calls are
_FUNCTION_CLASS = type(torch.autograd.Function)
_pure: dict[int, bool] = {}


def is_builtin(function: Any) -> bool:
    """Whether a function is one of torch's own in C++, and not the ``apply`` of a Function, C++ since torch 2.14."""
    return type(function) is BuiltinFunctionType and type(function.__self__) is not _FUNCTION_CLASS


def is_whole_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is one of torch's own, called with ordinary tensors, which changes none of them, or compiled.

    Under autocast one of torch's own makes casts besides, and parameters' casts are not to be kept.
    """
    if is_builtin(function):
        if not (_pure.get(id(function)) or _is_pure(function)) or any_autocast_enabled() or "out" in kwargs:
            return False
    elif not is_compiled(function):
        return False
    if not kwargs and _ORDINARY.issuperset(map(type, args)):
        return True
    return all(map(_is_ordinary, args)) and all(map(_is_ordinary, kwargs.values()))


def _is_ordinary(value: Any) -> bool:
    if type(value) in _ORDINARY:
        return True
    if isinstance(value, torch.Tensor):
        return False
    return not isinstance(value, (list, tuple)) or all(map(_is_ordinary, value))


def _is_pure(function: Any) -> bool:
    pure = _pure.get(id(function))
    if pure is None:
        name = function.__name__
        known = any(getattr(place, name, None) is function for place in (torch, F))
        # Norms change running statistics; what is named so changes its argument.
        pure = _pure[id(function)] = known and not name.endswith("_") and "_norm" not in name
    return pure


@cache
def may_draw(name: str) -> bool:
    """Whether a function of torch's own may draw random numbers, as its ops' tags and parameters tell."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):  # such as a method of Python's, `__eq__`
        return True
    ops = [getattr(packet, overload) for overload in packet.overloads()]
    return any(
        torch.Tag.nondeterministic_seeded in op.tags or any(value.name in _OF_RANDOM for value in op._schema.arguments)
        for op in ops
    )


# Ops that consist of others have no tag, but parameters by which they draw.
_OF_RANDOM = {"p", "train", "training", "dropout", "dropout_p", "generator"}


class RunningCall(Running):
    """A call of a function whose Python does not run in replay."""

    _state: State = ()

    def __init__(
        self, ops: Log, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
        is_pure: bool,
    ) -> None:  # fmt: skip
        self._is_pure = is_pure
        given: Sequence[Any]
        leaves = given = args if is_pure and not kwargs else _leaves_of(args, kwargs)
        super().__init__(ops, call, Given(function, leaves))
        kinds = set(map(type, leaves))
        try:
            if not USUAL.issuperset(kinds):
                if not _FLAT.issuperset(kinds):
                    raise RuntimeError
                given = [arg for arg in leaves if type(arg) in USUAL]
            call.layout = [(one.shape, one.stride()) for one in given]
            call.reads = list(map(storage_key, given))
        except RuntimeError:  # sparse tensors have no strides
            given = list(tensors_in(leaves, {}))
            call.layout = layout_of(leaves, {})
            call.reads = [key for tensor in given for key in keys_of(tensor)]
        if not is_pure:
            self._state = state_of((function, *args, *kwargs.values()))
            places = self.given.places()
            variables = [tensor for place in places if (tensor := place.tensor) is not None and not is_lazy(tensor)]
            self.given.before = [(tensor, version_of(tensor)) for tensor in (*given, *variables)]
        self.draws = not is_builtin(function) or may_draw(function.__name__)
        if self.draws and ops.draws is not None:
            ops.draws.begin()

    def returns(self, result: Any) -> None:
        """Note what the call returns."""
        call, ops = self.call, self.ops
        for tensor, version in self.given.before:
            if version_of(tensor) != version:
                self.note_written(tensor, version)
        leaves: Sequence[Any] = (result,)
        form = None
        if (
            type(result) is torch.Tensor and result._base is None and result.layout is torch.strided
            and not result.dtype.is_complex and (key := storage_key(result)) not in call.reads
            and (self._is_pure or self._is_new(result, key))
        ):  # fmt: skip
            if self.draws or ops.departures.waiting:
                self.end()
            else:
                self.last = sequence_number()
            ops.note_result(call, result, key)
        else:
            if not isinstance(result, torch.Tensor):
                leaves, form = flatten(result)
            if why := refused(leaves):
                raise cannot_be_skipped(ops.region, call, why, "Return tensors and plain values")
            self._returns_several(leaves, () if form is None or form.is_leaf() else (form,))
        if call.start == call.end or self.last - self.first > 1:
            refuse_gradient(ops.region, call.name, self.first, leaves)
        if not self._is_pure:
            self._check_left(leaves)

    def _is_new(self, result: torch.Tensor, key: int) -> bool:
        """Whether the call has made the storage of its result, which is no view."""
        node = result.grad_fn
        if node is not None and node_number(node) >= self.first and not self.written:
            return True
        return self.given.find(result, key) is None

    def _returns_several(self, leaves: Sequence[Any], template: tuple[Any, ...]) -> None:
        ops, call = self.ops, self.call
        self.end()
        seen: dict[int, int] = {}
        forms, made = [], []
        for at, leaf in enumerate(leaves):
            form = leaf
            if isinstance(leaf, torch.Tensor) and (first := seen.setdefault(id(leaf), at)) != at:
                form = Again(first)
            elif isinstance(leaf, torch.Tensor):
                form = self._form_of(leaf)
                if type(form) in (Meta, WrapperMeta):
                    made.append((at, leaf))
            forms.append(form)
        call.template = template
        call.results = forms if call.template else forms[0]
        call.gradients = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        ops.note_results(call, leaves, made)

    def _form_of(self, leaf: torch.Tensor) -> Any:
        """Describe a tensor of the result."""
        key = key_of(leaf)
        found = self.given.find(leaf, key)
        if found is not None:
            place, source = found
            if source is leaf:
                return Passed(place, None)
            both = type(leaf) in DENSE and type(source) in DENSE
            if (
                both
                and leaf.layout is source.layout is torch.strided
                and leaf.dtype in (source.dtype, source.dtype.to_real())
            ):
                view = Waiting.of(leaf, None, place, source, None)
                return Passed(place, view, leaf.requires_grad, leaf._base is not None)
        if leaf.is_leaf and leaf.requires_grad:
            return leaf
        meta = described(leaf, None)
        return (
            meta
            if type(meta) in (Meta, WrapperMeta)
            else Slot(leaf.detach(), self.ops.region.hooks, leaf.requires_grad)
        )

    def _check_left(self, leaves: Sequence[Any]) -> None:
        """Look for effects of the call other than its result."""
        ops = self.ops
        made = self.last - self.first
        if made > 1 or (made and not (len(leaves) == 1 and has_one_output(node_behind(leaves[0])))):
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            # Where a view is modified later, autograd goes on from what it is a view of.
            tensors += [leaf._base for leaf in tensors if leaf._base is not None]
            self.outputs = {(node, leaf.output_nr) for leaf in tensors if (node := node_behind(leaf)) is not None}
        if self._state and is_changed(self._state, ops.region.function):
            why = "it changed which tensors a variable, container or iterator of the region holds"
            raise cannot_be_skipped(ops.region, self.call, why, "Return the tensors")
        if self.written:
            ops.note_writes(self)


def cannot_be_skipped(region: Region, call: Call, why: str, remedy: str) -> UsageError:
    """Return the error about a call that has effects on its region other than its result."""
    return UsageError(
        f"replay cannot skip this call: {why}",
        region=region.name,
        op=call.name,
        remedy=f"{remedy}, use remat.native_save_region, whose Python runs again in replay, or give the call the "
        "policy RECOMPUTE.",
    )


def _leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    return args if is_flat(args, kwargs) else leaves_of(args, kwargs)


def refuse_gradient(region: Region, name: str, first: int, leaves: Sequence[Any]) -> None:
    """Refuse a gradient inside of the region's forward through a call's result, where no saved tensor shows it."""
    for leaf in leaves:
        node = leaf.grad_fn if type(leaf) is torch.Tensor and leaf._base is None else node_behind(leaf)
        if node is not None and node_number(node) >= first:
            node.register_prehook(partial(region.note_gradient, name))
