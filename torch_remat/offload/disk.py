"""`DiskOffloader`: tensors of the CPU or of a device wait in files, which threads write and read.

NOTE [ Life of a disk ticket ]
1. A thread writes the file. Until it is written, the ticket has the tensor, which may be read; then the tensor is freed
   and the file is read. If the file cannot be written, the tensor stays until it is released. One warning says so.
2. A tensor that is released before its thread comes is not written. Who releases it removes the file after it drops the
   tensor, and the thread looks for the tensor after it has written: whichever comes last removes the file.
3. The folder lives as long as the offloader, its tickets and what threads do with them.
4. A forked child has no threads. What was written belongs to the parent, and may be read; what was not written stays.
"""

from __future__ import annotations

import os
from concurrent import futures
from pathlib import Path

import torch

from torch_remat.errors import OffloadError
from torch_remat.offload import files
from torch_remat.offload.protocol import OffloadInfo
from torch_remat.offload.shared import BoundedOffloader, Ticket, require_numbers
from torch_remat.offload.streams import event_after, host_copy

_LOST = (
    "The gradient cannot be computed without it: run the step again. Look for what else writes to or clears the "
    "directory, and at the health of the disk."
)


class DiskTicket(Ticket):
    """One tensor in a file, or on its way there; see NOTE [ Life of a disk ticket ].

    Attributes:
        folder: Where the file is.
        path: The file.
        writing: The job that writes it.
        ahead: The job that reads it ahead.
    """

    __slots__ = ("_checksum", "_device", "_dtype", "_ready", "ahead", "folder", "path", "writing")

    writing: futures.Future[None]

    def __init__(self, tensor: torch.Tensor, info: OffloadInfo, folder: files.Folder) -> None:
        super().__init__(tensor, info)
        self.folder, self.path = folder, folder.new_path()
        self._dtype, self._device, self._ready = tensor.dtype, tensor.device, event_after(tensor)
        self._checksum = 0
        self.ahead: futures.Future[torch.Tensor] | None = None

    def has_left(self, wait: bool) -> bool:
        """Whether the tensor is in its file, or cannot be; with ``wait``, wait until either is true."""
        if wait:
            futures.wait([self.writing])
        return self.writing.done()

    def write(self) -> None:
        """Write the file, in a thread."""
        tensor = self.tensor
        if tensor is None:
            return
        try:
            self._checksum = files.write(self.path, host_copy(tensor, self._ready))
        except BaseException as error:
            self.stays = True
            notices = self.folder.notices
            notices.failure = notices.failure or (
                f"DiskOffloader({os.path.dirname(os.path.dirname(self.path))!r}): no file could be written for "
                f"{self.info.name} ({self.info.bytes:,} bytes): {type(error).__name__}: {error}. It stays in memory, "
                "as other tensors may; training goes on."
            )
        if self.stays or self.tensor is None:
            self.folder.remove_file(self.path)
        else:
            self.tensor = self._ready = None

    def read(self) -> torch.Tensor:
        """Return the tensor that the file has; may raise ``OSError`` or ``ValueError``."""
        return files.read(self.path, self.info.bytes, self._checksum)

    def load(self) -> torch.Tensor:
        """Return the tensor, as it was, from where a thread has read it ahead or from the file; see `read`."""
        ahead, self.ahead = self.ahead, None
        content = self.read() if ahead is None or ahead.cancel() else ahead.result()
        return content.view(self._dtype).to(self._device)


class DiskOffloader(BoundedOffloader[DiskTicket]):
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
        super().__init__(max_bytes, min_bytes, prefetch_bytes, queue_bytes=queue_bytes)
        require_numbers(self, 1, threads=threads)
        self.directory = os.path.abspath(directory)
        Path(self.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        files.remove_folders_left_in(self.directory)
        self._threads = threads
        self._begin()

    def _begin(self) -> None:
        """Begin with no files and no threads."""
        self._pid = os.getpid()
        self._writers, self._readers = [futures.ThreadPoolExecutor(self._threads, "torch_remat files") for _ in "wr"]
        self._folder: files.Folder | None = None

    def __repr__(self) -> str:
        return f"DiskOffloader({self.directory!r}, max_bytes={self.max_bytes}, min_bytes={self.min_bytes})"

    def prefetch(self, ticket: DiskTicket) -> None:
        """Have the file read in the background; see `Offloader.prefetch`."""
        self._settle()
        if ticket.tensor is None and ticket.ahead is None:
            ticket.ahead = self._readers.submit(ticket.read)

    def onload(self, ticket: DiskTicket) -> torch.Tensor:
        """Return the tensor; see `Offloader.onload`.

        Raises:
            OffloadError: The file is missing or damaged.
        """
        self._settle()
        self._notices.tell_failure()
        if (tensor := ticket.tensor) is not None:
            return tensor
        try:
            return ticket.load()
        except (OSError, ValueError) as error:
            raise OffloadError(
                f"the file {ticket.path} that holds this tensor cannot be used: {error}",
                region=ticket.info.region,
                op=ticket.info.op,
                tensor=ticket.info.tensor,
                file=ticket.path,
                remedy=_LOST,
            ) from None

    def release(self, ticket: DiskTicket) -> None:
        """Remove the file; see `Offloader.release`."""
        super().release(ticket)
        ticket.tensor = ticket.ahead = None
        ticket.folder.remove_file(ticket.path)

    def flush(self) -> None:
        """Wait until everything that was offloaded is in its file, or cannot be; warn if something could not."""
        self._settle()
        futures.wait([ticket.writing for ticket in list(self._pending)])
        self._settle()
        self._notices.tell_failure()

    def _settle(self, room: int = 0) -> None:
        if self._pid != os.getpid():
            for ticket in self._pending:
                ticket.stays = True
                self._away.pop(ticket, None)
            self._pending.clear()
            self._begin()
        super()._settle(room)

    def _ticket(self, tensor: torch.Tensor, info: OffloadInfo) -> DiskTicket:
        if self._folder is None:
            self._folder = files.Folder(self.directory, self._notices)
        return DiskTicket(tensor, info, self._folder)

    def _send(self, ticket: DiskTicket, tensor: torch.Tensor) -> None:
        ticket.writing = self._writers.submit(ticket.write)
