"""One tensor on its way to a file and back.

In: a tensor. Kept: the tensor, until its file is written; then its path and checksum. Out: its bytes, or an error that
names it.

NOTE [ Life of an entry ]
1. At first it has the tensor, which may be read. A thread writes the file; then the entry has a *result*.
2. Written (an empty result): the tensor is let go of, and its file is read. Stuck (the result tells why there is no
   file): the tensor stays until it is released.
3. What is released before a thread has taken it is not written. What a thread has in its hands then, it drops.
4. No lock is needed. Result and release come in any order, on two threads; who brings one calls `tidy`, which looks at
   both, so that at least one of them sees both.
"""

from __future__ import annotations

import os
from contextlib import suppress
from queue import SimpleQueue

import torch

from torch_remat.errors import OffloadError
from torch_remat.offload import files
from torch_remat.offload.crew import Bell, Job
from torch_remat.offload.protocol import OffloadInfo

_LOST = (
    "The gradient cannot be computed without it: run the step again. Look for what else writes to or clears the "
    "directory, and at the health of the disk."
)


class Entry(Job):
    """One tensor, and the job to write it; see NOTE [ Life of an entry ].

    Args:
        tensor: The tensor.
        info: What it is.
        ready: On a device: the stream is done that made it.

    Attributes:
        result: None as long as the file is to be written, "" when it is, else why it could not be.
        ahead: The job that reads the file before it is asked for.
        counted: Whether the store counts it among what is away.
    """

    __slots__ = (
        *("ahead", "checksum", "counted", "device", "dtype", "info", "path", "pid", "ready", "released", "result"),
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, info: OffloadInfo, ready: torch.cuda.Event | None) -> None:
        super().__init__()
        self.tensor: torch.Tensor | None = tensor
        self.info = info
        self.ready = ready
        self.dtype, self.device = tensor.dtype, tensor.device
        self.result: str | None = None
        self.released = False
        self.counted = False
        self.path = ""
        self.pid = os.getpid()
        self.checksum = 0
        self.ahead: Reading | None = None

    def do(self) -> None:
        """Write the file."""
        result, tensor = "", self.tensor
        try:
            assert tensor is not None
            self.checksum = files.write(self.path, on_host(tensor, self.ready))
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        del tensor
        self.end(result)

    def end(self, result: str) -> None:
        """Note how the writing went."""
        self.result = result
        self.tidy()

    def release(self) -> None:
        """Forget the tensor, here and in its file, now or as soon as a thread is done with it."""
        self.released = True
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.take(None)
        if self.take(None):
            self.result = "it was released"
        self.tidy()

    def tidy(self) -> None:
        """Let go of what is not needed any more."""
        if self.result is None:
            return  # a thread may be at it
        if self.released or not self.result:
            self.tensor = self.ready = None
        if (self.released or self.result) and self.pid == os.getpid():
            files.remove(self.path)


class Reading(Job):
    """The job to read a file before it is asked for.

    Attributes:
        value: What was read; None if that failed, which the next one who reads it will tell.
        is_done: Whether it was tried.
        bell: Rung then.
    """

    __slots__ = ("_file", "bell", "is_done", "value")

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self._file = entry.path, entry.info.bytes, entry.checksum
        self.value: torch.Tensor | None = None
        self.is_done = False
        self.bell: Bell = SimpleQueue()

    def do(self) -> None:
        """Read the file."""
        with suppress(Exception):
            self.value = files.read(*self._file)
        self.is_done = True
        self.bell.put(None)


def read(entry: Entry) -> torch.Tensor:
    """Return what the entry's file has, as bytes of the CPU.

    Raises:
        OffloadError: The file is missing or has other content.
    """
    try:
        return files.read(entry.path, entry.info.bytes, entry.checksum)
    except (OSError, ValueError) as error:
        info = entry.info
        raise OffloadError(
            f"the file {entry.path} that holds this tensor cannot be used: {error}",
            region=info.region,
            op=info.op,
            tensor=info.tensor,
            file=entry.path,
            remedy=_LOST,
        ) from None


def on_host(tensor: torch.Tensor, ready: torch.cuda.Event | None) -> torch.Tensor:
    """Return a tensor in host memory, from a device by way of a stream of its own."""
    if tensor.device.type == "cpu":
        return tensor
    if ready is None:
        return tensor.cpu()
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream):
        copied = tensor.to("cpu", non_blocking=True)
    stream.synchronize()
    return copied
