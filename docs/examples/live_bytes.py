"""Live bytes over one training step, exact to the byte.

How bytes are counted
    PyTorch's allocators report each block that they hand out and each that comes back. ``torch.profiler`` notes these
    reports as ``[memory]`` events, in order and with a time, for the CPU and for CUDA alike, and its trace (a public
    format, written by ``export_chrome_trace``) holds them. Their running sum is what lives at each moment: no sampling,
    no reading of the process's size, nothing is missed between two looks. The CPU allocator reports the bytes that were
    asked for. The CUDA allocator reports its blocks, which are multiples of 512 bytes; the sum is what
    ``torch.cuda.memory_allocated()`` would show.

    The profiler cannot know what was there before it began. That is passed in: the *standing* tensors, which live
    through the whole step (weights, optimizer state, the batch), counted once for each storage. Gradients are not among
    them, since each step frees them at its end and makes them anew.

    Not counted, because no allocator of PyTorch sees it: scratch memory inside math libraries and the interpreter.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler announces its start and its end on stderr

PHASES = ("forward", "backward", "optimizer")
"""The parts of a training step; ``phase`` marks each of them."""

_TRACE_DEVICE_TYPES = {"cpu": 0, "cuda": 1}


def phase(name: str) -> record_function:
    """Return a context manager that marks a part of a training step for the recorder; it costs microseconds."""
    return record_function(f"phase:{name}")


@dataclass(frozen=True)
class Sample:
    """The bytes that live from one allocator event until the next.

    Attributes:
        phase: Which part of the step it falls into.
        progress: How far that part was, from 0.0 to 1.0. It counts allocator events, not time, so that the same step
            always gives the same samples, however busy the machine is.
        live_bytes: Bytes alive right after the event.
    """

    phase: str
    progress: float
    live_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """What one step did with memory.

    Attributes:
        standing_bytes: Weights, optimizer state and batch, which live all along.
        samples: Live bytes in order of time, standing bytes included. Each phase has one at 0.0 and one at 1.0.
    """

    standing_bytes: int
    samples: list[Sample]

    @property
    def kept_bytes(self) -> int:
        """What forward left alive for backward, weights and other standing bytes not included."""
        last = [sample for sample in self.samples if sample.phase == "forward"][-1]
        return last.live_bytes - self.standing_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at any moment, standing bytes included."""
        return max(sample.live_bytes for sample in self.samples)


class LiveBytes:
    """Records the live bytes of the training step that runs inside ``with``.

    Each of ``PHASES`` must be marked with ``phase(...)`` in it, once and in that order. Afterwards ``memory`` holds
    what was recorded.

    Args:
        standing: Tensors on ``device`` that live before, during and after the step.
        device: Whose bytes are counted.
    """

    memory: StepMemory

    def __init__(self, standing: Iterable[Tensor], device: torch.device) -> None:
        self._standing_bytes = storage_bytes(standing)
        self._device = device
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)  # of GPU allocations too

    def __enter__(self) -> LiveBytes:
        """Start to record."""
        self._profiler.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Stop, and unless the step failed read what was recorded."""
        self._profiler.__exit__(kind, error, trace)
        if kind is not None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        self.memory = StepMemory(self._standing_bytes, _samples(events, self._standing_bytes, self._device))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes behind ``tensors``; a storage that several of them share counts once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _samples(events: list[dict], standing_bytes: int, device: torch.device) -> list[Sample]:
    """Turn the events of a trace into samples, with one at both ends of each phase."""
    spans = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    changes = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == _TRACE_DEVICE_TYPES[device.type]
    ]
    if not changes:
        raise RuntimeError(f"the profiler reported no allocation on {device}")
    changes.sort(key=lambda change: change[0])  # stable: the trace lists simultaneous events in order

    samples: list[Sample] = []
    live_bytes = standing_bytes
    for name in PHASES:
        span = spans[f"phase:{name}"]
        end = span["ts"] + span["dur"]
        live_bytes += sum(change for time, change in changes if time < span["ts"])  # between two phases
        inside = [change for time, change in changes if span["ts"] <= time <= end]
        changes = [(time, change) for time, change in changes if time > end]
        samples.append(Sample(name, 0.0, live_bytes))
        for index, change in enumerate(inside, start=1):
            live_bytes += change
            samples.append(Sample(name, index / (len(inside) + 1), live_bytes))
        samples.append(Sample(name, 1.0, live_bytes))
    return samples
