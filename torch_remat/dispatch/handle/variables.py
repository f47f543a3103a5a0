"""What a function reaches besides its arguments: cells, globals, defaults, arguments of partials, attributes.

In: the function of a call that replay leaves out. Kept: paths, never values. Out: tensors by their paths, in forward to
find one, in replay to have its counterpart; and the lists, dicts and variables that a call may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_, itemgetter, methodcaller
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import Module

Path = tuple[Callable[[Any], Any], ...]  # leads from the function to the value
State = list[tuple[Any, tuple[Any, ...]]]  # variables and containers, each with what it holds
_DEPTH = 3  # of functions and containers in each other
_NONE: Mapping[str, Any] = MappingProxyType({})


def tensors_reached(call: tuple[Any, ...]) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors that a call ``(function, *leaves)`` reaches, and their paths, those of closure cells first."""
    function = call[0]
    if type(function) is FunctionType:
        for at, cell in enumerate(function.__closure__ or ()):
            for value in _held_by(cell):
                if isinstance(value, torch.Tensor):
                    yield (itemgetter(0), partial(_cell_contents, at)), value
    for at, root in enumerate(call):
        if type(root) not in _BARE:
            for path, value in _reached(root):
                if isinstance(value, torch.Tensor):
                    yield (itemgetter(at), *path), value


def at_path(call: tuple[Any, ...], path: Path) -> Any:
    """Return what lies at a path of a call; None if nothing does."""
    value: Any = call
    try:
        for step in path:
            value = step(value)
    except (LookupError, AttributeError, TypeError, ValueError):
        return None
    return value


def state_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = _NONE) -> State:
    """Return what a call may change otherwise than in tensors, each with what it holds.

    These are the variables that its function closes over; lists, dicts, sets, iterators, and attributes of objects,
    those of modules apart, among these and among its arguments.
    """
    state: State = []
    for root in (function, *args, *kwargs.values()):
        if type(root) in _BARE or (type(root) is FunctionType and not (root.__closure__ or root.__defaults__)):
            continue
        _note_state(state, root, _DEPTH, (torch.Tensor, Module, type, ModuleType))
    return state


def changed_in(state: State, region_function: Any) -> bool:
    """Whether one of them holds other objects now, and is none that the region's own function reaches, too."""
    changed = [holder for holder, held in state if not _same(_held_by(holder), held)]
    if not changed:
        return False
    outside: State = []
    _note_state(outside, region_function, 2 * _DEPTH, (torch.Tensor, type, ModuleType))
    function: Any = getattr(region_function, "__func__", region_function)
    for name in function.__code__.co_names if isinstance(function, FunctionType) else ():
        _note_state(outside, function.__globals__.get(name), _DEPTH, (torch.Tensor, type, ModuleType))
    known = {id(holder) for holder, _ in outside}
    return any(id(holder) not in known for holder in changed)


def _note_state(state: State, root: Any, depth: int, passed_over: tuple[type, ...]) -> None:
    """Note what holds objects, breadth first."""
    level, seen = [root], set()
    for _ in range(depth):
        following: list[Any] = []
        for value in level:
            if type(value) in _BARE or id(value) in seen or isinstance(value, passed_over):
                continue
            seen.add(id(value))
            for holder in _holders_of(value):
                held = _held_by(holder)
                state.append((holder, held))
                following += held
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


def identity_of(function: Any) -> Any:
    """Return what tells a function from others and is the same in replay, which defines inner functions anew."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__func__
    if isinstance(function, FunctionType):
        return function.__code__
    if isinstance(function, BuiltinFunctionType):
        owner = function.__self__  # the class, of a custom Function's ``apply``
        return (owner, function.__name__) if isinstance(owner, type) else function
    return type(function)


def _reached(function: Any) -> Iterator[tuple[Path, Any]]:
    """Yield what a function reaches, breadth first."""
    level: list[tuple[Path, Any]] = [((), function)]
    seen = {id(function)}
    for depth in range(_DEPTH):
        following: list[tuple[Path, Any]] = []
        for path, value in level:
            for steps, inner in _parts_of(value, is_called=not path):
                if inner is None or id(inner) in seen:
                    continue
                seen.add(id(inner))
                yield (*path, *steps), inner
                if depth + 1 < _DEPTH and type(inner) not in _BARE:
                    following.append(((*path, *steps), inner))
        level = following


_BARE = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, bytes, complex, type(None), type))


def _parts_of(value: Any, is_called: bool) -> Iterator[tuple[Path, Any]]:
    """Yield the parts of a function or container, and how to get them."""
    if isinstance(value, Module):
        for name, module in value.named_modules():
            get = methodcaller("get_submodule", name)
            for attribute, inner in _attributes_of(module):
                yield (get, attrgetter(attribute)), inner
    elif isinstance(value, FunctionType):
        for at, cell in enumerate(value.__closure__ or ()):
            yield (partial(_cell_contents, at),), next(iter(_held_by(cell)), None)
        for at, inner in enumerate(value.__defaults__ or ()):
            yield (attrgetter("__defaults__"), itemgetter(at)), inner
        for name, inner in (value.__kwdefaults__ or {}).items():
            yield (attrgetter("__kwdefaults__"), itemgetter(name)), inner
        for name in value.__code__.co_names:
            if isinstance(inner := value.__globals__.get(name), (torch.Tensor, Module)):
                yield (attrgetter("__globals__"), itemgetter(name)), inner
        wrapped = value.__dict__.get("__wrapped__")
        if wrapped is not None:
            yield (attrgetter("__wrapped__"),), wrapped
    elif isinstance(value, partial):
        yield (attrgetter("func"),), value.func
        for at, inner in enumerate(value.args):
            yield (attrgetter("args"), itemgetter(at)), inner
        for name, inner in value.keywords.items():
            yield (attrgetter("keywords"), itemgetter(name)), inner
    elif isinstance(value, MethodType):
        yield (attrgetter("__func__"),), value.__func__
        for steps, inner in _parts_of(value.__self__, is_called=True):
            yield (attrgetter("__self__"), *steps), inner
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield (itemgetter(key),), inner
    elif isinstance(value, (list, tuple)):
        for at, inner in enumerate(value):
            yield (itemgetter(at),), inner
    elif is_called and type(value) not in _BARE:
        for name, inner in getattr(value, "__dict__", {}).items():
            yield (attrgetter(name),), inner


def _attributes_of(module: Module) -> Iterator[tuple[str, Any]]:
    for name, tensor in (*module._buffers.items(), *module._parameters.items()):
        yield name, tensor
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _cell_contents(at: int, function: FunctionType) -> Any:
    return (function.__closure__ or ())[at].cell_contents


def _held_by(holder: Any) -> tuple[Any, ...]:
    if isinstance(holder, CellType):
        try:
            return (holder.cell_contents,)
        except ValueError:  # not set yet
            return ()
    if isinstance(holder, dict):
        return (*holder, *holder.values())
    return (object(),) if isinstance(holder, Iterator) else tuple(holder)  # how far an iterator is, it does not tell


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
