"""`DiskOffloader`: tensors of the CPU or of a device wait in files; and the threads that write and read these."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from weakref import finalize

import torch

from torch_remat.errors import OffloadError
from torch_remat.offload import files
from torch_remat.offload.files import DiskTicket, Stage
from torch_remat.offload.protocol import OffloadInfo
from torch_remat.offload.shared import Shared, locked, require_numbers

_LOST = (
    "The gradient cannot be computed without it: run the step again. Look for what else writes to or clears the "
    "directory, and at the health of the disk."
)


class DiskOffloader:
    """Keeps offloaded tensors in raw files, of which backward reads back what it needs.

    Threads in the background write the files. Until a file is written, its tensor is kept and used; if it cannot be
    written (the disk is full, the directory is gone, the thread died), the tensor simply stays. One warning says so, at
    the next tensor that is sent or read, in `flush`, or when the offloader goes. Files are private (mode 0600), and
    have checksums, compared when they are read. They are removed when the tensor is released, when the graph dies, with
    the offloader, and at exit; those of a process that was killed, by the next offloader on the same directory.

    The space is really used: choose a directory on a local disk, not one in memory (``/tmp`` often is).

    Args:
        directory: Where the files go; it is made, with mode 0700, if it is not there.
        max_bytes: How many bytes may be away at once, or None. A tensor beyond that stays where it is; one warning
            says so. Tensors that could not be written do not count.
        min_bytes: The smallest tensor worth a file; smaller ones stay.
        prefetch_bytes: How many bytes are read ahead of their use; 0 for none.
        threads: How many threads write and read.
        queue_bytes: How many bytes may wait to be written. Forward waits beyond that, so that memory cannot fill up
            with tensors that are about to go.

    Raises:
        UsageError: A number is negative, or there are no threads.
        OSError: The directory cannot be made.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import torch_remat as remat
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     offloader = remat.DiskOffloader(directory, max_bytes=1 << 30, min_bytes=0)
        ...     x = torch.randn(4, 8, requires_grad=True)
        ...     y = remat.checkpoint(offloader=offloader, offload_inputs=True)(torch.nn.Linear(8, 8))(x)
        ...     y.sum().backward()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        min_bytes: int = 64 << 10,
        prefetch_bytes: int = 256 << 20,
        threads: int = 2,
        queue_bytes: int = 256 << 20,
    ) -> None:
        require_numbers("DiskOffloader", max_bytes=max_bytes or 0, min_bytes=min_bytes, prefetch_bytes=prefetch_bytes,
                        queue_bytes=queue_bytes)  # fmt: skip
        require_numbers("DiskOffloader", 1, threads=threads)
        self.directory = os.path.abspath(directory)
        self.max_bytes = max_bytes
        self.min_bytes = min_bytes
        self.prefetch_bytes = prefetch_bytes
        Path(self.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        files.remove_orphans(self.directory)
        self._store = _Store(self.directory, threads, queue_bytes)
        finalize(self, self._store.close)  # also at exit

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the tensors that are away now, with those whose files are being written, without those that stay."""
        return self._store.used_bytes()

    def offload(self, tensor: torch.Tensor, info: OffloadInfo) -> DiskTicket | None:
        """Queue the tensor to be written; see `Offloader.offload`."""
        self._store.tell_failure()
        if info.bytes < max(1, self.min_bytes):
            return None
        ticket = DiskTicket(self.directory, tensor, info)
        if not self._store.put(ticket, self.max_bytes):
            self._store.warn_once(
                "full",
                f"DiskOffloader({self.directory!r}): {info.name} ({info.bytes:,} bytes) would exceed "
                f"max_bytes={self.max_bytes}. It stays in memory, as other tensors may; training goes on.",
            )
            return None
        return ticket

    def prefetch(self, ticket: DiskTicket) -> None:
        """Have the file read in the background; see `Offloader.prefetch`."""
        self._store.read_ahead(ticket)

    def onload(self, ticket: DiskTicket) -> torch.Tensor:
        """Return the tensor; see `Offloader.onload`.

        Raises:
            OffloadError: The file is missing or damaged.
        """
        self._store.tell_failure()
        value = self._store.get(ticket)
        if value.device == ticket.device and value.dtype == ticket.dtype:
            return value
        return value.view(ticket.dtype).to(ticket.device)

    def release(self, ticket: DiskTicket) -> None:
        """Remove the file; see `Offloader.release`."""
        self._store.release(ticket)

    def still_here(self, ticket: DiskTicket) -> torch.Tensor | None:
        """Return the tensor while its file is not written, or if it cannot be; see `Offloader`."""
        return ticket.tensor

    def stays(self, ticket: DiskTicket) -> bool:
        """Whether the file could not be written, so that the tensor stays; see `Offloader`."""
        return ticket.stage is Stage.FAILED

    def flush(self) -> None:
        """Wait until everything that was offloaded is in its file, or cannot be; warn if something could not."""
        self._store.flush()
        self._store.tell_failure()


class _Store(Shared):
    """A directory of raw files, and so many threads that write and read them."""

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
        self._progress = threading.Condition(self._lock)  # a job has ended, or a ticket was released
        self._reads: deque[DiskTicket] = deque()
        self._writes: deque[DiskTicket] = deque()
        self._running: set[DiskTicket] = set()
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
        while (self._writes or self._running) and self._queued_bytes + count > self._queue_bytes:
            self._wait()
        if max_bytes is not None and self._used_bytes + count > max_bytes:
            return False
        self._used_bytes += count
        self._queued_bytes += count
        self._paths.add(ticket.path)
        self._writes.append(ticket)
        self._has_work.notify()
        return True

    @locked
    def read_ahead(self, ticket: DiskTicket) -> None:
        """Have a thread read a file that is about to be needed."""
        if ticket.stage is Stage.DONE and ticket.ahead is None:
            self._start_threads()
            ticket.stage = Stage.QUEUED
            self._reads.append(ticket)
            self._has_work.notify()

    def get(self, ticket: DiskTicket) -> torch.Tensor:
        """Return the tensor that was put, or what its file has, as bytes of the CPU; may raise `OffloadError`."""
        value, info = self._at_hand(ticket), ticket.info
        try:
            return ticket.read() if value is None else value
        except (OSError, ValueError) as error:
            raise OffloadError(
                f"the file {ticket.path} that holds this tensor cannot be used: {error}",
                region=info.region,
                op=info.op,
                tensor=info.tensor,
                file=ticket.path,
                remedy=_LOST,
            ) from None

    @locked
    def _at_hand(self, ticket: DiskTicket) -> torch.Tensor | None:
        """Return the tensor if it is there, or has been read ahead."""
        if ticket.tensor is not None:
            return ticket.tensor
        while ticket.stage is Stage.RUNNING:
            self._progress.wait()
        ticket.stage = Stage.DONE  # if it was QUEUED, this thread is faster
        value, ticket.ahead = ticket.ahead, None
        return value

    @locked
    def flush(self) -> None:
        """Wait until each tensor is written, or cannot be."""
        while self._writes or self._running:
            self._wait()

    def close(self) -> None:
        """Stop the threads, remove the files, and tell what nobody was told yet."""
        if threading.current_thread() in self._threads:  # a garbage collection came there; it cannot wait for itself
            threading.Thread(target=self.close, daemon=True).start()
            return
        with self._lock:
            self._closed = True
            self._has_work.notify_all()
        for thread in list(self._threads):
            thread.join()
        while self._paths:
            files.remove(self._paths.pop())
        if os.path.isdir(self.directory):  # else its owner was done with it, as with a temporary one
            self.tell_failure()

    def _after_fork(self) -> None:
        super()._after_fork()
        for ticket in (*self._reads, *self._writes, *self._running):
            ticket.stage = Stage.FAILED if ticket.failure else Stage.DONE
            if ticket.failure and not ticket.released:
                self._used_bytes -= ticket.info.bytes
        self._start_empty()

    def _forget(self, ticket: DiskTicket) -> None:
        ticket.released = True
        if ticket.stage is not Stage.FAILED:
            self._used_bytes -= ticket.info.bytes
        if ticket.stage is Stage.QUEUED and ticket.failure:
            self._queued_bytes -= ticket.info.bytes
            self._progress.notify_all()
        if ticket.stage is not Stage.RUNNING:
            self._drop(ticket)

    def _drop(self, ticket: DiskTicket) -> None:
        ticket.stage = Stage.FAILED
        ticket.tensor = ticket.ahead = ticket.ready = None
        if ticket.path in self._paths:  # else it belongs to the parent of this process
            self._paths.discard(ticket.path)
            files.remove(ticket.path)

    def _wait(self) -> None:
        self._start_threads()  # in the place of those that died
        self._has_work.notify_all()  # an exception may have come before `put` could
        self._progress.wait()

    def _start_threads(self) -> None:
        """Start the threads that are missing; may raise RuntimeError."""
        while len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name="torch_remat files", daemon=True)
            thread.start()
            self._threads.add(thread)

    def _work(self) -> None:
        ticket: DiskTicket | None = None
        try:
            while (ticket := self._take(ticket)) is not None:
                ticket.work()
        finally:
            self._end_thread(ticket)

    @locked
    def _take(self, done: DiskTicket | None) -> DiskTicket | None:
        """Take the next ticket off a queue; None if the thread shall end."""
        self._end_job(done)
        while not self._closed:
            for queue in (self._reads, self._writes):
                while queue:
                    if (ticket := queue.popleft()).stage is Stage.QUEUED:
                        ticket.stage = Stage.RUNNING
                        self._running.add(ticket)
                        return ticket
            self._progress.notify_all()
            self._has_work.wait(1)  # a release that comes just before it lets go of the lock finds no other holder
            self._forget_released()
        return None

    @locked
    def _end_thread(self, ticket: DiskTicket | None) -> None:
        self._end_job(ticket)
        self._threads.discard(threading.current_thread())
        self._progress.notify_all()  # who waits starts another one

    def _end_job(self, ticket: DiskTicket | None) -> None:
        if ticket is None or ticket not in self._running:
            return
        self._running.discard(ticket)
        self._progress.notify_all()
        if ticket.tensor is not None:  # it was to be written
            self._queued_bytes -= ticket.info.bytes
        ticket.stage = Stage.FAILED if ticket.failure else Stage.DONE
        if not ticket.failure:
            ticket.tensor = ticket.ready = None
        elif not ticket.released:
            self._used_bytes -= ticket.info.bytes
        if ticket.failure:
            self._failure = self._failure or (
                f"DiskOffloader({self.directory!r}): no file could be written for {ticket.info.name} "
                f"({ticket.info.bytes:,} bytes): {ticket.failure}. It stays in memory, as other tensors may; training "
                "goes on."
            )
        if ticket.released:
            self._drop(ticket)
