"""`DiskOffloader`: tensors of the CPU or of a device wait in files."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from weakref import finalize

import torch

from torch_remat.errors import UsageError
from torch_remat.offload import files
from torch_remat.offload.entry import Entry
from torch_remat.offload.protocol import OffloadInfo
from torch_remat.offload.store import Store


class DiskOffloader:
    """Keeps offloaded tensors in raw files, of which backward reads back what it needs.

    Threads in the background write the files. Until a file is written, its tensor is kept and used; if it cannot be
    written (the disk is full, the directory is gone), the tensor simply stays, and one warning says so. Files have a
    checksum, which is compared when they are read. They are private (mode 0600), one for each tensor, and removed when
    the tensor is released, when the graph dies, with the offloader, and at exit. Those of a process that was killed are
    removed by the next offloader on the same directory, machine and user.

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
        for name, value, least in (("max_bytes", 0 if max_bytes is None else max_bytes, 0), ("min_bytes", min_bytes, 0),
                                   ("prefetch_bytes", prefetch_bytes, 0), ("threads", threads, 1),
                                   ("queue_bytes", queue_bytes, 0)):  # fmt: skip
            if not isinstance(value, int) or value < least:
                raise UsageError(
                    f"DiskOffloader({name}={value!r}) is not possible", remedy=f"{name} is a number from {least} on."
                )
        self.directory = os.path.abspath(directory)
        self.max_bytes = max_bytes
        self.min_bytes = min_bytes
        self.prefetch_bytes = prefetch_bytes
        Path(self.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        files.remove_orphans(self.directory)
        self._store = Store(self.directory, threads, queue_bytes)
        self._said: set[str] = set()
        finalize(self, self._store.abandon)  # also at exit

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the tensors that are away now, with those whose files are being written, without those that stay."""
        return self._store.used_bytes()

    def offload(self, tensor: torch.Tensor, info: OffloadInfo) -> Entry | None:
        """Queue the tensor to be written; see `Offloader.offload`."""
        self._tell_failure()
        if info.bytes < max(1, self.min_bytes):
            return None
        ready = None
        if tensor.device.type == "cuda":
            ready = torch.cuda.current_stream(tensor.device).record_event()
        entry = Entry(tensor, info, ready)
        if not self._store.put(entry, self.max_bytes):
            self._say("full", f"{info.name} ({info.bytes:,} bytes) would exceed max_bytes={self.max_bytes}")
            return None
        return entry

    def prefetch(self, ticket: Entry) -> None:
        """Have the file read in the background; see `Offloader.prefetch`."""
        self._store.read_ahead(ticket)

    def onload(self, ticket: Entry) -> torch.Tensor:
        """Return the tensor; see `Offloader.onload`.

        Raises:
            OffloadError: The file is missing or damaged.
        """
        self._tell_failure()
        value = self._store.get(ticket)
        if value.device == ticket.device and value.dtype == ticket.dtype:
            return value
        return value.view(ticket.dtype).to(ticket.device)

    def release(self, ticket: Entry) -> None:
        """Remove the file; see `Offloader.release`."""
        self._store.release(ticket)

    def still_here(self, ticket: Entry) -> torch.Tensor | None:
        """Return the tensor while its file is not written, or if it cannot be; see `Offloader`."""
        return ticket.tensor

    def stays(self, ticket: Entry) -> bool:
        """Whether the file could not be written, so that the tensor stays; see `Offloader`."""
        return bool(ticket.result)

    def flush(self) -> None:
        """Wait until everything that was offloaded is in its file, or cannot be."""
        self._store.flush()
        self._tell_failure()

    def _tell_failure(self) -> None:
        failure = self._store.failure
        if failure is not None:
            self._store.failure = None
            self._say("failed", f"no file could be written for {failure}")

    def _say(self, kind: str, what: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(
                f"DiskOffloader({self.directory!r}): {what}. It stays in memory, as other tensors may; training goes "
                "on.",
                RuntimeWarning,
                stacklevel=4,
            )
