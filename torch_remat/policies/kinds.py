"""Policies for the ops of a whole region: which results forward keeps.

In: an op with its arguments, result and name. Kept: which entries of a policy have matched, while one forward runs.
Out: a decision for each result, and an error for an entry that matched nothing.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import lru_cache, partial
from operator import attrgetter
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch.compiler import is_compiling
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

from torch_remat._compat import OperatorBase, OpOverloadPacket
from torch_remat.errors import Carried, PolicyError, shown
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.policies.functions import (
    OPS,
    found_at,
    is_function,
    label_of,
    name_of,
    not_seen,
    place_of,
    seen_as,
)


class Decision(IntEnum):
    """What a policy says of one result; where policies are combined the higher one holds.

    Attributes:
        keeps: Whether the result is kept, here or elsewhere.
        offloads: Whether it leaves the device.
    """

    PREFER_RECOMPUTE = 0
    PREFER_OFFLOAD = 1
    PREFER_SAVE = 2
    MUST_RECOMPUTE = 3
    MUST_OFFLOAD = 4
    MUST_SAVE = 5
    LEFT_OUT = 6

    keeps: bool
    offloads: bool

    def __init__(self, _value: int) -> None:
        self.offloads = self._name_.endswith("OFFLOAD")
        self.keeps = self.offloads or self._name_.endswith("SAVE")


# By name, since not all releases of torch know the policies that offload.
OF_TORCH = {
    name: Decision[name.replace("CPU_", "")]
    for name in TorchPolicy.__members__
    if name.replace("CPU_", "") in Decision.__members__
}
_DECISIONS: dict[Any, Decision] = {
    False: Decision.PREFER_RECOMPUTE,
    None: Decision.PREFER_RECOMPUTE,  # a function written for selective activation checkpointing may fall through
    True: Decision.MUST_SAVE,
    CheckpointPolicy.RECOMPUTE: Decision.PREFER_RECOMPUTE,
    CheckpointPolicy.SAVE: Decision.MUST_SAVE,
    CheckpointPolicy.OFFLOAD: Decision.MUST_OFFLOAD,
    **{TorchPolicy[name]: decision for name, decision in OF_TORCH.items()},
}


# What a policy function may return, with the answer of its decider: the one decision for all results.
RECOMPUTED = (Decision.PREFER_RECOMPUTE,)
_SAVED = (Decision.MUST_SAVE,)
_ANSWERS: dict[Any, Sequence[Decision]] = {
    said: RECOMPUTED if decision is Decision.PREFER_RECOMPUTE else (decision,) for said, decision in _DECISIONS.items()
}


_NONE: Mapping[Any, Decision] = MappingProxyType({})


class ChoosesModules(Protocol):
    """What a region asks of a policy that chooses modules."""

    def name_of(self, module: Any) -> str | None:
        """Return the path of a module that it chooses; None for another."""

    def enter(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        """Find the modules of a region that begins."""


class Named(Protocol):
    """An op of which automatic names are known."""

    def labels(self) -> Sequence[str]:
        """Return the automatic names of all results."""


class OpContext:
    """What a policy function gets as its first argument.

    Attributes:
        op_output: What the op returned.
        is_recompute: False: policies are asked in forward only; before 2.13 ``torch.compile`` asks in both phases.
        names: The automatic names of the op's results.
        state: A dict of the policy function's own, empty at the start of each forward: what it counts there is the
            same in every run of the region.
    """

    __slots__ = ("_op", "is_recompute", "op_output", "state")

    state: dict[str, Any]

    def __init__(self, op_output: Any, op: Named | None) -> None:
        self.op_output = op_output
        self.is_recompute = False
        self._op = op

    @property
    def names(self) -> Sequence[str]:
        """The automatic names of the op's results, such as ``["attention.mm_2_0"]``."""
        if self._op is None:
            raise Carried(
                PolicyError(
                    "code that a policy function calls reads the automatic name of an op, which was not found in time",
                    remedy="Read ctx.name in the policy function itself, or in a function that it calls by a global "
                    "name, closes over or wraps in functools.partial.",
                )
            )
        return self._op.labels()

    @property
    def name(self) -> str:
        """The automatic name of the op's first result, such as ``attention.mm_2_0``."""
        return self.names[0]


