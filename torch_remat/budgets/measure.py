"""The most that was allocated at once in a stretch of a program, above what was there at its start.

On the CPU a profiler of torch's counts each allocation, exactly. On an accelerator the allocator's own figures are
read, and its peak is reset; that has not run on one yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate

import torch

from torch_remat._compat import any_profiler_runs, log_allocations


class Measurement:
    """Measures one stretch, of one thread and of the backwards that it starts.

    Args:
        device_type: The type of the device whose memory counts.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._end_log: Callable[[], list[int]] | None = None
        self._before = 0
        self._thread = 0  # that it runs in; 0 while it does not run

    def begin(self) -> bool:
        """Begin; return False, and do nothing, where another profiler runs."""
        if self._device_type == "cpu":
            if any_profiler_runs():
                return False
            self._end_log = log_allocations()
        else:
            torch.accelerator.reset_peak_memory_stats()
            self._before = torch.accelerator.memory_allocated()
        self._thread = threading.get_ident()
        return True

    @property
    def runs_here(self) -> bool:
        """Whether it runs, and was begun in this thread."""
        return self._thread == threading.get_ident()

    @property
    def runs(self) -> bool:
        """Whether it runs."""
        return self._thread != 0

    def end(self) -> int:
        """End it; return the most bytes, 0 if it did not run in this thread."""
        if not self.runs_here:
            return 0
        self._thread = 0
        if self._device_type != "cpu":
            return int(torch.accelerator.max_memory_allocated()) - self._before
        end_log, self._end_log = self._end_log, None
        assert end_log is not None
        return max(accumulate(end_log(), initial=0))
