"""The score by which budgets choose what to evict, whatever they evict: prefixes of regions, or storages."""

from __future__ import annotations

import math


def eviction_score(cost: float, size_bytes: float, staleness: float) -> float:
    """Return what it costs to compute something again, over its bytes and over how long nothing has used it.

    Args:
        cost: Time that it takes to compute it again, in the unit of the caller.
        size_bytes: Bytes that its eviction frees.
        staleness: Time since it was used last, in the unit of the caller; 1 where the score does not decay.

    Returns:
        The least is evicted first. Infinite where bytes or staleness are zero.

    Example:
        >>> eviction_score(6.0, 3, 2.0)
        1.0
    """
    freed = size_bytes * staleness
    return cost / freed if freed else math.inf
