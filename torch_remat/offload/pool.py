"""Host memory that is used again, since pinning it is slow.

Only copies to and from pinned memory overlap with a device's other work.

In: a number of bytes. Kept: buffers that were given back, with the mark of the last copy that uses them. Out: a
buffer that no copy uses any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

SLACK = 1.25
"""How many times the bytes that are asked for a used buffer may have."""


class Mark(Protocol):
    """A point in a stream's work, such as a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class _Free(NamedTuple):
    buffer: torch.Tensor
    used_until: Mark | None


class BufferPool:
    """Byte buffers in host memory, within a limit. It has no lock: its owner calls it under one.

    Args:
        max_bytes: How many bytes may be in use or kept for use, or None.
        allocate: Returns a fresh buffer of so many bytes; may raise ``RuntimeError`` or ``MemoryError`` if there is
            none.
        size_of: Returns how many bytes are really taken where so many are asked for.
        give_back: Gives the memory of dropped buffers back to the system, where nobody else does.

    Attributes:
        total_bytes: Bytes in use or kept for use.
    """

    def __init__(
        self,
        max_bytes: int | None,
        allocate: Callable[[int], torch.Tensor],
        size_of: Callable[[int], int] = int,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_bytes = max_bytes
        self.total_bytes = 0
        self._allocate = allocate
        self._size_of = size_of
        self._give_back = give_back
        self._free: list[_Free] = []

    def take(self, count: int) -> torch.Tensor | None:
        """Return a buffer of at least ``count`` bytes that no copy uses, or None if there is no room for one."""
        room = self._size_of(count)
        largest = max(SLACK * count, count + 4096, room)
        sizes = [(free.buffer.nbytes, place) for place, free in enumerate(self._free)]
        for _, place in sorted(size for size in sizes if count <= size[0] <= largest):
            used_until = self._free[place].used_until
            if used_until is None or used_until.query():
                return self._free.pop(place).buffer
        if not self._make_room(room):
            return None
        try:
            buffer = self._allocate(room)
        except (RuntimeError, MemoryError):
            return None
        self.total_bytes += buffer.nbytes
        return buffer

    def give(self, buffer: torch.Tensor, used_until: Mark | None) -> None:
        """Take a buffer back; it is handed out again once the mark is reached."""
        self._free.append(_Free(buffer, used_until))

    def _make_room(self, count: int) -> bool:
        """Give memory back to the system until the limit allows for more, the longest unused first."""
        if self.max_bytes is None:
            return True
        if count > self.max_bytes:
            return False
        dropped = False
        while self.total_bytes + count > self.max_bytes and self._free:
            buffer, used_until = self._free.pop(0)
            if used_until is not None:
                used_until.synchronize()
            self.total_bytes -= buffer.nbytes
            del buffer
            dropped = True
        if dropped:
            self._give_back()
        return self.total_bytes + count <= self.max_bytes
