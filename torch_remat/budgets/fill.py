"""What is to be evicted is offered to an offloader first, as long as that keeps up.

In: a saved tensor that a budget is about to evict. Kept: by its region, what stands for it; here weak references, to
know what has not left yet. Out: the same, or None if the tensor is to be evicted.
"""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from torch_remat._compat import without_dispatch_modes
from torch_remat.dispatch.region.region import Region
from torch_remat.offload.sender import Offloaded

_SHARE = 8
"""Of the budget, one part in so many may be on its way: that much is counted as gone and is not yet."""


class _Sent(ref[Offloaded]):
    """What was sent and may still be here."""

    __slots__ = ()


class Filler:
    """Offers tensors of one budget.

    Attributes:
        budget_bytes: The budget.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._leaving: list[_Sent] = []

    def offer(self, region: Region, place: int, tensor: Tensor) -> Offloaded | None:
        """Send a tensor away; None if it stays, or if too much has not left yet."""
        if tensor.is_sparse or self._bytes_leaving() + tensor.nbytes > self.budget_bytes // _SHARE:
            return None
        with torch.no_grad(), without_dispatch_modes():
            away = region.sender().send(tensor, None, f"saved tensor {place}", "residual")
        if away is not None and away.transfer.copy.told("still_here") is not None:
            self._leaving.append(_Sent(away))
        return away

    def _bytes_leaving(self) -> int:
        leaving = [(sent, away) for sent in self._leaving if (away := sent()) is not None]
        here = [(sent, away) for sent, away in leaving if isinstance(away.transfer.copy.told("still_here"), Tensor)]
        self._leaving = [sent for sent, _ in here]
        return sum(away.transfer.copy.bytes for _, away in here)
