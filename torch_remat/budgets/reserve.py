"""What a step needs besides what its regions keep, measured in the first steps.

In: where a step's first region begins, and where backward ends. Kept: two numbers. Out: the bytes to hold in reserve.

NOTE [ How the reserve is learned ]
1. A step's *transient* is the most that was allocated at once, above what was there when the step's first region began,
   less what regions kept when backward came to them. It is what replays fill, gradients on their way, and all that lies outside of regions.
2. On the CPU torch's own profiler counts each allocation of the step, exactly; it costs microseconds an allocation. On
   an accelerator the allocator's own figures are read, and its peak is reset.
3. The first step is measured, and the second: only then are there gradients from before, and the reserve is in use. From
   then on steps are measured whose first region gets larger inputs than any that was, by a twentieth or more, and those
   after a step that passed the budget. Until they are, the reserve grows with the inputs.
4. Where another profiler runs nothing is measured.
"""

from __future__ import annotations

import threading
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile

from torch_remat._compat import any_profiler_runs

_GROWN = 1.05
_LEAST, _MOST = 3, 8  # how often each size is measured; more than the least where the peak passes the budget


class Reserve:
    """Learns how much room a step needs.

    Args:
        device_type: The type of the device whose memory counts.
        budget_bytes: What the peak is to stay within.
    """

    def __init__(self, device_type: str, budget_bytes: int) -> None:
        self._device_type = device_type
        self._budget_bytes = budget_bytes
        self._transients: list[int] = []  # of steps whose first region got so many bytes:
        self._scale = 0
        self._times = self._again = 0
        self._running: Any = None
        self._thread = 0
        self._before = 0

    def bytes_for(self, scale: int) -> int:
        """Return the room for a step whose first region gets so many bytes."""
        grown = scale / self._scale if self._scale else 1.0
        return int(max(self._transients[-2:], default=0) * max(grown, 1.0))

    def wants(self, scale: int) -> bool:
        """Whether something is to be learned from a step that begins, whose first region gets so many bytes."""
        if scale > self._scale * _GROWN:
            self._transients, self._scale = [self.bytes_for(scale)] if self._transients else [], scale
            self._times, self._again = 0, _LEAST
        if self._times >= min(self._again, _MOST) or self._running is not None:
            return False
        return self._device_type != "cpu" or not any_profiler_runs()

    def begin(self, kept: int) -> None:
        """Begin to measure; ``kept`` is what is kept for backward by now."""
        if self._device_type == "cpu":
            self._running = profile(use_cpu=True, profile_memory=True, acc_events=True)
            self._running.__enter__()
            self._before = kept
        else:  # not run on any such device yet
            self._running = torch.accelerator
            torch.accelerator.reset_peak_memory_stats()
            self._before = kept - torch.accelerator.memory_allocated()
        self._thread = threading.get_ident()

    def end(self, kept: int) -> int:
        """End what `begin` has begun in this thread; return the step's peak, 0 if it was not measured.

        Args:
            kept: What regions kept when backward came to the first of them.
        """
        if self._running is None or self._thread != threading.get_ident():
            return 0
        running, self._running = self._running, None
        if self._device_type == "cpu":
            running.__exit__(None, None, None)
            events = [event for event in running.kineto_results.events() if event.name() == "[memory]"]
            events.sort(key=lambda event: event.start_ns())
            peak = max(accumulate((event.nbytes() for event in events), initial=0))
        else:
            peak = torch.accelerator.max_memory_allocated()
        peak += self._before
        self._times += 1
        if peak > self._budget_bytes:
            self._again = self._times + 1  # what is given up now is filled again before something has been freed
        self._transients.append(max(peak - kept, 0))
        return peak

    @property
    def measures(self) -> bool:
        """Whether a step is being measured."""
        return self._running is not None
