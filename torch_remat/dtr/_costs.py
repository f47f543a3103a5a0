"""What ops cost, for the heuristics.

In: a way to tell costs, and runs of ops. Kept: the way. Out: a number for each run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from torch_remat.dtr._kinds import leaves
from torch_remat.dtr._ops import Known
from torch_remat.errors import UsageError

Cost = Literal["measured", "flops"] | Callable[..., float]


class Costs:
    """What ops cost: seconds that were measured, or what a function says.

    Args:
        cost: ``"measured"``, ``"flops"``, or a function of at most four arguments: the op, its arguments, its
            keyword arguments, and its result.
    """

    def __init__(self, cost: Cost) -> None:
        self._function: Callable[..., float] | None = None
        self._count = 4
        if cost == "flops":
            self._function = flops
        elif callable(cost):
            self._function, self._count = cost, _arity(cost)
        elif cost != "measured":
            raise UsageError(
                f"cost={cost!r} is no way to tell what ops cost",
                remedy='It is "measured", "flops", or a function of an op, its args, its kwargs and its result.',
            )
        self.measured = self._function is None

    def of(self, known: Known, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
        """Return the cost of a run."""
        if self._function is None:
            return known.cost
        return float(self._function(*(func, args, kwargs, result)[: self._count]))


def _arity(function: Callable[..., float]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 4
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 4
    return min(4, sum(parameter.kind in (0, 1) for parameter in parameters))


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the floating-point operations of a run; of ops that torch's counter does not know, one per element."""
    count = flop_registry.get(getattr(func, "overloadpacket", None))
    if count is None:
        return float(sum(leaf.numel() for leaf in leaves(result) if isinstance(leaf, torch.Tensor)))
    return float(count(*args, **kwargs, out_val=result))
