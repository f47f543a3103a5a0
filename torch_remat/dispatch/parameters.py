"""The parameters of the module that a region runs, compared between forward and replay.

In: a region's function. Kept: the parameters themselves, which are not the region's memory. Out: an error where one was
replaced by another with other values.

Autograd does not save a weight whose input needs no gradient, nor any bias, so the saved tensors alone do not show that
such a parameter was replaced (`torch.func.functional_call` around the region, an attribute that was set anew).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter

from torch_remat.dispatch.generators import among_attributes
from torch_remat.dispatch.mismatch import replaced_parameter

if TYPE_CHECKING:
    from torch_remat.dispatch.region import Region

# A region inside a method of a whole model would otherwise walk the model in every region.
MAX_MODULES = 64
# The usual ones of torch's own, to which nobody adds a generator, are not searched for one.
_BARE = frozenset(kind for kind in vars(torch.nn).values() if isinstance(kind, type) and issubclass(kind, Module))


def parameters_of(
    function: Callable[..., Any], generators: list[torch.Generator] | None = None
) -> Sequence[torch.Tensor | None]:
    """Return the parameters of a module, or of the module whose method a function is; at most of `MAX_MODULES`.

    Args:
        function: The module or method.
        generators: Gets the random generators among the attributes of the same modules.
    """
    if type(function) is FunctionType:
        return ()
    module = function if isinstance(function, Module) else getattr(function, "__self__", None)
    if not isinstance(module, Module):
        return ()
    found: list[torch.Tensor | None] = []
    modules = [module]
    for module in modules:  # grows meanwhile
        found += module._parameters.values()
        modules += filter(None, module._modules.values())
        if generators is not None and type(module) not in _BARE:
            generators += among_attributes(module)
        if len(modules) > MAX_MODULES:
            break
    return found


def check_parameters(region: Region, before: Sequence[torch.Tensor | None]) -> None:
    """Raise if replay would use another parameter than forward, with other values.

    Raises:
        MismatchError: A parameter was replaced.
    """
    assert region.function is not None
    now = parameters_of(region.function)
    if len(now) == len(before) and all(map(is_, before, now)):
        return
    for place in range(max(len(before), len(now))):
        one = before[place] if place < len(before) else None
        other = now[place] if place < len(now) else None
        if one is not other and not _may_stand_for(one, other):
            raise replaced_parameter(region, place, one, other)


def _may_stand_for(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return False
    if not {type(one), type(other)} <= {torch.Tensor, Parameter}:
        return True  # sharded in one phase and not in the other: the wrapper that did it knows what it does
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
