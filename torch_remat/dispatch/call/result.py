"""The effects of a call on its region: its result, which is allowed, and all others, which are not.

In: what a call returned; and, before it runs, its function and arguments. Kept: for each leaf of the result a
description if the call made the tensor, else where replay finds it; until the call is over, which tensors the variables
and containers in its reach hold. Out: in replay the result, rebuilt from kept tensors and placeholders; in forward the
variables and containers that the call changed, and the calls that made a tensor which the region uses although the call
did not return it. Each of these is an error.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from operator import length_hint
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node
from torch.nn import Module, Parameter

from torch_remat._compat import adopt_pytree_node, is_refused, node_number, optree
from torch_remat.dispatch.call.entry import Call, Source, Waiting
from torch_remat.dispatch.holder import CAST
from torch_remat.dispatch.keys import DENSE

_PLAIN = (
    int, float, bool, str, bytes, complex, type(None), Enum, type, slice, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_FLAT = frozenset((*DENSE, int, float, bool, str, complex, type(None)))
_NAMESPACE = "torch_remat.results"  # of optree: results are looked into further than arguments
SAME = "The function must make the same calls in both phases, on tensors with the same memory layout."


class Passed(NamedTuple):
    """A tensor of a result that is an argument or a variable of the call, or a view of one.

    Attributes:
        place: Which of them.
        view: Its placement there; None if it is the same tensor.
        has_history: Whether it needs a gradient.
        is_view: Whether it was a view of another tensor for autograd, too.
    """

    place: Source
    view: Waiting | None
    has_history: bool = True
    is_view: bool = True


class Again(NamedTuple):
    """A tensor that came before in the same result.

    Attributes:
        at: Where: among the leaves.
    """

    at: int


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
            return f"it returned an object of type {type(leaf).__name__}, which replay cannot create"
        if is_refused(leaf):
            return "it returned a view created without gradients whose base now has a grad_fn"
    return ""


# Effects of a call other than its result.

State = Sequence[tuple[Any, tuple[Any, ...]]]  # holders of objects, each with the tensors that it holds
_DEPTH = 3  # of functions and containers in each other
_BARE = frozenset((torch.Tensor, Parameter, int, float, bool, str, bytes, complex, type(None), type, torch.dtype))
_NOT_WALKED = (torch.Tensor, Module, type, ModuleType)


def identity_of(function: Any) -> Any:
    """Return what identifies a function and is the same in replay, which defines inner functions anew."""
    while isinstance(function, partial) or hasattr(type(function), "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    if isinstance(function, MethodType):
        if isinstance(owner := function.__self__, type):  # the ``apply`` of a custom Function
            return owner, function.__name__
        function = function.__func__
    if type(function) is BuiltinFunctionType:
        owner = function.__self__
        if isinstance(owner, type):  # what most of torch's own are methods of
            return owner, function.__name__
        if owner is None or isinstance(owner, ModuleType):
            return function
        # A tensor's method: in replay it may be a placeholder's.
        return torch.Tensor if isinstance(owner, torch.Tensor) else type(owner), function.__name__
    return function.__code__ if isinstance(function, FunctionType) else type(function)


def state_of(roots: Sequence[Any]) -> State:
    """Return the tensors held by what a call may change: variables, lists, dicts, sets, iterators, attributes.

    Args:
        roots: The function and the arguments of the call.
    """
    holding = [
        root
        for root in roots
        if type(root) not in _BARE and (type(root) is not FunctionType or root.__closure__ or root.__defaults__)
    ]
    if not holding:  # as most calls
        return ()
    return [(holder, _tensors_held(holder)) for holder in _holders(holding, _DEPTH, _NOT_WALKED)]


def is_changed(state: State, region_function: Any) -> bool:
    """Whether one of them holds other tensors now and is not reached by the region's own function too."""
    changed = [holder for holder, held in state if not _same(_tensors_held(holder), held)]
    if not changed:
        return False
    function: Any = getattr(region_function, "__func__", region_function)
    names = function.__code__.co_names if isinstance(function, FunctionType) else ()
    roots = [region_function, *(function.__globals__.get(name) for name in names)]
    known = {id(holder) for holder in _holders(roots, 2 * _DEPTH, (torch.Tensor, type, ModuleType))}
    return any(id(holder) not in known for holder in changed)


