"""What our two offloaders share: a lock that `release` never waits for, and what users are told.

In: tickets that are released while a method holds the lock. Kept: those, until the holder lets go. Out: each of them,
forgotten once under the lock.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar
from weakref import WeakSet

from torch_remat.errors import UsageError

T = TypeVar("T")
S = TypeVar("S", bound="Shared[Any]")
P = ParamSpec("P")
R = TypeVar("R")


class Shared(Generic[T]):
    """State that threads share under one lock, and that hears of releases from inside garbage collections.

    A collection may interrupt a method that holds the lock, on the same thread. So `release` only queues the ticket,
    and forgets it at once if the lock is free. Else its holder does, at the latest when it lets go.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._released: deque[T] = deque()
        self._failure: str | None = None
        self._warned: set[str] = set()
        _alive.add(self)

    def release(self, ticket: T) -> None:
        """Forget a tensor, now or soon; see `Offloader.release`."""
        self._released.append(ticket)
        self._forget_if_free()

    def _fail(self, what: str) -> None:
        """Note why a tensor that was taken cannot leave; the first reason is told by the next `tell_failure`."""
        self._failure = self._failure or what

    def tell_failure(self) -> None:
        """Warn, once, if a tensor that was taken could not leave."""
        if self._failure is not None:
            self.warn_once("failure", self._failure)

    def warn_once(self, kind: str, message: str) -> None:
        """Warn if there was no warning of this kind yet."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn_user(message)

    def _after_fork(self) -> None:
        """Begin anew in a forked child: a thread that it does not have may have held the lock."""
        self._lock = threading.Lock()

    def _forget(self, ticket: T) -> None:
        """Forget a released ticket; called under the lock."""
        raise NotImplementedError

    def _forget_released(self) -> None:
        while self._released:
            self._forget(self._released.popleft())

    def _forget_if_free(self) -> None:
        # A ticket that is queued after the holder's last look finds the lock free.
        while self._released and not self._lock.locked():
            with self._lock:
                self._forget_released()


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a method of `Shared` run under the lock, with what was released before and meanwhile forgotten."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with self._lock:
                self._forget_released()
                return method(self, *args, **kwargs)
        finally:
            self._forget_if_free()

    return run


def require_numbers(owner: str, **numbers: tuple[object, int]) -> None:
    """Raise a `UsageError` unless each number is an integer and at least as large as the second of its pair."""
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or value < least:
            raise UsageError(
                f"{owner}({name}={value!r}) is not possible", remedy=f"{name} is a whole number from {least} on."
            )


def warn_user(message: str) -> None:
    """Warn at the nearest line outside of this library and torch."""
    frame, level = sys._getframe(1), 2
    while (
        frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "torch_remat") and frame.f_back is not None
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


_alive: WeakSet[Shared[Any]] = WeakSet()


def _after_fork() -> None:
    for shared in list(_alive):
        shared._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
