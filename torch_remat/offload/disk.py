"""`DiskOffloader`: tensors of the CPU or of a device wait in files."""

from __future__ import annotations

import os
from pathlib import Path
from weakref import finalize

import torch

from torch_remat.offload import files
from torch_remat.offload.protocol import OffloadInfo
from torch_remat.offload.shared import require_numbers
from torch_remat.offload.store import DiskTicket, Stage, Store


class DiskOffloader:
    """Keeps offloaded tensors in raw files, of which backward reads back what it needs.

    Threads in the background write the files. Until a file is written, its tensor is kept and used; if it cannot be
    written (the disk is full, the directory is gone, the thread died), the tensor simply stays. One warning says so, at
    the next tensor that is offloaded or read, in `flush`, or when the offloader goes. Files have a checksum, which is
    compared when they are read. They are private (mode 0600), one for each tensor, and removed when the tensor is
    released, when the graph dies, with the offloader, and at exit. Those of a process that was killed are removed by
    the next offloader on the same directory, machine and user.

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
        require_numbers("DiskOffloader", max_bytes=(max_bytes or 0, 0), min_bytes=(min_bytes, 0),
                        prefetch_bytes=(prefetch_bytes, 0), threads=(threads, 1),
                        queue_bytes=(queue_bytes, 0))  # fmt: skip
        self.directory = os.path.abspath(directory)
        self.max_bytes = max_bytes
        self.min_bytes = min_bytes
        self.prefetch_bytes = prefetch_bytes
        Path(self.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        files.remove_orphans(self.directory)
        self._store = Store(self.directory, threads, queue_bytes)
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
        ready = None
        if tensor.device.type == "cuda":
            ready = torch.cuda.current_stream(tensor.device).record_event()
        ticket = DiskTicket(files.new_path(self.directory), tensor, info, ready)
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
