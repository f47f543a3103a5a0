"""`auto_forward` and `op`: the forward is written as for plain autograd, name and policy come from outside."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import torch_remat as remat
from tests.handle_ops import POLICIES, RECOMPUTE, SAVE, policy_ids
from tests.helpers import assert_same_program, checkpointed, leaf


class Named(Function):
    """The form of the README: the last two arguments are name and policy."""

    @staticmethod
    @remat.auto_forward("x", "y")
    def forward(ctx, x, log, op_name, remat_policy):
        log.append((op_name, remat_policy))
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y.exp()

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y.exp() * x.cos(), None, None, None


class Own(Function):
    """The form for `op`: only its own arguments."""

    @staticmethod
    @remat.auto_forward("x", "y")
    def forward(ctx, x, log):
        log.append("ran")
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y.exp()

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y.exp() * x.cos(), None


@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
def test_forward_gets_name_and_policy_as_its_last_two_arguments_and_from_op_neither(policy):
    log = []

    def program(wrap):
        bound = remat.op(Own.apply, "op", policy=policy)
        x = leaf(3)
        y = wrap(lambda x: bound(Named.apply(x.cos(), log, "named", policy), log))(x)
        y = wrap(lambda x: bound(x, log))(y)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, replays=1 + (policy is RECOMPUTE))
    named, own = [("named", policy)], ["ran"]
    assert log == [*named, *own * 2] * 2 + (own + named + own if policy is RECOMPUTE else [])


@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
def test_decorator_works_above_below_and_without_staticmethod(policy):
    def forward(ctx, x, op_name, remat_policy):
        ctx.save_for_backward(x)
        return x.sin()

    decorate = remat.auto_forward("x")
    assert decorate(forward).__name__ == "forward"
    for decorated in (staticmethod(decorate(forward)), decorate(forward), decorate(staticmethod(forward))):
        kind = type("Kind", (Function,), {"forward": decorated, "backward": staticmethod(backward_of_sine)})

        def program(wrap, kind=kind):
            x = leaf(3)
            wrap(lambda x: kind.apply(x.exp(), "it", policy))(x).sum().backward()
            return x.grad

        assert_same_program(program, replays=1)


def backward_of_sine(ctx, grad):
    return grad * ctx.saved_tensors[0].cos(), None, None


@pytest.mark.parametrize("count", [0, 1, 3])
def test_saving_another_number_of_tensors_than_names_is_an_error(count):
    class Wrong(Function):
        @staticmethod
        @remat.auto_forward("one", "two")
        def forward(ctx, x, op_name, remat_policy):
            ctx.save_for_backward(*[x] * count)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None, None

    for policy in POLICIES:
        with pytest.raises(remat.UsageError) as caught:
            checkpointed(lambda x, policy=policy: Wrong.apply(x.sin(), "it", policy), region_name="block")(leaf(3))
        assert (caught.value.region, caught.value.op) == ("block", "it")


@pytest.mark.parametrize("matrices", [1, 2])
def test_a_call_without_name_and_policy_is_the_plain_function(matrices):
    class Product(Function):
        @staticmethod
        @remat.auto_forward("x", "w")
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    def program(wrap):
        x = leaf(4, 4)
        w = leaf(4, 4) if matrices == 2 else x
        y = wrap(lambda x: Product.apply(x.sin(), w).exp())(x)
        return y, *torch.autograd.grad(y.sum(), {x, w})

    assert_same_program(program, replays=1)


def test_a_forward_that_takes_name_and_policy_and_gets_neither_is_an_error():
    with pytest.raises(remat.UsageError, match="op_name"):
        checkpointed(lambda x: Named.apply(x.cos()))(leaf(3))


def test_the_first_remedy_for_a_native_reader_of_a_handles_output_is_op():
    y = checkpointed(lambda x: Named.apply(x.cos(), [], "it", SAVE).sin())(leaf(3))
    with pytest.raises(remat.PlaceholderError) as caught:
        y.sum().backward()
    assert caught.value.remedy.startswith("Either (1) call the op as remat.op(")
