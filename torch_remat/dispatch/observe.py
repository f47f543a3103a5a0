"""Who watches regions and ops run: ranges in a profile, and observers such as those of `trace` and `explain`.

In: the begin and end of each phase of a region, and of each op in it. Kept: nothing once the phase is over. Out: ranges
named ``remat::region::op [phase]`` while a profiler runs, and calls of observers.

A region asks `is_watched` once in each phase; unless it is, nothing of this runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from torch_remat._compat import ProfilerRange, node_number, profiler_runs, sequence_number
from torch_remat.dispatch.handle.op import RematHandle
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.errors import qualified_name
from torch_remat.policies.decision import CheckpointPolicy

# Of the whole process, since backward runs in threads of its own, which have no context variables of their callers.
_observers: tuple[Observer, ...] = ()


class Observer:
    """What may be watched; each method does nothing here. It may keep no tensor past the phase."""

    def begin_region(self, region: Any, phase: str) -> None:
        """A region's function begins to run in phase ``"forward"`` or ``"replay"``."""

    def end_region(self, region: Any, phase: str) -> None:
        """It has ended, or has raised."""

    def finish_region(self, region: Any, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """The region's forward is over, and the tape is as it stays; ``boundary`` are the nodes of its outputs."""

    def begin_op(self, region: Any, op: WatchedOp, phase: str) -> None:
        """An op begins in a region."""

    def policy_of(self, region: Any, name: str, policy: CheckpointPolicy) -> CheckpointPolicy:
        """Return the policy that an op is to have instead of its own."""
        return policy

    def end_op(self, region: Any, op: WatchedOp, phase: str) -> None:
        """The op has ended, was skipped, or has raised; ``op.outputs_made`` are its outputs, if it ran."""

    def offload_began(self, tensor: torch.Tensor, key: int) -> None:
        """An offloader has taken a tensor's memory, and may free it on a thread that no profiler sees.

        ``key`` is the id of the `StoredCopy`.
        """

    def gave_up(self, region: Any, places: Sequence[int], freed: int, offloaded: int, kept: int) -> None:
        """A budget has emptied holders of a region.

        ``places`` are those of its saved tensors; ``freed`` the bytes that replay makes again, ``offloaded`` those that
        an offloader has taken, and ``kept`` those that the budget's regions keep from now on.
        """


def tell_offloaded(tensor: torch.Tensor, key: int) -> None:
    """Tell observers that an offloader has taken a tensor, now or under an earlier name."""
    for observer in _observers:
        observer.offload_began(tensor, key)


def is_observed() -> bool:
    """Whether an observer wants to know what budgets do."""
    return _observers != ()


def tell_given_up(region: Any, places: Sequence[int], freed: int, offloaded: int, kept: int) -> None:
    """Tell observers what a budget has given up; see `Observer.gave_up`."""
    for observer in _observers:
        observer.gave_up(region, places, freed, offloaded, kept)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let an observer watch all regions of this process."""
    global _observers
    _observers = (*_observers, observer)
    try:
        yield
    finally:
        _observers = tuple(one for one in _observers if one is not observer)


def is_watched() -> bool:
    """Whether a region that begins a phase now has to be watched."""
    return profiler_runs() or _observers != ()


class Watch:
    """Watches one phase of one region."""

    def __init__(self, mode: Any) -> None:
        self.region = mode.region
        self.phase = "replay" if mode.replaying else "forward"
        self._observers = _observers
        self._open: list[tuple[WatchedOp | None, AbstractContextManager[Any] | None]] = []  # None for the region

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tell that the region's function runs inside."""
        self._begin_range(None)
        for observer in self._observers:
            observer.begin_region(self.region, self.phase)
        try:
            yield
        finally:
            self.end(None)

    def finish(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """Note that the region's forward is over."""
        for observer in self._observers:
            observer.finish_region(self.region, boundary)

    def policy_of(self, name: str, policy: CheckpointPolicy) -> CheckpointPolicy:
        """Return the policy that observers want an op to have."""
        for observer in self._observers:
            policy = observer.policy_of(self.region, name, policy)
        return policy

    def begin(self, op: RematHandle | None, name: str, policy: CheckpointPolicy, ctx: Any) -> WatchedOp:
        """Begin an op's range and return the op, watched."""
        watched = WatchedOp(self, op, name, policy, ctx)
        self._begin_range(watched)
        for observer in self._observers:
            observer.begin_op(self.region, watched, self.phase)
        return watched

    def run_native(
        self,
        run: Callable[..., Any],
        name: str,
        policy: CheckpointPolicy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a native region by ``run(name, policy, function, args, kwargs)``, as an op that is watched."""
        policy = self.policy_of(name, policy)
        watched = self.begin(None, name, policy, None)
        first = sequence_number()
        watched.numbers = first, first
        try:
            result = run(name, policy, function, args, kwargs)
            watched.numbers = first, sequence_number()
            if self.phase == "forward" or policy is CheckpointPolicy.RECOMPUTE:
                watched.outputs_made = tuple(leaves_of((result,), {}))
                watched.as_tuple = not isinstance(result, torch.Tensor)
        finally:
            self.end(watched)
        return result

    def name_saved(self, named: Sequence[tuple[str, torch.Tensor | None]]) -> None:
        """Note what the op that runs saves, by name."""
        if self._open and (op := self._open[-1][0]) is not None:
            op.named = {**dict(named), **op.named}

    def _begin_range(self, op: WatchedOp | None) -> None:
        entered = None
        if profiler_runs():
            name = qualified_name(self.region.name, None if op is None else op.name)
            entered = ProfilerRange(f"remat::{name} [{self.phase}]")
            entered.__enter__()
        self._open.append((op, entered))

    def end(self, op: WatchedOp | None) -> None:
        """End the range of an op, or of the region, and those inside it that an exception has left open."""
        while any(one is op for one, _ in self._open):
            last, entered = self._open.pop()
            for observer in self._observers[::-1]:
                if last is None:
                    observer.end_region(self.region, self.phase)
                else:
                    observer.end_op(self.region, last, self.phase)
            if entered is not None:
                entered.__exit__(None, None, None)


class WatchedOp(RematHandle):
    """An op that is watched while its body runs: each step is done by the op's own handle.

    Attributes:
        name: The op's name.
        policy: Its policy.
        numbers: The sequence number of its first autograd node, and that after its last; equal if it has none.
        named: What it saves, by name.
        outputs_made: Its outputs, of a native region all leaves of the result; None if it was skipped or raised.
        as_tuple: Whether they have numbers as names, since it returned something else than one tensor.
    """

    def __init__(self, watch: Watch, op: RematHandle | None, name: str, policy: CheckpointPolicy, ctx: Any) -> None:
        self.name = name
        self.policy = policy
        number = node_number(ctx) if isinstance(ctx, torch.autograd.graph.Node) else -1
        self.numbers = (number, number + 1) if number >= 0 else (0, 0)
        self.named: Mapping[str, torch.Tensor | None] = {}
        self.outputs_made: tuple[Any, ...] | None = None
        self.as_tuple = False
        self._watch = watch
        self._handle = op or RematHandle(ctx, name)

    def maybe_load_saved(self) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Do as the op does; if it is skipped, that is its end."""
        return self.load(())

    def load(self, args: tuple[Any, ...]) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Do the same for a caller that knows the inputs."""
        outputs = self._handle.load(args)
        if outputs is not None:
            self._finish()
        return outputs

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Do as the op does."""
        return self._handle.save_or_load_inputs(*args)

    def save_for_backward(self, saved_tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Do as the op does."""
        self._handle.save_for_backward(saved_tensors)
        self.named = saved_tensors

    def record_outputs(self, *outs: torch.Tensor, as_tuple: bool = False) -> Any:
        """Do as the op does."""
        made = self._handle.record_outputs(*outs, as_tuple=as_tuple)
        self.as_tuple = isinstance(made, tuple)
        self.outputs_made = made if self.as_tuple else (made,)
        self._finish()
        return made

    def _finish(self) -> None:
        self._watch.end(self)
        self.named, self.outputs_made = {}, None
