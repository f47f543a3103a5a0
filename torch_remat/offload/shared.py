"""What our two offloaders share: bounds in bytes, which tensors are away, and what users are told.

A garbage collection may call `release` in the middle of any other method, so `release` must not wait for a lock, and
nothing here has one: single operations of a dict are atomic.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from torch_remat.errors import UsageError, shown, warn
from torch_remat.offload.protocol import OffloadInfo


class Ticket:
    """One tensor that is away, or on its way.

    Attributes:
        tensor: What was offloaded, until it has left or is released; if it could not leave, until it is released.
        info: What it is called.
        stays: Whether it could not leave.
    """

    __slots__ = ("info", "stays", "tensor")

    def __init__(self, tensor: torch.Tensor, info: OffloadInfo) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.info = info
        self.stays = False

    def has_left(self, wait: bool) -> bool:
        """Whether the tensor has left, or could not; with ``wait``, wait until either is true."""
        raise NotImplementedError


T = TypeVar("T", bound=Ticket)


class Notices:
    """What users are told of an offloader, one warning of each kind.

    Attributes:
        failure: Why a tensor that was taken could not leave, for a later call to say.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._told: set[str] = set()

    def tell(self, kind: str, message: str) -> None:
        """Warn, unless the message is empty or there was a warning of this kind."""
        if message and kind not in self._told:
            self._told.add(kind)
            warn(message)

    def tell_failure(self) -> None:
        """Warn, once, if a tensor that was taken could not leave."""
        self.tell("failure", self.failure)


class BoundedOffloader(Generic[T]):
    """Takes tensors within bounds of bytes; a subclass says where to.

    Args:
        max_bytes: How much may be away, or None.
        min_bytes: The smallest tensor that is taken.
        prefetch_bytes: How much is brought back ahead of its use.
        pending: How much may be on its way, by the name that users know it by.
    """

    def __init__(self, max_bytes: int | None, min_bytes: int, prefetch_bytes: int, **pending: int) -> None:
        numbers = {"max_bytes": max_bytes or 0, "min_bytes": min_bytes, "prefetch_bytes": prefetch_bytes}
        require_numbers(self, 0, **numbers, **pending)
        self.max_bytes = max_bytes
        self.min_bytes = min_bytes
        self.prefetch_bytes = prefetch_bytes
        (self._pending_bytes,) = pending.values()
        self._pending: dict[T, None] = {}  # on their way, the oldest first
        self._away: dict[T, int] = {}  # with the bytes that count for ``max_bytes``
        self._notices = Notices()

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the tensors that are away now, or on their way, without those that could not leave."""
        self._settle()
        return sum(ticket.info.bytes for ticket in list(self._away))

    def offload(self, tensor: torch.Tensor, info: OffloadInfo) -> T | None:
        """Begin to take a tensor away; see `Offloader.offload`."""
        self._notices.tell_failure()
        if info.bytes < max(1, self.min_bytes):
            return None
        self._settle(info.bytes)
        ticket = self._ticket(tensor, info)
        self._away[ticket] = self._counted(tensor)
        if self.max_bytes is not None and sum(list(self._away.values())) > self.max_bytes:
            self.release(ticket)
            self._notices.tell(
                "full",
                f"{self!r}: {info.name} ({info.bytes:,} bytes) would exceed max_bytes={self.max_bytes}. It stays "
                "where it is, as other tensors may; training goes on.",
            )
            return None
        try:
            self._send(ticket, tensor)
        except BaseException:
            self.release(ticket)
            raise
        self._pending[ticket] = None
        self._settle()
        return ticket

    def release(self, ticket: T) -> None:
        """Forget a tensor; see `Offloader.release`."""
        self._away.pop(ticket, None)

    def still_here(self, ticket: T) -> torch.Tensor | None:
        """Return the tensor while it has not left; see `Offloader`."""
        return ticket.tensor

    def stays(self, ticket: T) -> bool:
        """Whether the tensor could not leave; see `Offloader`."""
        return ticket.stays

    def _settle(self, room: int = 0) -> None:
        """Forget tensors that have left, the oldest first; wait for those that leave no room for so many bytes."""
        pending = list(self._pending)
        total = room + sum(ticket.info.bytes for ticket in pending)
        for ticket in pending:
            if not ticket.has_left(room > 0 and total > self._pending_bytes):
                break
            total -= ticket.info.bytes
            self._pending.pop(ticket, None)
            if ticket.stays:
                self._away.pop(ticket, None)

    def _ticket(self, tensor: torch.Tensor, info: OffloadInfo) -> T:
        raise NotImplementedError

    def _counted(self, tensor: torch.Tensor) -> int:
        """Return how many bytes a tensor takes where it goes."""
        return tensor.nbytes

    def _send(self, ticket: T, tensor: torch.Tensor) -> None:
        """Begin to take the tensor away; may raise."""
        raise NotImplementedError


def require_numbers(owner: object, least: int, **numbers: object) -> None:
    """Raise a `UsageError` unless all numbers are integers, and not less than ``least``."""
    for name, value in numbers.items():
        if not isinstance(value, int) or value < least:
            raise UsageError(
                f"{type(owner).__name__}({name}={shown(value)}) is not possible",
                remedy=f"{name} is an int from {least} on.",
            )
