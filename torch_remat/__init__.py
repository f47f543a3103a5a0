"""Explicit activation rematerialization for PyTorch."""

from torch_remat._checkpoint import checkpoint, checkpoint_sequential, is_recomputing
from torch_remat.errors import MismatchError, MutationError, OutputError, ReleasedError, RematError, UsageError

__all__ = [
    "MismatchError",
    "MutationError",
    "OutputError",
    "ReleasedError",
    "RematError",
    "UsageError",
    "checkpoint",
    "checkpoint_sequential",
    "is_recomputing",
]
