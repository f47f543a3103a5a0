"""The names of torch_remat 0.2.x, over this library: ``import torch_remat.v02 as remat``.

Code written for that release runs with this line changed and no other. ``docs/migrating.md`` lists what differs.
Nothing else in the package imports it.
"""

from torch_remat._checkpoint import is_recomputing
from torch_remat._region import recompute_needs_tensor
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.v02._checkpoint import checkpoint, name_scope, region
from torch_remat.v02._hooks import (
    SavedTensorInfo,
    SavedTensorKind,
    current_saved_tensor_info,
    save_for_backward,
    saved_tensors_hooks,
)
from torch_remat.v02._reports import (
    clear_memory_snapshot_cache,
    discover_autograd_roots,
    format_current_memory_report,
    format_oom_saved_tensors_report,
    format_saved_tensors_report,
    memory_snapshot_annotate,
    oom_observer,
    print_current_memory_report,
    print_saved_tensors_report,
)
from torch_remat.v02._scope import RecomputeStateHook
from torch_remat.v02._trace import collect_trace, trace_scope

__all__ = [
    "RecomputeStateHook",
    "SavedTensorInfo",
    "SavedTensorKind",
    "checkpoint",
    "clear_memory_snapshot_cache",
    "collect_trace",
    "current_saved_tensor_info",
    "discover_autograd_roots",
    "format_current_memory_report",
    "format_oom_saved_tensors_report",
    "format_saved_tensors_report",
    "is_placeholder",
    "is_recomputing",
    "memory_snapshot_annotate",
    "name_scope",
    "oom_observer",
    "print_current_memory_report",
    "print_saved_tensors_report",
    "recompute_needs_tensor",
    "region",
    "save_for_backward",
    "saved_tensors_hooks",
    "trace_scope",
]
