"""What the measurements must show.

Times that may be at most so much of a peer's; bytes that forward may leave; the time of one saved tensor, which may
not depend on how many there are; and where a peer is told to keep the same, its bytes, its peak and the ops that it
replays, which ours may not exceed. A bar is judged where its workload was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .contenders import (
    BLIND,
    OURS,
    OURS_CLOSURE,
    OURS_NATIVE,
    OURS_POLICY,
    REENTRANT,
    REMAT_0_1,
    REMAT_0_2,
    SAC,
    TORCH,
)
from .handles import ALTERNATING_OPS
from .measure import Result

AT_MOST = {
    ("overhead", OURS, TORCH): 0.60,
    ("overhead", OURS, REMAT_0_2): 0.55,
    ("overhead", OURS, REENTRANT): 1.00,
    ("transformer", OURS, TORCH): 1.00,
    ("transformer", OURS, REMAT_0_2): 0.95,
    ("handles", OURS, REMAT_0_1): 0.57,
    **{(f"handles-alternating-{ops}", OURS, REMAT_0_2): 0.65 for ops in ALTERNATING_OPS},
    **{(f"handles-alternating-{ops}", OURS, TORCH): 1.00 for ops in ALTERNATING_OPS},
    ("watching", OURS, BLIND): 1.02,
    **{("native-overhead", ours, SAC): 0.60 for ours in (OURS_NATIVE, OURS_CLOSURE)},
    **{("native-overhead", ours, REMAT_0_2): 0.70 for ours in (OURS_NATIVE, OURS_CLOSURE)},
    **{(f"native-{kept}", OURS_NATIVE, SAC): 1.00 for kept in ("attention", "matmuls")},
    ("policies-overhead", OURS_POLICY, SAC): 0.75,
    **{(f"policies-{kept}", OURS_POLICY, SAC): 1.00 for kept in ("attention", "matmuls")},
}
"""How many times a peer's time ours may be, by workload, contender of ours, and peer."""

FLAT_WITHIN = 1.25
"""How many times the cheapest saved tensor's time, or op's, the one in the largest region may take."""


@dataclass(frozen=True)
class Verdict:
    """A bar, what was measured, and whether that passes."""

    bar: str
    measured: str
    passed: bool


def judge(results: Mapping[str, Result]) -> list[Verdict]:
    """Return the verdict on each bar whose workload is among the results."""
    return [
        *_times(results),
        *_retained(results),
        *_twins(results),
        *_flatness(results),
        *_flatness_of_ops(results),
    ]


def _times(results: Mapping[str, Result]) -> Iterator[Verdict]:
    for (workload, ours, peer), limit in AT_MOST.items():
        if workload in results:
            ratio = results[workload].ratio(ours, peer)
            low, high = results[workload].ratio_quartiles(ours, peer)
            bar = f"{_label(workload, ours)}: time at most {limit:.2f} of {peer}"
            yield Verdict(bar, f"{ratio:.3f} (quartiles {low:.3f} to {high:.3f})", ratio <= limit)


def _retained(results: Mapping[str, Result]) -> Iterator[Verdict]:
    for name, result in results.items():
        for ours in result.workload.ours:
            retained, ideal = result.measurements[ours].retained_bytes, result.workload.ideal_retained_bytes
            bar = f"{_label(name, ours)}: {ideal:,} bytes retained after forward"
            yield Verdict(bar, f"{retained:,}", retained == ideal)


def _twins(results: Mapping[str, Result]) -> Iterator[Verdict]:
    for name, result in results.items():
        twin = result.workload.twin
        if twin is None:
            continue
        its, its_ops = result.measurements[twin], result.replayed[twin]
        for ours in result.workload.ours:
            mine, ops = result.measurements[ours], result.replayed[ours]
            label = _label(name, ours)
            for what, measured, limit in (
                ("bytes retained", mine.retained_bytes, its.retained_bytes),
                ("peak", mine.peak_bytes, its.peak_bytes),
            ):
                bar = f"{label}: {what} not above {twin}'s"
                yield Verdict(bar, f"{measured:,} beside {limit:,}", measured <= limit)
            never_more = all(count <= its_ops.get(op, 0) for op, count in ops.items())
            counts = f"{sum(ops.values())} beside {sum(its_ops.values())}"
            yield Verdict(f"{label}: replay runs no op more often than {twin}'s", counts, never_more)


def _label(workload: str, ours: str) -> str:
    return workload if ours == OURS else f"{workload}, {ours}"


def _flatness(results: Mapping[str, Result]) -> Iterator[Verdict]:
    costs = us_per_saved_tensor(results, OURS)
    if len(costs) > 1:
        cheapest, largest = min(costs.values()), costs[max(costs)]
        bar = f"{max(costs):,} saved tensors: time of each at most {FLAT_WITHIN:.2f} of the least of all sizes"
        yield Verdict(bar, f"{largest:.2f} us over {cheapest:.2f} us", largest <= FLAT_WITHIN * cheapest)


def _flatness_of_ops(results: Mapping[str, Result]) -> Iterator[Verdict]:
    sized = {result.workload.ops: result for result in results.values() if result.workload.ops is not None}
    costs = {ops: result.measurements[OURS].median_us / ops for ops, result in sized.items()}
    if len(costs) > 1:
        cheapest, largest = min(costs.values()), costs[max(costs)]
        bar = f"{max(costs):,} ops with handles: time of each at most {FLAT_WITHIN:.2f} of the least of all sizes"
        yield Verdict(bar, f"{largest:.2f} us over {cheapest:.2f} us", largest <= FLAT_WITHIN * cheapest)


def us_per_saved_tensor(results: Mapping[str, Result], contender: str) -> dict[int, float]:
    """Return the microseconds above the floor for each saved tensor, by the number of them in the region."""
    sized = [result for result in results.values() if result.workload.saved_tensors is not None]
    counts = {result.workload.saved_tensors or 0: result for result in sized}
    return {count: result.over_floor_us(contender) / count for count, result in sorted(counts.items())}
