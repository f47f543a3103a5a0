"""Whole programs: shapes of graphs, and the ways in which backward walks them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.checkpoint import GraphExecGroup

import torch_remat as remat
from tests.helpers import (
    Calls,
    CountOps,
    Stack,
    assert_equal_gradients,
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    leaf,
    leaf_copies,
    parameter_gradients,
    plain,
)


class Logged(torch.autograd.Function):
    """Identity that saves its input and logs its name when its backward runs."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.save_for_backward(x)
        ctx.log, ctx.name = log, name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        ctx.log.append(ctx.name)
        return grad * saved / saved, None, None


def two_branches(x):
    """Two outputs whose backwards share no saved tensor."""
    return x.sin().exp(), x.cos().tanh()


def test_one_region_has_equal_outputs_and_gradients():
    assert_equal_gradients(chain, checkpointed(chain), [leaf(4, 3)])


def test_regions_in_a_row_have_equal_gradients_and_replay_once_each():
    def program(wrap):
        model = Stack(wrap, depth=3)
        x = leaf(2, 5, 8)
        y = model(x)
        y.square().mean().backward()
        return [y, x.grad, *parameter_gradients(model)]

    assert_same_program(program, replays=6)


def test_regions_replay_in_the_order_of_backward_each_just_before_it_is_needed():
    log = []

    def block(x, name):
        log.append(f"run {name}")
        return Logged.apply(x.sin(), log, f"backward {name}")

    x = leaf(3)
    for name in "abc":
        x = checkpointed(block)(x, name)
    log.clear()
    x.sum().backward()
    assert log == ["run c", "backward c", "run b", "backward b", "run a", "backward a"]


def test_replay_starts_when_backward_needs_the_first_saved_tensor():
    log = []

    def block(x):
        log.append("run")
        h = Logged.apply(x.sin(), log, "first")
        return NoSave.apply(h, log)

    class NoSave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, log):
            ctx.log = log
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ctx.log.append("saves nothing")
            return grad, None

    y = checkpointed(block)(leaf(3))
    log.clear()
    y.sum().backward()
    assert log == ["saves nothing", "run", "first"]


def test_is_recomputing_is_true_in_replay_only():
    phases = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            phases.append(("forward of op", remat.is_recomputing()))
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            phases.append(("backward of op", remat.is_recomputing()))
            return grad * ctx.saved_tensors[0]

    y = checkpointed(lambda x: Probe.apply(x.sin()))(leaf(3))
    assert not remat.is_recomputing()
    y.sum().backward()
    assert phases == [("forward of op", False), ("backward of op", False), ("forward of op", True)]
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


@pytest.mark.parametrize("watched", [False, True])
def test_replay_runs_a_few_tiny_ops_after_the_last_saved_tensor_rather_than_stop(watched):
    ends = []

    def block(x, w):
        y = (x @ w).sin() @ w
        ends.append(remat.is_recomputing())
        return y

    y = checkpointed(block)(leaf(3, 3), leaf(3, 3))
    with CountOps() if watched else contextlib.nullcontext():
        torch.autograd.backward(y, torch.ones_like(y))
    assert ends == ([False] if watched else [False, True])  # what watches is to see the same ops in both phases


def test_without_early_stop_the_function_runs_to_its_end():
    ends = []

    def block(x):
        y = x.sin() + 1
        ends.append(remat.is_recomputing())
        return y

    checkpointed(block, early_stop=False)(leaf(3)).sum().backward()
    assert ends == [False, True]
    ends.clear()
    checkpointed(block)(leaf(3)).sum().backward()
    assert ends == [False]


def test_region_that_saves_nothing_is_never_replayed():
    function = Calls(lambda x: x + 1)
    x = leaf(3)
    checkpointed(function)(x).sum().backward()
    assert function.total == 1
    assert_same(x.grad, torch.ones(3))


def test_backward_with_retain_graph_works_any_number_of_times():
    def program(wrap):
        x, w = leaf(4, 3), leaf(3, 3)
        y = wrap(lambda x: chain(x @ w).sin())(x)
        grads = []
        for retain in (True, True, True, False):
            y.square().sum().backward(retain_graph=retain)
            grads += [x.grad.clone(), w.grad.clone()]
        return grads

    assert_same_program(program)


