"""The parameters that a region uses, compared between forward and replay.

In: a region's function, the modules among its arguments, and the autograd graph that its forward has made. Kept: the
parameters themselves, which are not the region's memory, and their versions at the end of forward. Out: an error where
one was replaced by another with other values, or where replay reads one that was changed in place.

Autograd does not save a weight whose input needs no gradient, nor any bias, so the saved tensors alone do not show that
such a parameter is another one (`torch.func.functional_call` around the region, an attribute that was set anew, a step
of an optimizer before backward).

NOTE [ Which parameters a region uses ]
1. The leaves of the region's own graph are all parameters that it used and that require a gradient, wherever the
   function found them: in a module at any depth, in a global variable, in an object. Versions tell of their changes.
2. A parameter that was replaced, or that needs no gradient, has to be looked up where the function finds it: in modules
   that it reaches through itself, its closure, its arguments, or as a method or `partial` of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain, zip_longest
from operator import attrgetter, is_
from types import FunctionType, MethodType
from typing import Any, NoReturn

import optree
import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import Module, Parameter

from torch_remat._compat import DispatchMode, node_number
from torch_remat.dispatch.check.mismatch import REPLACED, described
from torch_remat.dispatch.generators import among_attributes
from torch_remat.errors import MismatchError, MutationError, RematError, at_user_line

# The usual ones of torch's own, to which nobody adds a generator, are not searched for one.
_BARE = frozenset(kind for kind in vars(torch.nn).values() if isinstance(kind, type) and issubclass(kind, Module))


def parameters_of(
    function: Callable[..., Any],
    arguments: Sequence[Module] = (),
    generators: list[torch.Generator] | None = None,
    buffered: list[Module] | None = None,
) -> Sequence[torch.Tensor | None]:
    """Return the parameters that a function reaches: those of the modules that it reaches.

    Args:
        function: A module, a method of one, or a function that closes over some; also a ``partial`` of these.
        arguments: The modules among its arguments.
        generators: Gets the random generators among the attributes of the same modules.
        buffered: Gets those of the modules that have buffers.
    """
    found: list[torch.Tensor | None] = []
    modules: list[Module] = []
    if not arguments and isinstance(function, Module):
        modules.append(function)
    else:
        for value in reached_by(function, arguments):
            if isinstance(value, Module):
                modules.append(value)
            else:
                found.append(value)
    seen = set(modules)
    for module in modules:  # grows meanwhile
        if module._parameters:
            found += module._parameters.values()
        if module._modules:
            for inner in module._modules.values():
                if inner is not None and inner not in seen:
                    seen.add(inner)
                    modules.append(inner)
        if module._buffers and buffered is not None:
            buffered.append(module)
        if generators is not None and type(module) not in _BARE:
            generators += among_attributes(module)
    return found


with torch.enable_grad():
    # The type of the nodes at the ends of a graph; that of a parameter is made anew for each graph.
    ACCUMULATE: Any = type(get_gradient_edge(torch.zeros((), requires_grad=True, device="cpu")).node)


_next_functions: Callable[[torch.autograd.graph.Node], Iterable[tuple[Any, int]]] = attrgetter("next_functions")


def note_used(region: Any, nodes: Iterable[torch.autograd.graph.Node | None]) -> None:
    """Note what parameters a region uses, and their versions; see NOTE [ Which parameters a region uses ].

    Args:
        region: The region, at the end of its forward.
        nodes: The nodes of its outputs.
    """
    first_number: int = region.first_number  # what is older, the region has not made
    leaves: dict[int, torch.Tensor] = {}
    todo = [node for node in nodes if node is not None and node_number(node) >= first_number]
    seen: set[Any] = {None, *todo}
    child: Any
    for child, _ in chain.from_iterable(map(_next_functions, todo)):  # which grows meanwhile
        if child not in seen:
            seen.add(child)
            if type(child) is ACCUMULATE:
                leaf = child.variable
                leaves[id(leaf)] = leaf
            elif child._sequence_nr() >= first_number:  # what `node_number` says, for an eighth of its time
                todo.append(child)
    for argument in region.inputs.originals:  # these are compared on their own
        leaves.pop(argument, None)
    used = dict(zip(map(id, region.parameters), region.parameters, strict=True)) | leaves
    used.pop(id(None), None)
    region.used = list(used.values())
    region.versions = _versions_of(region.used)


def _versions_of(tensors: Sequence[torch.Tensor]) -> Sequence[int]:
    """Return how often each tensor was changed in place; -1 where that is not counted."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # a tensor of inference mode
        return [-1 if one.is_inference() else one._version for one in tensors]


_version = attrgetter("_version")


