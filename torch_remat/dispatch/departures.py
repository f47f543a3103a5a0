"""What leaves the device in one forward of a region, by OFFLOAD.

In: what a log would keep: holders of saved tensors, and results that replay reads. Kept: what has left, by storage.
Out: pairs of hooks, by which the tensors come back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat._compat import SavedTensorHooks, storage_key, with_shared_versions, without_dispatch_modes
from torch_remat.dispatch.holder import OpHolder
from torch_remat.offload.sender import Offloaded, Sender


class Departures:
    """What leaves the device in one forward of a region, each by a pair of hooks.

    Args:
        sender: Returns the region's sender.
        holds: Whether a tensor's memory stays with the region's inputs.
        unwatched: Shows the ops of a transfer to nobody.

    Attributes:
        waiting: Holders whose tensors are to leave, with these: an op may fill a buffer after it has saved it.
    """

    __slots__ = ("_holds", "_sender", "_sent", "_unwatched", "waiting")

    def __init__(
        self,
        sender: Callable[[], Sender],
        holds: Callable[[torch.Tensor], bool],
        unwatched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.waiting: list[tuple[OpHolder, torch.Tensor]] = []
        self._sender, self._holds, self._unwatched = sender, holds, unwatched
        # What has left, by storage, with the version that it had: kept results of the same memory share its way.
        self._sent: dict[int, tuple[StorageWeakRef, int, Offloaded]] = {}

    def send(self) -> None:
        """Send what waits, now that its op is over."""
        waiting, together = [*self.waiting], object()
        self.waiting.clear()
        for holder, tensor in waiting:
            with torch.no_grad(), self._unwatched(), without_dispatch_modes(), with_shared_versions():
                if self._holds(tensor):
                    continue
                away = self._sender().send(tensor, holder.op, holder.tensor_name, "residual", together)
                if away is not None:
                    holder.value, holder.packed, holder.unpack = None, away, Offloaded.load
                    storage = StorageWeakRef(tensor.untyped_storage())
                    self._sent[storage_key(tensor)] = storage, tensor._version, away

    def hooks_of(self, op: str | None, name: str, tensor: torch.Tensor) -> SavedTensorHooks | None:
        """Send a result that replay needs, unless its storage is away already; return its hooks, None if it stays."""
        sender, away = self._sender(), None
        if (known := self._known(tensor)) is not None:
            away = sender.share(known, tensor, op, name)
        if away is None:
            away = sender.send(tensor, op, name, "input")
        return None if away is None else ((lambda _: away), Offloaded.load)

    def _known(self, tensor: torch.Tensor) -> Offloaded | None:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        storage, version, away = self._sent.get(storage_key(tensor), (None, 0, None))
        return away if storage is not None and not storage.expired() and version == tensor._version else None
