"""Which ops are collectives, told by their namespaces: those of torch.distributed, functional and in place."""

from __future__ import annotations

from typing import Any

from torch_remat._compat import COLLECTIVES

# They communicate nothing. What waits hands on the memory of the collective's result, which is kept with that.
_NO_COMMUNICATION = frozenset(("wait_tensor", "_wrap_tensor_autograd", "check_for_nan"))


def is_of_collectives(op: Any) -> bool:
    """Whether an op is a collective, or waits for one."""
    return getattr(op, "namespace", "") in COLLECTIVES


def is_collective(op: Any) -> bool:
    """Whether an op communicates with other processes."""
    return is_of_collectives(op) and op.overloadpacket.__name__ not in _NO_COMMUNICATION


def is_all_gather(op: Any) -> bool:
    """Whether a collective gathers the parts of all processes in each, also beside something else."""
    return "allgather" in op.overloadpacket.__name__.replace("_", "")
