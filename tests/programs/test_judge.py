"""The judge of drawn programs notices what it is there for."""

from __future__ import annotations

import pytest

from tests.programs.kept import check_recomputed
from tests.programs.outcome import outcome
from tests.programs.program import SAVE, Body, Program, Step
from tests.programs.running import DECISIONS, LATER, TREES

PRODUCT = Step("call", "op", 0, 0, Body((Step("read", "weight"), Step("unary", "tanh")), (0,)), SAVE)
SINE = Step("unary", "sin")


@pytest.mark.parametrize("tree", TREES)
def test_result_trees_of_regions_and_calls_are_equal_to_plain_autograd(tree):
    for returns in ((0,), (0, 0), (0, 3)):
        call = PRODUCT._replace(body=PRODUCT.body._replace(returns=returns, tree=tree))
        found = outcome(Program(Body((call, SINE), returns, tree)))
        assert found == "equal" or (tree == "dataclass" and found == "UsageError"), found


@pytest.mark.parametrize("later", LATER)
def test_a_change_between_the_phases_is_refused_where_replay_reads_it(later):
    read = {"buffer": "read", "replaced buffer": "read", "closed": "closed", "closed replaced": "closed"}
    reader = Step("state", read[later]) if later in read else Step("read", "weight")
    found = outcome(Program(Body((reader, SINE), (0,)), later=later))
    assert found in ("equal", "MutationError", "MismatchError", "refused by autograd"), found


def test_a_saved_call_that_replay_recomputes_is_noticed(monkeypatch):
    program = Program(Body((PRODUCT, SINE), (0,)))
    check_recomputed(program)
    recomputed = program._replace(body=Body((PRODUCT._replace(policy="RECOMPUTE"), SINE), (0,)))
    check_recomputed(recomputed)
    monkeypatch.setitem(DECISIONS, "SAVE", DECISIONS["RECOMPUTE"])
    with pytest.raises(AssertionError, match="replay recomputes what is saved"):
        check_recomputed(program)
