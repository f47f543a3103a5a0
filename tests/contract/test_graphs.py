"""Whole programs: shapes of graphs, and the ways in which backward walks them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import GraphExecGroup

import torch_remat as remat
from tests.helpers import (
    Calls,
    CountOps,
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    leaf,
    name_of,
)


def two_branches(x):
    """Two outputs whose backwards share no saved tensor."""
    return x.sin().exp(), x.cos().tanh()


class Logged(torch.autograd.Function):
    """Identity that logs its phases, and saves its input if it has a name."""

    @staticmethod
    def forward(ctx, x, log, name):
        log.append((f"forward of {name}", remat.is_recomputing()))
        ctx.save_for_backward(*([x] if name else []))
        ctx.log, ctx.name = log, name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        ctx.log.append((f"backward of {ctx.name}", remat.is_recomputing()))
        return grad * saved[0] / saved[0] if saved else grad, None, None


def test_replay_starts_when_backward_needs_a_saved_tensor_and_is_recomputing_until_it_ends():
    log = []
    y = checkpointed(lambda x: Logged.apply(Logged.apply(x.sin(), log, "saves"), log, ""))(leaf(3))
    assert log == [("forward of saves", False), ("forward of ", False)]
    log.clear()
    y.sum().backward()
    assert log[:2] == [("backward of ", False), ("forward of saves", True)]
    assert log[-1] == ("backward of saves", False)
    assert not remat.is_recomputing()


def test_early_stop_skips_what_comes_after_the_last_saved_tensor():
    def block(x, w):
        return (x @ w).sin() @ w

    for early_stop, matmuls in ((True, 1), (False, 2)):
        function = Calls(block)
        y = checkpointed(function, early_stop=early_stop)(leaf(64, 64), leaf(64, 64))
        with CountOps() as ops:
            torch.autograd.backward(y, torch.ones_like(y))
        assert function.total == 2
        assert ops.counts["mm"] == 4 + matmuls  # two for each matmul's backward, the rest is replay


@pytest.mark.parametrize("saved", ["rrelu_with_noise_0_0", "sin_0_0"])
def test_noise_that_an_op_fills_is_equal_or_refused_where_a_policy_saves_the_ops_result(saved):
    """It is none of its results, but is filled by it: replay makes both again, or refuses."""

    def program(wrap):
        x = leaf(50)
        y = wrap(lambda x: F.rrelu(x.sin(), training=True) * x)(x)
        return y, torch.autograd.grad(y.sum(), x, retain_graph=True), torch.autograd.grad(y.sum(), x), torch.rand(2)

    policy = remat.save_names(saved)
    if saved == "sin_0_0":
        assert_same_program(program, policy=policy)
    else:
        with pytest.raises(remat.PlaceholderError, match="saving it for backward"):
            program(remat.checkpoint(policy=policy))


@pytest.mark.parametrize("kept_before", [0, 2])
def test_second_backward_without_retain_graph_raises_and_says_how_to_keep_the_graph(kept_before):
    x = leaf(3)
    y = checkpointed(chain)(x)
    for _ in range(kept_before):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    grad = x.grad.clone()
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.sum().backward()
    assert_same(x.grad, grad)


def one_by_one(one, two, x):
    return torch.autograd.grad(one.sum(), x), torch.autograd.grad(two.sum(), x)


def together(one, two, x):
    torch.autograd.backward([one, two], [torch.ones(3), torch.full((3,), 2.0)])
    return x.grad


def first_dropped(one, two, x):
    del one
    return torch.autograd.grad(two.sum(), x)


def one_again(one, two, x):
    kept = torch.autograd.grad(one.sum(), x, retain_graph=True), torch.autograd.grad(two.sum(), x)
    return kept, torch.autograd.grad(one.sum(), x)


def in_one_group(one, two, x):
    with GraphExecGroup():
        one.sum().backward(retain_graph=True)
        two.sum().backward(retain_graph=True)
    return x.grad


@pytest.mark.parametrize("backward", [one_by_one, together, first_dropped, one_again, in_one_group], ids=name_of)
def test_two_outputs_share_one_replay(backward):
    def program(wrap):
        x = leaf(3)
        return backward(*wrap(two_branches)(x), x)

    assert_same_program(program, replays=2 if backward is one_again else 1)
