"""Offloaders for tests: one that counts and checks, and ways to make it fail."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from typing import Any

import torch

import torch_remat as remat

OFFLOAD = remat.CheckpointPolicy.OFFLOAD


class Counting:
    """Keeps bytes outside of tensors, counts what is done with each ticket, and asserts that it may be done.

    Attributes:
        sent: The infos of all tensors that were taken, in order; a ticket is an index of this list.
        log: What happened, in order: `("offload", ticket)`, `("prefetch", ticket)`, ...
        least_bytes: The smallest tensor that is taken.
        refuse: Raised by `offload` if it is set.
        lose: Raised by `onload` if it is set.
    """

    def __init__(self, prefetch_bytes: int = 0, least_bytes: int = 0) -> None:
        self.prefetch_bytes = prefetch_bytes
        self.least_bytes = least_bytes
        self.sent: list[remat.offload.OffloadInfo] = []
        self.log: list[tuple[str, int]] = []
        self.refuse: Exception | None = None
        self.lose: BaseException | None = None
        self.released: Counter[int] = Counter()
        self._content: dict[int, tuple[bytes, torch.dtype]] = {}
        self._lock = threading.Lock()

    def offload(self, tensor: torch.Tensor, info: remat.offload.OffloadInfo) -> int | None:
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert info.bytes == tensor.nbytes
        if self.refuse is not None:
            raise self.refuse
        if info.bytes < self.least_bytes:
            return None
        with self._lock:
            ticket = len(self.sent)
            self.sent.append(info)
            self._content[ticket] = (ctypes.string_at(tensor.data_ptr(), tensor.nbytes), tensor.dtype)
        self.log.append(("offload", ticket))
        return ticket

    def prefetch(self, ticket: int) -> None:
        assert not self.released[ticket]
        self.log.append(("prefetch", ticket))

    def onload(self, ticket: int) -> torch.Tensor:
        assert not self.released[ticket]
        self.log.append(("onload", ticket))
        if self.lose is not None:
            raise self.lose
        content, dtype = self._content[ticket]
        return torch.frombuffer(bytearray(content), dtype=dtype)

    def release(self, ticket: int) -> None:
        self.log.append(("release", ticket))
        self.released[ticket] += 1
        self._content.pop(ticket, None)

    @property
    def names(self) -> list[str]:
        """The names of what was sent, in order."""
        return [info.name for info in self.sent]

    @property
    def bytes(self) -> int:
        """The bytes of what was sent and not released."""
        return sum(info.bytes for ticket, info in enumerate(self.sent) if not self.released[ticket])

    def count(self, what: str) -> int:
        """Return how often something was done."""
        return sum(done == what for done, _ in self.log)

    def assert_all_released_once(self) -> None:
        """Assert that each ticket was released exactly once."""
        assert dict(self.released) == dict.fromkeys(range(len(self.sent)), 1)


class Declining:
    """Takes nothing."""

    def __init__(self) -> None:
        self.asked: list[remat.offload.OffloadInfo] = []

    def offload(self, tensor: torch.Tensor, info: remat.offload.OffloadInfo) -> None:
        self.asked.append(info)

    def prefetch(self, ticket: Any) -> None:
        raise AssertionError

    onload = release = prefetch