class OpPolicy(ABC):
    """A policy for the ops of a region; ``|`` combines it with another of any kind, and the stronger decision holds.

    Stronger is: excluding by name, then MUST before PREFER, then saving before offloading before recomputing.

    Attributes:
        is_ready: Whether it is one of the library's own, of which not all has to occur.
        expects_ops: Whether a region in which it selects nothing is worth a word. A function is the user's own logic,
            and names that match nothing are an error.
    """

    expects_ops = is_ready = False
    taken_apart: Split | None = None  # once `split` has done it

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles have; they are taken apart anew, since pickle does not know all functions."""
        return {name: value for name, value in vars(self).items() if name != "taken_apart"}

    def op_names(self) -> Sequence[str]:
        """Return the names of the ops that it lists."""
        return ()

    def functions(self) -> Mapping[Any, Decision]:
        """Return what it decides about functions, if it does not ask for ops."""
        return _NONE

    def left_out(self) -> Sequence[str]:
        """Return the patterns on names that it excludes, if it does nothing else."""
        return ()

    def modules(self) -> Sequence[ChoosesModules]:
        """Return it, if it chooses modules and does nothing else."""
        return ()

    def kinds(self) -> Iterable[OpPolicy]:
        """Return the policies of which it is made."""
        return (self,)

    @abstractmethod
    def begin(self) -> Decider:
        """Begin one forward."""

    @abstractmethod
    def parts(self) -> tuple[Any, ...]:
        """Return kinds of policy, each followed by the one argument that makes it: constants to the compiler."""

    def __or__(self, other: Any) -> OpPolicy:
        """Combine with another policy."""
        return Combined((self, as_policy(other)))

    def __ror__(self, other: Any) -> OpPolicy:
        """Combine with another policy."""
        return Combined((as_policy(other), self))


class Decider(ABC):
    """A policy while one forward runs.

    Attributes:
        reads_names: Whether it decides by automatic names, so that all ops have to be counted.
        notes_packed: Whether it asks which results autograd saves, so that these have to be noted.
        plans: What the runtime knows of ops, by identity; where the op alone decides, it outlives the forward.
    """

    reads_names = notes_packed = False
    plans: dict[int, Any]

    def __init__(self) -> None:
        self.plans = {}

    @abstractmethod
    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        """Return the decision for each result of an op, or one decision for all."""

    def decide_op(self, op: Any) -> bool | None:
        """Return whether the one result of an op is kept, if the op alone decides and it does not leave the device."""
        return None

    def may_save(self, op: Any) -> bool:
        """Whether ops of the same kind, whatever their overload, are known to be among those that are saved."""
        return False

    def decide_name(self, name: str) -> Decision:
        """Return the decision for a tensor that was named by hand."""
        return Decision.PREFER_RECOMPUTE

    def unmatched(self, names: Iterable[str]) -> PolicyError | None:
        """Return the error about an entry that matched nothing, if there is one; ``names`` are all names."""
        return None


class FunctionPolicy(OpPolicy):
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
        return FunctionPolicy, (self._function,)

    def begin(self) -> Decider:
        """Begin one forward."""
        if self._reads_names is None and not is_compiling():
            self._reads_names = reads_names(self._function)
        return _FunctionDecider(self._function, bool(self._reads_names))

    def parts(self) -> tuple[Any, ...]:
        """Return the kind and the function."""
        return FunctionPolicy, self._function

    def __call__(self, *call: Any, **kwargs: Any) -> Any:
        """Decide as the function does, so that a policy function can ask this one; without arguments return itself."""
        return self._function(*call, **kwargs) if call else self


class _FunctionDecider(Decider):
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
            return _ANSWERS[said]
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
        elif isinstance(one, FunctionPolicy):
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
    usual = (FunctionType, MethodType, partial, FunctionPolicy)
    return [one for one in found if isinstance(one, usual)]


class OpListPolicy(OpPolicy):
    """Saves the results of certain ops, of which none has to occur; an `OpOverloadPacket` means all its overloads."""

    expects_ops = True

    def __init__(self, ops: Iterable[Any]) -> None:
        self._given = list(ops)
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

    def __repr__(self) -> str:
        return f"[{', '.join(map(str, self._given))}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _list_of, ([_path_of(op) for op in self._ops],)  # torch does not pickle ops

    def begin(self) -> Decider:
        """Begin one forward."""
        if self._known is None:
            self._known = {id(op) for op in self._ops}, {id(_kind_of(op)) for op in self._ops}, {}
        return _OpListDecider(*self._known)

    def op_names(self) -> Sequence[str]:
        """Return the names of the ops, without namespace and overload."""
        return list(dict.fromkeys(getattr(_kind_of(op), "__name__", str(op)) for op in self._ops))

    def parts(self) -> tuple[Any, ...]:
        """Return the kind and the ops."""
        return OpListPolicy, tuple(self._ops)


def _path_of(op: Any) -> str:
    return str(op) if hasattr(op, "overloadpacket") else f"higher_order.{op}"


def _list_of(paths: Iterable[str]) -> OpListPolicy:
    return OpListPolicy([attrgetter(path)(torch.ops) for path in paths])


def _kind_of(op: Any) -> Any:
    """Return what all overloads of an op have in common."""
    return getattr(op, "overloadpacket", op)


class _OpListDecider(Decider):
    def __init__(self, ops: set[int], kinds: set[int], plans: dict[int, Any]) -> None:
        self._ops, self._kinds, self.plans = ops, kinds, plans

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        return _SAVED if id(op) in self._ops else RECOMPUTED

    def decide_op(self, op: Any) -> bool:
        return id(op) in self._ops

    def may_save(self, op: Any) -> bool:
        return id(_kind_of(op)) in self._kinds


class FunctionsPolicy(OpPolicy):
    """Saves what calls of certain functions save and return; of which none has to occur.

    Args:
        functions: They, as a user names them: ``F.linear``, ``torch.matmul``, ``torch.Tensor.exp``, a higher-order op.
        decision: What is done with them.
    """

    expects_ops = True

    def __init__(self, functions: Iterable[Any], decision: Decision = Decision.MUST_SAVE) -> None:
        self._given = tuple(functions)
        self._decision = decision
        self._names = tuple(dict.fromkeys(map(name_of, self._given)))
        self._functions = dict.fromkeys([seen for function in self._given for seen in seen_as(function)], decision)

    def functions(self) -> Mapping[Any, Decision]:
        """Return the decision about each."""
        return self._functions

    def __repr__(self) -> str:
        return f"[{', '.join(map(label_of, self._given))}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _functions_at, (tuple(map(place_of, self._given)), self._decision)

    def op_names(self) -> Sequence[str]:
        """Return the names of the functions."""
        return self._names

    def parts(self) -> tuple[Any, ...]:
        """Return, for the compiler, what keeps the ops that the functions are made of."""
        return OpsOfFunctions, self._names

    def begin(self) -> Decider:
        """Begin one forward whose ops are asked for, as by torch's own contexts."""
        return OpsOfFunctions(self._names).begin()


