"""`CpuOffloader`: tensors of a device wait in host memory.

Only copies from and to pinned memory overlap with a device's other work. PyTorch keeps what was pinned, in powers of
two, and hands it out again once all copies from and to it are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from torch_remat._compat import accelerator_type
from torch_remat.offload.protocol import OffloadInfo
from torch_remat.offload.shared import Shared, locked, require_numbers
from torch_remat.offload.streams import Copier, Event, copier_for


class _Ticket:
    """One tensor in host memory, or on its way there.

    Attributes:
        source: The tensor on the device, until its copy is done; for good if that failed.
        stored: Its bytes in host memory.
        event: After the last copy from or to there.
        failure: Why the copy to the host failed, if it did.
        value: What a prefetch has brought back, with the event after that copy.
    """

    __slots__ = ("copier", "event", "failure", "name", "source", "stored", "value")

    def __init__(self, source: torch.Tensor, stored: torch.Tensor, name: str, copier: Copier) -> None:
        self.source: torch.Tensor | None = source
        self.stored, self.name, self.copier = stored, name, copier
        self.event = copier.to_host(source, stored)
        self.failure = ""
        self.value: tuple[torch.Tensor, Event] | None = None

    def has_left(self, wait: bool = False) -> bool:
        """Whether the copy to the host is done; the tensor on the device is let go then."""
        if self.source is not None and not self.failure:
            try:
                if wait and self.event is not None:
                    self.event.synchronize()
                if self.event is None or self.event.query():
                    self.source = None
            except RuntimeError as error:
                self.failure = str(error)
        return self.source is None

    def bring_back(self) -> tuple[torch.Tensor, Event]:
        """Start the copy back."""
        value = self.copier.to_device(self.stored, self.event)
        self.event = value[1]
        return value


class CpuOffloader(Shared):
    """Keeps offloaded tensors in host memory.

    Tensors of a CUDA device are copied to pinned memory on a side stream, while the device goes on; the device's memory
    is free once the copy is done and the offloader is called again. They come back on another side stream, ahead of
    backward. The GPU part of this has not run: no GPU was at hand. Other devices work with blocking copies. Tensors of
    the CPU are copied from memory to memory, which saves nothing: that is for tests, and one warning says so.

    PyTorch pins memory in powers of two, and that is how it counts here; it keeps what was pinned for later tensors.

    Args:
        max_bytes: How much host memory may be in use, or None. A tensor for which nothing is left, or for which
            none can be pinned, stays on the device; one warning says so.
        min_bytes: The smallest tensor worth moving; smaller ones stay.
        prefetch_bytes: How many bytes are brought back ahead of their use; 0 for none.
        max_pending_bytes: How many bytes on the device may wait for their copy; a tensor beyond that makes the host
            wait for the oldest copy, so that the device's memory cannot fill up with tensors that are about to go.
        copier: Returns the copies for a device, for tests.

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
        copier: Callable[[torch.device], Copier] = copier_for,
    ) -> None:
        require_numbers("CpuOffloader", max_bytes=max_bytes or 0, min_bytes=min_bytes, prefetch_bytes=prefetch_bytes,
                        max_pending_bytes=max_pending_bytes)  # fmt: skip
        super().__init__()
        self.prefetch_bytes = prefetch_bytes
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self.max_pending_bytes = max_pending_bytes
        self._make_copier = copier
        self._copiers: dict[torch.device, Copier] = {}
        self._pending: deque[_Ticket] = deque()
        self._offloaded_bytes = self._host_bytes = 0

    def __repr__(self) -> str:
        return f"CpuOffloader(max_bytes={self.max_bytes}, min_bytes={self.min_bytes})"

    @property
    @locked
    def offloaded_bytes(self) -> int:
        """Bytes of the tensors that are away now."""
        return self._offloaded_bytes

    @property
    @locked
    def host_bytes(self) -> int:
        """Bytes of host memory in use."""
        return self._host_bytes

    def offload(self, tensor: torch.Tensor, info: OffloadInfo) -> _Ticket | None:
        """Start the copy to host memory; see `Offloader.offload`."""
        if info.bytes < self.min_bytes:
            return None
        self.tell_failure()
        ticket = self._send(tensor, info)
        if ticket is None:
            self.warn_once(
                "full",
                f"CpuOffloader: there is no host memory left for {info.name} ({info.bytes:,} bytes), so it stays on "
                f"the device, as other tensors may. max_bytes={self.max_bytes} is the limit.",
            )
        elif tensor.device.type == "cpu":
            self.warn_once(
                "useless",
                f"CpuOffloader moves tensors to host memory, and {info.name} is there already: offloading tensors of "
                "the CPU this way saves nothing. DiskOffloader takes them out of memory.",
            )
        return ticket

    def prefetch(self, ticket: _Ticket) -> None:
        """Start the copy back; see `Offloader.prefetch`."""
        locked(CpuOffloader._drop_settled)(self)
        if ticket.value is None and ticket.has_left():
            ticket.value = ticket.bring_back()

    def onload(self, ticket: _Ticket) -> torch.Tensor:
        """Return the tensor, usable on the current stream; see `Offloader.onload`."""
        locked(CpuOffloader._drop_settled)(self)
        self.tell_failure()
        source = ticket.source
        if source is not None and not ticket.has_left():
            return source
        value, ticket.value = ticket.value or ticket.bring_back(), None
        ticket.copier.use(*value)
        return value[0]

    def still_here(self, ticket: _Ticket) -> torch.Tensor | None:
        """Return the tensor on the device while it is kept for its copy; see `Offloader`."""
        return ticket.source

    def stays(self, ticket: _Ticket) -> bool:
        """Whether the copy failed, so that the tensor stays on the device; see `Offloader`."""
        return ticket.failure != ""

    @locked
    def _send(self, tensor: torch.Tensor, info: OffloadInfo) -> _Ticket | None:
        room = _host_bytes_of(info.bytes)
        if self.max_bytes is not None and self._host_bytes + room > self.max_bytes:
            return None
        try:
            stored = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=accelerator_type() == "cuda")
        except (RuntimeError, MemoryError):
            return None
        if tensor.device not in self._copiers:
            self._copiers[tensor.device] = self._make_copier(tensor.device)
        ticket = _Ticket(tensor, stored, info.name, self._copiers[tensor.device])
        self._host_bytes += room
        self._offloaded_bytes += info.bytes
        self._pending.append(ticket)
        self._drop_settled()
        while sum(ticket.stored.nbytes for ticket in self._pending) > self.max_pending_bytes:
            self._drop_settled(wait=True)
        return ticket

    def _forget(self, ticket: _Ticket) -> None:
        ticket.value = None
        self._offloaded_bytes -= ticket.stored.nbytes
        self._host_bytes -= _host_bytes_of(ticket.stored.nbytes)

    def _drop_settled(self, wait: bool = False) -> None:
        """Forget copies that are done or have failed, the oldest first; with ``wait``, at least one."""
        while self._pending and (self._pending[0].has_left(wait) or self._pending[0].failure):
            ticket, wait = self._pending.popleft(), False
            if ticket.failure and not self._failure:
                self._failure = (
                    f"CpuOffloader: {ticket.name} ({ticket.stored.nbytes:,} bytes) could not be copied to host memory: "
                    f"{ticket.failure}. It stays on the device, as other tensors may; training goes on."
                )


def _host_bytes_of(count: int) -> int:
    return 1 << (count - 1).bit_length() if accelerator_type() == "cuda" else count