def check_parameters(region: Any, fail: Callable[[RematError], NoReturn]) -> list[AbstractContextManager[Any]]:
    """Compare the parameters with those of forward, at the start of a replay.

    Returns:
        The contexts that the replay needs: one that looks for reads of those that are others now, if any are.

    Raises:
        MismatchError: A parameter is gone.
    """
    # A forward that is not over has noted nothing yet.
    versions = _versions_of(region.used) if region.finished else region.versions
    before: Sequence[torch.Tensor | None] = region.parameters
    now = parameters_of(region.function, region.inputs.modules()) if before else before
    if versions == region.versions and len(now) == len(before) and all(map(is_, before, now)):
        return []
    others: dict[int, Callable[[], RematError]] = {}
    known = set() if len(now) == len(before) else set(map(id, before))  # which only stand elsewhere
    for place, (one, other) in enumerate(zip_longest(before, now)):
        if one is not other and not _may_stand_for(one, other):
            if other is None:
                raise _replaced(region, place, one, other)
            if id(other) not in known:
                others[id(other)] = partial(_replaced, region, place, one, other)
    for place, (one, old, new) in enumerate(zip(region.used, region.versions, versions, strict=True)):
        if old != new and id(one) not in others:
            others[id(one)] = partial(_changed, region, place, one)
    return [_Unread(others, fail)] if others else []


class _Unread(DispatchMode):
    """Ends a replay that reads one of certain parameters, with an error for each by its address.

    Others may be replaced or changed: a region's function may reach a whole model and use a part of it.
    """

    def __init__(self, errors: Mapping[int, Callable[[], RematError]], fail: Callable[[RematError], NoReturn]) -> None:
        super().__init__()
        self._errors = errors
        self._fail = fail

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves: list[Any] = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type]
        for leaf in leaves:
            if (error := self._errors.get(id(leaf))) is not None:
                self._fail(error())
        return op(*args, **(kwargs or {}))


def reached_by(function: Callable[..., Any], arguments: Sequence[Module]) -> Iterator[Module | Parameter]:
    """Yield the modules and parameters that a region's function reaches, in its variables and among its arguments."""
    values: list[Any] = [function, *arguments]
    owners, seen = {id(function)}, set()  # of methods; and those and functions that were looked at
    for value in values:  # grows meanwhile
        kind = type(value)
        if isinstance(value, Module) or kind is Parameter:
            yield value
        elif kind is FunctionType:
            if id(value) not in seen:  # which may close over itself
                seen.add(id(value))
                for cell in value.__closure__ or ():
                    with suppress(ValueError):  # of a variable that has no value now
                        values.append(cell.cell_contents)
        elif kind is MethodType:
            owners.add(id(value.__self__))
            values += (value.__self__, value.__func__)
        elif kind is partial:
            values += (value.func, *value.args, *value.keywords.values())
        elif (kind is list or kind is tuple) and value and isinstance(value[0], (Module, Parameter)):
            values += value
        elif id(value) in owners and id(value) not in seen:  # an object that can be called, or has the method
            seen.add(id(value))
            values += [one for one in getattr(value, "__dict__", {}).values() if isinstance(one, _HELD)]


_HELD = (Module, Parameter, FunctionType, MethodType, partial, list, tuple)


def _name_of(region: Any, place: int, parameter: torch.Tensor | None) -> str:
    """Return what an error calls a parameter: its place, and its name in the module that has it, if one has."""
    for value in reached_by(region.function, region.inputs.modules()):
        if isinstance(value, Module):
            for name, other in value.named_parameters():
                if other is parameter:
                    return f"parameter {place} ({name})"
    return f"parameter {place}"


def _replaced(region: Any, place: int, one: torch.Tensor | None, other: torch.Tensor | None) -> RematError:
    before, now = ("none" if it is None else described(it) for it in (one, other))
    how = f"{now}, with other values" if before == now else f"{before}, then {now}"
    reader = "" if other is None else f", and replay reads the other one{at_user_line()}"
    what = f"this parameter was replaced between forward and replay ({how}){reader}"
    return MismatchError(what, region=region.name, tensor=_name_of(region, place, other), remedy=REPLACED)


def _changed(region: Any, place: int, parameter: torch.Tensor) -> RematError:
    return MutationError(
        f"this parameter, {described(parameter)}, was changed in place since forward, and replay reads it"
        f"{at_user_line()}",
        region=region.name,
        tensor=_name_of(region, place, parameter),
        remedy="Change parameters (a step of an optimizer, an average of weights) after backward.",
    )


def _may_stand_for(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    if not {type(one), type(other)} <= {torch.Tensor, Parameter}:
        return True  # sharded in one phase and not in the other: the wrapper that did it knows what it does
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
