"""What may watch regions and their ops: `observed_by` lets it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import Node

from torch_remat.dispatch.options import observers
from torch_remat.dispatch.region.region import Region
from torch_remat.offload.sender import told
from torch_remat.reports.watch import WatchedOp


class Observer:
    """What the runtime and budgets tell; each method does nothing here. It may keep no tensor past the phase."""

    def begin(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        """An op of a region, or without one the region's function, begins to run in ``"forward"`` or ``"replay"``."""

    def end(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        """It has ended, or has raised; an op may have been skipped."""

    def finish(self, region: Region, boundary: Sequence[Node | None]) -> None:
        """The region's forward is over, and the tape is as it stays; ``boundary`` are the nodes of its outputs."""

    def offload_began(self, tensor: torch.Tensor, key: int) -> None:
        """An offloader has taken a tensor's memory, now or under an earlier name.

        It may free that on a thread that no profiler sees. ``key`` is the id of the `StoredCopy`.
        """

    def gave_up(self, region: Region, places: Sequence[int], freed: int, offloaded: int, kept: int) -> None:
        """A budget has emptied holders of a region.

        ``places`` are those of its saved tensors; ``freed`` the bytes that replay makes again, ``offloaded`` those that
        an offloader has taken, and ``kept`` those that the budget's regions keep from now on.
        """


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let an observer watch all regions of this process."""
    observers.append(observer)
    told.append(observer.offload_began)
    try:
        yield
    finally:
        observers[:] = [one for one in observers if one is not observer]
        told[:] = [one for one in told if one != observer.offload_began]
