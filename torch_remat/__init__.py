"""Explicit activation rematerialization for PyTorch."""

from typing import TYPE_CHECKING

from torch_remat import _requires as _requires  # first: it says so where torch is too old
from torch_remat import policies
from torch_remat._checkpoint import checkpoint, checkpoint_sequential, is_recomputing
from torch_remat._handle import auto_forward, get_handle
from torch_remat._names import checkpoint_name, name_scope
from torch_remat._offload import offload_to
from torch_remat._op import native_save_region, op, recompute_needs_tensor
from torch_remat._util.lazy import loaded_on_use
from torch_remat.dispatch.call.handle import RematHandle
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.errors import (
    MismatchError,
    MutationError,
    OffloadError,
    PlaceholderError,
    PolicyError,
    ReleasedError,
    RematError,
    RematWarning,
    UsageError,
)
from torch_remat.offload.protocol import Offloader
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat import budgets as budgets
    from torch_remat import dtr, testing
    from torch_remat import reports as reports
    from torch_remat._drop_in import drop_in
    from torch_remat.budgets.limit import budget
    from torch_remat.modules.hugging_face import enable_gradient_checkpointing
    from torch_remat.modules.layers import checkpoint_modules
    from torch_remat.modules.saved import save_modules
    from torch_remat.offload.cpu import CpuOffloader
    from torch_remat.offload.disk import DiskOffloader
    from torch_remat.policies.names import offload_names, save_names
    from torch_remat.reports.explain import explain
    from torch_remat.reports.memory import format_current_memory_report, memory_report, print_current_memory_report
    from torch_remat.reports.names import list_names
    from torch_remat.reports.oom import report_on_oom
    from torch_remat.reports.trace import trace

__all__ = [
    "CheckpointPolicy",
    "CpuOffloader",
    "DiskOffloader",
    "MismatchError",
    "MutationError",
    "OffloadError",
    "Offloader",
    "PlaceholderError",
    "PolicyError",
    "ReleasedError",
    "RematError",
    "RematHandle",
    "RematWarning",
    "UsageError",
    "auto_forward",
    "budget",
    "checkpoint",
    "checkpoint_modules",
    "checkpoint_name",
    "checkpoint_sequential",
    "drop_in",
    "dtr",
    "enable_gradient_checkpointing",
    "explain",
    "format_current_memory_report",
    "get_handle",
    "is_placeholder",
    "is_recomputing",
    "list_names",
    "memory_report",
    "name_scope",
    "native_save_region",
    "offload_names",
    "offload_to",
    "op",
    "policies",
    "print_current_memory_report",
    "recompute_needs_tensor",
    "report_on_oom",
    "save_modules",
    "save_names",
    "testing",
    "trace",
]

# What a training step may do without is loaded when it is first asked for: by module, its names.
_LOADED_ON_USE = {
    "_drop_in": ("drop_in",),
    "modules.hugging_face": ("enable_gradient_checkpointing",),
    "modules.layers": ("checkpoint_modules",),
    "modules.saved": ("save_modules",),
    "budgets.limit": ("budget",),
    "offload.cpu": ("CpuOffloader",),
    "offload.disk": ("DiskOffloader",),
    "policies.names": ("offload_names", "save_names"),
    "reports.explain": ("explain",),
    "reports.memory": ("format_current_memory_report", "memory_report", "print_current_memory_report"),
    "reports.names": ("list_names",),
    "reports.oom": ("report_on_oom",),
    "reports.trace": ("trace",),
    "budgets": ("budgets",),
    "dtr": ("dtr",),
    "reports": ("reports",),
    "testing": ("testing",),
}
__getattr__ = loaded_on_use(__name__, _LOADED_ON_USE, [policies])


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, "budgets", "offload", "reports"})
