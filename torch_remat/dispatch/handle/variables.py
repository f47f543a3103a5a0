"""What a function reaches besides its arguments: cells, defaults, arguments of partials, attributes of ``self``.

In: the function of a call that replay leaves out. Kept: paths, never values. Out: tensors by their paths, in forward to
find one, in replay to have its counterpart; and the lists, dicts and variables that a call may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch.nn import Module

Path = tuple[Callable[[Any], Any], ...]  # leads from the function to the value
State = list[tuple[Any, tuple[Any, ...]]]  # variables and containers, each with what it holds
_DEPTH = 3  # of functions and containers in each other
_CONTAINERS = (list, dict, set)
_NONE: Mapping[str, Any] = MappingProxyType({})


def tensors_reached(call: tuple[Any, ...]) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield the tensors that a call reaches, each with its path, those that its function closes over first.

    Args:
        call: The function, and the leaves of its arguments.
    """
    function = call[0]
    if type(function) is FunctionType:
        for at, cell in enumerate(function.__closure__ or ()):
            for value in _held_by(cell):
                if isinstance(value, torch.Tensor):
                    yield (_FIRST, partial(_cell_contents, at)), value
    for at, root in enumerate(call):
        if type(root) not in _BARE:
            for path, value in _reached(root, True):
                if isinstance(value, torch.Tensor):
                    yield (itemgetter(at), *path), value


_FIRST = itemgetter(0)


def at_path(call: tuple[Any, ...], path: Path) -> Any:
    """Return what lies at a path of a call; None if nothing does."""
    value: Any = call
    try:
        for step in path:
            value = step(value)
    except (LookupError, AttributeError, TypeError, ValueError):
        return None
    return value


def state_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = _NONE, in_objects: bool = False) -> State:
    """Return the variables that a function closes over, and the lists, dicts and sets in reach, with what they hold.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        in_objects: Whether to look into modules and other objects, too.
    """
    state: State = []
    for root in (function, *args, *kwargs.values()):
        if type(root) in _BARE:
            continue
        if type(root) is FunctionType and not in_objects:
            if root.__closure__ is not None:
                _note_cells(state, root)
            if root.__defaults__ is None and not root.__dict__:
                continue
        elif isinstance(root, torch.Tensor):
            continue
        for value in (root, *(value for _, value in _reached(root, in_objects))):
            holders = [value] if isinstance(value, _CONTAINERS) else _cells_of(value)
            state += [(holder, _held_by(holder)) for holder in holders]
    return state


def _note_cells(state: State, function: FunctionType) -> None:
    """Do the same for what a plain function closes over."""
    for cell in function.__closure__ or ():
        held = _held_by(cell)
        state.append((cell, held))
        for value in held:
            if type(value) in _BARE or isinstance(value, (torch.Tensor, Module)):
                continue
            for inner in (value, *(inner for _, inner in _reached(value, False))):
                holders = [inner] if isinstance(inner, _CONTAINERS) else _cells_of(inner)
                state += [(holder, _held_by(holder)) for holder in holders]


def changed_in(state: State, region_function: Any) -> bool:
    """Whether one of them holds other objects now, and is none that the region's own function reaches, too."""
    changed = [holder for holder, held in state if not _same(_held_by(holder), held)]
    if not changed:
        return False
    outside = {id(holder) for holder, _ in state_of(region_function, (), in_objects=True)}
    return any(id(holder) not in outside for holder in changed)


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


def _reached(function: Any, in_objects: bool) -> Iterator[tuple[Path, Any]]:
    """Yield what a function reaches, breadth first; also the attributes of modules, and of an object that is called."""
    level: list[tuple[Path, Any]] = [((), function)]
    seen = {id(function)}
    for depth in range(_DEPTH):
        following: list[tuple[Path, Any]] = []
        for path, value in level:
            for step, inner in _parts_of(value, in_objects, is_called=not path):
                if inner is None or id(inner) in seen:
                    continue
                seen.add(id(inner))
                yield (*path, step), inner
                if depth + 1 < _DEPTH and type(inner) not in _BARE:
                    following.append(((*path, step), inner))
        level = following


_BARE = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, bytes, complex, type(None), type))


def _parts_of(value: Any, in_objects: bool, is_called: bool) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Yield the parts of a function or container, and how to get them."""
    if isinstance(value, Module):
        if not in_objects:
            return
        for name, module in value.named_modules():
            get = _submodule(name)
            for attribute, inner in _attributes_of(module):
                yield partial(_then, get, attrgetter(attribute)), inner
    elif isinstance(value, FunctionType):
        for at, cell in enumerate(value.__closure__ or ()):
            yield partial(_cell_contents, at), next(iter(_held_by(cell)), None)
        for at, inner in enumerate(value.__defaults__ or ()):
            yield partial(_then, attrgetter("__defaults__"), itemgetter(at)), inner
        for name, inner in (value.__kwdefaults__ or {}).items():
            yield partial(_then, attrgetter("__kwdefaults__"), itemgetter(name)), inner
        wrapped = value.__dict__.get("__wrapped__")
        if wrapped is not None:
            yield attrgetter("__wrapped__"), wrapped
    elif isinstance(value, partial):
        yield attrgetter("func"), value.func
        for at, inner in enumerate(value.args):
            yield partial(_then, attrgetter("args"), itemgetter(at)), inner
        for name, inner in value.keywords.items():
            yield partial(_then, attrgetter("keywords"), itemgetter(name)), inner
    elif isinstance(value, MethodType):
        yield attrgetter("__func__"), value.__func__
        owner = value.__self__
        for step, inner in _parts_of(owner, in_objects, is_called=True):
            yield partial(_then, attrgetter("__self__"), step), inner
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield itemgetter(key), inner
    elif isinstance(value, (list, tuple)):
        for at, inner in enumerate(value):
            yield itemgetter(at), inner
    elif in_objects and is_called and type(value) not in _BARE:
        for name, inner in getattr(value, "__dict__", {}).items():
            yield attrgetter(name), inner


def _attributes_of(module: Module) -> Iterator[tuple[str, Any]]:
    for name, tensor in (*module._buffers.items(), *module._parameters.items()):
        yield name, tensor
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _submodule(name: str) -> Callable[[Module], Module]:
    return lambda module: module.get_submodule(name)


def _then(first: Callable[[Any], Any], second: Callable[[Any], Any], value: Any) -> Any:
    return second(first(value))


def _cell_contents(at: int, function: FunctionType) -> Any:
    return (function.__closure__ or ())[at].cell_contents


def _cells_of(value: Any) -> Sequence[CellType]:
    return value.__closure__ or () if isinstance(value, FunctionType) else ()


def _held_by(holder: Any) -> tuple[Any, ...]:
    if isinstance(holder, CellType):
        try:
            return (holder.cell_contents,)
        except ValueError:  # not set yet
            return ()
    if isinstance(holder, dict):
        return (*holder, *holder.values())
    return tuple(holder)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(_is, one, other))


def _is(one: Any, other: Any) -> bool:
    return one is other
