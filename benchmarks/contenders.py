"""The ways to checkpoint a function that are measured against each other, each with its default options."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from torch_remat.dispatch import observe
from torch_remat.dispatch.region.region import forward, region, replay

from . import peers

Function = Callable[..., torch.Tensor]
Wrap = Callable[[Function], Function]

NONE = "none"
FLOOR = "floor"
TORCH = "torch non-reentrant"
REENTRANT = "torch reentrant"
REMAT_0_1 = "torch_remat 0.1.0"
REMAT_0_2 = "torch_remat 0.2.2"
OURS = "ours"
BLIND = "ours, without reports"
SAC = "SAC"
OURS_NATIVE = "ours native"
OURS_CLOSURE = "ours native closure"
OURS_POLICY = "ours policy"


def full_recompute() -> dict[str, Wrap]:
    """Return, by name, how each contender turns a function into one that is recomputed in backward.

    Two are references. ``none`` does not checkpoint: it gives the gradients that all must equal. ``floor`` does
    not checkpoint either but runs one more forward, which is what recomputing costs if the bookkeeping is free.
    """
    return {
        NONE: lambda function: function,
        FLOOR: _one_more_forward,
        TORCH: lambda function: _torch(function, use_reentrant=False),
        REENTRANT: lambda function: _torch(function, use_reentrant=True),
        REMAT_0_1: lambda function: _decorated(peers.load("0.1.0").checkpoint, function),
        REMAT_0_2: lambda function: _decorated(peers.load("0.2.2").checkpoint, function),
        OURS: lambda function: _decorated(remat.checkpoint, function),
    }


def package_of(name: str) -> ModuleType:
    """Return the torch_remat package of a contender."""
    return remat if name == OURS else peers.load({REMAT_0_1: "0.1.0", REMAT_0_2: "0.2.2"}[name])


def without_reports() -> Wrap:
    """Return how a function becomes a region that nothing can watch and no report can find."""
    return lambda function: _blind(_decorated(remat.checkpoint, function))


def with_reports() -> Wrap:
    """Return how a function becomes a region of ours, in a process where others are blind."""
    return lambda function: _seeing(_decorated(remat.checkpoint, function))


def _one_more_forward(function: Function) -> Function:
    def run(*args: Any) -> torch.Tensor:
        function(*args)
        return function(*args)

    return run


def _torch(function: Function, *, use_reentrant: bool) -> Function:
    return lambda *args: torch_checkpoint(function, *args, use_reentrant=use_reentrant)


def _blind(function: Function) -> Function:
    def run(*args: Any) -> torch.Tensor:
        # Until the next forward, so that the backward that follows is blind, too.
        forward.is_watched = replay.is_watched = _nobody
        region._regions = _Forgetful()
        return function(*args)

    return run


def _seeing(function: Function) -> Function:
    def run(*args: Any) -> torch.Tensor:
        forward.is_watched = replay.is_watched = observe.is_watched
        region._regions = _REGIONS
        return function(*args)

    return run


def _nobody() -> bool:
    return False


class _Forgetful:
    """Where a region writes that it is alive, and nobody reads it."""

    def __setitem__(self, key: int, value: Any) -> None: ...


_REGIONS = region._regions


def _decorated(checkpoint: Callable[[], Wrap], function: Function) -> Function:
    # Decorated anew in each call, as a model's forward does it.
    return lambda *args: checkpoint()(function)(*args)
