"""What replay does with an op."""

from __future__ import annotations

from enum import Enum

from torch_remat.errors import UsageError, shown


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


def require_policy(policy: object, op: str, region: str | None = None) -> None:
    """Raise `UsageError` if what was given as the policy of one call is not one."""
    if not isinstance(policy, CheckpointPolicy):
        raise UsageError(
            f"{shown(policy)} is not a policy",
            region=region,
            op=op,
            remedy="The policy of a call is remat.CheckpointPolicy.SAVE, OFFLOAD or RECOMPUTE.",
        )
