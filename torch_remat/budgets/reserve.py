"""What a step needs on an accelerator besides what its regions keep, from the peaks of the allocator.

In: where a step's first region begins, and where its backward ends. Kept: what the latest steps needed. Out: the bytes
to hold in reserve.

NOTE [ How the reserve is learned ]
1. A step's *transient* is the most that was allocated at once, above what was there when the step began, less the most
   that regions kept in backward: what they kept when backward began, or what a replay filled and what was kept before
   it, if that is more. It is gradients on their way, what replays make besides, and all that is outside of regions.
2. The most of the latest steps counts, in proportion to the bytes that a step's first region gets, if these are more
   than before. The second step has room for a replay of the largest region besides, since the first may have had none,
   and later ones some to spare, since what is evicted differs a little from step to step.
"""

from __future__ import annotations

from collections import deque

import torch

from torch_remat.budgets.steps import Step

_LATEST = 4  # so many steps count
_SPARE = 32  # one part of the budget in so many is left besides


class Reserve:
    """Learns how much room a step needs.

    Args:
        budget_bytes: What the peak is to stay within.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._transients: deque[tuple[int, int]] = deque(maxlen=_LATEST)  # with the bytes of the first region's inputs
        self._before = -1
        self._scale = 0

    def begin(self, scale: int, last: Step | None) -> int:
        """Begin to measure a step whose first region gets so many bytes; return the room for it."""
        torch.accelerator.reset_peak_memory_stats()
        self._before, self._scale = torch.accelerator.memory_allocated(), scale
        if not self._transients or last is None:
            return 0
        most = max(int(needed * max(scale / (of or 1), 1.0)) for needed, of in self._transients)
        largest = max((row.recomputed_bytes for row in last.rows), default=0)
        return most + (largest if len(self._transients) == 1 else self._budget_bytes // _SPARE)

    def end(self, step: Step) -> None:
        """End it, if it is not ended yet: note the step's peak."""
        if self._before >= 0:
            step.peak_bytes = int(torch.accelerator.max_memory_allocated()) - self._before
            self._transients.append((max(step.peak_bytes - step.most_in_backward(), 0), self._scale))
            self._before = -1
