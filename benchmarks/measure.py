"""Measures all contenders of a workload in one process, in turn, so that what the machine does meets all alike.

Gradients first: a contender that computes something else is not worth timing. Then bytes (``memory``). Then
time: one thread, the garbage collector off, many short rounds. Each round takes one sample of each contender, in
an order that rotates and turns round, so none always follows the same one. A sample is the mean time of a few
steps; a step is forward, backward and the release of the graph. Contenders are compared within each round, and
the median of these ratios counts: a machine that is slower for a while slows both sides of them.

The clock is the process's CPU time: on one thread it equals the time on the wall, less what other programs had of
the core. It does not see waiting, so work that waits (for a device, for another thread) needs another clock.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median, quantiles
from time import perf_counter, process_time_ns

import torch

from . import memory
from .contenders import FLOOR, NONE, before
from .replayed import replayed_ops
from .workloads import Workload, clear_gradients

ROUNDS = 150
WARMUP_ROUNDS = 2
LEAST_ROUNDS = 7
"""Are measured, however little time there is."""


@dataclass(frozen=True)
class Measurement:
    """What one contender took.

    Attributes:
        samples_us: Microseconds a step, one sample for each round.
        retained_bytes: What forward left allocated.
        peak_bytes: Most that was allocated during a step.

    Bytes are 0 where they were not counted.
    """

    samples_us: tuple[float, ...]
    retained_bytes: int
    peak_bytes: int

    @property
    def median_us(self) -> float:
        """The median of the samples."""
        return median(self.samples_us)


@dataclass(frozen=True)
class Result:
    """One workload's measurements.

    Attributes:
        workload: The workload.
        measurements: By contender, in the order of the table.
        replayed: The ops that replay runs, by contender, and how often; empty where the workload has no twin.
        failed: What contenders raised that could not run; they were not measured.
    """

    workload: Workload
    measurements: Mapping[str, Measurement]
    replayed: Mapping[str, Mapping[str, int]]
    failed: Mapping[str, str]

    @property
    def ours(self) -> str:
        """The first of our contenders that ran; no checkpointing where none did."""
        return next((name for name in self.workload.ours if name in self.measurements), NONE)

    def ratio(self, contender: str, peer: str) -> float:
        """Return how many times the peer's time the contender takes, as the median of the rounds' ratios."""
        return median(self._ratios(contender, peer))

    def ratio_quartiles(self, contender: str, peer: str) -> tuple[float, float]:
        """Return the quartiles of the rounds' ratios."""
        return quartiles(self._ratios(contender, peer))

    def over_floor_us(self, contender: str) -> float:
        """Return the time above the floor, what the contender's bookkeeping costs, as the median over the rounds."""
        return median(ours - floor for ours, floor in self._pairs(contender, FLOOR))

    def _ratios(self, contender: str, peer: str) -> list[float]:
        return [ours / theirs for ours, theirs in self._pairs(contender, peer)]

    def _pairs(self, contender: str, peer: str) -> Iterator[tuple[float, float]]:
        """Yield both samples of each round."""
        return zip(self.measurements[contender].samples_us, self.measurements[peer].samples_us, strict=True)


class GradientMismatchError(AssertionError):
    """A contender's output or gradient is not, bit for bit, that of the code without checkpointing."""


