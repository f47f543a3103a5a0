"""What applies to a region: its options, the budget that it runs in, and its observers.

In: a region, or one phase of it, that begins. Kept: nothing here. Out: what the user chose for it; inside a budget its
*keeper*, which fills holders at the end of forward and may empty them at any time, since a replay fills empty ones; and
its `Watch`, which is notified of what runs while a profiler or an observer such as `trace` is active.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from weakref import ref

import torch
from torch.autograd.graph import Node

from torch_remat._compat import Handler, profiler_runs
from torch_remat.offload.protocol import Offloader
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.policies.policy import ChoosesModules, ChoosesRungs, KeptFunctions, OpPolicy

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
DeterminismCheck = Literal["default", "bitwise", "none"] | Callable[[torch.Tensor], Any]


class OpLog(Protocol):
    """Logs the ops of both phases of regions, as long as these live."""

    def begin(self, region: object, phase: str) -> Handler:
        """Begin the phase ``"forward"`` or ``"replay"`` anew; return the watcher of its ops."""

    def side_by_side(self, region: object) -> str:
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
    op_log: OpLog | None = None  # for ``debug=True``
    # What the policy says of functions, of modules, and by price; ``policy`` is what it says of ops, ``chosen`` is all.
    functions: KeptFunctions | None = None
    modules: Sequence[ChoosesModules] = ()
    price: ChoosesRungs | None = None
    chosen: OpPolicy | None = None


# Regions with these, and only this object, skip what options may ask for.
DEFAULTS = Options()


class Keeper(Protocol):
    """What one region asks.

    Attributes:
        owners: The budgets that the region is in.
        keeps: Whether it fills holders; if not, the region's forward ends as outside of a budget.
    """

    owners: Sequence[Any]
    keeps: bool

    def note(self, ops: Any) -> None:
        """Take note of a saved tensor that a replay could fill, given the region's calls and ops, if it has any."""

    def keep(self, entry: ref[Any], value: torch.Tensor | None) -> None:
        """Fill one of these holders, or leave it empty, at the end of forward, in the order in which they were noted.

        Args:
            entry: The tape's weak reference to it.
            value: The saved tensor, detached; None if the holder is gone.
        """

    def finish(self) -> None:
        """Forward is over: count what the region keeps besides."""

    def reach(self) -> None:
        """Backward has come to the region, and asks next what is empty."""

    def replay(self, replay: Callable[[], None]) -> None:
        """Run one replay, and take its time."""


class Keeping(Protocol):
    """What gives regions their keepers.

    Attributes:
        registers: The budgets, innermost first.
    """

    registers: Sequence[Any]

    def runner(
        self, options: Options, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """Return what runs a function as it is, with its arguments; None for one that runs as a region."""

    def begin(self, region: Any) -> Keeper | None:
        """Return the keeper of a region whose forward begins."""


# What the regions of this thread ask; None outside of budgets.
keeping: ContextVar[Keeping | None] = ContextVar("torch_remat_keeping", default=None)


# Who watches all regions of this process; see `reports.watch`. Not of a thread: backward runs in threads of its own,
# which have no context variables of their callers.
observers: list[Any] = []


class Watch(Protocol):
    """Watches one phase of one region, as a context manager around the region's function."""

    def __enter__(self) -> None:
        """Begin the phase."""

    def __exit__(self, *raised: object) -> None:
        """End the phase."""

    def watch(self, handle: Any, name: str, policy: CheckpointPolicy, ctx: Any) -> None:
        """Take note of an op with a handle, which begins."""

    def run_native(self, run: Callable[..., Any], name: str, policy: CheckpointPolicy, *call: Any) -> Any:
        """Run a call by ``run(name, policy, *call)``."""

    def name_saved(self, named: Sequence[tuple[str, torch.Tensor | None]]) -> None:
        """Take note of what the call that runs saves, by name."""

    def finish(self, boundary: Sequence[Node | None]) -> None:
        """Take note that forward is over; ``boundary`` are the nodes of its outputs."""


def is_watched() -> bool:
    """Whether a region that begins a phase now has to be watched; if not, nothing is told in this phase."""
    return True if observers else profiler_runs()


def watch_by(make: Callable[[Any], Watch]) -> None:
    """Let a function make what watches the phase of a mode."""
    global _make
    _make = make


def watch(mode: Any) -> Watch:
    """Return what watches the phase of a mode."""
    assert _make is not None
    return _make(mode)


_make: Callable[[Any], Watch] | None = None
