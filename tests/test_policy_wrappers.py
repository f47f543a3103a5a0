"""Regions under an op-level policy that wrap a result in a tensor subclass, of which no op tells."""

from __future__ import annotations

import pytest
from helpers import assert_equal_gradients, leaf
from native_programs import aten, region, replayed_ops
from torch import Tensor


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