class OpsOfFunctions(OpPolicy):
    """Saves the results of the ops that functions of certain names are made of."""

    expects_ops = True

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._ops = frozenset(op for name in names for op in (name, *OPS.get(name, ())))

    def __repr__(self) -> str:
        return f"[{', '.join(self._names)}]"

    def op_names(self) -> Sequence[str]:
        """Return the names of the ops."""
        return sorted(self._ops)

    def parts(self) -> tuple[Any, ...]:
        """Return the kind and the names of the functions."""
        return OpsOfFunctions, self._names

    def begin(self) -> Decider:
        """Begin one forward."""
        return _OpsDecider(self._ops)


class _OpsDecider(Decider):
    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._attention = any("attention" in name for name in names)

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        name = op_name(op)
        is_attention = self._attention and "attention" in name and "backward" not in name
        found = is_attention or name in self._names or name.lstrip("_") in self._names
        return (Decision.MUST_SAVE if found else Decision.PREFER_RECOMPUTE,)


def _functions_at(places: Iterable[Any], decision: Decision) -> FunctionsPolicy:
    return FunctionsPolicy(map(found_at, places), decision)


def op_name(op: Any) -> str:
    """Return the name of an op without its overload: ``mm``, or ``lib.op`` for one that is not torch's."""
    packet: str = getattr(_kind_of(op), "__name__", "")
    return packet if getattr(op, "namespace", "aten") == "aten" else f"{op.namespace}.{packet}"


class KeptFunctions(NamedTuple):
    """What a policy says of functions.

    Attributes:
        decisions: By what a mode sees of each.
        left_out: Patterns on the names of calls that are not kept.
        policy: The policy, with what it says of ops.
        tables: What each phase of a region does with each function, once a first region was made.
    """

    decisions: Mapping[Any, Decision]
    left_out: Sequence[str]
    policy: OpPolicy
    tables: dict[str, Any]


_TABLES: dict[Any, dict[str, Any]] = {}  # since many make a policy anew in each step


class Split(NamedTuple):
    """What a policy says of ops, for which these have to be watched; of functions; and of modules."""

    ops: OpPolicy | None
    functions: KeptFunctions | None
    modules: Sequence[ChoosesModules]


def split(policy: OpPolicy) -> Split:
    """Take a policy apart."""
    if policy.taken_apart is None:
        policy.taken_apart = _split(policy)
    return policy.taken_apart


