"""What is bought at one price, beside the optimum that trying everything finds."""

from __future__ import annotations

import random
from itertools import product
from types import SimpleNamespace

import pytest

from torch_remat.budgets.price import Part, choose
from torch_remat.ladders.ladder import Rung, _lower_hull


def drawn(chance):
    """Return a ladder of some rungs that keep more and cost less, the last of which is plain code."""
    sizes = sorted(chance.sample(range(10, 100), chance.randint(2, 4)))
    times = sorted(chance.sample(range(10, 100), len(sizes)), reverse=True)
    found = [Rung(5, 100), *map(Rung, sizes, times), Rung(100, 0, is_plain=True)]
    rungs = _lower_hull(found)
    return SimpleNamespace(rungs=rungs, between=[one for one in found if one not in rungs], whole_bytes=100)


@pytest.mark.parametrize("counts_replays", [False, True])
def test_what_is_bought_is_near_the_optimum(counts_replays):
    ratios = []
    for seed in range(60):
        chance = random.Random(seed)
        one, other = drawn(chance), drawn(chance)
        parts = [Part(ladder) for ladder in (one, one, other, one)]
        limit = chance.randint(30, 380)
        choice = choose(parts, limit, counts_replays)
        assert choice.bytes == sum(rung.bytes for rung in choice.rungs) <= limit
        every = [(*part.ladder.rungs, *part.ladder.between) for part in parts]
        for place, rungs in enumerate(every):
            left = limit - choice.bytes + choice.rungs[place].bytes
            better = [rung for rung in rungs if rung.bytes <= left and rung.ns < 0.95 * choice.rungs[place].ns]
            assert not better or counts_replays  # else what a replay fills decides, too
        best = min(
            sum(rung.ns for rung in rungs) for rungs in product(*every) if sum(rung.bytes for rung in rungs) <= limit
        )
        assert choice.ns == sum(rung.ns for rung in choice.rungs) >= best
        ratios.append((choice.ns + 1) / (best + 1))
    if not counts_replays:
        assert sum(ratios) / len(ratios) < 1.05
        assert max(ratios) < 1.5
