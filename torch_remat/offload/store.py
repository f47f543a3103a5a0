"""A directory of raw files, and the threads that fill it: what is behind `DiskOffloader`.

In: tensors, in a queue with a bound. Kept: each tensor until its file is written, for good if it cannot be. Out: the
tensor itself, or what its file has.

NOTE [ Life of a disk ticket ]
1. QUEUED and RUNNING: it has the tensor, which may be read; a thread writes the file. DONE: the tensor is let go of,
   and the file is read. FAILED: there is no file; the tensor stays until it is released, and the first failure is told.
2. What is released while it is QUEUED is not written. What is RUNNING then, its thread drops when it is done.
3. All of that changes under the store's lock. A thread that dies of an exception leaves its ticket FAILED, and the next
   call that needs threads starts another one.
4. A forked child has no threads, and no files either: what was written belongs to the parent, and may be read; what was
   not has FAILED, which nobody needs to be told.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial

import torch

from torch_remat.errors import OffloadError
from torch_remat.offload import files
from torch_remat.offload.protocol import OffloadInfo
from torch_remat.offload.shared import Shared, locked
from torch_remat.offload.streams import host_copy

_LOST = (
    "The gradient cannot be computed without it: run the step again. Look for what else writes to or clears the "
    "directory, and at the health of the disk."
)
_DIED = "the thread that wrote the file died"


class Stage(Enum):
    """How far a thread has come with a file; see NOTE [ Life of a disk ticket ]."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class _ReadAhead:
    """A file that is read before it is asked for; who asks for one that failed reads it again."""

    __slots__ = ("stage", "value")

    def __init__(self) -> None:
        self.stage = Stage.QUEUED
        self.value: torch.Tensor | None = None


class DiskTicket:
    """One tensor in a file, or on its way there; see NOTE [ Life of a disk ticket ].

    Args:
        path: Where its file shall be.
        tensor: The tensor.
        info: What it is.
        ready: On a CUDA device: the event after what made it.
    """

    __slots__ = ("ahead", "checksum", "device", "dtype", "info", "path", "ready", "released", "stage", "tensor")

    def __init__(self, path: str, tensor: torch.Tensor, info: OffloadInfo, ready: torch.cuda.Event | None) -> None:
        self.path = path
        self.tensor: torch.Tensor | None = tensor
        self.info = info
        self.ready = ready
        self.dtype, self.device = tensor.dtype, tensor.device
        self.stage = Stage.QUEUED
        self.released = False
        self.checksum = 0
        self.ahead: _ReadAhead | None = None

    def read(self) -> torch.Tensor:
        """Return what the file has, as bytes of the CPU; may raise ``OSError`` or ``ValueError``."""
        return files.read(self.path, self.info.bytes, self.checksum)


