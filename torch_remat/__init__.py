"""Explicit activation rematerialization for PyTorch."""

import importlib
import types
import typing

from torch_remat import policies, testing
from torch_remat._auto_forward import auto_forward, op
from torch_remat._checkpoint import checkpoint, checkpoint_sequential, is_recomputing
from torch_remat._handle import get_handle
from torch_remat._list_names import NamedResult, NameTable, list_names
from torch_remat._names import name_scope
from torch_remat._native import native_region, native_save_region
from torch_remat._offload import offload_to
from torch_remat._save_names import checkpoint_name, offload_names, save_names
from torch_remat.dispatch.op import RematHandle
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.errors import (
    LogError,
    MismatchError,
    MutationError,
    OffloadError,
    OutputError,
    PlaceholderError,
    PolicyError,
    ReleasedError,
    RematError,
    RematWarning,
    UsageError,
)
from torch_remat.offload import CpuOffloader, DiskOffloader, Offloader, OffloadInfo
from torch_remat.reports.explain import explain
from torch_remat.reports.explanation import Explanation
from torch_remat.reports.memory import format_current_memory_report, memory_report, print_current_memory_report
from torch_remat.reports.model import MemoryReport
from torch_remat.reports.oom import report_on_oom
from torch_remat.reports.timeline import Trace
from torch_remat.reports.trace import trace

if typing.TYPE_CHECKING:
    from torch_remat import dtr

__all__ = [
    "CheckpointPolicy",
    "CpuOffloader",
    "DiskOffloader",
    "Explanation",
    "LogError",
    "MemoryReport",
    "MismatchError",
    "MutationError",
    "NameTable",
    "NamedResult",
    "OffloadError",
    "OffloadInfo",
    "Offloader",
    "OutputError",
    "PlaceholderError",
    "PolicyError",
    "ReleasedError",
    "RematError",
    "RematHandle",
    "RematWarning",
    "Trace",
    "UsageError",
    "auto_forward",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_sequential",
    "dtr",
    "explain",
    "format_current_memory_report",
    "get_handle",
    "is_placeholder",
    "is_recomputing",
    "list_names",
    "memory_report",
    "name_scope",
    "native_region",
    "native_save_region",
    "offload_names",
    "offload_to",
    "op",
    "policies",
    "print_current_memory_report",
    "report_on_oom",
    "save_names",
    "testing",
    "trace",
]


if not typing.TYPE_CHECKING:  # a type checker knows the names above and no others

    def __getattr__(name: str) -> types.ModuleType:
        """Import the bench for dynamic rematerialization when it is first named: nothing else needs it."""
        if name == "dtr":
            return importlib.import_module("torch_remat.dtr")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
