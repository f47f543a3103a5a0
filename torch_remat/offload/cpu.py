"""`CpuOffloader`: tensors of a device wait in host memory.

Only copies from and to pinned memory overlap with a device's other work. PyTorch keeps what was pinned, in powers of
two, and reuses it once all copies from and to it are done.
"""

from __future__ import annotations

import torch

from torch_remat.offload import streams
from torch_remat.offload.protocol import OffloadInfo
from torch_remat.offload.shared import BoundedOffloader, Ticket


class _Ticket(Ticket):
    """One tensor in host memory, or on its way there.

    Attributes:
        device: Where it was.
        stored: Its copy in host memory.
        event: After the copy to there.
        value: What a prefetch has brought back, with the event after that copy.
    """

    __slots__ = ("device", "event", "stored", "value")

    event: streams.Event
    stored: torch.Tensor

    def __init__(self, tensor: torch.Tensor, info: OffloadInfo) -> None:
        super().__init__(tensor, info)
        self.device = tensor.device
        self.value: tuple[torch.Tensor, streams.Event] | None = None

    def has_left(self, wait: bool) -> bool:
        """Whether the copy to the host is done; the tensor on the device is freed then."""
        if self.event is not None:
            if wait:
                self.event.synchronize()
            elif not self.event.query():
                return False
        self.tensor = None
        return True

    def bring_back(self) -> tuple[torch.Tensor, streams.Event]:
        """Start the copy back."""
        return streams.copy_to_device(self.stored, self.device, self.event)


class CpuOffloader(BoundedOffloader[_Ticket]):
    """Keeps offloaded tensors in host memory.

    Tensors of a CUDA device are copied to pinned memory on a side stream, while the device goes on; the device's memory
    is free once the copy is done and the offloader is called again. They come back on the same side stream, ahead of
    backward. The GPU part of this has not run: no GPU was at hand. Other devices work with blocking copies. Tensors of
    the CPU are copied from memory to memory, which saves nothing: that is for tests, and one warning says so.

    PyTorch pins memory in powers of two, and that is how it counts here; it keeps what was pinned for later tensors.

    Args:
        max_bytes: How much host memory may be in use, or None. A tensor for which nothing is left, or for which
            none can be pinned, stays on the device; one warning says so.
        min_bytes: The smallest tensor worth moving; smaller ones stay.
        prefetch_bytes: How many bytes are brought back ahead of their use; 0 for none.
        max_pending_bytes: How many bytes on the device may wait for their copy. Before more are sent the host waits for
            the oldest copies, so that the device's memory cannot fill up with tensors that are about to go.

    Raises:
        UsageError: A number is negative.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> offloader = remat.CpuOffloader(max_bytes=8 << 30)
        >>> block = remat.checkpoint(offloader=offloader, offload_inputs=True)(torch.nn.Linear(8, 8))
    """

    def __init__(
        self,
        *,
        max_bytes: int | None = None,
        min_bytes: int = 64 << 10,
        prefetch_bytes: int = 256 << 20,
        max_pending_bytes: int = 1 << 30,
    ) -> None:
        super().__init__(max_bytes, min_bytes, prefetch_bytes, max_pending_bytes=max_pending_bytes)

    def __repr__(self) -> str:
        return f"CpuOffloader(max_bytes={self.max_bytes}, min_bytes={self.min_bytes})"

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(list(self._away.values()))

    def prefetch(self, ticket: _Ticket) -> None:
        """Start the copy back; see `Offloader.prefetch`."""
        self._settle()
        if ticket.value is None and ticket.tensor is None:
            ticket.value = ticket.bring_back()

    def onload(self, ticket: _Ticket) -> torch.Tensor:
        """Return the tensor, usable on the current stream; see `Offloader.onload`."""
        self._settle()
        if (source := ticket.tensor) is not None:
            return source
        (value, event), ticket.value = ticket.value or ticket.bring_back(), None
        streams.use(value, event)
        return value

    def release(self, ticket: _Ticket) -> None:
        """Forget a tensor; see `Offloader.release`."""
        super().release(ticket)
        ticket.value = None

    def _counted(self, tensor: torch.Tensor) -> int:
        return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_cuda else tensor.nbytes

    def _ticket(self, tensor: torch.Tensor, info: OffloadInfo) -> _Ticket:
        return _Ticket(tensor, info)

    def _send(self, ticket: _Ticket, tensor: torch.Tensor) -> None:
        ticket.stored, ticket.event = streams.copy_to_host(tensor)
        if tensor.device.type == "cpu":
            self._notices.tell(
                "useless",
                f"CpuOffloader moves tensors to host memory, and {ticket.info.name} is there already: offloading "
                "tensors of the CPU this way saves nothing. DiskOffloader takes them out of memory.",
            )
