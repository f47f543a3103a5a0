"""One tensor on its way to a file and back.

In: a tensor. Kept: the tensor, until its file is written; then its path and checksum. Out: its bytes, or an error that
names it.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

from torch_remat.errors import OffloadError
from torch_remat.offload import files
from torch_remat.offload.protocol import OffloadInfo

_LOST = (
    "The gradient cannot be computed without it: run the step again. Look for what else writes to or clears the "
    "directory, and at the health of the disk."
)


class Entry:
    """One tensor; `store` tells of its life."""

    __slots__ = ("checksum", "device", "dtype", "info", "path", "pid", "ready", "state", "tensor", "value")

    def __init__(self, tensor: torch.Tensor, info: OffloadInfo, ready: torch.cuda.Event | None) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.info = info
        self.ready = ready  # on a device: the stream is done that made the tensor
        self.dtype, self.device = tensor.dtype, tensor.device
        self.state: Literal["waiting", "writing", "written", "stuck", "gone"] = "waiting"
        self.path = ""
        self.pid = os.getpid()
        self.checksum = 0
        self.value: torch.Tensor | None = None  # what a thread has read ahead


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
