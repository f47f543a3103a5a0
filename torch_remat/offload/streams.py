"""Copies between a device and host memory, off the device's main stream.

NOTE [ Who waits for whom ]
1. A copy to the host waits for the stream that is current, which makes the tensor; the ticket keeps it until then.
2. A copy back waits for the copy to the host. Its memory belongs to the side stream, so it waits for no other stream.
3. Who uses a tensor that came back makes its stream wait for the copy, and has the allocator keep the memory until that
   stream's work is done (``record_stream``).
4. PyTorch hands pinned memory out again when the streams have done all copies from and to it.
5. A value that is read again may be read on another stream. The first reader's stream has waited for the copy; the
   others wait for that one (`Arrival`).
"""

from __future__ import annotations

from typing import Any

import torch

Event = Any
"""A point in a stream's work with ``query()`` and ``synchronize()``: a ``torch.cuda.Event``, or None if it is past."""


class Copier:
    """Copies for one device, done when the call returns: for the CPU, and for devices other than CUDA's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, tensor: torch.Tensor, stored: torch.Tensor) -> Event:
        """Copy a tensor into host memory of the same form; return the event after it."""
        stored.copy_(tensor)
        return None

    def to_device(self, stored: torch.Tensor, after: Event) -> tuple[torch.Tensor, Event]:
        """Copy host memory into new memory of the device; return the tensor, and the event after the copy."""
        return torch.empty_like(stored, device=self._device, pin_memory=False).copy_(stored), None

    def use(self, tensor: torch.Tensor, event: Event) -> None:
        """Make a tensor that came back usable on the current stream."""


class CudaCopier(Copier):
    """Copies on two side streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def to_host(self, tensor: torch.Tensor, stored: torch.Tensor) -> Event:
        """Copy on the side stream, once the current stream is done."""
        self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_host):
            stored.copy_(tensor, non_blocking=True)
            return self._to_host.record_event()

    def to_device(self, stored: torch.Tensor, after: Event) -> tuple[torch.Tensor, Event]:
        """Copy on the other side stream, once the copy to the host is done."""
        if after is not None:
            self._to_device.wait_event(after)
        with torch.cuda.stream(self._to_device):
            tensor = torch.empty_like(stored, device=self._device, pin_memory=False)
            tensor.copy_(stored, non_blocking=True)
            return tensor, self._to_device.record_event()

    def use(self, tensor: torch.Tensor, event: Event) -> None:
        """Make the current stream wait for the copy."""
        current = torch.cuda.current_stream(self._device)
        if event is not None:
            current.wait_event(event)
        tensor.record_stream(current)


def copier_for(device: torch.device) -> Copier:
    """Return a new copier for a device."""
    return CudaCopier(device) if device.type == "cuda" else Copier(device)


def event_after(tensor: torch.Tensor) -> Event:
    """Return the event after what makes a tensor on the current stream of a CUDA device; None for other devices."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.device.type == "cuda" else None


def host_copy(tensor: torch.Tensor, ready: Event) -> torch.Tensor:
    """Return a tensor in host memory; from a CUDA device by a stream of its own, once the event has come."""
    if ready is None:
        return tensor.cpu()
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        return tensor.cpu()


class Arrival:
    """Where a value came back, so that its later readers can wait on their own streams; see NOTE, 5."""

    __slots__ = ("_event", "_streams")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()
        self._streams = [stream]

    def reach(self, value: torch.Tensor) -> None:
        """Make the value usable on the current stream."""
        current = torch.cuda.current_stream(value.device)
        if current not in self._streams:
            current.wait_event(self._event)
            value.record_stream(current)
            self._streams.append(current)


def arrival_of(value: torch.Tensor) -> Arrival | None:
    """Return where a value has just come back; None where there are no streams to think of."""
    return Arrival(torch.cuda.current_stream(value.device)) if value.device.type == "cuda" else None
