"""What a skipped call would leave to its region otherwise than by its result; each is an error in forward.

In: the function and the arguments of a call, before it runs; the graph of the region at its end. Kept until the call is
over: which tensors the variables and containers in its reach hold. Out: what it changed there, and the calls of which
the region goes on with a tensor that was not returned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from operator import length_hint
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn import Module, Parameter

from torch_remat._compat import node_number
from torch_remat.dispatch.holder import CAST
from torch_remat.dispatch.log.readers import Readers

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
    state: list[Any] = []
    for root in roots:
        if type(root) in _BARE or (type(root) is FunctionType and not (root.__closure__ or root.__defaults__)):
            continue
        _note_state(state, root, _DEPTH, _NOT_WALKED)
    return state


def is_changed(state: State, region_function: Any) -> bool:
    """Whether one of them holds other tensors now, and is none that the region's own function reaches, too."""
    changed = [holder for holder, held in state if not _same(_tensors_held(holder), held)]
    if not changed:
        return False
    outside: list[Any] = []
    _note_state(outside, region_function, 2 * _DEPTH, (torch.Tensor, type, ModuleType))
    function: Any = getattr(region_function, "__func__", region_function)
    for name in function.__code__.co_names if isinstance(function, FunctionType) else ():
        _note_state(outside, function.__globals__.get(name), _DEPTH, (torch.Tensor, type, ModuleType))
    known = {id(holder) for holder, _ in outside}
    return any(id(holder) not in known for holder in changed)


def _note_state(state: list[Any], root: Any, depth: int, not_walked: tuple[type, ...]) -> None:
    """Note what holds objects, breadth first."""
    level, seen = [root], set()
    for _ in range(depth):
        following: list[Any] = []
        for value in level:
            if type(value) in _BARE or id(value) in seen or isinstance(value, not_walked):
                continue
            seen.add(id(value))
            for holder in _holders_of(value):
                state.append((holder, _tensors_held(holder)))
                following += _held_by(holder)
            if isinstance(value, FunctionType):
                following += (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            elif isinstance(value, MethodType):
                following += (value.__func__, value.__self__)
            elif isinstance(value, partial):
                following += (value.func, *value.args, *value.keywords.values())
            elif isinstance(value, tuple):
                following += value
        level = following


def _holders_of(value: Any) -> Sequence[Any]:
    if isinstance(value, FunctionType):
        return value.__closure__ or ()
    if isinstance(value, (list, dict, set, Iterator)):
        return (value,)
    if type(value).__module__.partition(".")[0] == "torch":
        return ()  # contexts, and the like
    attributes = getattr(value, "__dict__", None)
    return (attributes,) if type(attributes) is dict else ()


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


def call_left_by_a_tensor(calls: Sequence[Any], readers: Readers) -> Any:
    """Return a call of which a node outside reads a node that made no result; None if there is none.

    Args:
        calls: Those that made more nodes than their result has, in order, each with the numbers of its ``first`` node
            and of the first one after it, ``last``, and its ``outputs``: nodes, with which of a node's outputs.
        readers: The nodes that read each node of the region's graph.
    """
    starts = [call.first for call in calls]
    for node, by in readers.items():
        number = node_number(node)
        at = bisect_right(starts, number) - 1
        if at < 0 or number >= (call := calls[at]).last:
            continue
        for reader, place in by:
            is_inside = call.first <= node_number(reader) < call.last
            if not (is_inside or (node, place) in call.outputs or _is_cast(node)):
                return call
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
