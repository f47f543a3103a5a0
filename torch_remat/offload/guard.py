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
R = TypeVar("R")


class _Here(threading.local):
    """This thread.

    Attributes:
        mortal: Whether it may be killed, and so takes no lock; see NOTE [ Threads that may be killed ].
    """

    mortal = False


here = _Here()


class Guard(Generic[T]):
    """A lock, and a queue of values that whoever holds it hands to a function.

    `add` never waits: the value is dealt with at once if the lock is free, else by its holder, at the latest when it
    lets go of it. So `add` may be called from a finalizer that interrupts the holder on its own thread. On a thread
    that may be killed, it leaves the value to the next caller.

    An exception may come between any two bytecodes (Ctrl-C on the main thread), but not inside of C code. So the lock
    is C's own, and it is taken by ``with``, or by one call of C code that also notes that it was: no exception finds
    it taken and nobody there to let go of it.

    Args:
        settle: The owner's method that is called with each value, under the lock; known weakly, as the owner has the
            guard.

    Attributes:
        lock: The lock.
    """

    def __init__(self, settle: Callable[[T], None]) -> None:
        self.lock = threading.Lock()
        self._settle = WeakMethod(settle)
        self._waiting: deque[T] = deque()
        _guards.add(self)

    def add(self, value: T) -> None:
        """Have a value dealt with, now or soon."""
        self._waiting.append(value)
        if not here.mortal:
            self._drain()

    def run(self, work: Callable[[], R]) -> R:
        """Deal with what came before, do something, and deal with what came meanwhile.

        Args:
            work: What to do under the lock.
        """
        try:
            with self.lock:
                self._settle_all()
                return work()
        finally:
            self._drain()

    def _drain(self) -> None:
        # A value that is added after the last look finds the lock free.
        while self._waiting:
            taken: list[bool] = []
            try:
                taken += map(self.lock.acquire, (False,))
                if True not in taken:
                    return
                self._settle_all()
            finally:
                if True in taken:
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