def test_backward_with_retain_graph_works_after_other_regions_ran():
    def program(wrap):
        x = leaf(4)
        y = wrap(chain)(x)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        other = torch.autograd.grad(wrap(chain)(x).sum(), x)
        return first, other, torch.autograd.grad(y.sum(), x)

    assert_same_program(program, replays=3)


@pytest.mark.parametrize("early_stop", [True, False])
def test_second_backward_without_retain_graph_raises_and_says_how_to_keep_the_graph(early_stop):
    x = leaf(3)
    y = checkpointed(chain, early_stop=early_stop)(x)
    y.sum().backward()
    grad = x.grad.clone()
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.sum().backward()
    assert_same(x.grad, grad)


def test_second_backward_raises_after_some_backwards_that_kept_the_graph():
    x = leaf(3)
    y = checkpointed(chain)(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.sum().backward()


def test_two_outputs_backpropagated_one_by_one_share_one_replay_without_retain_graph():
    def program(wrap):
        x = leaf(3)
        one, two = wrap(two_branches)(x)
        one.sum().backward()
        first = x.grad.clone()
        two.sum().backward()
        return first, x.grad

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("third", [False, True])
def test_two_outputs_backpropagated_one_by_one_share_one_replay_where_the_graph_is_kept(third):
    def program(wrap):
        x = leaf(3)
        one, two = wrap(two_branches)(x)
        gradients = list(torch.autograd.grad(one.sum(), x, retain_graph=True))
        gradients += torch.autograd.grad(two.sum(), x)
        if third:
            gradients += torch.autograd.grad(one.sum(), x)
        return gradients

    assert_same_program(program, replays=1 + third)


def test_two_outputs_backpropagated_in_reverse_order_share_one_replay():
    def program(wrap):
        x = leaf(3)
        one, two = wrap(two_branches)(x)
        two.sum().backward()
        one.sum().backward()
        return x.grad

    assert_same_program(program, replays=1)


def test_two_outputs_backpropagated_together_are_equal():
    def program(wrap):
        x = leaf(3)
        torch.autograd.backward(wrap(two_branches)(x), [torch.ones(3), torch.full((3,), 2.0)])
        return x.grad

    assert_same_program(program, replays=1)


def test_two_outputs_with_a_common_trunk_raise_on_the_second_backward_as_in_plain_autograd():
    def block(x):
        trunk = x.sin().exp()
        return trunk.cos(), trunk.tanh()

    for wrap in (plain, checkpointed):
        one, two = wrap(block)(leaf(3))
        one.sum().backward()
        with pytest.raises(RuntimeError, match="retain_graph"):
            two.sum().backward()


def test_one_of_two_outputs_dropped_leaves_the_other_right():
    def program(wrap):
        x = leaf(3)
        outputs = list(wrap(two_branches)(x))
        del outputs[0]
        outputs[0].sum().backward()
        return x.grad

    assert_same_program(program, replays=1)


def test_backwards_in_one_graph_exec_group_share_one_replay():
    def program(wrap):
        x = leaf(3)
        one, two = wrap(two_branches)(x)
        with GraphExecGroup():
            one.sum().backward(retain_graph=True)
            two.sum().backward(retain_graph=True)
        return x.grad

    assert_same_program(program, replays=1)


def test_input_gradient_and_weight_gradient_in_one_graph_exec_group_share_one_replay():
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        y = wrap(lambda x: x.sin() @ w)(x)
        with GraphExecGroup():
            (gx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            (gw,) = torch.autograd.grad(y.sum(), w)
        return gx, gw

    assert_same_program(program, replays=1)


def test_several_graph_exec_groups_over_one_region_replay_at_most_once_each():
    function = Calls(two_branches)
    x = leaf(3)
    one, two = checkpointed(function)(x)
    for group in range(3):
        with GraphExecGroup():
            one.sum().backward(retain_graph=True)
            two.sum().backward(retain_graph=True)
        assert 1 <= function.replays <= group + 1
    expected = leaf_copies([x])[0]
    for _ in range(3):
        for y in two_branches(expected):
            y.sum().backward()
    assert_same(expected.grad, x.grad)


def test_micro_batches_through_one_model_accumulate_equal_gradients():
    def program(wrap):
        model = Stack(wrap, depth=1)
        losses = [model(torch.randn(2, 4, 8)).square().mean() for _ in range(3)]
        for loss in reversed(losses):
            loss.backward()
        return parameter_gradients(model)

    assert_same_program(program, replays=6)
