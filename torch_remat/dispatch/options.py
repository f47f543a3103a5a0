"""What a user chooses for a region, as the runtime reads it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

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


# Regions with these, and only this object, skip what options may ask for.
DEFAULTS = Options()
