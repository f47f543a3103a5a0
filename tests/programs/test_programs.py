"""A fixed sample of drawn programs, `REMAT_PROGRAMS` of each seed; `make soak` draws others."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.programs.outcome import outcome
from tests.programs.program import Body, Program, Step
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


def step(kind, what, one=0, two=0, policy=None):
    return Step(kind, what, one, two, body=None, policy=policy, closes=False)


def test_replay_that_starts_over_runs_a_call_of_which_forward_kept_no_result():
    """All calls were kept or skipped, so that forward expected no replay to go on past the product."""
    steps = (
        step("unary", "filled"), step("unary", "max", 2, 4), step("call", "native mm", 1, 3, "RECOMPUTE"),
        step("read", "mask", 0, 5), step("state", "read"), step("call", "native mm", 0, 5, "RECOMPUTE"),
    )  # fmt: skip
    program = Program(
        Body(steps, returns=(4,), tree="nested"), policy="chance 5", around="nothing", backward="one by one",
        hooks=None, autocast=None, inputs="plain", offload=False, budget=None, early_stop=False, fault=None, later=None,
    )  # fmt: skip
    assert outcome(program) == "equal after a start over"
