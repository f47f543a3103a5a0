"""A directory of raw files, and what is in it: what is behind `DiskOffloader`.

In: tensors, in a queue with a bound. Kept: entries, each with its tensor until its file is written, for good if it
cannot be. Out: the tensor itself, or what its file has.

The threads of a crew write and read the files; they may be killed. What is counted here changes under the guard's lock,
which only other threads take: they settle what the crew has ended. A thread that dies leaves its entry stuck, and
the next call starts another one. A forked child has no threads, and no files either: what was written belongs to the
parent, and may be read; what was not is stuck.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakSet

import torch

from torch_remat.offload import files
from torch_remat.offload.crew import Crew, rings
from torch_remat.offload.entry import Entry, Reading, read
from torch_remat.offload.guard import Guard, here

R = TypeVar("R")


class Store:
    """A directory of raw files, and the threads that fill it.

    Args:
        directory: Where the files are.
        threads: How many threads write and read.
        queue_bytes: How many bytes may wait for a thread; `put` blocks beyond that.

    Attributes:
        guard: Its lock.
        failure: What went wrong with the latest file that could not be written, until someone has told of it.
    """

    def __init__(self, directory: str, threads: int, queue_bytes: int) -> None:
        self.directory = directory
        self.failure: str | None = None
        self._count = threads
        self._queue_bytes = queue_bytes
        self._used_bytes = 0
        self.guard: Guard[Entry] = Guard(self._forget)
        self._start_empty()
        _stores.add(self)

    def _start_empty(self) -> None:
        self._crew: Crew[Reading, Entry] = Crew(self._count)
        self._unwritten: dict[Entry, None] = {}  # and what is not settled yet
        self._queued_bytes = 0  # of those
        self._paths: set[str] = set()
        self._closed = False

    def used_bytes(self) -> int:
        """Return the bytes that are in files or on the way there."""
        return self._locked(lambda: self._used_bytes)

    def put(self, entry: Entry, max_bytes: int | None) -> bool:
        """Queue a tensor to be written; blocks while the queue is full. False if there would be too many bytes."""
        entry.path = files.new_path(self.directory)
        return self._until(partial(self._put_now, entry, max_bytes))

    def read_ahead(self, entry: Entry) -> None:
        """Have a thread read a file that is about to be needed."""
        if entry.result == "" and entry.ahead is None:
            entry.ahead = Reading(entry)
            self._crew.add_urgent(entry.ahead)
            self._locked(self._look_after_crew)

    def get(self, entry: Entry) -> torch.Tensor:
        """Return the tensor that was put, or what its file has, as bytes of the CPU.

        Raises:
            OffloadError: The file is missing or has other content.
        """
        tensor = entry.tensor
        if tensor is not None:
            return tensor
        reading, entry.ahead = entry.ahead, None
        if reading is None or reading.take(None):  # no thread has begun: this one is faster
            return read(entry)
        while not reading.is_done and (rings(reading.bell) or not self._locked(reading.taker_died)):
            pass
        value, reading.value = reading.value, None
        return read(entry) if value is None else value

    def release(self, entry: Entry) -> None:
        """Forget a tensor. Does not wait, and may be called from anywhere."""
        entry.release()
        self.guard.add(entry)

    def flush(self) -> None:
        """Wait until each tensor is written, or stuck."""
        self._until(self._is_flushed)

    def abandon(self) -> None:
        """Close, wherever the last reference was dropped."""
        if here.mortal:  # by a garbage collection in a thread that takes no lock, and cannot wait for itself
            threading.Thread(target=self.close, daemon=True).start()
        else:
            self.close()

    def close(self) -> None:
        """Stop the threads and remove the files."""
        self._locked(self._refuse_all)
        self._crew.close()
        while self._paths:
            files.remove(self._paths.pop())

    def after_fork(self) -> None:
        """Begin anew in a forked child."""
        unwritten = [*self._unwritten]
        self._start_empty()
        for entry in unwritten:
            self._unwritten[entry] = None
            if entry.result is None:
                entry.end("the process was forked")
            self._settle(entry)

    def _until(self, attempt: Callable[[], bool | None]) -> bool:
        """Try something under the lock, again whenever an entry is settled; return what it returns but None."""
        done = self._locked(attempt)
        if done is None:
            with self._crew.news() as wait:
                while (done := self._locked(attempt)) is None:
                    if not wait():
                        self._locked(self._mend_crew)
        return done

    def _locked(self, work: Callable[[], R]) -> R:
        return self.guard.run(partial(self._settled, work))

    def _settled(self, work: Callable[[], R]) -> R:
        while self._crew.ended:
            self._settle(self._crew.ended.popleft())
        return work()

    def _put_now(self, entry: Entry, max_bytes: int | None) -> bool | None:
        count = entry.info.bytes
        self._look_after_crew()
        if self._unwritten and self._queued_bytes + count > self._queue_bytes:
            return None
        if self._closed or (max_bytes is not None and self._used_bytes + count > max_bytes):
            return False
        if not self._crew.threads:
            raise RuntimeError("no thread can be started")
        self._used_bytes += count
        entry.counted = True
        self._queued_bytes += count
        self._unwritten[entry] = None
        self._paths.add(entry.path)
        self._crew.add(entry)
        return True

    def _is_flushed(self) -> bool | None:
        self._look_after_crew()
        return None if self._unwritten else True

    def _refuse_all(self) -> None:
        self._closed = True
        self._unwritten.clear()

    def _look_after_crew(self) -> None:
        if not (self._closed or self._crew.is_whole()):
            self._mend_crew()

    def _mend_crew(self) -> None:
        """Start threads in the place of those that died, and settle what those had in their hands."""
        if self._closed:
            return
        for entry in [*self._unwritten]:
            if entry.taker_died() and entry.result is None:
                entry.end("the thread that wrote the file died")
            if entry.result is not None:
                self._settle(entry)
        problem = self._crew.make_whole(entry for entry in self._unwritten if not entry.taken)
        if problem is not None:  # nobody is there to do it
            for entry in [*self._unwritten]:
                if entry.take(None):
                    entry.end(problem)
                    self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Count an entry that has a result."""
        if entry not in self._unwritten:
            return
        del self._unwritten[entry]
        self._queued_bytes = self._queued_bytes - entry.info.bytes if self._unwritten else 0
        entry.tidy()  # in case that the thread that brought the result died before it did
        if entry.result:
            self._uncount(entry)
            if not entry.released and entry.pid == os.getpid() and self.failure is None:
                self.failure = f"{entry.info.name} ({entry.info.bytes:,} bytes): {entry.result}"
        if entry.result or entry.released:
            self._paths.discard(entry.path)
        self._crew.ring()

    def _forget(self, entry: Entry) -> None:
        """Count an entry that was released."""
        self._uncount(entry)
        if entry.result is not None:
            self._settle(entry)
            self._paths.discard(entry.path)

    def _uncount(self, entry: Entry) -> None:
        if entry.counted:
            entry.counted = False
            self._used_bytes -= entry.info.bytes


_stores: WeakSet[Store] = WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
