"""What static schedules need on a chain: two yardsticks for heuristics.

The chain is N layers forward, then a gradient op for each, from the last to the first; a gradient op reads the input
of its layer and the gradient above it. Every result takes one unit of memory and every op one unit of time; a layer's
own result is not needed by its gradient. Without recomputation such a chain needs N units (3 at least).
"""

from __future__ import annotations

import math

from torch_remat.errors import UsageError


def optimal_chain(length: int, budget: int) -> int:
    """Return how many forward ops the best schedule runs again; none can do with fewer.

    The best schedule is that of Griewank and Walther's *revolve*: if each layer of a stretch is passed ``r`` times at
    most, with ``c`` results held at most, the stretch can have ``comb(c + r, c)`` layers. While the last layers run
    there is no gradient above them, so that a chain is a stretch of one layer less, whose first pass counts as its own.

    Args:
        length: Layers of the chain.
        budget: Results that may be held at once, those of the op that runs included.

    Raises:
        UsageError: No schedule fits: three layers and more need a budget of 3, two need 2.

    Example:
        >>> optimal_chain(64, 64), optimal_chain(64, 16), optimal_chain(64, 3)
        (0, 48, 1891)
    """
    if length < 1 or budget < min(length, 3):
        raise UsageError(
            f"a chain of {length} layers does not fit in a budget of {budget}",
            remedy="It takes a layer at least, and a budget of 3 (1 for one layer, 2 for two).",
        )
    if budget >= length:
        return 0
    held, passes = budget - 2, 1
    while math.comb(held + passes, held) < length - 1:
        passes += 1
    return (passes - 1) * (length - 1) - math.comb(held + passes, held + 1) + 1


def chen_chain(length: int) -> tuple[int, int]:
    """Return the budget and the forward ops run again of Chen's schedule: segments of the square root.

    Forward holds the last result of each segment; backward runs each segment again, once.

    Args:
        length: Layers of the chain.

    Example:
        >>> chen_chain(64)
        (15, 56)
    """
    size = math.ceil(math.sqrt(length))
    segments = [min(size, length - start) for start in range(0, length, size)]
    # Before a segment lie the results held, in it its own but the last, and the gradient above with the new one.
    budget = max(held + layers - 1 + (1 if held == len(segments) - 1 else 2) for held, layers in enumerate(segments))
    return max(budget, min(length, 3)), sum(layers - 1 for layers in segments)
