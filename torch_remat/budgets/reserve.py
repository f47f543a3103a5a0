"""What a step needs besides what its regions keep, measured in the first steps.

In: where a step's first region begins, and where backward ends. Kept: two numbers. Out: the bytes to hold in reserve.

NOTE [ How the reserve is learned ]
1. A step's *transient* is the most that was allocated at once, above what was there when the step began, less the most
   that regions kept in backward: what they kept when backward began, or what a replay filled and what was kept before
   it, if that is more. It is gradients on their way, what replays make besides, and all that lies outside of regions.
   What autograd has saved before the first region begins is looked up in the graph.
2. So what replays fill needs no reserve: when backward comes to a region, those after it are gone, and before these
   began it was full within the limit. That does not hold of a region that gives up its own while its forward runs,
   since nothing else is left. Where some region may have to, there is room for a replay of the largest region besides.
3. On the CPU a profiler of torch's counts each allocation of the step, exactly; it costs microseconds an allocation. On
   an accelerator the allocator's own figures are read, and its peak is reset.
4. The first three steps are measured, and the larger of the latest two counts; the second step has that room in any
   case, since the first may not have shown what replays take, and the third and later ones some to spare, where inputs
   have grown the same room: other lengths may come, of which the first region's input does not tell. From the
   second on there are gradients from before, and the reserve is in use. Then those are whose first region gets larger
   inputs than any that was, by a twentieth or more, and a step after one that passed the budget. Until then the reserve
   grows with the inputs.
5. Where another profiler runs nothing is measured.
"""

from __future__ import annotations

from torch_remat.budgets.measure import Measurement
from torch_remat.budgets.steps import Step

_GROWN = 1.05
_SPARE = 32  # one part in so many is left besides in the third step, and
_SPARE_LATER = 64  # in later ones, since what is given up differs a little from step to step
_NEAR = 8  # a region that is within the limit by less than one part in so many may yet have to give up its own
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
        self._is_estimate = False  # whether the first of them was reckoned from smaller steps
        self._varies = False  # whether inputs have grown
        self._largest = 0  # the most that a region has saved
        self._times = self._again = 0
        self._before = 0

    def bytes_for(self, scale: int, before: Step | None = None) -> int:
        """Return the room for a step.

        Args:
            scale: How many bytes its first region gets.
            before: The step before it.
        """
        grown = self._grown(scale)
        room, most = max(self._transients[-2:], default=0), max(self._transients, default=0)
        if before is None or not self._transients:
            return int(room * grown)
        self._largest = max(self._largest, before.largest())
        if len(self._transients) == 1 or not before.fits(self._budget_bytes - most - self._budget_bytes // _NEAR):
            return int((most + before.largest()) * grown)
        spare = self._budget_bytes // (_SPARE if len(self._transients) == 2 else _SPARE_LATER)
        return int(room * grown) + max(spare, self._largest if self._varies else 0)

    def _grown(self, scale: int) -> float:
        return max(scale / self._scale, 1.0) if self._scale else 1.0

    def wants(self, scale: int) -> bool:
        """Whether something is to be learned from a step that begins, whose first region gets so many bytes."""
        if scale > self._scale * _GROWN:
            self._transients = [self.bytes_for(scale)] if self._transients else []
            self._is_estimate = self._varies = bool(self._transients)
            self._scale = scale
            self._times, self._again = 0, _LEAST
        return self._times < min(self._again, _MOST) and not self.measurement.runs

    def begin(self, kept: int) -> None:
        """Begin to measure, if nothing else does; ``kept`` is what is kept for backward by now."""
        self.measurement.begin()
        self._before = kept

    def end(self, step: Step) -> int:
        """End what was begun in this thread; return the step's peak, 0 if it was not measured."""
        if not self.measurement.runs_here:
            return 0
        peak = self.measurement.end() + self._before
        self._times += 1
        if peak > self._budget_bytes:
            # What is given up now is filled again before something has been freed.
            self._again = max(self._again, self._times + 1)
        self._transients.append(max(peak - step.most_in_backward(), 0))
        if self._is_estimate and self._times > 1:
            del self._transients[0]
            self._is_estimate = False
        return peak
