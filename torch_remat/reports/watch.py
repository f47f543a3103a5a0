"""Watches a phase of a region for a profiler and for observers, and reports what runs.

In: the calls of the runtime, see `options.Watch`. Kept: nothing once the phase is over. Out: ranges named
``remat::region::op [phase]`` while a profiler runs, and calls of each `Observer` that `observed_by` lets watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node

from torch_remat._compat import ProfilerRange, node_number, profiler_runs, sequence_number
from torch_remat.dispatch.call.handle import RematHandle
from torch_remat.dispatch.mode import RematMode
from torch_remat.dispatch.options import observers
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.offload.sender import told
from torch_remat.policies.decision import CheckpointPolicy


class WatchedOp:
    """A call with a name, as observers see it."""

    numbers = 0, 0  # the sequence number of its first autograd node, and that after its last; equal if it has none

    def __init__(self, name: str) -> None:
        self.name = name


class Observer(Protocol):
    """What the runtime and budgets notify. It may keep no tensor past the phase."""

    def begin(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        """An op of a region, or without one the region's function, begins to run in ``"forward"`` or ``"replay"``."""

    def end(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        """It has ended, or has raised; an op may have been skipped."""

    def finish(self, region: Region) -> None:
        """The region's forward is over, and the tape is as it stays."""

    def gave_up(self, region: Region, freed: int, kept: int) -> None:
        """A region of a budget keeps less from now on.

        ``freed`` are the bytes that its replay recomputes, ``kept`` those that the budget's regions keep after it.
        """

    def came_back(self, tensor: torch.Tensor) -> None:
        """An offloader has brought a tensor back."""


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let an observer watch all regions of this process."""
    observers.append(observer)
    told.append(observer.came_back)
    try:
        yield
    finally:
        observers[:] = [one for one in observers if one is not observer]
        told[:] = [one for one in told if one != observer.came_back]


class PhaseWatch:
    """Watches one phase of one region, as a context manager."""

    def __init__(self, mode: RematMode) -> None:
        region = mode.region
        assert isinstance(region, Region)
        self.region = region
        self.phase = "replay" if mode.replaying else "forward"
        self.observers: tuple[Observer, ...] = tuple(observers)
        self._open: list[tuple[WatchedOp | None, AbstractContextManager[Any] | None]] = []  # None for the region

    def __enter__(self) -> None:
        """Begin the phase: the region's function runs inside."""
        self._begin(None)

    def __exit__(self, *raised: object) -> None:
        """End the phase."""
        self.end(None)

    def watch(self, handle: Any, name: str, ctx: Any) -> None:
        """Begin an op, and let its handle say when it ends."""
        op = WatchedOp(name)
        if isinstance(ctx, Node) and (number := node_number(ctx)) >= 0:
            op.numbers = number, number + 1
        handle.__class__ = _watched(handle.__class__)
        handle.watch, handle.watched = self, op
        self._begin(op)

    def run_native(self, run: Callable[..., Any], name: str, policy: CheckpointPolicy, *call: Any) -> Any:
        """Run a call by ``run(name, policy, *call)``."""
        op, first = WatchedOp(name), sequence_number()
        self._begin(op)
        try:
            result = run(name, policy, *call)
            op.numbers = first, sequence_number()
        finally:
            self.end(op)
        return result

    def finish(self) -> None:
        """Report that forward is over."""
        for observer in self.observers:
            observer.finish(self.region)

    def _begin(self, op: WatchedOp | None) -> None:
        entered = None
        if profiler_runs():
            name = qualified_name(self.region.name, None if op is None else op.name)
            entered = ProfilerRange(f"remat::{name} [{self.phase}]")
            entered.__enter__()
        self._open.append((op, entered))
        for observer in self.observers:
            observer.begin(self.region, op, self.phase)

    def end(self, op: WatchedOp | None) -> None:
        """End the range of an op, or of the region, and those inside it that an exception has left open."""
        while any(one is op for one, _ in self._open):
            last, entered = self._open.pop()
            for observer in self.observers[::-1]:
                observer.end(self.region, last, self.phase)
            if entered is not None:
                entered.__exit__(None, None, None)


class _Watched(RematHandle):
    """What a handle does besides while its op is watched."""

    watch: PhaseWatch
    watched: WatchedOp

    def load(self, args: tuple[Any, ...]) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        outputs = super().load(args)
        if outputs is not None:
            self.watch.end(self.watched)
        return outputs

    def record_outputs(self, *outs: torch.Tensor, as_tuple: bool = False) -> Any:
        made = super().record_outputs(*outs, as_tuple=as_tuple)
        self.watch.end(self.watched)
        return made


@cache
def _watched(kind: Any) -> Any:
    return type(kind.__name__, (_Watched, kind), {})
