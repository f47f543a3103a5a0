"""The functions that a policy may list: those of torch that user code calls, such as ``F.linear``, and their like.

In: functions, as a user names them. Kept: nothing. Out: what a mode for torch functions sees when one of them is
called; their names; the ops that they are made of; and copies of those that hide what they call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import is_tensor_method_or_property

from torch_remat._compat import PRODUCTS_BY_FACE, TORCHS_NAMESPACES, OperatorBase, OpOverloadPacket
from torch_remat.errors import PolicyError, shown
from torch_remat.policies.decision import Decision

_SPACES = (torch, torch.Tensor, F, torch.linalg, torch.special)
_NEVER = frozenset(("batch_norm", "instance_norm", "native_batch_norm", "rnn_relu", "rnn_tanh", "lstm", "gru"))
_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
             "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__", "__delitem__")  # fmt: skip
_PYTHON_MODULES = ("torch.nn.functional", "torch.functional")  # of torch's functions in Python
# What their functions are made of, where that has another name.
OPS: Mapping[str, tuple[str, ...]] = {
    "linear": ("addmm", "mm", "bmm", "mkldnn._linear_pointwise"),
    "bilinear": ("_trilinear",),
    "matmul": ("mm", "bmm", "mv", "dot", "addmm"),
    "linalg_matmul": ("mm", "bmm", "mv", "dot"),
    "multi_head_attention_forward": ("bmm", "baddbmm"),
}


def is_function(value: Any) -> bool:
    """Whether a policy may list a value as a function: of torch, a higher-order op, or another overridable one."""
    if _is_higher(value) or _is_flex(value):
        return True
    if isinstance(value, FunctionType) and value in PRODUCTS_BY_FACE:
        return True
    if isinstance(value, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)):
        return _is_of_torch(value)
    return isinstance(value, FunctionType) and _is_overridable(value)


def _is_higher(value: Any) -> bool:
    return isinstance(value, OperatorBase) and not hasattr(value, "overloadpacket")


def _is_flex(value: Any) -> bool:
    """Whether a value is the function of users around a higher-order op, which they have imported then."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and value is module.flex_attention


def _is_of_torch(function: Any) -> bool:
    if is_tensor_method_or_property(function):
        return True
    module = getattr(function, "__module__", None) or getattr(function, "__qualname__", "")
    return any(getattr(space, name_of(function), None) is function for space in _SPACES) or "torch" in str(module)


def _is_overridable(function: FunctionType) -> bool:
    """Whether a Python function takes part in ``__torch_function__``: it asks for it, or is wrapped to, or it is known.

    Torch knows of those that leave it to another function to ask (``F.max_pool2d``).
    """
    names = function.__code__.co_names
    if any("torch_function" in name for name in names) or function.__code__.co_filename == torch.overrides.__file__:
        return True
    return function.__module__ in _PYTHON_MODULES and function in torch.overrides.get_testing_overrides()


@cache
def seen_as(function: Any) -> tuple[Any, ...]:
    """Return what a mode sees when a function is called, or its method or operator of the same name.

    Raises:
        PolicyError: It cannot be kept, or no mode sees it.
    """
    if _is_flex(function):
        return (torch.ops.higher_order.flex_attention,)
    if _is_higher(function):
        return (function,)
    if isinstance(function, FunctionType) and function in PRODUCTS_BY_FACE:
        return (PRODUCTS_BY_FACE[function],)
    if not is_function(function):
        raise not_seen(function)
    name = name_of(function)
    if changes_arguments(name):
        raise PolicyError(
            f"a policy lists {label_of(function)}, whose calls are never kept, since they change their arguments",
            remedy="Leave it out: it runs again in replay.",
        )
    found = [function]
    for space in _SPACES:
        other = getattr(space, name, None)
        if other is not None and is_function(other) and not any(other is one for one in found):
            found.append(other)
    return tuple(found)


def changes_arguments(name: str) -> bool:
    """Whether a function of torch's own changes its arguments, or statistics, by its name."""
    return name in _NEVER or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def calls_of_ops(given: Sequence[Any], ops: Sequence[Any]) -> Sequence[Any]:
    """Return what a mode sees when user code calls ops of other libraries, overloads and packets; else nothing.

    Those of torch's own are called by functions, in C++, and a mode does not see them. A call of a packet may mean any
    of its overloads, so that all of these have to be there.

    Args:
        given: What was listed: overloads and packets.
        ops: Their overloads.

    Raises:
        PolicyError: All are of other libraries, and one changes its arguments.
    """
    if any(getattr(op, "namespace", "higher_order") in TORCHS_NAMESPACES for op in ops):
        return ()
    for one in given:
        if all(op._schema.is_mutable for op in _overloads(one)):
            raise PolicyError(
                f"a policy lists {label_of(one)}, whose calls are never kept, since they change their arguments",
                remedy="Leave it out: it runs again in replay. A policy function (ctx, op, ...) can keep its result.",
            )
    packets = list(dict.fromkeys(op.overloadpacket for op in ops))
    every = [op for packet in packets for op in _overloads(packet)]
    if any(op._schema.is_mutable or op not in ops for op in every):
        return ()
    return [*packets, *every]


