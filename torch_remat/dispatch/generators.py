"""The random generators that a region's function reaches without an argument.

In: a region's function. Kept: nothing. Out: the generators found where a look costs next to nothing: in what a plain
function closes over, in its globals and defaults; among the attributes of the object that the region runs, and of the
modules in which `parameters_of` finds parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import Any

from torch import Generator
from torch.nn import Module


def generators_of(function: Callable[..., Any]) -> list[Generator]:
    """Return the generators that a function reaches by itself; those of modules tell `among_attributes`."""
    if type(function) is not FunctionType:
        if isinstance(function, Module):
            return []
        attributes = getattr(function, "__dict__", _NOTHING).values()
        if (
            type(function) is not MethodType
            and not isinstance(function, partial)
            and Generator not in map(type, attributes)
        ):
            return []
        return _of_object(function)
    found: list[Generator] = []
    names = function.__code__.co_names
    if names and Generator in map(type, map(function.__globals__.get, names)):
        found += _among(map(function.__globals__.get, names))
    if function.__closure__ is not None:
        with suppress(ValueError):  # one is not set yet
            for cell in function.__closure__:
                if type(value := cell.cell_contents) is Generator:
                    found.append(value)
    if function.__defaults__ is not None:
        found += _among(function.__defaults__)
    if function.__kwdefaults__ is not None:
        found += _among(function.__kwdefaults__.values())
    wrapped = function.__dict__.get("__wrapped__")
    if wrapped is not None:
        found += generators_of(wrapped)
    return found


def among_attributes(module: Module) -> Iterable[Generator]:
    """Return the generators among a module's own attributes."""
    attributes = module.__dict__
    # What every module has comes first; it would take most of the time.
    if Generator in map(type, islice(reversed(attributes.values()), len(attributes) - _COUNT)):
        return _among(attributes.values())
    return ()


_COUNT = len(Module().__dict__)
_NOTHING: Mapping[str, Any] = {}


def _of_object(function: Callable[..., Any]) -> list[Generator]:
    found: list[Generator] = []
    owner: Any = function
    if type(function) is MethodType:
        owner = function.__self__
        if type(function.__func__) is FunctionType:
            found += generators_of(function.__func__)
    elif isinstance(function, partial):
        found += _among((*function.args, *function.keywords.values()))
        found += generators_of(function.func)
    if not isinstance(owner, Module):
        attributes: Mapping[str, Any] = getattr(owner, "__dict__", {})
        found += _among(attributes.values())
    return found


def _among(values: Iterable[Any]) -> list[Generator]:
    return [value for value in values if type(value) is Generator]
