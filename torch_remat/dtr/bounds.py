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

    A schedule for a stretch of layers, whose input is held, goes forward to some layer, holds its result, does what
    lies behind it with one unit less, and then what lies before it. The best place moves on by at most one when the
    stretch grows by one, so that length times budget steps are enough.

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
    # Forward ops for stretches of 0, 1, 2, ... layers with so much room beside the input and the gradient above:
    # one layer needs room for its gradient. `first` is the last stretch of the chain, which has no gradient above
    # it and so one more unit of room, and whose last layer is run as well.
    stretch: list[float] = [0, 0, *[math.inf] * (length - 1)]
    first: list[float] = [0, 1, *[math.inf] * (length - 1)]
    for _room in range(2, budget + 1):
        first = _with_one_more(first, stretch)
        stretch = _with_one_more(stretch, None)
    return int(first[length]) - length


def _with_one_more(behind: list[float], before: list[float] | None) -> list[float]:
    """Return the fewest ops for each length, where the part behind the held result has one unit less.

    Args:
        behind: Ops for the part behind, by its length.
        before: Ops for the part before, by its length; None where that is what is being computed.
    """
    ops = behind[:2]
    before = ops if before is None else before
    place = 1
    for length in range(2, len(behind)):
        ops.append(place + before[place] + behind[length - place])
        while place + 1 < length:
            other = place + 1 + before[place + 1] + behind[length - place - 1]
            if other > ops[length]:
                break
            ops[length], place = other, place + 1
    return ops


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
