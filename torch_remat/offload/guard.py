"""A lock for objects that are also told of things from inside a garbage collection.

In: calls that need the lock. Kept: those that came while it was taken. Out: each of them, run once under the lock.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakMethod, WeakSet

T = TypeVar("T")


class Guard(Generic[T]):
    """A lock, and a queue of values that whoever holds it hands to a function.

    `add` never waits: the value is dealt with at once if the lock is free, else by its holder, at the latest when it
    lets go of it. So `add` may be called from a finalizer that interrupts the holder on its own thread. To wait for
    something under it, make a ``threading.Condition`` of the guard itself: that lets go of it as others do.

    Args:
        settle: The owner's method that is called with each value, under the lock; known weakly, as the owner has the
            guard.
    """

    def __init__(self, settle: Callable[[T], None]) -> None:
        self.lock = threading.Lock()
        self._settle = WeakMethod(settle)
        self._waiting: deque[T] = deque()
        _guards.add(self)

    def add(self, value: T) -> None:
        """Have a value dealt with, now or soon."""
        self._waiting.append(value)
        self._drain()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock."""
        return self.lock.acquire(blocking)

    def release(self) -> None:
        """Let go of the lock, and deal with what came meanwhile."""
        self.lock.release()
        if self._waiting:
            self._drain()

    def __enter__(self) -> None:
        """Take the lock, and deal with what came before."""
        self.lock.acquire()
        try:
            self._settle_all()
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        """Let go of the lock, and deal with what came meanwhile."""
        self.release()

    def _drain(self) -> None:
        # A value that is added after the last look finds the lock free.
        while self._waiting and self.lock.acquire(blocking=False):
            try:
                self._settle_all()
            finally:
                self.lock.release()

    def _settle_all(self) -> None:
        while self._waiting:
            value, settle = self._waiting.popleft(), self._settle()
            if settle is not None:
                settle(value)


_guards: WeakSet[Guard[Any]] = WeakSet()


def _after_fork() -> None:
    # A thread that the child does not have may have held the lock.
    for guard in list(_guards):
        guard.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
