"""What the measurements must show.

Times that may be at most so much of a peer's; bytes that forward may leave; the time of one saved tensor, which may
not depend on how many there are; and where a peer is told to keep the same, its bytes, its peak and the ops that it
replays, which ours may not exceed. A bar is judged where its workload was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .contenders import (
    BLIND,
    NONE,
    OURS,
    OURS_CALLS,
    OURS_CLOSURE,
    OURS_DROP_IN,
    OURS_FUNCTION,
    OURS_MODULES,
    OURS_NATIVE,
    OURS_OP,
    OURS_OP_CLOSURE,
    OURS_POLICY,
    REENTRANT,
    REMAT_0_1,
    REMAT_0_2,
    SAC,
    TORCH,
    before,
)
from .handles import ALTERNATING_OPS
from .measure import Result
from .real import TINY
from .workloads import Workload


@dataclass(frozen=True)
class Bar:
    """How many times a peer's time ours must not exceed, and how many times it should; None: only shown."""

    must: float | None = None
    aim: float | None = None


BARS = {
    ("overhead", OURS, TORCH): Bar(0.68, 0.62),
    ("overhead-module", OURS, TORCH): Bar(0.70, 0.64),
    ("overhead", OURS, REMAT_0_2): Bar(0.62, 0.57),
    ("overhead", OURS, REENTRANT): Bar(),
    ("encoder-layer", OURS, TORCH): Bar(0.84, 0.80),
    ("transformer", OURS, TORCH): Bar(1.00, 0.98),
    ("transformer", OURS, REMAT_0_2): Bar(0.95),
    ("watching", OURS, BLIND): Bar(1.02),
    ("native-overhead", OURS_NATIVE, SAC): Bar(0.50, 0.35),
    ("native-overhead", OURS_CLOSURE, SAC): Bar(0.70, 0.60),
    ("native-overhead", OURS_NATIVE, REMAT_0_2): Bar(0.70),
    ("native-overhead", OURS_CLOSURE, REMAT_0_2): Bar(),
    ("native-overhead", OURS_OP, SAC): Bar(0.45, 0.35),
    ("native-overhead", OURS_OP_CLOSURE, SAC): Bar(),
    ("native-overhead", OURS_OP, REMAT_0_2): Bar(0.45, 0.35),
    ("native-attention", OURS_NATIVE, SAC): Bar(1.00),
    ("native-matmuls", OURS_NATIVE, SAC): Bar(1.00),
    ("native-blocks", OURS_NATIVE, SAC): Bar(0.62, 0.50),
    ("native-blocks", OURS_OP, SAC): Bar(0.50),
    ("policies-overhead", OURS_POLICY, SAC): Bar(0.75, 0.65),
    ("policies-overhead", OURS_FUNCTION, SAC): Bar(),
    ("policies-overhead", OURS_CALLS, SAC): Bar(0.50, 0.42),
    ("native-blocks", OURS_CALLS, SAC): Bar(0.65, 0.55),
    ("native-blocks", OURS_MODULES, SAC): Bar(0.60, 0.50),
    **{(f"policies-{kept}", OURS_CALLS, SAC): Bar(1.00, 0.95) for kept in ("attention", "matmuls")},
    **{(f"real-{name}-policy", OURS_CALLS, SAC): Bar(0.70, 0.58) for name in TINY},
    ("real-llama-256-policy", OURS_CALLS, SAC): Bar(0.97, 0.94),
    **{(f"policies-{kept}", OURS_POLICY, SAC): Bar(1.00, 0.97) for kept in ("attention", "matmuls")},
    ("titan-selective", OURS_DROP_IN, SAC): Bar(1.00, 0.95),
    ("handles", OURS, REMAT_0_1): Bar(0.80, 0.75),
    ("handles", OURS, TORCH): Bar(),
    **{(f"handles-alternating-{ops}", OURS, REMAT_0_2): Bar(0.75, 0.65) for ops in ALTERNATING_OPS},
    **{(f"handles-alternating-{ops}", OURS, TORCH): Bar() for ops in ALTERNATING_OPS},
    **{(f"real-{name}", OURS, TORCH): Bar(0.92, 0.85) for name in TINY},
    ("real-llama-256", OURS, TORCH): Bar(1.00, 0.98),
    **{(f"real-{name}-policy", ours, SAC): Bar(1.00, 0.90) for name in TINY for ours in (OURS_POLICY, OURS_FUNCTION)},
    **{("real-llama-256-policy", ours, SAC): Bar(1.00, 0.97) for ours in (OURS_POLICY, OURS_FUNCTION)},
}
"""Bars on time, by workload, contender of ours, and peer."""

FLAT_WITHIN = 1.25
"""How many times the cheapest saved tensor's time, or op's, the one in the largest region may take."""


@dataclass(frozen=True)
class TimeVerdict:
    """A bar on time and the ratio that was measured; without a ratio, why it could not be.

    Attributes:
        label: The workload and, where it is not ``ours``, the contender.
        peer: Which ours is compared with.
        bar: The limits.
        ratio: The median of the rounds' ratios, and their quartiles.
        failed: What was raised.
    """

    label: str
    peer: str
    bar: Bar
    ratio: tuple[float, float, float] | None
    failed: str = ""

    @property
    def passed(self) -> bool:
        """Whether what must be is."""
        if self.ratio is None:
            return False
        return self.bar.must is None or self.ratio[0] <= self.bar.must

    @property
    def status(self) -> str:
        """One word: by which of the limits this passes, if by any."""
        if self.ratio is None:
            return "NOT RUN"
        if self.bar.must is None:
            return "-"
        if not self.passed:
            return "MISS"
        return "aim" if self.bar.aim is not None and self.ratio[0] <= self.bar.aim else "must"


