"""Trains one model, one step at a time, and compares it with another one that was trained another way."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gpt import GPT, Attend, GPTConfig, RunBlock, causal_attention
from live_bytes import LiveBytes, StepMemory, phase
from torch import Tensor

import torch_remat as remat


class DifferenceError(Exception):
    """Two ways did not compute the same."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how fast at most, from which seed and where a model is trained."""

    steps: int
    learning_rate: float
    seed: int
    device: torch.device

    def rate_factor(self, step: int) -> float:
        """Return the share of the learning rate at ``step``: up for a tenth of the steps, then down to zero."""
        warm_up = max(1, self.steps // 10)
        return min((step + 1) / warm_up, (self.steps - step) / (self.steps - warm_up))


class Trainer:
    """One way's model, optimizer, random state and results.

    Several trainers may take turns in one process: each goes on from where its own last step left the generators.

    Args:
        model: Sizes of the model.
        training: How it is trained.
        run_block: How its blocks are run.
        attend: How they mix values.

    Attributes:
        model: The model.
        losses: The loss of each step so far, in nats per byte.
        step_seconds: The time of each step so far that was not recorded: of the process on a CPU, so that other
            programs do not count; on the wall with a GPU, whose work the process only waits for.
    """

    def __init__(
        self, model: GPTConfig, training: TrainingConfig, run_block: RunBlock, attend: Attend = causal_attention
    ) -> None:
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self._device = training.device
        self._clock = time.process_time if self._device.type == "cpu" else time.perf_counter
        torch.manual_seed(training.seed)
        self.model = GPT(model, run_block, attend).to(self._device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=training.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, training.rate_factor)
        self._random_states = _get_random_states(self._device)

    def train(self, batch: tuple[Tensor, Tensor]) -> None:
        """Take one step and time it."""
        with self._own_random_states():
            self._synchronize()
            start = self._clock()
            loss = self._step(batch)
            self._synchronize()
            self.step_seconds.append(self._clock() - start)
        self._after_step(loss)

    def train_recorded(self, batch: tuple[Tensor, Tensor]) -> StepMemory:
        """Take one step and record its live bytes."""
        state = [value for entry in self._optimizer.state.values() for value in entry.values()]
        standing = [
            tensor for tensor in (*self.model.parameters(), *state, *batch) if tensor.device.type == self._device.type
        ]
        with self._own_random_states(), LiveBytes(standing, self._device) as live_bytes:
            loss = self._step(batch)
            self._synchronize()
        self._after_step(loss)
        return live_bytes.memory

    def train_traced(self, batch: tuple[Tensor, Tensor]) -> tuple[remat.reports.MemoryReport, remat.reports.Trace]:
        """Take one step; return what was kept after forward, and what happened when."""
        with self._own_random_states(), remat.trace() as trace:
            loss = self.model(*batch)
            report = remat.memory_report(loss)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._synchronize()
        self._after_step(loss.detach())
        return report, trace

    def _step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        with phase("forward"):
            loss = self.model(*batch)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _after_step(self, loss: Tensor) -> None:
        self._schedule.step()
        self.losses.append(loss.item())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _own_random_states(self) -> Iterator[None]:
        torch.set_rng_state(self._random_states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random_states[1], self._device)
        yield
        self._random_states = _get_random_states(self._device)

    @property
    def random_states(self) -> list[Tensor]:
        """Where this way's last step left the generators: of the CPU, and of the GPU if it is used."""
        return self._random_states


def _get_random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def check_last_loss(trainers: Mapping[str, Trainer]) -> None:
    """Raise DifferenceError unless all had the same finite loss in their last step, to the last bit."""
    (reference, expected), *others = ((name, trainer.losses[-1]) for name, trainer in trainers.items())
    step = len(trainers[reference].losses)
    if not math.isfinite(expected):
        raise DifferenceError(f"step {step}: the loss of {reference} is {expected}")
    for name, loss in others:
        if loss != expected:
            raise DifferenceError(
                f"step {step}: the loss of {name} is {loss!r}, the loss of {reference} is {expected!r}"
            )


def check_final_state(trainers: Mapping[str, Trainer]) -> None:
    """Raise DifferenceError unless all ended with the same parameters and random states, to the last bit."""
    (reference, expected), *others = trainers.items()
    for name, trainer in others:
        pairs = zip(expected.model.named_parameters(), trainer.model.parameters(), strict=True)
        for (parameter_name, left), right in pairs:
            if not torch.equal(left, right):
                raise DifferenceError(f"{reference} and {name} ended with different values in {parameter_name}")
        if not all(map(torch.equal, expected.random_states, trainer.random_states)):
            raise DifferenceError(f"{reference} and {name} drew different numbers of random numbers")
