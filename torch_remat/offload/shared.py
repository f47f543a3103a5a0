"""What our two offloaders share: a lock that `release` never waits for, and what users are told."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakSet

from torch_remat.errors import UsageError, shown, warn

F = TypeVar("F", bound=Callable[..., Any])


class Shared:
    """State that threads share under one lock, and that hears of releases from inside garbage collections.

    A collection may interrupt a method that holds the lock, on the same thread. So `release` only queues the ticket,
    and forgets it at once if the lock is free. Else its holder does, at the latest when it lets go.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._released: deque[Any] = deque()
        self._failure = ""
        self._warned: set[str] = set()
        _alive.add(self)

    def release(self, ticket: Any) -> None:
        """Forget a tensor, now or soon; see `Offloader.release`."""
        self._released.append(ticket)
        self._forget_if_free()

    def tell_failure(self) -> None:
        """Warn, once, if a tensor that was taken could not leave."""
        self.warn_once("failure", self._failure)

    def warn_once(self, kind: str, message: str) -> None:
        """Warn, unless the message is empty or there was a warning of this kind."""
        if message and kind not in self._warned:
            self._warned.add(kind)
            warn(message)

    def _forget(self, ticket: Any) -> None:
        raise NotImplementedError

    def _forget_released(self) -> None:
        while self._released:
            self._forget(self._released.popleft())

    def _forget_if_free(self) -> None:
        # A ticket that is queued after the holder's last look finds the lock free.
        while self._released and not self._lock.locked():
            with self._lock:
                self._forget_released()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # a thread that the child does not have may have held the other


def locked(method: F) -> F:
    """Let a method of `Shared` run under the lock, with what was released before and meanwhile forgotten."""

    @wraps(method)
    def run(self: Shared, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._lock:
                self._forget_released()
                return method(self, *args, **kwargs)
        finally:
            self._forget_if_free()

    return cast(F, run)


def require_numbers(owner: str, least: int = 0, **numbers: object) -> None:
    """Raise a `UsageError` unless all numbers are integers, and not less than ``least``."""
    for name, value in numbers.items():
        if not isinstance(value, int) or value < least:
            raise UsageError(
                f"{owner}({name}={shown(value)}) is not possible", remedy=f"{name} is an int from {least} on."
            )


def _after_fork() -> None:
    for shared in list(_alive):
        shared._after_fork()


_alive: WeakSet[Shared] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
