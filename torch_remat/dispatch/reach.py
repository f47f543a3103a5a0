"""What a region's function reaches without an argument, and what it returns: the one walker.

In: a region's function, and the modules among its arguments. Kept: nothing. Out: parameters, random generators, and the
*places* of other tensors (buffers, attributes, closure cells, globals, entries of lists and dicts), where replay looks
for them again; of whatever the function returned the tensors, and their autograd nodes.

The walk costs a region little: it looks at a function's cells, defaults and named globals, through partials, methods
and wrappers, at the attributes of the object that runs, one level into lists, tuples and dicts, and at all of a module.
Anything deeper is not found; docs/limits.md says so. An output that is hidden deeper (in a generator, or behind slots)
is not found either: the replay starts when autograd unpacks the first empty holder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import Module, Parameter

from torch_remat._compat import PYTREE_NAMESPACE, adopt_pytree_node, optree

# Torch's own modules, to which nobody adds an attribute, have buffers at most; a bare `Module()` is a holder.
_BARE = {kind for kind in vars(torch.nn).values() if isinstance(kind, type) and issubclass(kind, Module)} - {Module}
_COUNT = len(Module().__dict__)  # of the attributes that every module has, which come first
_NUMBERS = frozenset((int, float, bool, str, NoneType))


class Place(NamedTuple):
    """Where a tensor was found.

    Attributes:
        holder: What holds it: the buffers or attributes of a module, a closure cell, a list, a dict.
        key: Its name or index there; of a closure cell the variable's name.
        tensor: The tensor; None for a buffer that is not set.
        module: The module whose buffer it is; None for other tensors.
    """

    holder: Any
    key: Any
    tensor: Tensor | None
    module: Module | None

    def held(self) -> Any:
        """Return what is at the place now; None if nothing is."""
        if type(self.holder) is CellType:
            try:
                return self.holder.cell_contents
            except ValueError:  # of a variable that was deleted
                return None
        try:
            return self.holder[self.key]
        except LookupError:
            return None

    def put(self, value: object) -> None:
        """Put a value there."""
        if type(self.holder) is CellType:
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value

    @property
    def name(self) -> str:
        """What an error calls the tensor."""
        if self.module is not None:
            return f"buffer {self.key!r} of {type(self.module).__name__}"
        return f"variable {self.key!r}" if isinstance(self.key, str) else f"entry {self.key!r} of a container"


class Reached:
    """What one walk has found.

    Attributes:
        modules: The modules, each before those that it has.
        parameters: The parameters, and other leaves that require a gradient, in an order that replay finds again; None
            for one that a module has not set.
        generators: The random generators.
        places: The other tensors.
        numbers: Of modules that have such tensors, or may get some, the attributes that are numbers, strings or None:
            where, and what they were.
        leaves: Where those of the parameters lie that are plain tensors, and before how many places: what replay has of
            a result that was kept is such a leaf, too.
    """

    __slots__ = ("generators", "leaves", "modules", "numbers", "parameters", "places")

    def __init__(self) -> None:
        self.modules: list[Module] = []
        self.parameters: list[Tensor | None] = []
        self.generators: list[Generator] = []
        self.places: list[Place] = []
        self.numbers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.leaves: list[tuple[int, Place]] = []

    @property
    def tensors(self) -> list[Place]:
        """All places where plain tensors lie, in an order that replay finds again."""
        found = list(self.places)
        for before, place in reversed(self.leaves):
            found.insert(before, place)
        return found

    def add_modules(self, parameters_alone: bool) -> None:
        """Look at the modules found, and at those that they have."""
        parameters, places, modules = self.parameters, self.places, self.modules
        seen = set(modules)
        for module in modules:  # grows meanwhile
            if module._parameters:
                parameters += module._parameters.values()
            if module._modules:
                for inner in module._modules.values():
                    if inner is not None and inner not in seen:
                        seen.add(inner)
                        modules.append(inner)
            if parameters_alone:
                continue
            if module._buffers:
                buffers = module._buffers
                places += [Place(buffers, name, tensor, module) for name, tensor in buffers.items()]
            if type(module) not in _BARE:
                self._add_attributes(module.__dict__, bool(module._buffers))

    def _add_attributes(self, attributes: dict[str, Any], has_buffers: bool) -> None:
        own = max(len(attributes) - _COUNT, 0)  # a scripted module has fewer
        kinds = set(map(type, islice(reversed(attributes.values()), own)))
        if Generator in kinds:
            self.generators += [value for value in attributes.values() if type(value) is Generator]
        if Tensor in kinds:
            self.places += [
                Place(attributes, name, value, None) for name, value in attributes.items() if type(value) is Tensor
            ]
        if NoneType in kinds or ((has_buffers or Tensor in kinds) and not kinds.isdisjoint(_NUMBERS)):
            items = islice(reversed(attributes.items()), own)
            self.numbers.append((attributes, {name: value for name, value in items if type(value) in _NUMBERS}))


def reach(function: Callable[..., Any], arguments: Sequence[Module] = (), parameters_alone: bool = False) -> Reached:
    """Return what a function reaches.

    Args:
        function: A module, a method, a function, a callable object; also a ``partial`` or a wrapper of these.
        arguments: The modules among its arguments.
        parameters_alone: Whether of modules nothing else is asked for.
    """
    found = Reached()
    if not arguments and isinstance(function, Module):
        found.modules.append(function)
    else:
        _walk(found, [function, *arguments])
    if found.modules:
        found.add_modules(parameters_alone)
    return found


def _walk(found: Reached, values: list[Any]) -> None:
    owners, seen = {id(values[0])}, set()  # objects that run; and what was looked at
    for value in values:  # grows meanwhile
        kind = type(value)
        if isinstance(value, Module):
            if value not in found.modules:
                found.modules.append(value)
        elif kind is Generator:
            found.generators.append(value)
        elif kind in _CONTAINERS:
            values += _parts(found, value)
        elif id(value) in seen:  # a function may close over itself
            continue
        elif kind is FunctionType:
            seen.add(id(value))
            values += _of_function(found, value)
        elif kind is MethodType:
            owners.add(id(value.__self__))
            values += (value.__self__, value.__func__)
        elif kind is partial:
            values.append(value.func)
            values += _held(found, value.args, enumerate(value.args))
            values += _held(found, value.keywords, value.keywords.items())
        elif hasattr(kind, "__wrapped__"):  # a region in this one
            seen.add(id(value))
            values.append(value.__wrapped__)
        elif id(value) in owners:  # an object that is called, or has the method
            seen.add(id(value))
            attributes = getattr(value, "__dict__", {})
            values += _held(found, attributes, attributes.items())


def _of_function(found: Reached, function: FunctionType) -> list[Any]:
    """Return what a function holds to look at; note its tensors."""
    values: list[Any] = []
    if (cells := function.__closure__) is not None:
        for name, cell in zip(function.__code__.co_freevars, cells, strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # of a variable that has no value now
                continue
            if (role := _ROLES.get(type(value)) or _role_of(type(value))) > _OTHER:
                values.append(value)
            elif role == _TENSOR:
                _note_tensor(found, cell, name, value)
    held = function.__globals__
    for name in _names_in(function.__code__):
        if (value := held.get(name)) is None:
            continue
        if (role := _ROLES.get(type(value)) or _role_of(type(value))) == _TENSOR:
            _note_tensor(found, held, name, value)
        elif role == _OWNER:
            values.append(value)
    for default in (function.__defaults__, function.__kwdefaults__):
        if default:
            values += _held(found, default, default.items() if type(default) is dict else enumerate(default))
    if function.__dict__ and (wrapped := function.__dict__.get("__wrapped__")) is not None:
        values.append(wrapped)
    return values


def _names_in(code: CodeType) -> Sequence[str]:
    """Return the names of globals that a function names, or one defined in it."""
    if CodeType not in map(type, code.co_consts):
        return code.co_names
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if type(inner) is CodeType:
            names |= dict.fromkeys(_names_in(inner))
    return list(names)


def _parts(found: Reached, container: Any) -> list[Any]:
    """Return what a list, tuple or dict holds to look at, if its first entry is of interest; note its tensors."""
    if not container:
        return []
    first = next(iter(container.values() if type(container) is dict else container))
    if _role_of(type(first)) == _OTHER:
        return []
    held = _held(found, container, container.items() if type(container) is dict else enumerate(container))
    return [value for value in held if type(value) not in _CONTAINERS]  # one level


def _held(found: Reached, holder: Any, items: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
    """Note the tensors among what a holder holds; yield what else is of interest."""
    for key, value in items:
        role = _role_of(type(value))
        if role == _TENSOR:
            _note_tensor(found, holder, key, value)
        elif role > _OTHER:
            yield value


def _note_tensor(found: Reached, holder: Any, key: Any, tensor: Tensor) -> None:
    if isinstance(tensor, Parameter):
        found.parameters.append(tensor)
        return
    place = Place(holder, key, tensor, None)
    if tensor.requires_grad and node_of(tensor) is None:
        found.parameters.append(tensor)
        found.leaves.append((len(found.places), place))
    else:
        found.places.append(place)


def _role_of(kind: type) -> int:
    """Return what the walk does with objects of a type."""
    role = _ROLES.get(kind)
    if role is None:
        if issubclass(kind, Tensor):
            role = _TENSOR
        elif issubclass(kind, (Module, Generator)):
            role = _OWNER
        else:
            is_callable = kind in (*_CONTAINERS, FunctionType, MethodType, partial) or hasattr(kind, "__wrapped__")
            role = _CALLABLE if is_callable else _OTHER
        _ROLES[kind] = role
    return role


def places_in(arguments: Iterable[Any]) -> list[Place]:
    """Return where tensors are in arguments that are objects: their attributes and items, one container deep.

    A dataclass, a dict's subclass, a `UserDict`: what is no pytree is passed to replay as it is. Parameters and modules
    among the attributes are not looked at, since an object may hold a whole model.
    """
    found: list[Place] = []
    todo = [holder for value in arguments if type(value) not in _PLAIN for holder in _holders_in(value)]
    own = len(todo)
    for at, holder in enumerate(todo):  # grows meanwhile
        for key, value in dict.items(holder) if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, Tensor):
                if not isinstance(value, Parameter):
                    found.append(Place(holder, key, value, None))
            elif at < own and type(value) in _CONTAINERS:
                todo.append(value)
    return found


def _holders_in(value: Any) -> list[Any]:
    """Return the containers that an object consists of."""
    if isinstance(value, (*_NOT_LOOKED_INTO, Generator)):
        return []
    holders: list[Any] = [value] if isinstance(value, (dict, list, tuple)) else []
    if attributes := getattr(value, "__dict__", None):
        holders.append(attributes)
    kind: Any = type(value)
    if slots := _slots_of(kind):
        holders.append(_Slots((name, held) for name in slots if (held := getattr(value, name, None)) is not None))
        holders[-1].of = value
    return holders


@cache
def _slots_of(kind: Any) -> list[str]:
    slots = [name for one in kind.__mro__ for name in one.__dict__.get("__slots__", ())]
    return [name for name in slots if not name.startswith("__")]


class _Slots(dict[str, Any]):
    """The attributes of an object that has them in slots, by name."""

    of: Any

    def __getitem__(self, name: str) -> Any:
        return getattr(self.of, name, None)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.of, name, value)


# What has no tensors among its attributes.
_PLAIN = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
_TENSOR, _OTHER, _CALLABLE, _OWNER = 1, 2, 3, 4
_ROLES: dict[type, int] = {}  # by type, since to ask a class of torch's whether it has an instance is slow
_CONTAINERS = frozenset((list, tuple, dict))


_NOT_LOOKED_INTO = (Module, type, FunctionType, ModuleType)


def boundary_nodes(output: Any) -> list[torch.autograd.graph.Node]:
    """Return the autograd nodes of the tensors of a region's output, each once."""
    nodes: dict[torch.autograd.graph.Node, None] = {}
    todo, seen = [output], set()
    for value in todo:  # grows meanwhile
        if isinstance(value, torch.Tensor):
            if (node := node_of(value)) is not None:
                nodes[node] = None
        elif id(value) not in seen:
            seen.add(id(value))
            todo += _parts_of(value)
    return list(nodes)


def _parts_of(value: Any) -> Iterable[Any]:
    """Return what a value consists of; nothing if it is no container and no object with attributes."""
    kind = type(value)
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if dataclasses.is_dataclass(kind):
        return [getattr(value, field.name) for field in dataclasses.fields(kind) if hasattr(value, field.name)]
    if optree.register_pytree_node.get(kind, namespace=PYTREE_NAMESPACE) is not None or adopt_pytree_node(kind):
        children: Iterable[Any] = optree.tree_flatten_one_level(value, namespace=PYTREE_NAMESPACE)[0]
        return children
    if isinstance(value, _NOT_LOOKED_INTO):
        return ()
    attributes: Mapping[str, Any] = getattr(value, "__dict__", {})
    return attributes.values()


def node_of(tensor: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the autograd node of an output, or of what it is a view of.

    A view whose base was modified in place gets a new node when it is next asked for. Asked here, the node would be
    older than in plain autograd, and backward would add up gradients in another order; of one of several views
    (``unbind``) it would be an error.
    """
    base = tensor._base
    if base is None or tensor.is_inference() or not tensor._version:
        return tensor.grad_fn
    return base.grad_fn
