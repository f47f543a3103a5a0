"""Copies between a device and host memory, off the device's main stream.

In: a tensor on the device, or the buffer that has its bytes. Kept: two side streams for each device, one for each
direction. Out: marks, by which other streams and the host know when a copy is done.

NOTE [ Who waits for whom ]
1. A copy away from the device starts when the stream is done that was current when it was asked for: the tensor is made
   by then. The device's memory stays with the tensor until the copy is done (its ticket holds it).
2. A copy back starts when the copy away is done. Its memory belongs to the lane's own stream, so that the main stream
   need not be waited for.
3. Who uses a tensor that came back makes its stream wait for the copy, and has the allocator keep the memory until that
   stream's work is done (``record_stream``).
4. A host buffer is used again when the last copy from or to it is done, by the mark of that copy, whatever
   stream is current then.
5. A value that is read more than once may be read on several streams. The first reader's stream has waited for the
   copy; the others wait for that one (`Arrival`), whoever made the copy.
"""

from __future__ import annotations

from typing import Protocol

import torch

from torch_remat.offload.pool import Mark


class Lane(Protocol):
    """Copies for one device; see NOTE [ Who waits for whom ]."""

    def away(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Mark | None:
        """Copy a tensor into a host buffer of the same form; return the mark after it, None if it is done already."""
        ...

    def back(self, buffer: torch.Tensor, after: Mark | None) -> tuple[torch.Tensor, Mark | None]:
        """Copy a host buffer into new memory of the device; return the tensor, and the mark after the copy."""
        ...

    def arrive(self, tensor: torch.Tensor, mark: Mark | None) -> None:
        """Make a tensor that came back usable on the current stream."""
        ...


class BlockingLane:
    """Copies that are done when the call returns: for the CPU, and for devices other than CUDA's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def away(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Mark | None:
        """Copy, and wait."""
        buffer.copy_(tensor)
        return None

    def back(self, buffer: torch.Tensor, after: Mark | None) -> tuple[torch.Tensor, Mark | None]:
        """Copy, and wait."""
        return torch.empty_like(buffer, device=self._device, pin_memory=False).copy_(buffer), None

    def arrive(self, tensor: torch.Tensor, mark: Mark | None) -> None:
        """Do nothing: the copy is done."""


class CudaLane:
    """Copies on two side streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._away = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def away(self, tensor: torch.Tensor, buffer: torch.Tensor) -> Mark | None:
        """Copy on the side stream, once the current stream is done."""
        self._away.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._away):
            buffer.copy_(tensor, non_blocking=True)
            mark: Mark = self._away.record_event()
        return mark

    def back(self, buffer: torch.Tensor, after: Mark | None) -> tuple[torch.Tensor, Mark | None]:
        """Copy on the other side stream, once the copy away is done."""
        if isinstance(after, torch.cuda.Event):
            self._back.wait_event(after)
        with torch.cuda.stream(self._back):
            tensor = torch.empty_like(buffer, device=self._device, pin_memory=False)
            tensor.copy_(buffer, non_blocking=True)
            return tensor, self._back.record_event()

    def arrive(self, tensor: torch.Tensor, mark: Mark | None) -> None:
        """Make the current stream wait for the copy."""
        current = torch.cuda.current_stream(self._device)
        if isinstance(mark, torch.cuda.Event):
            current.wait_event(mark)
        tensor.record_stream(current)


class Arrival:
    """Where a value came back, so that its later readers can wait on their own streams; see NOTE, 5.

    Args:
        stream: The stream on which it is usable.
    """

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


def lane_for(device: torch.device) -> Lane:
    """Return a new lane for a device."""
    return CudaLane(device) if device.type == "cuda" else BlockingLane(device)
