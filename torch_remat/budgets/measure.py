"""The most that was allocated at once in a stretch of a program, above what was there at its start.

On the CPU torch's own profiler counts each allocation, exactly. On an accelerator the allocator's own figures are read,
and its peak is reset; that has not run on one yet.
"""

from __future__ import annotations

import threading
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile

from torch_remat._compat import any_profiler_runs


class Measurement:
    """Measures one stretch, of one thread and of the backwards that it starts.

    Args:
        device_type: The type of the device whose memory counts.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._profile: Any = None
        self._before = 0
        self._thread = 0  # that it runs in; 0 while it does not run

    def begin(self) -> bool:
        """Begin; return False, and do nothing, where another profiler runs."""
        if self._device_type == "cpu":
            if any_profiler_runs():
                return False
            self._profile = profile(use_cpu=True, profile_memory=True, acc_events=True)
            self._profile.__enter__()
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
        ended, self._profile = self._profile, None
        ended.__exit__(None, None, None)
        events = [event for event in ended.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        return int(max(accumulate((event.nbytes() for event in events), initial=0)))
