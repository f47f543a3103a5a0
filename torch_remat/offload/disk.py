"""`DiskOffloader`: tensors of the CPU or of a device wait in files, which threads write and read.

NOTE [ Life of a disk ticket ]
1. A thread writes the file. Until it is there, the ticket has the tensor, which may be read; then the tensor is let go
   of, and the file is read. If it cannot be written, the tensor stays until it is released; the first failure is told.
2. What is released before its thread has come is not written; what is being written then, its thread removes.
3. All of that changes under the store's lock.
4. A forked child has no threads, and no files either: what was written belongs to the parent, and may be read; what was
   not stays, which nobody needs to be told.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from weakref import finalize

import torch

from torch_remat.errors import OffloadError
from torch_remat.offload import files
from torch_remat.offload.protocol import OffloadInfo
from torch_remat.offload.shared import Shared, locked, require_numbers
from torch_remat.offload.streams import event_after, host_copy

_LOST = (
    "The gradient cannot be computed without it: run the step again. Look for what else writes to or clears the "
    "directory, and at the health of the disk."
)
_THREADS = "torch_remat files"


class DiskTicket:
    """One tensor in a file, or on its way there; see NOTE [ Life of a disk ticket ].

    Attributes:
        tensor: What was offloaded, as long as it is here.
        stays: Whether the file could not be written.
        writing: The job that writes it.
    """

    __slots__ = (
        *("checksum", "device", "dtype", "folder", "info", "path", "ready", "released", "stays", "tensor", "writing"),
    )

    writing: Future[None]

    def __init__(self, folder: files.Folder, tensor: torch.Tensor, info: OffloadInfo) -> None:
        self.folder, self.path, self.info = folder, folder.new_path(), info
        self.dtype, self.device, self.ready = tensor.dtype, tensor.device, event_after(tensor)
        self.tensor: torch.Tensor | None = tensor
        self.checksum = 0
        self.stays = self.released = False

    def read(self) -> torch.Tensor:
        """Return what the file has, as bytes of the CPU; may raise ``OSError`` or ``ValueError``."""
        return files.read(self.path, self.info.bytes, self.checksum)

    def read_ahead(self) -> torch.Tensor | None:
        """Return the same; None if that fails: its reader reads it again, and reports the error."""
        try:
            return self.read()
        except BaseException:
            return None


class DiskOffloader:
    """Keeps offloaded tensors in raw files, of which backward reads back what it needs.

    Threads in the background write the files. Until a file is written, its tensor is kept and used; if it cannot be
    written (the disk is full, the directory is gone), the tensor simply stays. One warning says so, at the next tensor
    that is sent or read, in `flush`, or when the offloader goes. Files are private (mode 0600), in a temporary
    directory of their own, and have checksums, compared when they are read. They are removed when the tensor is
    released, when the graph dies, with the offloader, and at exit; those of a process that was killed, by the next
    offloader on the same directory.

    The space is really used: choose a directory on a local disk, not one in memory (``/tmp`` often is).

    Args:
        directory: Where the files go; it is made, with mode 0700, if it is not there.
        max_bytes: How many bytes may be away at once, or None. A tensor beyond that stays where it is; one warning
            says so. Tensors that could not be written do not count.
        min_bytes: The smallest tensor worth a file; smaller ones stay.
        prefetch_bytes: How many bytes are read ahead of their use; 0 for none.
        threads: How many threads write, and as many read.
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
        files.remove_folders_left_in(self.directory)
        self._store = _Store(self.directory, threads, queue_bytes)
        finalize(self, self._store.close)  # also at exit

    def __repr__(self) -> str:
        return f"DiskOffloader({self.directory!r}, max_bytes={self.max_bytes}, min_bytes={self.min_bytes})"

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the tensors that are away now, with those whose files are being written, without those that stay."""
        return self._store.used_bytes()

    def offload(self, tensor: torch.Tensor, info: OffloadInfo) -> DiskTicket | None:
        """Queue the tensor to be written; see `Offloader.offload`."""
        self._store.tell_failure()
        if info.bytes < max(1, self.min_bytes):
            return None
        ticket = self._store.put(tensor, info, self.max_bytes)
        if ticket is None:
            self._store.warn_once(
                "full",
                f"DiskOffloader({self.directory!r}): {info.name} ({info.bytes:,} bytes) would exceed "
                f"max_bytes={self.max_bytes}. It stays in memory, as other tensors may; training goes on.",
            )
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
        return ticket.stays

    def flush(self) -> None:
        """Wait until everything that was offloaded is in its file, or cannot be; warn if something could not."""
        self._store.flush()
        self._store.tell_failure()


class _Store(Shared):
    """The files of one offloader, and the threads that write and read them."""

    def __init__(self, directory: str, threads: int, queue_bytes: int) -> None:
        super().__init__()
        self.directory = directory
        self._count = threads
        self._queue_bytes = queue_bytes
        self._used_bytes = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self._progress = threading.Condition(self._lock)  # a file was written, or its ticket released
        self._writers, self._readers = [ThreadPoolExecutor(self._count, _THREADS) for _ in range(2)]
        self._unwritten: set[DiskTicket] = set()
        self._queued_bytes = 0  # of these
        self._ahead: dict[DiskTicket, Future[torch.Tensor | None]] = {}
        self._folder: files.Folder | None = None
        self._writing = 0  # how many threads write now
        self._is_closed = False

    @locked
    def used_bytes(self) -> int:
        """Return the bytes that are in files or on the way there."""
        return self._used_bytes

    @locked
    def put(self, tensor: torch.Tensor, info: OffloadInfo, max_bytes: int | None) -> DiskTicket | None:
        """Have a tensor written; blocks while too much waits. None if there would be too many bytes.

        Raises:
            OSError: There can be no directory.
            RuntimeError: There can be no thread.
        """
        while self._unwritten and self._queued_bytes + info.bytes > self._queue_bytes:
            self._progress.wait()
        if max_bytes is not None and self._used_bytes + info.bytes > max_bytes:
            return None
        if self._folder is None:
            self._folder = files.Folder(self.directory)
        ticket = DiskTicket(self._folder, tensor, info)
        try:
            ticket.writing = self._writers.submit(self._write, ticket)
        except RuntimeError:
            ticket.tensor = None  # a later thread may still come to it
            raise
        self._unwritten.add(ticket)
        self._used_bytes += info.bytes
        self._queued_bytes += info.bytes
        return ticket

    @locked
    def read_ahead(self, ticket: DiskTicket) -> None:
        """Have a thread read a file that is about to be needed."""
        if ticket.tensor is None and ticket not in self._ahead:
            self._ahead[ticket] = self._readers.submit(ticket.read_ahead)

    def get(self, ticket: DiskTicket) -> torch.Tensor:
        """Return the tensor that was put, or what its file has, as bytes of the CPU; may raise `OffloadError`."""
        value, ahead, info = *self._at_hand(ticket), ticket.info
        if ahead is not None and not ahead.cancel():  # else this thread is faster
            value = ahead.result()
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
    def _at_hand(self, ticket: DiskTicket) -> tuple[torch.Tensor | None, Future[torch.Tensor | None] | None]:
        """Return the tensor if it is here, and the job that reads it ahead, if there is one."""
        return ticket.tensor, self._ahead.pop(ticket, None)

    @locked
    def flush(self) -> None:
        """Wait until each tensor is written, or cannot be."""
        while self._unwritten:
            self._progress.wait()

    def close(self) -> None:
        """Stop the threads, remove the files, and tell what nobody was told yet.

        It waits for nothing, and starts no thread: a garbage collection may come in the middle of a thread's start. Of
        files that are being written the last one to end removes the folder.
        """
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)
        self.release(None)  # which stands for all

    def _end(self) -> None:
        if self._folder is not None:
            self._folder.remove()
        if os.path.isdir(self.directory):  # else its owner was done with it, as with a temporary one
            self.tell_failure()

    def _after_fork(self) -> None:
        super()._after_fork()
        for ticket in self._unwritten:
            ticket.stays = True
            if not ticket.released:
                self._used_bytes -= ticket.info.bytes
        self._start_empty()

    def _forget(self, ticket: DiskTicket | None) -> None:
        if ticket is None:
            self._is_closed = True
            if not self._writing:
                self._end()
            return
        ticket.released = True
        if not ticket.stays:
            self._used_bytes -= ticket.info.bytes
        if ticket in self._unwritten:
            if not ticket.writing.cancel():
                return  # its thread drops it
            self._is_over(ticket)
        self._drop(ticket)

    def _drop(self, ticket: DiskTicket) -> None:
        ticket.tensor = ticket.ready = None
        if (ahead := self._ahead.pop(ticket, None)) is not None:
            ahead.cancel()
        ticket.folder.remove_file(ticket.path)

    def _is_over(self, ticket: DiskTicket) -> None:
        if ticket in self._unwritten:
            self._unwritten.discard(ticket)
            self._queued_bytes -= ticket.info.bytes
            self._progress.notify_all()

    def _write(self, ticket: DiskTicket) -> None:
        """Write a file, in a thread."""
        if getattr(threading, "_SHUTTING_DOWN", False):
            return  # Python waits for the threads of a pool when the process leaves, and nobody will read
        if not self._begins_to_write():
            return
        failure = ""
        try:
            if ticket.tensor is not None:
                ticket.checksum = files.write(ticket.path, host_copy(ticket.tensor, ticket.ready))
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
        self._has_written(ticket, failure)

    @locked
    def _begins_to_write(self) -> bool:
        self._writing += not self._is_closed
        return not self._is_closed

    @locked
    def _has_written(self, ticket: DiskTicket, failure: str) -> None:
        self._writing -= 1
        self._note_written(ticket, failure)
        if self._is_closed and not self._writing:
            self._end()

    def _note_written(self, ticket: DiskTicket, failure: str) -> None:
        if ticket not in self._unwritten:
            return
        self._is_over(ticket)
        if not failure:
            ticket.tensor = ticket.ready = None
        else:
            self._note_failure(ticket, failure)
        if ticket.released:
            self._drop(ticket)

    def _note_failure(self, ticket: DiskTicket, failure: str) -> None:
        ticket.stays = True
        ticket.folder.remove_file(ticket.path)
        if not ticket.released:
            self._used_bytes -= ticket.info.bytes
        self._failure = self._failure or (
            f"DiskOffloader({self.directory!r}): no file could be written for {ticket.info.name} "
            f"({ticket.info.bytes:,} bytes): {failure}. It stays in memory, as other tensors may; training goes on."
        )
