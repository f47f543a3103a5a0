"""Copies between a device and host memory, on a side stream of the device.

NOTE [ Who waits for whom ]
1. A copy to the host waits for the stream that is current, which makes the tensor; the ticket keeps the tensor until
   the copy is done. A copy back waits for the copy to the host.
2. The memory of a value that comes back belongs to the side stream. Each stream that uses the value waits for the copy,
   and has the allocator keep the memory until that stream's work is done (``record_stream``).
3. PyTorch reuses pinned memory after the streams have done all copies from and to it.

Devices other than CUDA's have no events here: their copies are done when the call returns.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import torch

Event: TypeAlias = "torch.cuda.Event | None"
"""A point in a stream's work; None if it is past."""


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def event_after(tensor: torch.Tensor) -> Event:
    """Return the event after what the current stream of a CUDA device has been given; None for other devices."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
    """Copy a tensor into host memory, pinned for CUDA; return the copy, and the event after it."""
    stored = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    if not tensor.is_cuda:
        return stored.copy_(tensor), None
    stream = _side_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        return stored.copy_(tensor, non_blocking=True), stream.record_event()


def copy_to_device(stored: torch.Tensor, device: torch.device, after: Event) -> tuple[torch.Tensor, Event]:
    """Copy host memory into new memory of a device; return the tensor, and the event after the copy."""
    if device.type != "cuda":
        return torch.empty_like(stored, device=device, pin_memory=False).copy_(stored), None
    stream = _side_stream(device)
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        tensor = torch.empty_like(stored, device=device, pin_memory=False)
        return tensor.copy_(stored, non_blocking=True), stream.record_event()


def use(tensor: torch.Tensor, event: Event) -> None:
    """Make a tensor usable on the current stream, which waits for the event."""
    if event is not None:
        current = torch.cuda.current_stream(tensor.device)
        current.wait_event(event)
        tensor.record_stream(current)


def host_copy(tensor: torch.Tensor, ready: Event) -> torch.Tensor:
    """Return a tensor in host memory; from a CUDA device by a stream of its own, once the event has come."""
    if ready is None:
        return tensor.cpu()
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        return tensor.cpu()
