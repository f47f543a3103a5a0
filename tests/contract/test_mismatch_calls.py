"""Calls that differ between forward and replay, in a region or in regions inside it: errors that name the op."""

from __future__ import annotations

import pytest

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, STYLES, Both, Trace, call
from tests.helpers import checkpointed, leaf, pairwise

OFFLOAD = remat.CheckpointPolicy.OFFLOAD
A, B, C = ("a", SAVE), ("b", SAVE), ("c", SAVE)
AR, BR, CR = ("a", RECOMPUTE), ("b", RECOMPUTE), ("c", RECOMPUTE)

# What runs in forward, what in replay, and the op that the error names.
DIFFERENCES = {
    "policy to recompute": ([A, BR], [AR, BR], "a"),
    "policy to save": ([AR, BR], [A, BR], "a"),
    "policy to offload": ([A, B], [A, ("b", OFFLOAD)], "b"),
    "names swapped": ([A, B, CR], [B, A, CR], "b"),
    "another name": ([A, B], [A, C], "c"),
    "first is missing": ([A, B, CR], [B, CR], "b"),
    "recomputed one is new": ([A, C], [A, BR, C], "b"),
    # Where the last one is missing or new, replay shows it at its end alone.
    "last is missing": ([A, B], [A], None),
    "last is new": ([A], [A, B], "b"),
}


def run_ops(style, ops, x):
    """Run calls, given as `(name, policy)`, one after another."""
    for name, policy in ops:
        if style == "native":
            x = remat.op(lambda h: h.sin().exp(), name, policy=policy)(x)
        else:
            x = call(style, Both, Trace(), name, policy, x)
    return x


@pairwise(name=DIFFERENCES, style=[*STYLES, "native"], early_stop=[True, False])
def test_op_that_differs_in_replay_is_an_error_that_names_it(name, style, early_stop):
    forward, replay, op = DIFFERENCES[name]

    def block(x):
        return run_ops(style, replay if remat.is_recomputing() else forward, x.sin()), x.cos().exp()

    x = leaf(3)
    y, z = checkpointed(block, region_name="block", early_stop=early_stop)(x)
    with pytest.raises(remat.MismatchError) as caught:
        (y.sum() + z.sum()).backward()
    assert x.grad is None
    assert caught.value.region == "block"
    assert caught.value.op == op or op is None
    assert (op or forward[-1][0]) in str(caught.value)
    assert not remat.is_recomputing()


def nested(depth, block, **options):
    """Return a function that runs a block `depth` regions deep, with ops that save around each."""

    def level(x):
        h = x.sin()
        h = nested(depth - 1, block, **options)(h) if depth > 1 else checkpointed(block, region_name="inner")(h)
        return h.exp().cos()

    return checkpointed(level, region_name=f"level {depth}", **options)


def run_differing(style, forward, replay, depth=1, run_that_differs=2, **options):
    runs = []

    def block(x):
        runs.append(None)
        return run_ops(style, replay if len(runs) == run_that_differs else forward, x.cos())

    x = leaf(3)
    y = nested(depth, block, **options)(x)
    with pytest.raises(remat.MismatchError) as caught:
        y.sum().backward()
    assert x.grad is None
    assert len(runs) >= run_that_differs
    return caught.value


@pairwise(name=DIFFERENCES, style=[*STYLES, "native"], early_stop=[True, False])
def test_op_of_an_inner_region_that_differs_in_the_outer_replay_is_an_error_that_names_it(name, style, early_stop):
    forward, replay, op = DIFFERENCES[name]
    error = run_differing(style, forward, replay, early_stop=early_stop)
    assert_names(error, op)
    assert "level 1" in str(error)


@pytest.mark.parametrize("name", ["names swapped", "policy to save", "last is missing", "last is new"])
def test_op_that_differs_in_any_replay_around_it_is_an_error_that_names_it(name):
    """Its region's own replay is the run after those of the enclosing regions; it need not come to the last op."""
    forward, replay, op = DIFFERENCES[name]
    depth = 2
    own_replay = depth + 2
    for run in range(2, own_replay + (name != "last is missing" and name != "last is new")):
        assert_names(run_differing("auto", forward, replay, depth, run), op)


def assert_names(error, op):
    """Of an op that is missing at the end, the enclosing region is named, and the op only if replay went to its end."""
    if op is None:
        assert error.region == "inner" or error.region.startswith("level ")
    else:
        assert (error.region, error.op) == ("inner", op)


def test_op_that_moved_from_one_inner_region_to_another_is_an_error():
    def program(which):
        def outer(x):
            for index in range(3):
                ops = [A] if index in (0, which()) else []
                x = checkpointed(lambda x, ops=ops: run_ops("auto", ops, x.cos()), region_name=f"inner {index}")(x)
            return x

        return checkpointed(outer)(leaf(3)).sum()

    program(lambda: 1).backward()
    loss = program(lambda: 2 if remat.is_recomputing() else 1)
    with pytest.raises(remat.MismatchError) as caught:
        loss.backward()
    assert (caught.value.region, caught.value.op) == ("inner 2", "a")
