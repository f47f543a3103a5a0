"""Raw files: one tensor each, nothing but its bytes, readable by their owner only; and what is known of each.

What is read is a copy, in memory that is mapped for it. To map the file itself would be a trap: who shortens it then
ends this process (SIGBUS), and who changes it changes what was checked already.

A name is ``torch_remat-<machine>-<pid>-<start time of the process>-<number>.raw``. Files of this machine, pid namespace
and user whose process is gone (no such pid, or another start time) are removed by the next process that finds them.

NOTE [ Life of a disk ticket ]
1. QUEUED and RUNNING: it has the tensor, which may be read; a thread writes the file. DONE: the tensor is let go of,
   and the file is read. FAILED: there is no file; the tensor stays until it is released, and the first failure is told.
2. What is released while it is QUEUED is not written. What is RUNNING then, its thread drops when it is done.
3. All of that changes under the store's lock. The ticket that a dying thread had in its hands has FAILED; the next call
   that needs threads starts another.
4. A forked child has no threads, and no files either: what was written belongs to the parent, and may be read; what was
   not has FAILED, which nobody needs to be told.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import re
import socket
import stat
import zlib
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path

import torch

from torch_remat.offload.protocol import OffloadInfo
from torch_remat.offload.streams import event_after, host_copy

_CHUNK_BYTES = 4 << 20
_NAME = re.compile(r"torch_remat-([0-9a-f]{8})-(\d+)-(\d+)-\d+\.raw")
_numbers = itertools.count()


Stage = Enum("Stage", ["QUEUED", "RUNNING", "DONE", "FAILED"])
"""How far a thread has come with a ticket; see NOTE [ Life of a disk ticket ]."""


class DiskTicket:
    """One tensor in a file, or on its way there; see NOTE [ Life of a disk ticket ].

    Attributes:
        stage: How far the latest job has come: to write the file, or to read it ahead.
        failure: Why the file could not be written; empty once it is there.
        tensor: What was offloaded, until the file is there.
        ahead: What was read ahead.
    """

    __slots__ = (
        *("ahead", "checksum", "device", "dtype", "failure", "info", "path", "ready", "released", "stage", "tensor"),
    )

    def __init__(self, directory: str, tensor: torch.Tensor, info: OffloadInfo) -> None:
        self.path, self.info, self.ready = new_path(directory), info, event_after(tensor)
        self.dtype, self.device = tensor.dtype, tensor.device
        self.tensor: torch.Tensor | None = tensor
        self.ahead: torch.Tensor | None = None
        self.stage, self.failure = Stage.QUEUED, "the thread that wrote the file died"
        self.checksum = 0
        self.released = False

    def read(self) -> torch.Tensor:
        """Return what the file has, as bytes of the CPU; may raise ``OSError`` or ``ValueError``."""
        return read(self.path, self.info.bytes, self.checksum)

    def work(self) -> None:
        """Write the file, or read it ahead if it is there. If that fails, who asks for it reads it again, and tells."""
        try:
            if self.failure:
                assert self.tensor is not None
                self.checksum = write(self.path, host_copy(self.tensor, self.ready))
                self.failure = ""
            else:
                self.ahead = self.read()
        except Exception as error:
            if self.failure:
                self.failure = f"{type(error).__name__}: {error}"
        finally:
            if self.failure:
                remove(self.path)


def new_path(directory: str) -> str:
    """Return a path for a new file of this process."""
    pid = os.getpid()
    return os.path.join(directory, f"torch_remat-{_machine()}-{pid}-{_start_time(pid) or 0}-{next(_numbers)}.raw")


def write(path: str, content: torch.Tensor) -> int:
    """Write a contiguous tensor of the CPU to a new private file, and return a checksum; may raise ``OSError``."""
    checksum, memory = 0, memoryview((ctypes.c_char * content.nbytes).from_address(content.data_ptr())).cast("B")
    with open(path, "xb", buffering=0, opener=_open_private) as file:
        for start in range(0, len(memory), _CHUNK_BYTES):
            chunk = memory[start : start + _CHUNK_BYTES]
            checksum = zlib.crc32(chunk, checksum)
            while len(chunk):
                chunk = chunk[os.write(file.fileno(), chunk) :]
    return checksum


def read(path: str, count: int, checksum: int) -> torch.Tensor:
    """Return a file's bytes; ``OSError`` or, if their count or checksum is another than in `write`, ``ValueError``."""
    with open(path, "rb", buffering=0, opener=_open_private) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is no regular file any more")
        if about.st_size != count:
            raise ValueError(f"it has {about.st_size:,} bytes instead of {count:,}")
        content = mmap.mmap(-1, count, access=mmap.ACCESS_COPY)
        length = found = 0
        with memoryview(content) as memory:
            while got := file.readinto(memory[length : length + _CHUNK_BYTES]):
                found = zlib.crc32(memory[length : length + got], found)
                length += got
    if found != checksum:
        raise ValueError("its checksum is not that of what was written")
    return torch.frombuffer(content, dtype=torch.uint8)


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    with suppress(OSError):
        os.unlink(path)


def remove_orphans(directory: str) -> None:
    """Remove the files in a directory that belong to processes that are gone."""
    with suppress(OSError):
        for name in os.listdir(directory) if os.name == "posix" else ():
            match, path = _NAME.fullmatch(name), os.path.join(directory, name)
            if match and match[1] == _machine() and not _is_alive(int(match[2]), int(match[3])):
                about = os.lstat(path)
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                    remove(path)


def _open_private(path: str, flags: int) -> int:
    # Without O_NONBLOCK, to open a pipe would wait for someone who writes to it.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)


def _is_alive(pid: int, start_time: int) -> bool:
    present = _start_time(pid)
    if present is not None or Path("/proc/self/stat").exists():
        return present == start_time
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _start_time(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine did, or None if there is none or no way to know."""
    try:
        # The process's name stands in brackets and may contain anything; field 22 is the start time.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


@cache
def _machine() -> str:
    """Return a mark of this machine and pid namespace: elsewhere, a pid means nothing."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(f'{socket.gethostname()} {namespace}'.encode()):08x}"
