"""Policies by op: lists of ops, and functions of a user's own that are asked about each op.

In: an op with its arguments and result. Kept: of a list, ops and what the runtime knows of them. Out: a decision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.compiler import is_compiling

from torch_remat._compat import OperatorBase, OpOverloadPacket, op_of
from torch_remat.errors import Carried, PolicyError, shown
from torch_remat.policies.decision import ANSWERS, RECOMPUTED, Decision
from torch_remat.policies.functions import calls_of_ops, listed, not_seen
from torch_remat.policies.policy import Decider, OpContext, OpPolicy


class OpsPolicy(OpPolicy):
    """Decides about the results of certain ops, of which none has to occur.

    Ops of other libraries are found as functions are, where nothing else in a policy is about ops: see `calls_of_ops`.

    Args:
        ops: They, also as `torch.library.custom_op` gives them; an `OpOverloadPacket` means all its overloads.
        decision: What is done with their results.
    """

    def __init__(self, ops: Iterable[Any], decision: Decision = Decision.MUST_SAVE) -> None:
        self._given = [op_of(one) for one in ops]
        self._decision = decision
        self._ops: list[Any] = []
        # Ops and kinds by identity, and plans, from the first forward.
        self._known: tuple[set[int], set[int], dict[int, Any]] | None = None
        for op in self._given:
            if isinstance(op, OpOverloadPacket):
                self._ops += [getattr(op, overload) for overload in op.overloads()]
            elif isinstance(op, OperatorBase):
                self._ops.append(op)
            else:
                raise not_seen(op)
        # A compiler finds all by op, and would have to look into this.
        self._functions = {} if is_compiling() else dict.fromkeys(calls_of_ops(self._given, self._ops), decision)
        self.is_ready = bool(self._functions)
        self.says_nothing = decision is Decision.PREFER_RECOMPUTE
        self.expects_ops = decision.keeps

    def __repr__(self) -> str:
        return listed(map(str, self._given), self._decision)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ops_at, ([_path_of(op) for op in self._given], self._decision)  # torch does not pickle ops

    def functions(self) -> Mapping[Any, Decision]:
        """Return the decision about each call that a mode sees, if user code makes them all."""
        return self._functions

    def begin(self) -> Decider:
        """Begin one forward."""
        if self._known is None:
            self._known = {id(op) for op in self._ops}, {id(_kind_of(op)) for op in self._ops}, {}
        return _OpsDecider(self._decision, *self._known)

    def op_names(self) -> Sequence[str]:
        """Return the names of the ops that it keeps, without namespace and overload."""
        kept = self._ops if self._decision.keeps else ()
        return list(dict.fromkeys(getattr(_kind_of(op), "__name__", str(op)) for op in kept))

    def parts(self) -> tuple[Any, ...]:
        """Return the kind, the ops and the decision."""
        return OpsPolicy, tuple(self._ops), self._decision


def _path_of(op: Any) -> str:
    return str(op) if hasattr(op, "overloadpacket") or isinstance(op, OpOverloadPacket) else f"higher_order.{op}"


def _ops_at(paths: Iterable[str], decision: Decision) -> OpsPolicy:
    return OpsPolicy([attrgetter(path)(torch.ops) for path in paths], decision)


def _kind_of(op: Any) -> Any:
    """Return what all overloads of an op have in common."""
    return getattr(op, "overloadpacket", op)


class _OpsDecider(Decider):
    def __init__(self, decision: Decision, ops: set[int], kinds: set[int], plans: dict[int, Any]) -> None:
        self._answer = (decision,)
        self._ops, self._kinds, self.plans = ops, kinds, plans

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        return self._answer if id(op) in self._ops else RECOMPUTED

    def decide_op(self, op: Any) -> bool | None:
        if (is_listed := id(op) in self._ops) and self._answer[0].offloads:
            return None
        return is_listed and self._answer[0].keeps

    def may_save(self, op: Any) -> bool:
        return self._answer[0].keeps and id(_kind_of(op)) in self._kinds


def op_name(op: Any) -> str:
    """Return the name of an op without its overload: ``mm``, or ``lib.op`` for one that is not torch's."""
    packet: str = getattr(_kind_of(op), "__name__", "")
    return packet if getattr(op, "namespace", "aten") == "aten" else f"{op.namespace}.{packet}"