def _holders(roots: Sequence[Any], depth: int, not_walked: tuple[type, ...]) -> Iterator[Any]:
    """Yield what holds objects, breadth first."""
    level, seen = roots, set()
    for _ in range(depth):
        following: list[Any] = []
        for value in level:
            if type(value) in _BARE or id(value) in seen or isinstance(value, not_walked):
                continue
            seen.add(id(value))
            holders: Sequence[Any] = ()
            if isinstance(value, FunctionType):
                holders = value.__closure__ or ()
                following += (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            elif isinstance(value, MethodType):
                following += (value.__func__, value.__self__)
            elif isinstance(value, partial):
                following += (value.func, *value.args, *value.keywords.values())
            elif isinstance(value, tuple):
                following += value
            elif isinstance(value, (list, dict, set, Iterator)):
                holders = (value,)
            elif type(value).__module__.partition(".")[0] != "torch":  # else such as contexts
                holders = (attributes,) if type(attributes := getattr(value, "__dict__", None)) is dict else ()
            for holder in holders:
                yield holder
                following += _held_by(holder)
        level = following


def _held_by(holder: Any) -> tuple[Any, ...]:
    if isinstance(holder, CellType):
        try:
            return (holder.cell_contents,)
        except ValueError:  # not set yet
            return ()
    if isinstance(holder, dict):
        return (*holder, *holder.values())
    return () if isinstance(holder, Iterator) else tuple(holder)


def _tensors_held(holder: Any) -> tuple[Any, ...]:
    """Return the tensors that a holder holds; of an iterator how far it is."""
    if isinstance(holder, Iterator):
        frame = getattr(holder, "gi_frame", None)
        return (length_hint(holder, -1), -1 if frame is None else frame.f_lasti)
    return tuple([value for value in _held_by(holder) if isinstance(value, torch.Tensor)])


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(
        before is now or (type(now) is int and before == now) for before, now in zip(one, other, strict=True)
    )


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


class Left(NamedTuple):
    """A call that made more nodes than its result has.

    Attributes:
        call: It.
        first: The number of its first node.
        last: That of the first one after it.
        outputs: The nodes of its result, with which of the node's outputs each is.
    """

    call: Call
    first: int
    last: int
    outputs: set[tuple[Node, int]]


def call_left_by_a_tensor(calls: Sequence[Left], readers: Readers) -> Call | None:
    """Return a call, of these in order, of which a node outside reads a node that made no result, or None."""
    starts = [call.first for call in calls]
    for node, by in readers.items():
        number = node_number(node)
        at = bisect_right(starts, number) - 1
        if at < 0 or number >= (call := calls[at]).last:
            continue
        for reader, place in by:
            is_inside = call.first <= node_number(reader) < call.last
            if not (is_inside or (node, place) in call.outputs or _is_cast(node)):
                return call.call
    return None


def _is_cast(node: Node) -> bool:
    """Whether a node is that of a leaf's cast, which autocast makes once for all that read it."""
    return type(node) is CAST and hasattr(node.next_functions[0][0], "variable")


def defined_at(function: Any) -> tuple[str, int] | None:
    """Return file and line of what was called, given its identity: of a function, a class, or a custom Function."""
    if isinstance(function, tuple):
        function = function[0]
    if isinstance(function, type):
        function = getattr(getattr(function, "forward", None) or function.__call__, "__code__", None)
    return (function.co_filename, function.co_firstlineno) if isinstance(function, CodeType) else None
