"""The three kinds of `determinism_check`."""

from __future__ import annotations

import re

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

import torch_remat as remat
from tests.helpers import (
    assert_same,
    assert_same_program,
    checkpointed,
    leaf,
)

KINDS = ["default", "none", "bitwise"]


def nudged(at, count=4, amount=1.0):
    """Return a function of sines, before each of which it adds zero; replay adds something else at one place."""

    def block(x):
        for index in range(count):
            x = x + (amount if remat.is_recomputing() and index == at else 0.0)
            x = x.sin()
        return x

    return block


def backward(block, *args, **options):
    y = checkpointed(block, region_name="block", **options)(*args)
    y.sum().backward()


def mismatch(block, *args, **options):
    with pytest.raises(remat.MismatchError) as caught:
        backward(block, *args, **options)
    assert caught.value.region == "block"
    return caught.value


def position(error):
    found = re.search(r"\d+", error.tensor or "")
    assert found, f"no position in {error.tensor!r}"
    return int(found.group())


def test_default_sees_shape_and_dtype_and_the_last_values_and_none_sees_nothing():
    last = mismatch(nudged(1), leaf(3))
    assert position(last) == 3
    backward(nudged(1), leaf(3), determinism_check="none")
    scale = torch.ones(1)
    shape = mismatch(lambda x: (x * (scale.expand(3) if remat.is_recomputing() else scale)).sin(), leaf(3))
    dtype = mismatch(lambda x: (x * (scale.double() if remat.is_recomputing() else scale)).sin(), leaf(3))
    assert position(shape) == position(dtype)
    backward(lambda x: x * (scale.expand(3) if remat.is_recomputing() else scale), leaf(3), determinism_check="none")


def test_bitwise_reports_the_first_difference():
    positions = [position(mismatch(nudged(at), leaf(3), determinism_check="bitwise")) for at in range(4)]
    assert [p - positions[0] for p in positions] == [0, 1, 2, 3]


@pytest.mark.parametrize("check", ["all", torch.sum], ids=["name", "callable"])
def test_another_kind_is_an_error(check):
    with pytest.raises(remat.UsageError, match="determinism_check is 'default', 'none' or 'bitwise'"):
        remat.checkpoint(determinism_check=check)


@pytest.mark.parametrize("check", KINDS)
def test_tensor_changed_in_place_after_it_was_saved_is_no_difference_of_values(check):
    y = checkpointed(lambda x: x.sin().exp().add_(1), determinism_check=check)(leaf(3))
    with pytest.raises(remat.MutationError, match="modified in place after it was saved"):
        y.sum().backward()


class Bare(torch.Tensor):
    """A wrapper subclass that does not say what it consists of."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda leaf: leaf.inner if isinstance(leaf, Bare) else leaf  # noqa: E731
        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda leaf: Bare(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)


@pytest.mark.parametrize("inside", [False, True])
def test_bitwise_takes_wrapper_subclasses(inside):
    x = TwoTensor(torch.randn(3), torch.randn(3))
    x = (TwoTensor(x, x.detach()) if inside else x).requires_grad_()
    backward(lambda x: x.sin().exp(), x, determinism_check="bitwise")
    with pytest.raises(remat.MismatchError):
        backward(lambda x: (x + (1 if remat.is_recomputing() else 0)).sin().exp(), x, determinism_check="bitwise")


@pytest.mark.parametrize("block", [lambda x: Bare(x).sin().exp(), lambda x: Bare(x) @ WEIGHT @ WEIGHT])
def test_bitwise_refuses_a_subclass_whose_values_it_cannot_read(block):
    """Operators make "unsupported operand" of some errors."""
    with pytest.raises(remat.UsageError, match="cannot read the values of a Bare"):
        checkpointed(block, determinism_check="bitwise")(torch.ones(3, 4))


WEIGHT = leaf(4, 4)


def test_check_of_an_inner_region_reads_nothing_that_the_outer_replay_skips(recwarn):
    def function(x):
        return (x.t() @ x * torch.rand_like(x)).sin().t().exp()

    def gradients(wrap):
        torch.manual_seed(0)
        x = torch.linspace(0.1, 1, 16).view(4, 4).requires_grad_()
        inner = wrap(function, determinism_check="bitwise")
        saves = [getattr(torch.ops.aten, name) for name in ("mul", "sin", "cos", "clone")]
        return torch.autograd.grad(wrap(lambda x: inner(x * 2).cos() * x, policy=saves)(x).sum(), x)

    assert_same(gradients(lambda function, **_: function), gradients(checkpointed))
    assert not recwarn.list


@pytest.mark.parametrize("options", [{}, {"determinism_check": "bitwise"}, {"policy": [torch.ops.aten.mm]}], ids=str)
def test_tensors_without_memory_are_not_compared(options):
    def shape(x):
        a = torch.empty(x.shape, device="meta", requires_grad=True)
        return (a.sin() @ a.exp()).shape[0]

    def program(wrap):
        x = leaf(4, 4)
        wrap(lambda x: x.sin() * shape(x.exp()))(x.exp()).sum().backward()
        return x.grad

    assert_same_program(program, replays=1, **options)
    checkpointed(torch.sin, **options)(torch.randn(3, device="meta", requires_grad=True)).sum().backward()
