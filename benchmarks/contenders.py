"""The ways to checkpoint a function that are measured against each other, each with its default options.

Another checkout of this repository may take part too, as ``before``, wherever ``ours`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat

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
OURS_OP = "ours op"
OURS_OP_CLOSURE = "ours op closure"
OURS_POLICY = "ours policy"
OURS_FUNCTION = "ours policy function"
OURS_CALLS = "ours by function"
OURS_MODULES = "ours by module"
OURS_DROP_IN = "ours drop-in"
BEFORE = "before"


class UnavailableError(Exception):
    """A workload cannot be measured here; the message says why."""


_checkouts: dict[str, ModuleType] = {OURS: remat}


def compare_with(checkout: Path) -> None:
    """Let the package of another checkout of this repository take part, as ``before``."""
    _checkouts[BEFORE] = peers.load_checkout(checkout)


def versions(contender: str) -> dict[str, ModuleType]:
    """Return one of our contenders and, of a checkout to compare with, the same; with their packages."""
    return {contender.replace(OURS, name, 1): package for name, package in _checkouts.items()}


def before(contender: str) -> str:
    """Return what one of our contenders is called in the checkout to compare with."""
    return contender.replace(OURS, BEFORE, 1)


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
        REMAT_0_1: lambda function: region(peers.load("0.1.0"), function),
        REMAT_0_2: lambda function: region(peers.load("0.2.2"), function),
        **{name: partial(region, package) for name, package in versions(OURS).items()},
    }


def region(package: ModuleType, function: Function, **options: Any) -> Function:
    """Return a function that runs as a region of one of the packages."""
    # Decorated anew in each call, as a model's forward does it.
    return lambda *args, **kwargs: package.checkpoint(**options)(function)(*args, **kwargs)


def selectively(ops: list[Any], function: Function) -> Function:
    """Return a function that runs under selective activation checkpointing, with a list of ops to keep."""
    contexts = partial(create_selective_checkpoint_contexts, ops)
    return lambda *args, **kwargs: torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def policy_function(ops: list[Any]) -> Callable[..., bool]:
    """Return a list of ops to keep in the form of a policy function."""
    kept = frozenset(ops)
    return lambda ctx, op, *args, **kwargs: op in kept


def package_of(name: str) -> ModuleType:
    """Return the torch_remat package of a contender."""
    return _checkouts.get(name) or peers.load({REMAT_0_1: "0.1.0", REMAT_0_2: "0.2.2"}[name])


def without_reports() -> Wrap:
    """Return how a function becomes a region that nothing can watch and no report can find."""
    seeing = _names_for_reports()
    blind = [(names, name, _nobody if name == "is_watched" else _Forgetful()) for names, name, _ in seeing]
    return lambda function: _with_names(blind, region(remat, function))


def with_reports() -> Wrap:
    """Return how a function becomes a region of ours, in a process where others are blind."""
    seeing = _names_for_reports()
    return lambda function: _with_names(seeing, region(remat, function))


def _one_more_forward(function: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def _torch(function: Function, *, use_reentrant: bool) -> Function:
    return lambda *args, **kwargs: torch_checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def _with_names(values: list[tuple[dict[str, Any], str, Any]], function: Function) -> Function:
    def run(*args: Any) -> torch.Tensor:
        # Until the next forward, so that it holds for the backward that follows, too.
        for namespace, name, value in values:
            namespace[name] = value
        return function(*args)

    return run


def _nobody() -> bool:
    return False


class _Forgetful:
    """Where a region writes that it is alive, and nobody reads it."""

    def add(self, region: object) -> None: ...

    def discard(self, region: object) -> None: ...


@cache  # what the names stand for at first, before anything is blind
def _names_for_reports() -> list[tuple[dict[str, Any], str, Any]]:
    """Return each module's names in the runtime by which a region is watched and found: namespace, name, value."""
    runtime = [vars(module) for name, module in sys.modules.items() if name.startswith(f"{remat.__name__}.dispatch")]
    found = [(names, name, names[name]) for names in runtime for name in ("is_watched", "_regions") if name in names]
    if len({name for _, name, _ in found}) < 2:
        raise UnavailableError("the runtime no longer has the names by which reports watch and find a region")
    return found