class PolicyFunction(OpPolicy):
    """A function with the signature of selective activation checkpointing: ``(ctx, op, *args, **kwargs)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._reads_names: bool | None = None  # until the first forward
        if not is_compiling():  # whose partials have no attributes
            self.__doc__ = function.__doc__
            self.__module__ = getattr(function, "__module__", __name__)  # where pickle looks for it

    def __repr__(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = repr(self)  # as a decorator this has taken the function's place
        if getattr(sys.modules.get(self.__module__), name, None) is self:
            return name
        return PolicyFunction, (self._function,)

    def begin(self) -> Decider:
        """Begin one forward."""
        if self._reads_names is None and not is_compiling():
            self._reads_names = reads_names(self._function)
        return _PolicyFunctionDecider(self._function, bool(self._reads_names))

    def parts(self) -> tuple[Any, ...]:
        """Return the kind and the function, which decides."""
        return PolicyFunction, self._function, None

    def __call__(self, *call: Any, **kwargs: Any) -> Any:
        """Decide as the function does, so that a policy function can ask this one; without arguments return itself."""
        return self._function(*call, **kwargs) if call else self


class _PolicyFunctionDecider(Decider):
    def __init__(self, function: Callable[..., Any], reads_names: bool) -> None:
        super().__init__()
        self._function = function
        self._state: dict[str, Any] = {}
        self.reads_names = reads_names

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        context.state = self._state
        try:
            said = self._function(context, op, *args, **kwargs)
        except TypeError as error:
            raise Carried(error) from None
        try:
            return ANSWERS[said]
        except (KeyError, TypeError):
            pass
        raise Carried(  # not through a local name, which would make a cycle with the traceback
            PolicyError(
                f"the policy returned {shown(said)} for {op}",
                remedy="A policy function returns remat.CheckpointPolicy, torch.utils.checkpoint.CheckpointPolicy, "
                "a bool, or None for recomputing.",
            )
        )


_NAMES = frozenset(("name", "names", "path"))
_MANY = 100  # functions that a policy function reaches: what is that large is not looked through


def reads_names(function: Any) -> bool:
    """Whether the code of a policy function names ``name``, ``names`` or ``path``, so that all ops have to be counted.

    Code is looked for in the functions that it wraps, closes over or calls as globals. Whatever has no code may do so.
    """
    seen: dict[int, Any] = {}
    todo = [function]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # which keeps the id
        if isinstance(one, FunctionType):
            words = [word for code in _codes(one) for word in (*code.co_names, *code.co_consts)]
            if len(seen) > _MANY or not _NAMES.isdisjoint(words):
                return True
            todo += _functions_of(one)
        elif isinstance(one, partial):
            todo += [one.func, *filter(callable, (*one.args, *one.keywords.values()))]
        elif isinstance(one, PolicyFunction):
            todo.append(one._function)
        elif (inner := getattr(one, "__func__", None) or getattr(one, "__wrapped__", None)) is not None:
            todo.append(inner)
        elif isinstance(call := getattr(type(one), "__call__", None), FunctionType):  # noqa: B004
            todo.append(call)
        elif one is function:
            return True
    return False


def _codes(function: FunctionType) -> list[CodeType]:
    """Return the code of a function, and that of the functions which are defined in it."""
    codes = [function.__code__]
    for code in codes:  # which grows meanwhile
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
    return codes


def _functions_of(function: FunctionType) -> list[Any]:
    """Return what a function closes over, has as defaults, and names as globals, as far as it can be called."""
    found: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    names = {name for code in _codes(function) for name in code.co_names}
    found += [function.__globals__[name] for name in names if name in function.__globals__]
    usual = (FunctionType, MethodType, partial, PolicyFunction)
    return [one for one in found if isinstance(one, usual)]