@dataclass(frozen=True)
class Verdict:
    """A bar that is not on a ratio of times, what was measured, and whether that passes."""

    bar: str
    measured: str
    passed: bool


def only_judged(workload: Workload) -> Workload:
    """Return the workload with those contenders only that a bar names, no checkpointing, and what ours were before."""
    peers = {peer for name, _, peer in BARS if name == workload.name}
    ours = (*workload.ours, *map(before, workload.ours))
    names = {NONE, *ours, *peers, *([workload.twin] if workload.twin else [])}
    return replace(workload, forwards={name: run for name, run in workload.forwards.items() if name in names})


def judge_times(results: Mapping[str, Result]) -> list[TimeVerdict]:
    """Return the verdict on each bar on time whose workload is among the results."""
    return [
        _time(label_of(workload, ours), results[workload], ours, peer, bar)
        for (workload, ours, peer), bar in BARS.items()
        if workload in results
    ]


def judge(results: Mapping[str, Result]) -> list[Verdict]:
    """Return the verdict on each other bar whose workload is among the results."""
    return [*_retained(results), *_twins(results), *_flatness(results), *_flatness_of_ops(results)]


def _time(label: str, result: Result, ours: str, peer: str, bar: Bar) -> TimeVerdict:
    failed = [f"{name}: {result.failed[name]}" for name in (ours, peer) if name in result.failed]
    if failed:
        return TimeVerdict(label, peer, bar, None, "; ".join(failed))
    return TimeVerdict(label, peer, bar, (result.ratio(ours, peer), *result.ratio_quartiles(ours, peer)))


def _retained(results: Mapping[str, Result]) -> Iterator[Verdict]:
    for name, result in results.items():
        ideal = result.workload.ideal_retained_bytes
        for ours in ours_measured(result) if ideal is not None else ():
            retained = result.measurements[ours].retained_bytes
            bar = f"{label_of(name, ours)}: {ideal:,} bytes retained after forward"
            yield Verdict(bar, f"{retained:,}", retained == ideal)


def _twins(results: Mapping[str, Result]) -> Iterator[Verdict]:
    for name, result in results.items():
        twin = result.workload.twin
        if twin is None:
            continue
        its, its_ops = result.measurements[twin], result.replayed[twin]
        for ours in ours_measured(result):
            mine, ops = result.measurements[ours], result.replayed[ours]
            label = label_of(name, ours)
            for what, measured, limit in (
                ("bytes retained", mine.retained_bytes, its.retained_bytes),
                ("peak", mine.peak_bytes, its.peak_bytes),
            ):
                bar = f"{label}: {what} not above {twin}'s"
                yield Verdict(bar, f"{measured:,} beside {limit:,}", measured <= limit)
            if twin == SAC:
                never_more = all(count <= its_ops.get(op, 0) for op, count in ops.items())
                counts = f"{sum(ops.values())} beside {sum(its_ops.values())}"
                yield Verdict(f"{label}: replay runs no op more often than {twin}'s", counts, never_more)


def ours_measured(result: Result) -> list[str]:
    """Return our contenders that ran."""
    return [name for name in result.workload.ours if name in result.measurements]


def label_of(workload: str, ours: str) -> str:
    """Return how tables call a workload as one of our contenders runs it."""
    return workload if ours == OURS else f"{workload}, {ours}"


def _flatness(results: Mapping[str, Result]) -> Iterator[Verdict]:
    costs = us_per_saved_tensor(results, OURS)
    if len(costs) > 1:
        cheapest, largest = min(costs.values()), costs[max(costs)]
        bar = f"{max(costs):,} saved tensors: time of each at most {FLAT_WITHIN:.2f} of the least of all sizes"
        yield Verdict(bar, f"{largest:.2f} us over {cheapest:.2f} us", largest <= FLAT_WITHIN * cheapest)


def _flatness_of_ops(results: Mapping[str, Result]) -> Iterator[Verdict]:
    counted = [result for result in results.values() if result.workload.ops is not None]
    sized = {result.workload.ops: result for result in counted if OURS in result.measurements}
    costs = {ops: result.measurements[OURS].median_us / ops for ops, result in sized.items()}
    if len(costs) > 1:
        cheapest, largest = min(costs.values()), costs[max(costs)]
        bar = f"{max(costs):,} ops with handles: time of each at most {FLAT_WITHIN:.2f} of the least of all sizes"
        yield Verdict(bar, f"{largest:.2f} us over {cheapest:.2f} us", largest <= FLAT_WITHIN * cheapest)


def us_per_saved_tensor(results: Mapping[str, Result], contender: str) -> dict[int, float]:
    """Return the microseconds above the floor for each saved tensor, by the number of them in the region."""
    sized = [result for result in results.values() if result.workload.saved_tensors is not None]
    counts = {result.workload.saved_tensors or 0: result for result in sized if contender in result.measurements}
    return {count: result.over_floor_us(contender) / count for count, result in sorted(counts.items())}
