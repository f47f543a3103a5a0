"""What a budget's block refuses: models that are split or copied over ranks.

DDP and FSDP look at gradients in C++ code, past all ops, where an evicted tensor has no data; what functional
collectives return is wrapped and unwrapped past autograd, which would lose gradients; and an op of one rank that waits
for an op of another must not depend on what each evicts by its own clock. In: an op of the block. Out: an
error that says what to use instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_remat.errors import UsageError

# The ranges of a profile that the wrappers' forwards begin with, whether or not a profiler runs.
_RANGES = ("DistributedDataParallel.forward", "FullyShardedDataParallel.forward", "FSDP::")


def refuse_op(name: str, args: Sequence[Any]) -> None:
    """Raise if an op that must not run twice is a functional collective, or begins the forward of a wrapper."""
    if name.startswith("_c10d_functional"):
        raise _refusal(name)
    if args and isinstance(args[0], str) and args[0].startswith(_RANGES):
        raise _refusal(args[0].split(" ")[0])


def refuse_type(kind: type) -> None:
    """Raise if a tensor subclass stands for more than this rank's."""
    if kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed."):
        raise _refusal(kind.__name__)


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"remat.dtr.budget does not run over ranks, and {what} came in: each rank would evict by its own clock",
        remedy="Make regions instead, by remat.checkpoint_modules(model, ...) with a policy, or train with "
        "remat.budget(...). In a pipeline, a stage that is neither DDP, FSDP nor DTensor may run in a block.",
    )
