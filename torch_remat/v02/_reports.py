"""Reports of what is kept, under the names of 0.2.x: the texts are those of this library's reports.

In: losses, and a function that says something of each tensor. Kept: the latest snapshot of CUDA's allocator, until
`clear_memory_snapshot_cache`. Out: text.
"""

from __future__ import annotations

import gc
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import PurePath
from typing import Any, TextIO

import torch

from torch_remat.errors import UsageError
from torch_remat.reports.ledger import Annotate, storages_of
from torch_remat.reports.memory import annotated_report, current_report
from torch_remat.reports.text import format_bytes, format_region

Roots = torch.Tensor | Iterable[torch.Tensor] | None


def format_current_memory_report(annotate: Annotate | None = None) -> str:
    """Return, as text, what the region that runs now keeps so far.

    Args:
        annotate: What it returns for a tensor stands in the tensor's line.

    Raises:
        UsageError: No region runs here.
    """
    return format_region(current_report("format_current_memory_report", annotate))


def print_current_memory_report(file: TextIO | None = None, annotate: Annotate | None = None) -> None:
    """Print what `format_current_memory_report` returns.

    Args:
        file: Where to; standard output if None.
        annotate: What it returns for a tensor stands in the tensor's line.

    Raises:
        UsageError: No region runs here.
    """
    _write(file, format_region(current_report("print_current_memory_report", annotate)))


def format_saved_tensors_report(roots: Roots = None, annotate: Annotate | None = None) -> str:
    """Return, as text, what is kept for backward: by all live regions, and by the graph below some tensors.

    Args:
        roots: One tensor or several, such as the loss; None for the regions alone.
        annotate: What it returns for a tensor that a region keeps stands in the tensor's line.
    """
    given = () if roots is None else (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
    return str(annotated_report(given, annotate))


def print_saved_tensors_report(
    roots: Roots = None, file: TextIO | None = None, annotate: Annotate | None = None
) -> None:
    """Print what `format_saved_tensors_report` returns.

    Args:
        roots: One tensor or several, such as the loss; None for the regions alone.
        file: Where to; standard output if None.
        annotate: What it returns for a tensor that a region keeps stands in the tensor's line.
    """
    _write(file, format_saved_tensors_report(roots, annotate))


def format_oom_saved_tensors_report(annotate: Annotate | None = None) -> str:
    """Return, as text, what is kept for backward by all regions and all graphs that are alive.

    Args:
        annotate: What it returns for a tensor stands in the tensor's line; by default where it was allocated, if
            `memory_snapshot_annotate` can tell.
    """
    if annotate is None:
        with suppress(Exception):
            annotate = memory_snapshot_annotate()
    return format_saved_tensors_report(discover_autograd_roots(), annotate)


def discover_autograd_roots() -> list[torch.Tensor]:
    """Return all live tensors with a graph, for reports where no loss is at hand. It looks at every object."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return [tensor for tensor in tensors if tensor.grad_fn is not None]


def memory_snapshot_annotate(snapshot: Mapping[str, Any] | None = None) -> Annotate:
    """Return a function that tells where a tensor's memory was allocated: ``file.py:12 function``.

    Args:
        snapshot: What ``torch.cuda.memory._snapshot()`` returned; by default it is called, once until
            `clear_memory_snapshot_cache`. It has what ``torch.cuda.memory._record_memory_history()`` has recorded.

    Raises:
        UsageError: No snapshot was given, and this build of torch takes none.
    """
    blocks = sorted(_blocks_in(_snapshot() if snapshot is None else snapshot))
    starts = [start for start, _, _ in blocks]

    def annotate(tensor: torch.Tensor) -> str | None:
        for storage in storages_of(tensor):
            at = bisect_right(starts, storage.data_ptr()) - 1
            if at >= 0 and storage.data_ptr() < blocks[at][1]:
                return blocks[at][2]
        return None

    return annotate


def clear_memory_snapshot_cache() -> None:
    """Forget the snapshot, so that the next `memory_snapshot_annotate` takes a new one."""
    _snapshot.cache_clear()


@cache
def _snapshot() -> Mapping[str, Any]:
    take: Callable[[], Mapping[str, Any]] | None = vars(torch.cuda.memory).get("_snapshot")
    if take is None:
        raise UsageError("this build of torch takes no snapshots of CUDA's memory")
    try:
        return take()
    except AttributeError as error:  # of what only builds with CUDA have
        raise UsageError("this build of torch takes no snapshots of CUDA's memory") from error


def _blocks_in(snapshot: Mapping[str, Any]) -> Iterable[tuple[int, int, str]]:
    """Yield start, end and place of each block that is in use, if it is known."""
    for segment in snapshot.get("segments", ()):
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and (frame := _frame_of_user(block.get("frames") or ())):
                place = f"{PurePath(frame['filename']).name}:{frame['line']} {frame['name']}"
                yield block["address"], block["address"] + block["size"], place


def _frame_of_user(frames: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the innermost frame of Python code other than torch's and this package's; else the innermost."""
    for frame in frames:
        path = PurePath(frame["filename"])
        if path.suffix == ".py" and not {"torch", "torch_remat"} & set(path.parts):
            return frame
    return frames[0] if frames else None


def oom_observer(device: int, alloc: int, device_alloc: int, device_free: int) -> None:
    """Print what is kept for backward; to be attached to CUDA's allocator, which calls it before it raises.

    `torch_remat.report_on_oom` does the same, attached by itself, for the time of a ``with`` block.

    Args:
        device: The device.
        alloc: The bytes that were asked for.
        device_alloc: The bytes that the device had given.
        device_free: The bytes that it had left.
    """
    with suppress(Exception):  # the error that is on its way must not be hidden
        given = f"{format_bytes(device_alloc)} are given and {format_bytes(device_free)} free"
        print(  # noqa: T201
            f"torch_remat: out of memory: {format_bytes(alloc)} were asked for on cuda:{device}, of which {given}\n"
            f"{format_oom_saved_tensors_report()}",
            file=sys.stderr,
        )


def _write(file: TextIO | None, text: str) -> None:
    (sys.stdout if file is None else file).write(text + "\n")
