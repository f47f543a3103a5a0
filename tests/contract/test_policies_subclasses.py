"""Regions under an op-level policy that wrap a result in a tensor subclass, of which no op tells."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import torch_remat as remat
from tests.helpers import assert_equal_gradients, assert_same, leaf
from tests.native_programs import aten, region, replayed_ops


class Wrapped(Tensor):
    """Stands for another tensor, as the result of a collective does that is not waited for yet."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return unwrap(value.inner) if isinstance(value, Wrapped) else value

        return func(*map(unwrap, args), **(kwargs or {}))


def read_by_an_op(x, w):
    return (Wrapped((x @ w).sin().detach()) + x).exp() @ w


def saved_by_autograd(x, w):
    return x * Wrapped((x @ w).sin().detach())


def wrapped_twice(x, w):
    return (x * Wrapped(Wrapped((x @ w).sin().detach()))).exp()


@pytest.mark.parametrize("saved", [(), (aten.mm.default,), (aten.sin.default,), (aten.mm.default, aten.sin.default)])
@pytest.mark.parametrize("function", [read_by_an_op, saved_by_autograd, wrapped_twice], ids=lambda f: f.__name__)
def test_what_a_wrapper_has_inside_is_kept_or_made_again(function, saved):
    inputs = leaf(4, 4), leaf(4, 4)

    def policy(ctx, op, *args, **kwargs):
        return op in saved

    assert_equal_gradients(function, region(policy)(function), inputs)
    replayed = replayed_ops(function, region(policy), inputs)
    assert not {op.overloadpacket.__name__ for op in saved} & set(replayed)


def test_result_of_which_no_schema_says_that_it_is_a_view_stands_for_what_replay_leaves_out(recwarn):
    """`_unsafe_view` of a wrapper around placeholders would need their data; attention with dropout runs it."""

    def gradients(function):
        torch.manual_seed(0)
        x = TwoTensor(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4)).requires_grad_()
        y = function(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2).sin())(x * 1)
        return torch.autograd.grad(y.sum(), x)

    def policy(ctx, *_, **__):
        return ctx.name in ("div__0_0", "mul_2_0", "bmm_1_0")

    checked = remat.checkpoint(policy=policy, determinism_check="bitwise", early_stop=False)
    assert_same(gradients(lambda function: function), gradients(checked))
    assert not recwarn.list


def test_leaf_around_placeholders_is_not_looked_at():
    """Replay compares a leaf that was made in the region with forward's by their values: there are none."""

    def block(x):
        h = x * 1.5
        s = h.detach().requires_grad_()
        (grad,) = torch.autograd.grad(s.sin().square().sum(), s)
        return h * grad * 1

    def gradients(function):
        x = TwoTensor(torch.linspace(0, 1, 16).view(4, 4), torch.linspace(1, 2, 16).view(4, 4)).requires_grad_()
        return torch.autograd.grad(function(x * 1).sum(), x)

    kept = ["cos_0_0", "expand_0_0", "mul_2_0", "mul_4_0", "mul_5_0", "ones_like_0_0", "pow_1_0", "sin_0_0", "sum_0_0"]
    function = remat.checkpoint(policy=lambda ctx, *_, **__: ctx.name in kept)(block)
    assert_same(gradients(block), gradients(function))
