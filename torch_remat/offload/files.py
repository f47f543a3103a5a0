"""Raw files: one tensor each, nothing but its bytes, readable by their owner only.

In: bytes in memory. Kept: a file whose name tells which process it belongs to. Out: the bytes, checked. Nothing is ever
unpickled.

What is read is a copy, in memory that is mapped for it. To map the file itself would be a trap: who shortens it then
ends this process (SIGBUS), and who changes it changes what was checked already.

A name is ``torch_remat-<machine>-<pid>-<start time of the process>-<number>.raw``. A process that finds files of its
own machine whose process is gone (no such pid, or another start time) removes them. Files of other machines, of
other pid namespaces and of other users are left alone.
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
from functools import cache
from pathlib import Path

import torch

_CHUNK_BYTES = 4 << 20
_NAME = re.compile(r"torch_remat-([0-9a-f]{8})-(\d+)-(\d+)-\d+\.raw")
_numbers = itertools.count()


def new_path(directory: str) -> str:
    """Return a path for a new file of this process."""
    return os.path.join(directory, f"{_prefix(os.getpid())}-{next(_numbers)}.raw")


def write(path: str, content: torch.Tensor) -> int:
    """Write a tensor's bytes to a new private file, and return their checksum.

    Args:
        path: Where the file shall be; nothing may be there.
        content: A contiguous tensor of the CPU.

    Raises:
        OSError: The disk is full, the directory is gone, ... What was written of the file stays.
    """
    checksum, memory = 0, _memory_of(content)
    with open(path, "xb", buffering=0, opener=_open_private) as file:
        for start in range(0, len(memory), _CHUNK_BYTES):
            chunk = memory[start : start + _CHUNK_BYTES]
            checksum = zlib.crc32(chunk, checksum)
            while len(chunk):
                chunk = chunk[os.write(file.fileno(), chunk) :]
    return checksum


def read(path: str, count: int, checksum: int) -> torch.Tensor:
    """Return a file's bytes as a tensor; whatever becomes of the file, they stay as they are.

    Args:
        path: The file.
        count: How many bytes it must have.
        checksum: What `write` returned.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has another length or other content than when it was written.
    """
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


def remove_orphans(directory: str) -> list[str]:
    """Remove the files in a directory that belong to processes that are gone; return their names."""
    removed: list[str] = []
    if os.name != "posix":
        return removed
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None or match[1] != _machine() or _is_alive(int(match[2]), int(match[3])):
                continue
            with suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                    os.unlink(entry.path)
                    removed.append(entry.name)
    return removed


@cache
def _prefix(pid: int) -> str:
    """Return how the names of this process begin; a forked child has a pid of its own."""
    return f"torch_remat-{_machine()}-{pid}-{_start_time(pid) or 0}"


def _open_private(path: str, flags: int) -> int:
    # Without O_NONBLOCK, to open a pipe would wait for someone who writes to it.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)


def _memory_of(content: torch.Tensor) -> memoryview:
    array = (ctypes.c_char * content.nbytes).from_address(content.data_ptr())
    return memoryview(array).cast("B")


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
