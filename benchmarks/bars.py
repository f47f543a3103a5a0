"""What the measurements must show.

Three kinds of bars: times that may be at most so much of a peer's, bytes that forward may leave, and the time of
one saved tensor, which may not depend on how many there are. A bar is judged where its workload was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .contenders import OURS, REENTRANT, REMAT_0_1, REMAT_0_2, TORCH
from .measure import Result

AT_MOST = {
    ("overhead", TORCH): 0.60,
    ("overhead", REMAT_0_2): 0.55,
    ("overhead", REENTRANT): 1.00,
    ("transformer", TORCH): 1.00,
    ("transformer", REMAT_0_2): 0.95,
    ("handles", REMAT_0_1): 0.57,
}
"""How many times a peer's time ours may be, by workload and peer."""

FLAT_WITHIN = 1.25
"""How many times the cheapest saved tensor's time the one in the largest region may take."""


@dataclass(frozen=True)
class Verdict:
    """A bar, what was measured, and whether that passes."""

    bar: str
    measured: str
    passed: bool


def judge(results: Mapping[str, Result]) -> list[Verdict]:
    """Return the verdict on each bar whose workload is among the results."""
    return [*_times(results), *_retained(results), *_flatness(results)]


def _times(results: Mapping[str, Result]) -> Iterator[Verdict]:
    for (workload, peer), limit in AT_MOST.items():
        if workload in results:
            ratio = results[workload].ratio(OURS, peer)
            low, high = results[workload].ratio_quartiles(OURS, peer)
            bar = f"{workload}: time at most {limit:.2f} of {peer}"
            yield Verdict(bar, f"{ratio:.3f} (quartiles {low:.3f} to {high:.3f})", ratio <= limit)


def _retained(results: Mapping[str, Result]) -> Iterator[Verdict]:
    for name, result in results.items():
        retained, ideal = result.measurements[OURS].retained_bytes, result.workload.ideal_retained_bytes
        yield Verdict(f"{name}: {ideal:,} bytes retained after forward", f"{retained:,}", retained == ideal)


def _flatness(results: Mapping[str, Result]) -> Iterator[Verdict]:
    costs = us_per_saved_tensor(results, OURS)
    if len(costs) > 1:
        cheapest, largest = min(costs.values()), costs[max(costs)]
        bar = f"{max(costs):,} saved tensors: time of each at most {FLAT_WITHIN:.2f} of the least of all sizes"
        yield Verdict(bar, f"{largest:.2f} us over {cheapest:.2f} us", largest <= FLAT_WITHIN * cheapest)


def us_per_saved_tensor(results: Mapping[str, Result], contender: str) -> dict[int, float]:
    """Return the microseconds above the floor for each saved tensor, by the number of them in the region."""
    sized = [result for result in results.values() if result.workload.saved_tensors is not None]
    counts = {result.workload.saved_tensors or 0: result for result in sized}
    return {count: result.over_floor_us(contender) / count for count, result in sorted(counts.items())}