def measure(
    workloads: Sequence[Workload], rounds: int = ROUNDS, seconds: float | None = None, *, all_bytes: bool = True
) -> list[Result]:
    """Compare gradients, count bytes and take times, for all contenders of each workload.

    Args:
        workloads: The work. What is compared between workloads is only fair between those of one call.
        rounds: Samples of each contender.
        seconds: How long to take times at most: fewer rounds, but not fewer than ``LEAST_ROUNDS``.
        all_bytes: Count the bytes of all contenders; else only those that a bar asks for, ours and the twin's.

    Raises:
        GradientMismatchError: A contender computes something else; nothing is timed.
    """
    with undisturbed():
        failed = [check_gradients(workload) for workload in workloads]
        workloads = [_without(workload, names) for workload, names in zip(workloads, failed, strict=True)]
        retained_and_peak = [_bytes(workload, all_contenders=all_bytes) for workload in workloads]
        replayed = [{} if workload.twin is None else replayed_ops(workload) for workload in workloads]
        samples = take_times(workloads, rounds, seconds)
    return [
        Result(
            workload,
            {name: Measurement(tuple(taken[name]), *counted[name]) for name in workload.forwards},
            ops,
            missing,
        )
        for workload, counted, ops, taken, missing in zip(
            workloads, retained_and_peak, replayed, samples, failed, strict=True
        )
    ]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run the block on one thread, with the garbage collector off and what lives now out of its sight."""
    threads = torch.get_num_threads()
    collecting = gc.isenabled()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        gc.unfreeze()
        torch.set_num_threads(threads)


def check_gradients(workload: Workload) -> dict[str, str]:
    """Compare all outputs and gradients with those of ``none``; return what contenders raised that could not run.

    Raises:
        GradientMismatchError: A bit differs.
    """
    expected = _output_and_gradients(workload, NONE)
    failed = {}
    for contender in workload.forwards:
        try:
            computed = _output_and_gradients(workload, contender)
        except Exception as error:
            failed[contender] = f"{type(error).__name__}: {error}"
            continue
        for name, value in computed.items():
            if not same_bits(value, expected[name]):
                raise GradientMismatchError(f"{workload.name}: {contender} has another {name} than {NONE}")
    return failed


def take_times(
    workloads: Sequence[Workload], rounds: int, seconds: float | None = None
) -> list[dict[str, list[float]]]:
    """Return, for each workload and contender, the microseconds a step in each round."""
    samples: list[dict[str, list[float]]] = [{name: [] for name in workload.forwards} for workload in workloads]
    start = perf_counter()
    for index in range(-WARMUP_ROUNDS, rounds):
        if seconds is not None and index >= LEAST_ROUNDS and perf_counter() - start > seconds:
            break
        for workload, taken in zip(workloads, samples, strict=True):
            for name in _order(list(workload.forwards), index):
                sample = _sample_us(workload, workload.forwards[name])
                if index >= 0:
                    taken[name].append(sample)
        gc.collect()  # what contenders left in cycles, outside of anyone's time
    return samples


def quartiles(values: list[float]) -> tuple[float, float]:
    """Return the first and third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def _sample_us(workload: Workload, forward: Callable[[], torch.Tensor]) -> float:
    gradient = workload.output_grad
    nanoseconds = 0
    for _ in range(workload.steps):
        clear_gradients(workload)
        start = process_time_ns()
        forward().backward(gradient)  # nothing else holds the output, so the graph is freed within the time
        nanoseconds += process_time_ns() - start
    return nanoseconds / workload.steps / 1000


def _order(names: list[str], index: int) -> list[str]:
    start = index % len(names)
    rotated = names[start:] + names[:start]
    return rotated[::-1] if index % 2 else rotated


def _bytes(workload: Workload, *, all_contenders: bool) -> dict[str, tuple[int, int]]:
    named = {*workload.ours, *map(before, workload.ours), workload.twin}
    return {
        name: memory.retained_and_peak_bytes(workload, name) if all_contenders or name in named else (0, 0)
        for name in workload.forwards
    }


def _without(workload: Workload, names: Mapping[str, str]) -> Workload:
    if not names:
        return workload
    forwards = {name: forward for name, forward in workload.forwards.items() if name not in names}
    return replace(workload, forwards=forwards, twin=None if workload.twin in names else workload.twin)


def _output_and_gradients(workload: Workload, contender: str) -> dict[str, torch.Tensor | None]:
    clear_gradients(workload)
    output = workload.forwards[contender]()
    output.backward(workload.output_grad)
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in workload.leaves.items()}
    if not any(gradient is not None for gradient in gradients.values()):
        raise GradientMismatchError(f"{workload.name}: {contender} has no gradient")
    return {"output": output.detach(), **gradients}


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether the tensors' bytes are equal: equality of floats would let -0.0 pass for 0.0."""
    if one is None or other is None:
        return one is other  # a parameter that is not used
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
