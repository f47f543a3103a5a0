"""Explicit activation rematerialization for PyTorch."""

from torch_remat._auto_forward import auto_forward, op
from torch_remat._checkpoint import checkpoint, checkpoint_sequential, is_recomputing
from torch_remat._handle import RematHandle, get_handle
from torch_remat._names import name_scope
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.errors import (
    MismatchError,
    MutationError,
    OutputError,
    PlaceholderError,
    ReleasedError,
    RematError,
    UsageError,
)

__all__ = [
    "CheckpointPolicy",
    "MismatchError",
    "MutationError",
    "OutputError",
    "PlaceholderError",
    "ReleasedError",
    "RematError",
    "RematHandle",
    "UsageError",
    "auto_forward",
    "checkpoint",
    "checkpoint_sequential",
    "get_handle",
    "is_placeholder",
    "is_recomputing",
    "name_scope",
    "op",
]
