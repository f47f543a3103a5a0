"""The parameters that a region uses, compared between forward and replay.

In: the parameters that a region's function reaches. Kept: the parameters themselves, which are not the region's memory,
and their versions at the end of forward. Out: an error where one was replaced by another with other values, or where
replay reads one that was changed in place.

Autograd does not save a weight whose input needs no gradient, nor any bias, so the saved tensors alone do not show that
such a parameter is another one (`torch.func.functional_call` around the region, an attribute that was set anew, a step
of an optimizer before backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from operator import attrgetter, is_

import torch
from torch.nn import Parameter

from torch_remat.dispatch.check.compare import REPLACED, described
from torch_remat.dispatch.check.unread import MakeError
from torch_remat.dispatch.holder import RegionLike
from torch_remat.dispatch.reach import Reached, reach
from torch_remat.errors import MismatchError, MutationError, RematError, at_user_line


def versions_of(tensors: Sequence[torch.Tensor | None]) -> Sequence[int]:
    """Return how often each tensor was changed in place; -1 where that is not counted."""
    try:
        return list(map(_version, tensors))
    except (AttributeError, RuntimeError):  # a parameter that is not set; a tensor of inference mode
        return [-1 if one is None or one.is_inference() else one._version for one in tensors]


_version = attrgetter("_version")


def check_parameters(region: RegionLike) -> dict[int, MakeError]:
    """Compare the parameters with those of forward, at the start of a replay.

    Returns:
        The error about each that is another one now, or has other values, by its id: replay may not read it.

    Raises:
        MismatchError: A parameter is gone.
    """
    before: Sequence[torch.Tensor | None] = region.parameters
    if not before:
        return {}
    # A forward that is not over has noted nothing yet.
    versions = versions_of(before) if region.finished else region.versions
    now = _reached(region, parameters_alone=True).parameters
    if versions == region.versions and len(now) == len(before) and all(map(is_, before, now)):
        return {}
    others: dict[int, MakeError] = {}
    known = set() if len(now) == len(before) else set(map(id, before))  # which only stand elsewhere
    for place, (one, other) in enumerate(zip_longest(before, now)):
        if one is not other and not _may_stand_for(one, other):
            if other is None:
                raise _replaced(region, place, one, other)
            if id(other) not in known:
                others[id(other)] = partial(_replaced, region, place, one, other)
    for place, (one, old, new) in enumerate(zip(before, region.versions, versions, strict=True)):
        if one is not None and old != new and id(one) not in others:
            others[id(one)] = partial(_changed, region, place, one)
    return others


def _reached(region: RegionLike, parameters_alone: bool = False) -> Reached:
    assert region.function is not None
    assert region.inputs is not None
    return reach(region.function, region.inputs.modules(), parameters_alone)


def _name_of(region: RegionLike, place: int, parameter: torch.Tensor | None) -> str:
    """Return what an error calls a parameter: its place, and its name in the module that has it, if one has."""
    for module in _reached(region).modules:
        for name, other in module.named_parameters():
            if other is parameter:
                return f"parameter {place} ({name})"
    return f"parameter {place}"


def _replaced(region: RegionLike, place: int, one: torch.Tensor | None, other: torch.Tensor | None) -> RematError:
    before, now = ("none" if it is None else described(it) for it in (one, other))
    how = f"{now}, with other values" if before == now else f"{before}, then {now}"
    reader = "" if other is None else f", and replay reads the other one{at_user_line()}"
    what = f"this parameter was replaced between forward and replay ({how}){reader}"
    return MismatchError(what, region=region.name, tensor=_name_of(region, place, other), remedy=REPLACED)


def _changed(region: RegionLike, place: int, parameter: torch.Tensor) -> RematError:
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
