"""`CpuOffloader`: tensors of a device wait in host memory.

In: tensors of a device. Kept: their bytes in pinned buffers, and each tensor itself until its copy is done. Out: new
tensors, brought back on a side stream, ahead of their use where the runtime asks for it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from functools import cache

import torch

from torch_remat._compat import empty_pinned_cache
from torch_remat.errors import UsageError
from torch_remat.offload.guard import Guard
from torch_remat.offload.lanes import Lane, lane_for
from torch_remat.offload.pool import BufferPool, Mark
from torch_remat.offload.protocol import OffloadInfo


class _Ticket:
    """One tensor on its way.

    Attributes:
        source: The tensor on the device, until its copy is done.
        buffer: The pool's buffer.
        stored: The part of the buffer that has the tensor's bytes, in the tensor's form.
        mark: After the last copy from or to the buffer.
        value: What a prefetch has brought back, with the mark of that copy.
    """

    __slots__ = ("buffer", "lane", "mark", "source", "stored", "value")

    def __init__(self, source: torch.Tensor, buffer: torch.Tensor, lane: Lane) -> None:
        self.source: torch.Tensor | None = source
        self.buffer = buffer
        self.lane = lane
        self.stored = buffer[: source.nbytes].view(source.dtype)
        self.mark: Mark | None = None
        self.value: tuple[torch.Tensor, Mark | None] | None = None

    def arrived(self) -> bool:
        """Whether the copy away is done; if so, the tensor on the device is let go."""
        if self.source is not None and (self.mark is None or self.mark.query()):
            self.source = None
        return self.source is None

    def bring_back(self) -> tuple[torch.Tensor, Mark | None]:
        """Start the copy back."""
        value = self.lane.back(self.stored, self.mark)
        self.mark = value[1]
        return value


class CpuOffloader:
    """Keeps offloaded tensors in host memory.

    Tensors of a CUDA device are copied to pinned memory on a side stream, while the device goes on; the device's memory
    is free once the copy is done and the offloader is called again. They come back on another side stream, ahead of
    backward. The GPU part of this has not run: no GPU was at hand. Other devices work with plain, blocking copies.
    Tensors of the CPU are copied from memory to memory, which saves nothing and costs two copies: that is for tests,
    and one warning says so.

    Pinned buffers are used again, and kept until the offloader is gone. PyTorch pins memory in powers of two, and
    that is how it counts here.

    Args:
        max_bytes: How much host memory may be used, or None. A tensor for which there is none left, or for which
            none can be pinned, stays on the device; one warning says so.
        min_bytes: The smallest tensor worth moving; smaller ones stay.
        prefetch_bytes: How many bytes are brought back ahead of their use; 0 for none.
        max_pending_bytes: How many bytes on the device may wait for their copy; a tensor beyond that makes the host
            wait for the oldest copy, so that the device's memory cannot fill up with tensors that are about to go.
        lane: Returns the copies for a device, for tests.

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
        lane: Callable[[torch.device], Lane] = lane_for,
    ) -> None:
        for name, value in (("max_bytes", max_bytes or 0), ("min_bytes", min_bytes), ("prefetch_bytes", prefetch_bytes),
                            ("max_pending_bytes", max_pending_bytes)):  # fmt: skip
            if not isinstance(value, int) or value < 0:
                raise UsageError(
                    f"CpuOffloader({name}={value!r}) is not possible", remedy=f"{name} is a number of bytes."
                )
        self.prefetch_bytes = prefetch_bytes
        self.min_bytes = min_bytes
        self.max_pending_bytes = max_pending_bytes
        self._make_lane = lane
        self._lanes: dict[torch.device, Lane] = {}
        self._pool = BufferPool(max_bytes, _allocate, _size_of, _give_back)
        self._pending: deque[_Ticket] = deque()
        self._offloaded_bytes = 0
        self._said: set[str] = set()
        self._guard = Guard(self._forget)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the tensors that are away now."""
        return self._guard.run(lambda: self._offloaded_bytes)  # without what another thread's release left to do

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, in use or kept for use."""
        return self._pool.total_bytes

    def offload(self, tensor: torch.Tensor, info: OffloadInfo) -> _Ticket | None:
        """Start the copy to host memory; see `Offloader.offload`."""
        if info.bytes < self.min_bytes:
            return None
        ticket = self._guard.run(lambda: self._send(tensor, info.bytes))
        if ticket is None:
            self._say(
                f"CpuOffloader: there is no host memory left for {info.name} ({info.bytes:,} bytes), so it stays on "
                f"the device, as other tensors may. max_bytes={self._pool.max_bytes} is the limit."
            )
            return None
        if tensor.device.type == "cpu":
            self._say(
                f"CpuOffloader moves tensors to host memory, and {info.name} is there already: offloading tensors of "
                "the CPU this way saves nothing. DiskOffloader takes them out of memory."
            )
        return ticket

    def prefetch(self, ticket: _Ticket) -> None:
        """Start the copy back; see `Offloader.prefetch`."""
        self._let_go_of_sources()
        if ticket.value is None and ticket.arrived():
            ticket.value = ticket.bring_back()

    def onload(self, ticket: _Ticket) -> torch.Tensor:
        """Return the tensor, usable on the current stream; see `Offloader.onload`."""
        self._let_go_of_sources()
        source = ticket.source
        if not ticket.arrived() and source is not None:
            return source  # it has not even left
        value, ticket.value = ticket.value, None
        tensor, mark = value or ticket.bring_back()
        ticket.lane.arrive(tensor, mark)
        return tensor

    def release(self, ticket: _Ticket) -> None:
        """Give the buffer back to the pool; see `Offloader.release`."""
        self._guard.add(ticket)

    def still_here(self, ticket: _Ticket) -> torch.Tensor | None:
        """Return the tensor on the device while it is kept for its copy; see `Offloader`."""
        return ticket.source

    def _forget(self, ticket: _Ticket) -> None:
        self._offloaded_bytes -= ticket.stored.nbytes
        self._pool.give(ticket.buffer, ticket.mark)
        ticket.value = None

    def _lane_of(self, device: torch.device) -> Lane:
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = self._make_lane(device)
        return lane

    def _send(self, tensor: torch.Tensor, count: int) -> _Ticket | None:
        lane = self._lane_of(tensor.device)
        buffer = self._pool.take(count)
        if buffer is None:
            return None
        ticket = _Ticket(tensor, buffer, lane)
        try:
            ticket.mark = lane.away(tensor, ticket.stored)
        except BaseException:
            self._pool.give(buffer, None)
            raise
        self._offloaded_bytes += tensor.nbytes
        if not ticket.arrived():
            self._pending.append(ticket)
            self._drop_arrived()
            waiting = sum(ticket.stored.nbytes for ticket in self._pending)
            while waiting > self.max_pending_bytes:
                oldest = self._pending[0]  # it holds the tensor until the wait is over, also if that is interrupted
                waiting -= oldest.stored.nbytes
                if oldest.mark is not None:
                    oldest.mark.synchronize()
                oldest.arrived()
                self._pending.popleft()
        return ticket

    def _let_go_of_sources(self) -> None:
        if self._pending:
            self._guard.run(self._drop_arrived)

    def _drop_arrived(self) -> None:
        while self._pending and self._pending[0].arrived():
            self._pending.popleft()

    def _say(self, message: str) -> None:
        kind = message.partition(" ")[0]
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, RuntimeWarning, stacklevel=3)


@cache
def _pins() -> bool:
    return torch.cuda.is_available()


def _allocate(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=_pins())


def _size_of(count: int) -> int:
    # PyTorch pins powers of two, and keeps what was pinned.
    return 1 << (count - 1).bit_length() if _pins() else count


def _give_back() -> None:
    if _pins():
        empty_pinned_cache()


@cache
def default_offloader() -> CpuOffloader:
    """Return the offloader that all regions share that name none."""
    return CpuOffloader()
