"""What the runtime tells of a phase of a region while somebody watches: a profiler, or observers such as `trace`.

In: the begin and end of a phase, and of each call in it. Kept: nothing. Out: calls of a `Watch`, which reports make.

A region asks `is_watched` once in each phase; unless it is, nothing of this runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node

from torch_remat._compat import profiler_runs
from torch_remat.policies.decision import CheckpointPolicy

# Of the whole process, since backward runs in threads of its own, which have no context variables of their callers.
observers: list[Any] = []


class Watch(Protocol):
    """Watches one phase of one region, as a context manager around the region's function."""

    def __enter__(self) -> None:
        """Begin the phase."""

    def __exit__(self, *raised: object) -> None:
        """End the phase."""

    def policy_of(self, name: str, policy: CheckpointPolicy) -> CheckpointPolicy:
        """Return the policy that a call is to have instead of its own."""

    def watch(self, handle: Any, name: str, policy: CheckpointPolicy, ctx: Any) -> None:
        """Take note of an op with a handle, which begins."""

    def run_native(self, run: Callable[..., Any], name: str, policy: CheckpointPolicy, *call: Any) -> Any:
        """Run a call by ``run(name, policy, *call)``."""

    def name_saved(self, named: Sequence[tuple[str, torch.Tensor | None]]) -> None:
        """Take note of what the call that runs saves, by name."""

    def finish(self, boundary: Sequence[Node | None]) -> None:
        """Take note that forward is over; ``boundary`` are the nodes of its outputs."""


def is_watched() -> bool:
    """Whether a region that begins a phase now has to be watched."""
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
