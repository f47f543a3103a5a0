"""Policies by price for drawn programs: ladders of other steps and of known seconds, and acts by chance.

Nothing here depends on the clock or on what ran before: a program comes to the same acts each time.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from unittest.mock import patch

import torch

import torch_remat as remat
from torch_remat.dispatch.call import survey
from torch_remat.dispatch.call.functions import can_be_kept
from torch_remat.ladders import kinds, ladder
from torch_remat.policies.by_price import MemoryBudget


class Chance(MemoryBudget):
    """Keeps, skips or runs each call by chance, whatever a ladder says; some numbers of calls never come."""

    def __init__(self, seed: int) -> None:
        super().__init__(0.5)
        self._seed = seed

    def parts(self):
        """Return what tells it from others."""
        return Chance, self._seed

    def choose(self, ladder):
        """Return acts by chance."""
        chance, acts = random.Random(self._seed), {}
        for step in ladder.record.steps:
            if can_be_kept(step.function) and chance.random() < 0.7:
                places = tuple(chance.sample(range(2), chance.randint(0, 2)))
                acts.setdefault(step.function, {})[max(step.number + chance.choice((0, 0, 0, 0, 1, -1, 4)), 0)] = places
        return replace(ladder.rungs[0], acts=acts)


class Numbered(MemoryBudget):
    """Takes the rung of a number."""

    def __init__(self, number: int) -> None:
        super().__init__(0.5)
        self._number = number

    def parts(self):
        """Return what tells it from others."""
        return Numbered, self._number

    def choose(self, ladder):
        """Return the rung."""
        rungs = [rung for rung in ladder.rungs if not rung.is_plain]
        return rungs[self._number % len(rungs)] if rungs else ladder.rungs[0]


PRICED = {f"chance {seed}": Chance(seed) for seed in range(12)}
PRICED |= {f"rung {number}": Numbered(number) for number in range(6)}
PRICED["beside functions"] = Chance(20) | [torch.matmul, torch.sin]
PRICED["without names"] = Chance(21) & ~remat.save_names("*sin_0")


@contextlib.contextmanager
def with_ladders() -> Iterator[None]:
    """Let one forward be enough for a ladder, and no start over end its use; nothing is known before and after."""
    spent = count()

    def clock() -> int:
        return sum(at * 7919 % 20011 for at in range(next(spent) % 64)) * 40

    with (
        patch.object(kinds, "_SAMPLES", 1),
        patch.object(kinds, "_RESTARTS", 10**9),
        patch.object(kinds, "_said", _said),
        patch.multiple(ladder, _ACT_NS=0, _REGION_NS=0),
        patch.object(survey, "perf_counter_ns", clock),
    ):
        kinds.forget_kinds()
        try:
            yield
        finally:
            kinds.forget_kinds()


_said_of = kinds._said


def _said(leaf):
    """Take modules of one type for equal: each run of a program has its own."""
    return type(leaf) if isinstance(leaf, torch.nn.Module) else _said_of(leaf)


def starts_over() -> int:
    """Return how many replays have started over."""
    return sum(kind.restarts for kind in kinds._kinds.values())
