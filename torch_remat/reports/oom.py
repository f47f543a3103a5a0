"""`report_on_oom`: what regions and plain code keep at the moment when an allocation fails.

In: the error, with the frames that it left, and on CUDA the allocator's own call before it raises. Kept: nothing. Out:
a memory report on a stream. The error goes on as it is, whatever happens to the report.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from inspect import CO_OPTIMIZED
from types import TracebackType
from typing import Any, TextIO

import torch
from torch.nn import Module, ModuleList

from torch_remat._compat import accelerator_type, attach_oom_observer
from torch_remat._util.storages import tensors_in
from torch_remat._util.text import format_bytes
from torch_remat.dispatch.mode import current_mode
from torch_remat.reports.memory import memory_report


@dataclass(eq=False)
class _Watch:
    """One `report_on_oom` that is active."""

    file: TextIO | None
    told: bool = False  # by the allocator, about the error that is on its way


_active: list[_Watch] = []


@contextmanager
def report_on_oom(file: TextIO | None = None) -> Iterator[None]:
    """Print a memory report when an allocation inside fails for want of memory.

    It has all live regions. Where the error is seen as an exception, it also has what plain autograd keeps: the graphs
    of the tensors in the frames that the exception left; and if there is no region, the line that makes regions.

    On CUDA the allocator reports it before it raises, while all that filled the memory is there, also if the error is
    then caught inside. Elsewhere the error is seen when it leaves the block, also as the cause or context of another
    one. It is never hidden or changed.

    Args:
        file: Where to; standard error if None.

    Yields:
        None.

    Raises:
        Exception: What was raised inside; nothing of its own.

    Example:
        >>> import torch_remat as remat
        >>> with remat.report_on_oom():
        ...     pass  # a training step
    """
    watch = _Watch(file)
    _attach()
    _active.append(watch)
    handled = id(sys.exc_info()[1])  # what the block is a reaction to, if it is in an except clause
    try:
        yield
    except BaseException as error:
        _tell_of(watch, error, handled)
        raise
    finally:
        _active.remove(watch)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _tell_of(watch: _Watch, error: BaseException, handled: int) -> None:
    """Tell of the failed allocation that an error is, that caused it, or that was handled when it was raised."""
    waiting, seen = [error], {id(error), handled}
    for one in () if watch.told else waiting:  # grows meanwhile
        if is_out_of_memory(one):
            _tell(watch, str(one).partition("\n")[0] or type(one).__name__, one.__traceback__)
            return
        for behind in (one.__cause__, one.__context__, *getattr(one, "exceptions", ())):
            if isinstance(behind, BaseException) and id(behind) not in seen:
                seen.add(id(behind))
                waiting.append(behind)


def on_device_out_of_memory(device: int, requested: int, total: int, free: int) -> None:
    """Tell of a failed allocation, in bytes; the CUDA allocator calls this before it raises."""
    for watch in tuple(_active):
        watch.told = True
        had = f"which has {format_bytes(free)} free of {format_bytes(total)}"
        _tell(watch, f"{format_bytes(requested)} were asked for on cuda:{device}, {had}")


@cache
def _attach() -> None:
    """Attach the observer, once and for all: there is no way to detach one."""
    if attach_oom_observer is not None and accelerator_type() == "cuda":
        torch.cuda.init()
        attach_oom_observer(on_device_out_of_memory)


def _tell(watch: _Watch, what: str, traceback: TracebackType | None = None) -> None:
    with suppress(Exception):
        file = sys.stderr if watch.file is None else watch.file
        mode = current_mode()
        where = "" if mode is None else f" in the {'replay' if mode.replaying else 'forward'} of {mode.region.name}"
        try:
            text = f"{what}\n{_report(traceback)}"
        except Exception as error:
            text = f"{what}\nno memory report: {type(error).__name__}: {error}"
        file.write(f"torch_remat: out of memory{where}: {text}\n")
        file.flush()


def _report(traceback: TracebackType | None) -> str:
    """Return what is kept, by regions and below the tensors of the frames of a traceback, and how to keep less."""
    found = list(_values_in(traceback))
    modules = [one for one in found if isinstance(one, Module)]
    roots = [one for value in found for one in tensors_in(value) if one.grad_fn is not None]
    report = memory_report(*roots, *modules) if roots else memory_report()
    if report.older:  # regions matter more than plain code
        report = memory_report()
    if report.regions:
        return f"{report}\nTo keep less: smaller regions (of one layer each), a smaller batch, or offload_inputs=True."
    if not roots:
        return f"{report}\nWhat plain code keeps is in remat.memory_report(loss), with a smaller batch."
    return (
        f"{report}\nNo region is alive: all this is what plain autograd keeps. To keep less, add one line after the "
        f"model is made: remat.checkpoint_modules(model, {_patterns(modules)!r})"
    )


def _patterns(modules: list[Module]) -> str | list[str]:
    """Return the patterns for the layers of the outermost module: its lists of modules that are in no other."""
    found: list[str] = []
    for name, one in modules[0].named_modules() if modules else ():
        if name and isinstance(one, ModuleList) and not any(fnmatchcase(name, pattern) for pattern in found):
            found.append(f"{name}.*")
    return found if len(found) > 1 else (found or ["layers.*"])[0]


def _values_in(traceback: TracebackType | None) -> Iterator[Any]:
    """Yield the local variables of the frames of a traceback, the outermost first."""
    while traceback is not None:
        frame = traceback.tb_frame
        found = frame.f_locals
        yield from list(found.values())
        if frame.f_code.co_flags & CO_OPTIMIZED and type(found) is dict:
            found.clear()  # a copy, which would keep what the variables of a frame that goes on were
        traceback = traceback.tb_next
