"""What replay does with an op."""

from __future__ import annotations

from enum import Enum


class CheckpointPolicy(Enum):
    """Whether replay runs an op again.

    Example:
        >>> import torch_remat as remat
        >>> remat.CheckpointPolicy.SAVE
        <CheckpointPolicy.SAVE: 'save'>
    """

    RECOMPUTE = "recompute"
    """Replay runs the op again; of its inputs, those that replay would not have are kept."""

    SAVE = "save"
    """Replay skips the op; what its backward needs is kept from forward."""

    OFFLOAD = "offload"
    """As SAVE, but what is kept leaves the device and comes back when it is needed; see `Offloader`."""