class Store(Shared[DiskTicket]):
    """A directory of raw files, and the threads that fill it.

    Args:
        directory: Where the files are.
        threads: How many threads write and read.
        queue_bytes: How many bytes may wait for a thread; `put` blocks beyond that.
    """

    def __init__(self, directory: str, threads: int, queue_bytes: int) -> None:
        super().__init__()
        self.directory = directory
        self._count = threads
        self._queue_bytes = queue_bytes
        self._used_bytes = 0
        self._closed = False
        self._start_empty()

    def _start_empty(self) -> None:
        self._has_work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)  # something was written, read or released
        self._writes: deque[DiskTicket] = deque()
        self._writing: set[DiskTicket] = set()
        self._reads: deque[tuple[DiskTicket, _ReadAhead]] = deque()
        self._reading: set[_ReadAhead] = set()
        self._queued_bytes = 0  # of what is to be written and of what is being written
        self._paths: set[str] = set()
        self._threads: set[threading.Thread] = set()

    @locked
    def used_bytes(self) -> int:
        """Return the bytes that are in files or on the way there."""
        return self._used_bytes

    @locked
    def put(self, ticket: DiskTicket, max_bytes: int | None) -> bool:
        """Queue a tensor to be written; blocks while the queue is full. False if there would be too many bytes."""
        count = ticket.info.bytes
        self._start_threads()
        while self._queued_bytes and self._queued_bytes + count > self._queue_bytes:
            self._wait()
        if self._closed or (max_bytes is not None and self._used_bytes + count > max_bytes):
            return False
        self._used_bytes += count
        self._queued_bytes += count
        self._writes.append(ticket)
        self._has_work.notify()
        return True

    @locked
    def read_ahead(self, ticket: DiskTicket) -> None:
        """Have a thread read a file that is about to be needed."""
        if ticket.stage is Stage.DONE and ticket.ahead is None:
            self._start_threads()
            ticket.ahead = _ReadAhead()
            self._reads.append((ticket, ticket.ahead))
            self._has_work.notify()

    def get(self, ticket: DiskTicket) -> torch.Tensor:
        """Return the tensor that was put, or what its file has, as bytes of the CPU.

        Raises:
            OffloadError: The file is missing or has other content.
        """
        value = self._at_hand(ticket)
        if value is not None:
            return value
        try:
            return ticket.read()
        except (OSError, ValueError) as error:
            info = ticket.info
            raise OffloadError(
                f"the file {ticket.path} that holds this tensor cannot be used: {error}",
                region=info.region,
                op=info.op,
                tensor=info.tensor,
                file=ticket.path,
                remedy=_LOST,
            ) from None

    @locked
    def flush(self) -> None:
        """Wait until each tensor is written, or cannot be."""
        while self._writes or self._writing:
            self._wait()

    def _wait(self) -> None:
        self._start_threads()  # in the place of those that died
        self._progress.wait()

    def close(self) -> None:
        """Stop the threads, remove the files, and tell what nobody was told yet."""
        if threading.current_thread() in self._threads:  # a garbage collection came there; it cannot wait for itself
            threading.Thread(target=self.close, daemon=True).start()
            return
        for thread in self._stop():
            thread.join()
        while self._paths:
            files.remove(self._paths.pop())
        if os.path.isdir(self.directory):  # else its owner was done with it, as with a temporary one
            self.tell_failure()

    @locked
    def _stop(self) -> list[threading.Thread]:
        self._closed = True
        self._has_work.notify_all()
        return list(self._threads)

    def _after_fork(self) -> None:
        super()._after_fork()
        for ticket in (*self._writes, *self._writing):
            ticket.stage = Stage.FAILED
            if not ticket.released:
                self._used_bytes -= ticket.info.bytes
        for ahead in self._reading:
            ahead.stage = Stage.FAILED
        self._start_empty()

    @locked
    def _at_hand(self, ticket: DiskTicket) -> torch.Tensor | None:
        """Return the tensor if it is there, or has been read ahead."""
        ahead, ticket.ahead = ticket.ahead, None
        while ahead is not None and ahead.stage is Stage.RUNNING:
            self._progress.wait()
        return ticket.tensor if ahead is None else ahead.value

    def _forget(self, ticket: DiskTicket) -> None:
        ticket.released = True
        ticket.ahead = None
        if ticket.stage is not Stage.FAILED:
            self._used_bytes -= ticket.info.bytes
        if ticket.stage is Stage.QUEUED:
            self._queued_bytes -= ticket.info.bytes
            self._progress.notify_all()
        if ticket.stage is not Stage.RUNNING:
            ticket.tensor = ticket.ready = None
            self._remove_file(ticket)

    def _remove_file(self, ticket: DiskTicket) -> None:
        if ticket.path in self._paths:  # else there is none, or it belongs to the parent of this process
            self._paths.discard(ticket.path)
            files.remove(ticket.path)

    def _start_threads(self) -> None:
        """Start the threads that are missing; RuntimeError if there are none then."""
        while len(self._threads) < self._count and not self._closed:
            thread = threading.Thread(target=self._work, name="torch_remat files", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._threads:
                    raise RuntimeError("no thread can be started") from error
                return
            self._threads.add(thread)

    def _work(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                job()
                del job
        finally:
            self._end_thread()

    @locked
    def _next_job(self) -> Callable[[], None] | None:
        while not self._closed:
            while self._reads:
                ticket, ahead = self._reads.popleft()
                if ticket.ahead is ahead:  # nobody has asked for it meanwhile
                    ahead.stage = Stage.RUNNING
                    self._reading.add(ahead)
                    return partial(self._read, ticket, ahead)
            while self._writes:
                ticket = self._writes.popleft()
                if not ticket.released:
                    ticket.stage = Stage.RUNNING
                    self._writing.add(ticket)
                    self._paths.add(ticket.path)
                    return partial(self._write, ticket)
            self._progress.notify_all()
            self._has_work.wait()
        return None

    def _write(self, ticket: DiskTicket) -> None:
        failure = _DIED
        try:
            assert ticket.tensor is not None
            ticket.checksum = files.write(ticket.path, host_copy(ticket.tensor, ticket.ready))
            failure = ""
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            self._end_write(ticket, failure)

    @locked
    def _end_write(self, ticket: DiskTicket, failure: str) -> None:
        self._writing.discard(ticket)
        self._queued_bytes -= ticket.info.bytes
        ticket.stage = Stage.FAILED if failure else Stage.DONE
        if failure:
            self._fail(
                f"DiskOffloader({self.directory!r}): no file could be written for {ticket.info.name} "
                f"({ticket.info.bytes:,} bytes): {failure}. It stays in memory, as other tensors may; training goes on."
            )
            if not ticket.released:
                self._used_bytes -= ticket.info.bytes
        if failure or ticket.released:
            self._remove_file(ticket)
        if not failure or ticket.released:
            ticket.tensor = ticket.ready = None
        self._progress.notify_all()

    def _read(self, ticket: DiskTicket, ahead: _ReadAhead) -> None:
        value = None
        try:
            with suppress(Exception):  # who asks for it reads it again, and tells
                value = ticket.read()
        finally:
            self._end_read(ahead, value)

    @locked
    def _end_read(self, ahead: _ReadAhead, value: torch.Tensor | None) -> None:
        self._reading.discard(ahead)
        ahead.value, ahead.stage = value, Stage.FAILED if value is None else Stage.DONE
        self._progress.notify_all()

    @locked
    def _end_thread(self) -> None:
        self._threads.discard(threading.current_thread())
        self._progress.notify_all()