def _split(policy: OpPolicy) -> Split:
    modules = [one for part in policy.kinds() for one in part.modules()]
    found = [part for part in policy.kinds() if not part.modules()]
    if not found:
        return Split(None, None, modules)
    # Where ops are watched anyway, the library's own policies decide about these, by whose names others may know them.
    if not all(part.functions() for part in found):
        by_function = [part for part in found if part.functions() and not part.is_ready]
    else:
        by_function = found
    decisions: dict[Any, Decision] = {}
    for part in by_function:
        for function, decision in part.functions().items():
            decisions[function] = max(decision, decisions.get(function, decision))
    if not decisions:
        return Split(Combined(found) if modules else policy, None, modules)
    ops = [part for part in found if not any(part is one for one in by_function)]
    left_out = [pattern for part in ops for pattern in part.left_out()]
    key = (tuple(decisions.items()), tuple(left_out))
    kept = KeptFunctions(decisions, left_out, policy, _TABLES.setdefault(key, {}))
    if all(part.left_out() for part in ops):
        return Split(None, kept, modules)
    return Split(Combined(ops) if len(ops) > 1 else ops[0], kept, modules)


class Combined(OpPolicy):
    """Several policies, of which the strongest decision holds."""

    def __init__(self, policies: Sequence[OpPolicy]) -> None:
        self._policies = policies
        self.expects_ops = all(policy.expects_ops for policy in policies)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self._policies)).replace("| ~", "& ~")

    def kinds(self) -> Iterable[OpPolicy]:
        """Return the policies of which it is made."""
        return (kind for policy in self._policies for kind in policy.kinds())

    def begin(self) -> Decider:
        """Begin one forward."""
        return _CombinedDecider([policy.begin() for policy in self._policies])

    def op_names(self) -> Sequence[str]:
        """Return the names that any of them lists."""
        return [name for policy in self._policies for name in policy.op_names()]

    def parts(self) -> tuple[Any, ...]:
        """Return the kinds and arguments of all of them."""
        return tuple(part for policy in self._policies for part in policy.parts())


class _CombinedDecider(Decider):
    def __init__(self, deciders: Sequence[Decider]) -> None:
        super().__init__()
        self._deciders = deciders
        self.reads_names = any(decider.reads_names for decider in deciders)
        self.notes_packed = any(decider.notes_packed for decider in deciders)

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        found = [decider.decide(context, op, args, kwargs) for decider in self._deciders]
        count = max(map(len, found))
        if count == 1:
            return (max(said[0] for said in found if said),) if any(found) else ()
        return [max(said[place if len(said) > 1 else 0] for said in found if said) for place in range(count)]

    def may_save(self, op: Any) -> bool:
        return any(decider.may_save(op) for decider in self._deciders)

    def decide_name(self, name: str) -> Decision:
        return max(decider.decide_name(name) for decider in self._deciders)

    def unmatched(self, names: Iterable[str]) -> PolicyError | None:
        known = list(names)
        return next((error for decider in self._deciders if (error := decider.unmatched(known)) is not None), None)


@lru_cache
def _listed(policy: tuple[Any, ...]) -> OpPolicy:
    """Return the policy that a list is; many write it anew in each step."""
    functions = [one for one in policy if is_function(one)]
    ops = [one for one in policy if not is_function(one)]
    if ops and functions:
        return Combined((FunctionsPolicy(functions), OpListPolicy(ops)))
    return FunctionsPolicy(functions) if functions else OpListPolicy(ops)


def as_policy(policy: Any) -> OpPolicy:
    """Return what a user gave as a policy in the form that the runtime asks.

    Raises:
        PolicyError: It is not a policy.
    """
    if isinstance(policy, OpPolicy):
        return policy
    if isinstance(policy, (list, tuple, set, frozenset)):
        if is_compiling():  # which cannot look into functions, and needs the ops that they are made of
            names = [name_of(one) for one in policy if not isinstance(one, OperatorBase | OpOverloadPacket)]
            listed = OpListPolicy([one for one in policy if isinstance(one, OperatorBase | OpOverloadPacket)])
            return Combined((OpsOfFunctions(names), listed)) if names else listed
        try:
            return _listed(tuple(policy))
        except TypeError as error:
            if isinstance(error, PolicyError):
                raise
            raise not_seen(next(one for one in policy if not isinstance(one, Hashable))) from None
    if is_function(policy):
        return FunctionsPolicy([policy])
    if isinstance(policy, OperatorBase | OpOverloadPacket):
        return OpListPolicy([policy])
    if callable(policy):
        return FunctionPolicy(policy)
    raise PolicyError(
        f"{shown(policy)} is not a policy for the ops of a region",
        remedy="A policy is a list of functions and ops, a function (ctx, op, *args, **kwargs), remat.save_names(...), "
        "one of remat.policies, or several of these with | between them; policy & ~remat.save_names(...) excludes "
        "names.",
    )