def _overloads(op: Any) -> Sequence[Any]:
    return [getattr(op, name) for name in op.overloads()] if isinstance(op, OpOverloadPacket) else [op]


def not_seen(value: Any) -> PolicyError:
    """Return the error about what stands in a list and is neither an op nor a function that a region sees called."""
    if callable(value) and not isinstance(value, type):
        return PolicyError(
            f"a policy lists {shown(value)}, a call of which a region cannot see",
            remedy="Functions and methods of torch are seen, such as F.linear or torch.Tensor.exp, and higher-order "
            "ops. Keep a function of your own by remat.op(function, 'name')(x), a module by remat.save_modules.",
        )
    if isinstance(value, type) and issubclass(value, torch.nn.Module):
        return PolicyError(
            f"a policy lists {value.__name__}, which is a class of modules",
            remedy=f"Keep what such modules return by policy=remat.save_modules({value.__name__}), also with others: "
            f"remat.policies.save_attention | remat.save_modules({value.__name__}).",
        )
    return PolicyError(
        f"a policy lists {shown(value)}, which is neither an op nor a function",
        remedy="A list that is a policy has functions such as torch.nn.functional.linear, and ops such as "
        "torch.ops.aten.mm.default, or torch.ops.aten.mm for all its overloads.",
    )


def name_of(function: Any) -> str:
    """Return the short name of a function, by which its calls are counted: ``linear``; an op's has no overload."""
    function = getattr(function, "overloadpacket", function)
    return str(getattr(function, "__name__", function)).rpartition(".")[2]


def label_of(function: Any) -> str:
    """Return a function as a user writes it: ``F.linear``, ``torch.matmul``, ``torch.Tensor.exp``."""
    if _is_higher(function):
        return f"torch.ops.higher_order.{function}"
    if isinstance(function, OperatorBase | OpOverloadPacket):
        return f"torch.ops.{function}"
    for space, name in zip(_SPACES, ("torch", "torch.Tensor", "F", "torch.linalg", "torch.special"), strict=True):
        for attribute in (name_of(function), name_of(function).removeprefix("linalg_").removeprefix("special_")):
            if getattr(space, attribute, None) is function:
                return f"{name}.{attribute}"
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', name_of(function))}"


def listed(names: Iterable[str], decision: Decision) -> str:
    """Return a list of functions or ops as a user writes it; or a mapping, if these are not saved."""
    if decision is Decision.MUST_SAVE:
        return f"[{', '.join(names)}]"
    return "{" + ", ".join(f"{name}: {decision.name.lower().replace('_', ' ')}" for name in names) + "}"


def place_of(function: Any) -> Any:
    """Return where pickle finds a function of torch's own, which it does not know by itself; else the function."""
    label = label_of(function)
    return label if label.startswith(("torch.", "F.")) else function


def found_at(place: Any) -> Any:
    """Return the function at a place."""
    if not isinstance(place, str):
        return place
    root, _, path = place.partition(".")
    return attrgetter(path)({"torch": torch, "F": F}[root])


# Functions of `torch.nn.functional` that call others, in which a mode for torch functions is off.

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@cache
def _composites() -> Mapping[str, FunctionType]:
    found = {}
    for module in (F, torch.functional):
        for value in vars(module).values():
            if isinstance(value, FunctionType) and value.__module__ in _PYTHON_MODULES:
                found[value.__name__] = value
    return found


@cache
def opened_around(functions: tuple[Any, ...]) -> dict[Any, Callable[..., Any]]:
    """Return the functions of torch in Python that lead to one of these, each with a copy that asks for no override.

    So the functions that they call are seen, too.
    """
    wanted = {name_of(function) for function in functions if not isinstance(function, OperatorBase | OpOverloadPacket)}
    known = _composites()
    leads: set[str] = set()
    while True:
        more = {
            name
            for name, function in known.items()
            if name not in leads and not (wanted | leads).isdisjoint(function.__code__.co_names)
        }
        if not more:
            break
        leads |= more
    found = {known[name]: opened(known[name]) for name in leads}
    return {function: copy for function, copy in found.items() if copy is not None}


@cache
def opened(function: Any) -> Callable[..., Any] | None:
    """Return a copy of a function of torch in Python that asks for no override; None for any other function."""
    if not isinstance(function, FunctionType) or function.__module__ not in _PYTHON_MODULES:
        return None
    if set(_ASKS).isdisjoint(function.__code__.co_names):
        return None
    names = {name: _no for name in _ASKS if name in function.__globals__}
    copy = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    opened_copy: Callable[..., Any] = copy
    return opened_copy


def _no(*_args: Any) -> bool:
    return False
