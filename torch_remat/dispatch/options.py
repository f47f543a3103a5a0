"""What applies to a region: its options, the budget that it runs in, and its observers.

In: a region, or one phase of it, that begins. Kept: nothing here. Out: what the user chose for it; inside a budget what
it keeps by price, and its *keeper*, which counts that and may lower it until backward comes; and its `Watch`, which is
notified of what runs while a profiler or an observer such as `trace` is active.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch_remat._compat import Handler, profiler_runs
from torch_remat.offload.protocol import Offloader
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.ladders.kinds import Kind
    from torch_remat.ladders.ladder import Rung
    from torch_remat.policies.policy import ChoosesModules, ChoosesRungs, KeptFunctions, OpPolicy

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
DeterminismCheck = Literal["default", "bitwise", "none"]


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
    """What one region notifies in a budget.

    Attributes:
        owners: The budgets that the region is in.
    """

    owners: Sequence[Any]

    def finish(self) -> None:
        """Forward is over: count what the region keeps."""

    def reach(self) -> None:
        """Backward has come to the region, and asks next what is empty."""

    def replay(self, replay: Callable[[], None]) -> None:
        """Run one replay, and take its time."""


class Begun(NamedTuple):
    """What is known of a region by price before it begins.

    Attributes:
        kind: Its kind.
        shapes: The shapes of its arguments.
        rung: What it keeps; None for one that is recorded, or keeps nothing.
        is_new: Whether it is to be recorded.
        run: Runs it as plain code; None for a region.
        entry: What its budget knows of it.
    """

    kind: Kind
    shapes: Hashable
    rung: Rung | None = None
    is_new: bool = False
    run: Callable[..., Any] | None = None
    entry: Any = None


# Who watches all regions of this process; see `reports.watch`. Not of a thread: backward runs in threads of its own,
# which have no context variables of their callers.
observers: list[Any] = []


class Watch(Protocol):
    """Watches one phase of one region, as a context manager around the region's function."""

    def __enter__(self) -> None:
        """Begin the phase."""

    def __exit__(self, *raised: object) -> None:
        """End the phase."""

    def watch(self, handle: Any, name: str, ctx: Any) -> None:
        """Take note of an op with a handle, which begins."""

    def run_native(self, run: Callable[..., Any], name: str, policy: CheckpointPolicy, *call: Any) -> Any:
        """Run a call by ``run(name, policy, *call)``."""

    def finish(self) -> None:
        """Take note that forward is over."""


def is_watched() -> bool:
    """Whether a region that begins a phase now has to be watched; if not, nothing is told in this phase."""
    return True if observers else profiler_runs()
