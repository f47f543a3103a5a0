"""A fixed sample of drawn programs, `REMAT_PROGRAMS` of each seed; `make soak` draws others."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.programs.soak import batch, reproduction

PROGRAMS = int(os.environ.get("REMAT_PROGRAMS", "60"))


ODDS = [("",), ("",), ("later",), ("later",), ("hooks", "autocast"), ("inputs", "offload", "budget"), ("fault",)]


@pytest.mark.parametrize(("seed", "odds"), list(enumerate(ODDS)))
def test_drawn_programs_are_equal_to_plain_autograd_or_refused_by_the_contract(seed, odds):
    kinds: Counter[str] = Counter()
    failure = batch(seed, kinds, PROGRAMS, odds)
    if failure is not None:
        program, error = failure
        raise AssertionError(f"{error}\n{reproduction(program)}") from error
    right = sum(count for kind, count in kinds.items() if kind.startswith(("equal", "injected")))
    assert right > sum(kinds.values()) / 3
