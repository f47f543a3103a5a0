"""What replay does with an op: as users say it, and as policies decide it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

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


class Decision(IntEnum):
    """What a policy says of one result; where policies are combined the higher one holds.

    Attributes:
        keeps: Whether the result is kept, here or elsewhere.
        offloads: Whether it leaves the device.
    """

    PREFER_RECOMPUTE = 0
    PREFER_OFFLOAD = 1
    PREFER_SAVE = 2
    MUST_RECOMPUTE = 3
    MUST_OFFLOAD = 4
    MUST_SAVE = 5
    LEFT_OUT = 6

    keeps: bool
    offloads: bool

    def __init__(self, _value: int) -> None:
        self.offloads = self._name_.endswith("OFFLOAD")
        self.keeps = self.offloads or self._name_.endswith("SAVE")


# By name, since not all releases of torch know the policies that offload.
OF_TORCH = {
    name: Decision[name.replace("CPU_", "")]
    for name in TorchPolicy.__members__
    if name.replace("CPU_", "") in Decision.__members__
}
_SAID: dict[Any, Decision] = {
    False: Decision.PREFER_RECOMPUTE,
    None: Decision.PREFER_RECOMPUTE,  # a function written for selective activation checkpointing may fall through
    True: Decision.MUST_SAVE,
    CheckpointPolicy.RECOMPUTE: Decision.PREFER_RECOMPUTE,
    CheckpointPolicy.SAVE: Decision.MUST_SAVE,
    CheckpointPolicy.OFFLOAD: Decision.MUST_OFFLOAD,
    **{TorchPolicy[name]: decision for name, decision in OF_TORCH.items()},
}


# What a policy function may return, or a mapping say, with the answer of a decider: the one decision for all results.
RECOMPUTED = (Decision.PREFER_RECOMPUTE,)
ANSWERS: dict[Any, Sequence[Decision]] = {
    said: RECOMPUTED if decision is Decision.PREFER_RECOMPUTE else (decision,) for said, decision in _SAID.items()
}
