"""Raw files: one tensor each, nothing but its bytes, readable by their owner only.

What is read is a copy, in memory that is mapped for it. To map the file itself would be a trap: who shortens it then
ends this process (SIGBUS), and who changes it changes what was checked already.

The files of one process and offloader are in a temporary directory of their own, with a file ``lock`` that the process
has locked as long as it lives. A directory whose lock is free was left by a process that was killed: the next one that
comes removes it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from weakref import finalize

import torch

from torch_remat.offload.shared import Notices

if sys.platform != "win32":
    import fcntl

_PREFIX = "torch_remat-"
_PART_BYTES = 4 << 20


class Folder:
    """A new directory in another one, with mode 0700, for the files of this process; may raise ``OSError``.

    It is removed with all files when nothing refers to it, and at exit; then users are told what they were not yet.
    """

    def __init__(self, directory: str, notices: Notices) -> None:
        self.notices = notices
        self._pid = os.getpid()  # what a forked child has of it is not its own
        self._numbers = itertools.count()
        lock = -1
        while lock < 0:
            self._path = tempfile.mkdtemp(prefix=_PREFIX, dir=directory)
            file = os.path.join(self._path, "lock")
            lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            _lock(lock)
            if not os.path.exists(file):  # another process came before it was locked, and has removed it
                os.close(lock)
                lock = -1
        finalize(self, _remove, self._path, lock, self._pid, notices)

    def new_path(self) -> str:
        """Return a path for a new file."""
        return os.path.join(self._path, f"{next(self._numbers)}.raw")

    def remove_file(self, path: str) -> None:
        """Remove a file, if it is there and of this process."""
        if self._pid == os.getpid():
            with suppress(OSError):
                os.unlink(path)


def _remove(path: str, lock: int, pid: int, notices: Notices) -> None:
    os.close(lock)
    if pid == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
        if os.path.isdir(os.path.dirname(path)):  # else its owner was done with it, as with a temporary one
            notices.tell_failure()


def remove_folders_left_in(directory: str) -> None:
    """Remove what processes that are gone have left in a directory."""
    for folder in Path(directory).glob(f"{_PREFIX}*") if sys.platform != "win32" else ():
        with suppress(OSError):  # such as that of another user, or one that is locked
            lock = os.open(folder / "lock", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks, on which nobody takes it for free
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX)


def write(path: str, content: torch.Tensor) -> int:
    """Write a contiguous tensor of the CPU to a new private file, and return a checksum; may raise ``OSError``."""
    memory = memoryview((ctypes.c_char * content.nbytes).from_address(content.data_ptr())).cast("B")
    checksum = 0
    with open(path, "xb", opener=_open_private) as file:
        for part in _parts(memory):
            checksum = zlib.crc32(part, checksum)
            file.write(part)
    return checksum


def read(path: str, count: int, checksum: int) -> torch.Tensor:
    """Return a file's bytes; ``OSError`` or, if their count or checksum is another than in `write`, ``ValueError``."""
    with open(path, "rb", opener=_open_private) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is no longer a regular file")
        if about.st_size != count:
            raise ValueError(f"it has {about.st_size:,} bytes instead of {count:,}")
        content, found = mmap.mmap(-1, count, access=mmap.ACCESS_COPY), 0
        for part in _parts(memoryview(content)):
            file.readinto(part)
            found = zlib.crc32(part, found)
    if found != checksum:
        raise ValueError("its checksum is not that of what was written")
    return torch.frombuffer(content, dtype=torch.uint8)


def _parts(memory: memoryview) -> Iterator[memoryview]:
    """Yield parts that are still in the processor's cache when they are looked at again."""
    return (memory[start : start + _PART_BYTES] for start in range(0, len(memory), _PART_BYTES))


def _open_private(path: str, flags: int) -> int:
    # Without O_NONBLOCK, to open a pipe would wait for someone who writes to it.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)
