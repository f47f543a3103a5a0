"""Policies by function: lists of functions of torch, whose calls are kept.

In: functions, as a user names them. Kept: nothing. Out: a decision for each function that a mode sees; and, where
functions cannot be seen, as under a compiler, one for each of the ops that they are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_remat.policies.by_op import op_name
from torch_remat.policies.decision import Decision
from torch_remat.policies.functions import OPS, found_at, label_of, name_of, place_of, seen_as
from torch_remat.policies.policy import Decider, OpContext, OpPolicy


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
        return _OpsOfFunctionsDecider(self._ops)


class _OpsOfFunctionsDecider(Decider):
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
