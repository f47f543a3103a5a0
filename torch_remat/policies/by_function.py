"""Policies by function: lists of functions of torch, whose calls are kept.

In: functions, as a user names them. Kept: nothing. Out: a decision for each function that a mode sees; and, where
functions cannot be seen, as under a compiler, one for each of the ops that they are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_remat.policies.by_op import op_name
from torch_remat.policies.decision import RECOMPUTED, Decision
from torch_remat.policies.functions import OPS, found_at, label_of, listed, name_of, place_of, seen_as
from torch_remat.policies.policy import Decider, OpContext, OpPolicy


class FunctionsPolicy(OpPolicy):
    """Decides about what calls of certain functions save and return.

    Args:
        functions: They, as a user names them: ``F.linear``, ``torch.matmul``, ``torch.Tensor.exp``, a higher-order op.
        decision: What is done with them.
    """

    def __init__(self, functions: Iterable[Any], decision: Decision = Decision.MUST_SAVE) -> None:
        self._given = tuple(functions)
        self._decision = decision
        self._names = tuple(dict.fromkeys(map(name_of, self._given)))
        self._functions = dict.fromkeys([seen for function in self._given for seen in seen_as(function)], decision)
        self.says_nothing = decision is Decision.PREFER_RECOMPUTE
        self.expects_ops = decision.keeps

    def functions(self) -> Mapping[Any, Decision]:
        """Return the decision about each."""
        return self._functions

    def __repr__(self) -> str:
        return listed(map(label_of, self._given), self._decision)

    def __reduce__(self) -> tuple[Any, ...]:
        return _functions_at, (tuple(map(place_of, self._given)), self._decision)

    def op_names(self) -> Sequence[str]:
        """Return the names of the functions that it keeps."""
        return self._names if self._decision.keeps else ()

    def parts(self) -> tuple[Any, ...]:
        """Return, for the compiler, what decides about the ops that the functions are made of."""
        return OpsOfFunctions, self._names, self._decision

    def begin(self) -> Decider:
        """Begin one forward whose ops are asked for, as by torch's own contexts."""
        return OpsOfFunctions(self._names, self._decision).begin()


class OpsOfFunctions(OpPolicy):
    """Decides about the results of the ops that functions of certain names are made of."""

    expects_ops = True

    def __init__(self, names: Sequence[str], decision: Decision) -> None:
        self._names = tuple(names)
        self._decision = decision
        self._ops = frozenset(op for name in names for op in (name, *OPS.get(name, ())))

    def __repr__(self) -> str:
        return listed(self._names, self._decision)

    def op_names(self) -> Sequence[str]:
        """Return the names of the ops."""
        return sorted(self._ops)

    def parts(self) -> tuple[Any, ...]:
        """Return the kind, the names of the functions and the decision."""
        return OpsOfFunctions, self._names, self._decision

    def begin(self) -> Decider:
        """Begin one forward."""
        return _OpsOfFunctionsDecider(self._ops, self._decision)


class _OpsOfFunctionsDecider(Decider):
    def __init__(self, names: frozenset[str], decision: Decision) -> None:
        super().__init__()
        self._names = names
        self._answer = (decision,)
        self._attention = any("attention" in name for name in names)

    def decide(self, context: OpContext, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Decision]:
        name = op_name(op)
        is_attention = self._attention and "attention" in name and "backward" not in name
        found = is_attention or name in self._names or name.lstrip("_") in self._names
        return self._answer if found else RECOMPUTED


def _functions_at(places: Iterable[Any], decision: Decision) -> FunctionsPolicy:
    return FunctionsPolicy(map(found_at, places), decision)
