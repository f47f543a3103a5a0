"""Bytes that a step allocates, exact to the byte.

How bytes are counted: ``torch.profiler`` with ``profile_memory`` makes the CPU allocator report each block that it
gives or takes back, with the size that was asked for, not rounded. That is below the dispatcher, so nothing
escapes it, whatever allocates: values inside of autograd, and also the RNG state that ``torch.get_rng_state``
returns. The sum of these events over a stretch of the program is what that stretch leaves allocated; their
largest running sum is its peak. Blocks from before the stretch do not count, nor does their release: the workload's
inputs, its parameters, the gradient that backward starts from. Python objects (nodes, holders) are not counted either.

The events are read from the exported trace, which is public and keeps each event; the profiler's tables
add them up by op, which would lose the peak.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .workloads import Workload, clear_gradients


def retained_and_peak_bytes(workload: Workload, contender: str) -> tuple[int, int]:
    """Return the bytes that forward leaves allocated and the peak of forward and backward."""
    forward = workload.forwards[contender]
    clear_gradients(workload)
    with allocations() as events:
        output = forward()
    retained = sum(events)
    del output
    with allocations() as events:
        forward().backward(workload.output_grad)
    return retained, max(accumulate(events))


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Give a list that holds, once the block has been left, each allocation's bytes; negative where freed."""
    events: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield events
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_bytes())["traceEvents"]
    memory = [event for event in trace if event.get("name") == "[memory]"]
    events.extend(_born_within(event["args"] for event in sorted(memory, key=lambda event: event["ts"])))


def _born_within(records: Iterable[Mapping[str, int]]) -> Iterator[int]:
    """Yield the bytes of each record, but for releases of blocks that no record has allocated."""
    alive: set[int] = set()
    for record in records:
        size, address = record["Bytes"], record["Addr"]
        if size >= 0:
            alive.add(address)
            yield size
        elif address in alive:
            alive.remove(address)
            yield size


def check_counter() -> None:
    """Raise RuntimeError if this version of torch does not report what the counting here relies on."""
    for make in _KNOWN:
        with allocations() as events:
            kept = make()
        if sum(events) != kept.nbytes:
            raise RuntimeError(f"the profiler reports {sum(events)} bytes for a tensor of {kept.nbytes}")


_KNOWN: tuple[Callable[[], torch.Tensor], ...] = (
    lambda: torch.empty(3, dtype=torch.uint8),
    lambda: torch.ones(1000).sin().sin(),
    torch.get_rng_state,
)
