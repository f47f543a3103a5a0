"""Regions, and parts of them that are saved, while ``torch.compile`` traces: both are those of torch, which it knows.

In: what the user chose. Kept: whether a region is being traced, which the compiler follows as it follows other code.
Out: calls of ``torch.utils.checkpoint.checkpoint``, whose contexts say which ops are kept; the innermost call decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from torch_remat.dispatch.options import Options
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.policies.for_torch import all_offloaded, all_saved, contexts_for_torch

_in_region = False


def compiled_region(options: Options, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Run a function as one of torch's regions."""
    global _in_region
    more: dict[str, Any] = {}
    if options.context_fn is not None:
        more["context_fn"] = options.context_fn
    elif options.chosen is not None and (parts := options.chosen.parts()):
        more["context_fn"] = partial(contexts_for_torch, options.allow_cache_entry_mutation, *parts)
    more["preserve_rng_state"] = options.preserve_rng_state
    more["determinism_check"] = "none" if options.determinism_check == "none" else "default"
    if _in_region:  # inside torch's region nothing outside may be changed
        return _call(function, args, kwargs, more)
    _in_region = True
    try:
        return _call(function, args, kwargs, more)
    finally:
        _in_region = False


def compiled_part(
    policy: CheckpointPolicy, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run a part of a region whose results are kept, unless its policy is RECOMPUTE; outside of regions, call it."""
    if not _in_region or policy is CheckpointPolicy.RECOMPUTE:
        return function(*args, **kwargs)
    contexts = all_offloaded if policy is CheckpointPolicy.OFFLOAD else all_saved
    return _call(function, args, kwargs, {"context_fn": contexts})


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    def call(*args: Any) -> Any:
        return function(*args, **kwargs)

    return checkpoint(call, *args, use_reentrant=False, **more)
