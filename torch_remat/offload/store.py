"""Threads that write tensors to files and read them back: what is behind `DiskOffloader`.

In: tensors, in a queue with a bound. Kept: each tensor until its file is written, for good if it cannot be. Out: the
tensor itself, or what its file has.

NOTE [ Life of an entry ]
1. *waiting*: in the queue. *writing*: in a thread's hands. In both, the tensor is there and may be read.
2. *written*: the file has it. *stuck*: the file could not be written; the tensor stays until it is released.
3. *gone*: released. What a thread has in its hands then, it drops when it is done.
4. State changes under the guard's lock; files are written and read outside of it.
5. A thread that dies leaves its entry stuck, and the next call starts another thread. A forked child has no threads,
   and no files either: what was written belongs to the parent, and may be read; what was not is stuck.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from weakref import WeakSet

import torch

from torch_remat.offload import files
from torch_remat.offload.entry import Entry, on_host, read
from torch_remat.offload.guard import Guard


class Store:
    """A directory of raw files, and the threads that fill it.

    Args:
        directory: Where the files are.
        threads: How many threads write and read.
        queue_bytes: How many bytes may wait for a thread; `put` blocks beyond that.

    Attributes:
        used_bytes: Bytes of all entries that are not gone, in files or on the way.
        failure: What went wrong with the latest file that could not be written, until someone has told of it.
    """

    def __init__(self, directory: str, threads: int, queue_bytes: int) -> None:
        self.directory = directory
        self.used_bytes = 0
        self.failure: str | None = None
        self._count = threads
        self._queue_bytes = queue_bytes
        self._start_empty()
        _stores.add(self)

    def _start_empty(self) -> None:
        self.guard: Guard[Entry] = Guard(self._forget)
        self._changed = threading.Condition(self.guard)  # type: ignore[arg-type]
        self._threads: list[threading.Thread] = []
        self._writes: deque[Entry] = deque()
        self._reads: deque[Entry] = deque()
        # What threads have in their hands.
        self._writing: dict[Entry, threading.Thread] = {}
        self._reading: dict[Entry, threading.Thread] = {}
        self._paths: set[str] = set()
        self._queued_bytes = 0
        self._closed = False

    def put(self, entry: Entry, max_bytes: int | None) -> bool:
        """Queue a tensor to be written; blocks while the queue is full. False if there would be too many bytes."""
        count = entry.info.bytes
        with self.guard:
            self._look_after_threads()
            while self._queued_bytes and self._queued_bytes + count > self._queue_bytes:
                self._changed.wait(0.1)
                self._look_after_threads()
            if not (self._threads or self._closed):
                raise RuntimeError("no thread can be started")
            if self._closed or (max_bytes is not None and self.used_bytes + count > max_bytes):
                return False
            self.used_bytes += count
            self._queued_bytes += count
            self._writes.append(entry)
            self._changed.notify_all()
        return True

    def read_ahead(self, entry: Entry) -> None:
        """Have a thread read a file that is about to be needed."""
        with self.guard:
            if entry.state == "written" and entry.value is None and not self._is_being_read(entry):
                self._look_after_threads()
                self._reads.append(entry)
                self._changed.notify_all()

    def get(self, entry: Entry) -> torch.Tensor:
        """Return the tensor that was put, or what its file has, as bytes of the CPU.

        Raises:
            OffloadError: The file is missing or has other content.
        """
        with self.guard:
            if entry.tensor is not None:
                return entry.tensor
            if entry in self._reads:
                self._reads.remove(entry)  # no thread has begun: this one is faster
            while entry in self._reading:
                self._changed.wait(0.1)
                self._look_after_threads()
            value, entry.value = entry.value, None
        return read(entry) if value is None else value

    def flush(self) -> None:
        """Wait until each tensor is written, or stuck."""
        with self.guard:
            while self._writes or self._writing:
                self._look_after_threads()
                self._changed.wait(0.1)

    def abandon(self) -> None:
        """Close, wherever the last reference was dropped."""
        if threading.current_thread() in self._threads:
            # A garbage collection, perhaps while this thread holds the lock.
            threading.Thread(target=self.close, daemon=True).start()
        else:
            self.close()

    def close(self) -> None:
        """Stop the threads and remove the files."""
        with self.guard:
            self._closed = True
            self._queued_bytes = 0
            self._writes.clear()
            self._reads.clear()
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        while self._paths:
            files.remove(self._paths.pop())

    def after_fork(self) -> None:
        """Begin anew in a forked child."""
        unwritten = [*self._writes, *self._writing]
        self._start_empty()
        for entry in unwritten:
            entry.state = "stuck"

    def _forget(self, entry: Entry) -> None:
        self.used_bytes -= entry.info.bytes
        if entry.state == "waiting" and entry in self._writes:
            self._writes.remove(entry)
            self._queued_bytes -= entry.info.bytes
            self._changed.notify_all()
        elif entry.state == "written" and entry.pid == os.getpid():
            self._drop_file(entry)
        if entry.state != "writing":
            entry.tensor = None
        if entry in self._reads:
            self._reads.remove(entry)
        entry.state = "gone"
        entry.value = None

    def _is_being_read(self, entry: Entry) -> bool:
        return entry in self._reads or entry in self._reading

    def _drop_file(self, entry: Entry) -> None:
        if entry.path:
            files.remove(entry.path)
            self._paths.discard(entry.path)

    def _look_after_threads(self) -> None:
        """Start threads in the place of those that died, and settle what those had in their hands."""
        if self._closed or (len(self._threads) == self._count and all(thread.is_alive() for thread in self._threads)):
            return
        for entry, thread in [*self._writing.items()]:
            if not thread.is_alive():
                self._end_write(entry, "the thread that wrote the file died")
        for entry, thread in [*self._reading.items()]:
            if not thread.is_alive():
                del self._reading[entry]
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name="torch_remat files", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    self._give_up(f"no thread could be started: {error}")
                return
            self._threads.append(thread)

    def _give_up(self, problem: str) -> None:
        """Let everything that waits stay where it is: nobody is there to do it."""
        self._reads.clear()
        while self._writes:
            self._end_write(self._writes.popleft(), problem)

    def _work(self) -> None:
        thread = threading.current_thread()
        while True:
            with self.guard:
                while not (self._closed or self._reads or self._writes):
                    self._changed.wait()
                if self._closed:
                    return
                if self._reads:
                    entry = self._reads.popleft()
                    self._reading[entry] = thread
                else:
                    entry = self._writes.popleft()
                    self._writing[entry] = thread
                    entry.state = "writing"
                    entry.path = files.new_path(self.directory)
                    self._paths.add(entry.path)
            if entry in self._reading:
                self._read_one(entry)
            else:
                self._write_one(entry)
            del entry

    def _read_one(self, entry: Entry) -> None:
        value = None
        with suppress(Exception):  # `get` reads it again, and tells
            value = read(entry)
        with self.guard:
            del self._reading[entry]
            entry.value = None if entry.state == "gone" else value
            self._changed.notify_all()

    def _write_one(self, entry: Entry) -> None:
        tensor, problem = entry.tensor, None
        assert tensor is not None
        try:
            entry.checksum = files.write(entry.path, on_host(tensor, entry.ready))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        del tensor
        with self.guard:
            if entry in self._writing:
                self._end_write(entry, problem)

    def _end_write(self, entry: Entry, problem: str | None) -> None:
        self._writing.pop(entry, None)
        self._queued_bytes -= entry.info.bytes
        if entry.state == "gone" or problem is not None:
            self._drop_file(entry)
        if entry.state != "gone":
            entry.state = "written" if problem is None else "stuck"
        if entry.state != "stuck":
            entry.tensor = entry.ready = None
        elif self.failure is None:
            self.failure = f"{entry.info.name} ({entry.info.bytes:,} bytes): {problem}"
        self._changed.notify_all()


_stores: WeakSet[Store] = WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
