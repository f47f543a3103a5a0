"""What a step needs besides what its regions keep, measured in the first steps.

In: where a step's first region begins, and where backward ends. Kept: two numbers. Out: the bytes to hold in reserve.

NOTE [ How the reserve is learned ]
1. A step's *transient* is the most that was allocated at once, above what was there when the step began, less what
   regions kept when backward came to them. It is what replays fill, gradients on their way, and all that lies outside
   of regions. What autograd has saved before the first region begins is looked up in the graph.
2. On the CPU a profiler of torch's counts each allocation of the step, exactly; it costs microseconds an allocation. On
   an accelerator the allocator's own figures are read, and its peak is reset.
3. The first three steps are measured, and the larger of the latest two counts; the second step has room for a replay
   of the largest region besides, since the first may not have had to fill one. From the second on there are gradients
   from before, and the reserve is in use. Then those are whose first region gets larger inputs than any that was, by a
   twentieth or more, and a step after one that passed the budget. Until then the reserve grows with the inputs.
4. Where another profiler runs nothing is measured.
"""

from __future__ import annotations

from torch_remat.budgets.measure import Measurement

_GROWN = 1.05
_LEAST, _MOST = 3, 8  # how often each size is measured; more than the least where the peak passes the budget


class Reserve:
    """Learns how much room a step needs.

    Args:
        device_type: The type of the device whose memory counts.
        budget_bytes: What the peak is to stay within.

    Attributes:
        measurement: What measures a step, if one is being measured.
    """

    def __init__(self, device_type: str, budget_bytes: int) -> None:
        self.measurement = Measurement(device_type)
        self._budget_bytes = budget_bytes
        self._transients: list[int] = []  # of steps whose first region got so many bytes:
        self._scale = 0
        self._times = self._again = 0
        self._before = 0

    def bytes_for(self, scale: int, largest: int = 0) -> int:
        """Return the room for a step.

        Args:
            scale: How many bytes its first region gets.
            largest: What the largest region saves: its replay may have to fill that, which one step does not tell.
        """
        grown = max(scale / self._scale, 1.0) if self._scale else 1.0
        return int((max(self._transients[-2:], default=0) + (largest if len(self._transients) == 1 else 0)) * grown)

    def wants(self, scale: int) -> bool:
        """Whether something is to be learned from a step that begins, whose first region gets so many bytes."""
        if scale > self._scale * _GROWN:
            self._transients, self._scale = [self.bytes_for(scale)] if self._transients else [], scale
            self._times, self._again = 0, _LEAST
        return self._times < min(self._again, _MOST) and not self.measurement.runs

    def begin(self, kept: int) -> None:
        """Begin to measure, if nothing else does; ``kept`` is what is kept for backward by now."""
        self.measurement.begin()
        self._before = kept

    def end(self, kept: int) -> int:
        """End what was begun in this thread; return the step's peak, 0 if it was not measured.

        Args:
            kept: What regions kept when backward came to the first of them.
        """
        if not self.measurement.runs_here:
            return 0
        peak = self.measurement.end() + self._before
        self._times += 1
        if peak > self._budget_bytes:
            # What is given up now is filled again before something has been freed.
            self._again = max(self._again, self._times + 1)
        self._transients.append(max(peak - kept, 0))
        return peak
