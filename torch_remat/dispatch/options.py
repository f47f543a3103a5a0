"""What a user chooses for a region, as the runtime reads it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_remat.offload.protocol import Offloader

if TYPE_CHECKING:
    from torch_remat.policies.kinds import OpPolicy

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
DeterminismCheck = str | Callable[[torch.Tensor], Any]


class Options(NamedTuple):
    """The options of `torch_remat.checkpoint`, validated there."""

    region_name: str | None = None
    preserve_rng_state: bool = True
    determinism_check: DeterminismCheck = "default"
    early_stop: bool = True
    debug: bool = False
    context_fn: ContextFn | None = None
    policy: OpPolicy | None = None
    allow_cache_entry_mutation: bool = False
    observer: Callable[..., None] | None = None  # an `Observer` of the log
    offloader: Offloader | None = None
    offload_inputs: bool = False


# Regions with these, and only this object, skip what options may ask for.
DEFAULTS = Options()
