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
from dataclasses import dataclass
from statistics import median, quantiles
from time import process_time_ns

import torch

from . import memory
from .contenders import FLOOR, NONE
from .replayed import replayed_ops
from .workloads import Workload, clear_gradients

ROUNDS = 150
WARMUP_ROUNDS = 3


@dataclass(frozen=True)
class Measurement:
    """What one contender took.

    Attributes:
        samples_us: Microseconds a step, one sample for each round.
        retained_bytes: What forward left allocated.
        peak_bytes: Most that was allocated during a step.
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
    """

    workload: Workload
    measurements: Mapping[str, Measurement]
    replayed: Mapping[str, Mapping[str, int]]

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


def measure(workloads: Sequence[Workload], rounds: int = ROUNDS) -> list[Result]:
    """Compare gradients, count bytes and take times, for all contenders of each workload.

    Args:
        workloads: The work. What is compared between workloads is only fair between those of one call.
        rounds: Samples of each contender.

    Raises:
        GradientMismatchError: A contender computes something else; nothing is timed.
    """
    with undisturbed():
        for workload in workloads:
            check_gradients(workload)
        retained_and_peak = [
            {name: memory.retained_and_peak_bytes(workload, name) for name in workload.forwards}
            for workload in workloads
        ]
        replayed = [{} if workload.twin is None else replayed_ops(workload) for workload in workloads]
        samples = take_times(workloads, rounds)
    return [
        Result(workload, {name: Measurement(tuple(taken[name]), *counted[name]) for name in workload.forwards}, ops)
        for workload, counted, ops, taken in zip(workloads, retained_and_peak, replayed, samples, strict=True)
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


def check_gradients(workload: Workload) -> None:
    """Raise GradientMismatchError unless all outputs and gradients equal, bit for bit, those of ``none``."""
    expected = _output_and_gradients(workload, NONE)
    for contender in workload.forwards:
        for name, value in _output_and_gradients(workload, contender).items():
            if not torch.equal(_bits(value), _bits(expected[name])):
                raise GradientMismatchError(f"{workload.name}: {contender} has another {name} than {NONE}")


def take_times(workloads: Sequence[Workload], rounds: int) -> list[dict[str, list[float]]]:
    """Return, for each workload and contender, the microseconds a step in each round."""
    samples: list[dict[str, list[float]]] = [{name: [] for name in workload.forwards} for workload in workloads]
    for index in range(-WARMUP_ROUNDS, rounds):
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


def _output_and_gradients(workload: Workload, contender: str) -> dict[str, torch.Tensor]:
    clear_gradients(workload)
    output = workload.forwards[contender]()
    output.backward(workload.output_grad)
    computed = {"output": output.detach()}
    for name, leaf in workload.leaves.items():
        if leaf.grad is None:
            raise GradientMismatchError(f"{workload.name}: {contender} has no gradient of {name}")
        computed[f"gradient of {name}"] = leaf.grad
    return computed


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes: equality of floats would let -0.0 pass for 0.0."""
    return tensor.contiguous().view(torch.uint8)
