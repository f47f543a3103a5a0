"""What a user chooses for a region, as the runtime reads it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from torch_remat._compat import Handler
from torch_remat.offload.protocol import Offloader

if TYPE_CHECKING:
    from torch_remat.policies.kinds import OpPolicy

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
DeterminismCheck = Literal["default", "bitwise", "none"] | Callable[[torch.Tensor], Any]


class OpLog(Protocol):
    """Logs the ops of a region's two phases."""

    def begin(self, phase: str) -> Handler:
        """Begin the phase ``"forward"`` or ``"replay"`` anew; return the watcher of its ops."""

    def side_by_side(self) -> str:
        """Return both phases' ops as text, for an error about differing phases."""


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
    offloader: Offloader | None = None
    offload_inputs: bool = False
    observer: Callable[..., None] | None = None  # an `Observer` of the log
    op_log: Callable[[], OpLog] | None = None  # makes the log of one region, for ``debug=True``


# Regions with these, and only this object, skip what options may ask for.
DEFAULTS = Options()
