"""A policy by price: of each region what is dearest to recompute is kept, as far as a share of its bytes goes.

In: a share. Kept: nothing. Out: a rung of a region's ladder, which the runtime has recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_remat.errors import PolicyError, shown
from torch_remat.policies.given import as_policy as as_policy  # which `|` asks
from torch_remat.policies.policy import ChoosesRungs, OpPolicy

if TYPE_CHECKING:
    from torch_remat.ladders.ladder import Ladder, Rung


class MemoryBudget(OpPolicy):
    """Keeps of each region what is dearest to recompute, within a share of the bytes; see `memory_budget`."""

    def __init__(self, share: float) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise PolicyError(
                f"memory_budget({shown(share)}) is not a share",
                remedy="Give a number from 0, which recomputes everything, to 1, which recomputes nothing: 0.5.",
            )
        self._share = share

    def __repr__(self) -> str:
        return f"memory_budget({self._share})"

    def price(self) -> ChoosesRungs | None:
        """Return it."""
        return self

    def choose(self, ladder: Ladder) -> Rung:
        """Return what a region keeps, given what it can keep."""
        return ladder.at_share(self._share)

    def parts(self) -> tuple[Any, ...]:
        """Return the kind and the share; in a compiled region nothing is known of calls, and all is recomputed."""
        return MemoryBudget, self._share, None


def memory_budget(share: float) -> MemoryBudget:
    """Keep of each region what is dearest to recompute, within a share of the bytes that it would keep as plain code.

    The first forwards of a region's code keep nothing and are recorded, by call of a function of torch: its bytes, what
    reads it, its seconds. Minimum cuts of that tell what is worth keeping at each number of bytes: so of two tensors of
    one size that is kept whose recomputation takes longer. It needs no block around the step, as `remat.budget` does.
    Regions inside of other regions, under other saved-tensor hooks, and those that are compiled recompute everything.
    So do regions that communicate with other ranks, since each rank would decide by its own clock.

    Args:
        share: Of the bytes between what a region keeps if all is recomputed and what it keeps as plain code: from 0
            to 1. No more is kept; it may be less, since calls are kept as a whole.

    Returns:
        A policy, which ``|`` combines with functions and modules that are kept in any case, and
        ``& ~remat.save_names(...)`` with names of calls that are not.

    Raises:
        PolicyError: The share is no number from 0 to 1; or it is combined with a policy for ops.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> run = remat.checkpoint(policy=remat.policies.memory_budget(0.5))(block)
        >>> run(torch.randn(4, 8, requires_grad=True)).sum().backward()
    """
    return MemoryBudget(share)
