"""Gradients of gradients, gradients for a part of the graph, and gradients that leave a region."""

from __future__ import annotations

import itertools

import pytest
import torch

import torch_remat as remat
from tests.helpers import (
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    leaf,
    pairwise,
    plain,
    refused_if,
    tensors_in,
)
from tests.native_programs import full, on_cpu


def test_numerical_first_and_second_derivatives_agree():
    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    w = torch.randn(3, 3, dtype=torch.double, requires_grad=True)
    function = checkpointed(lambda x, w: (chain(x @ w).tanh(), x.sigmoid()))
    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))


def test_gradient_for_a_tensor_made_inside_the_region_is_equal():
    def program(wrap):
        inner = []

        def block(x):
            h = x.sin()
            if not inner:
                inner.append(h)
            return h.exp().cos()

        x = leaf(3)
        y = wrap(block)(x)
        return torch.autograd.grad(y.sum(), [inner[0], x])

    assert_same_program(program)


def test_views_of_what_was_changed_in_place_give_gradients_in_the_same_order():
    """Asking such a view for its node makes a new one, which counts where backward adds up in the order of nodes."""

    def function(x):
        y = x * 1.5
        row, column = y[1].expand(3, 3), y[:, 2:].expand(3, 3)
        y.mul_(0.5).mul_(0.5)
        return y, row, {"y": y, "columns": [column, column.t()]}

    def program(wrap):
        x = leaf(3, 3)
        outputs = tensors_in(wrap(function)(x))
        return torch.autograd.grad(sum(y.sin().sum() * place for place, y in enumerate(outputs, 1)), [x])

    for _ in range(20):
        assert_same_program(program)


# --- Gradients that leave a region: by one argument or variable, through what lies before, to another.
# Such a gradient is a `UsageError` in forward, unless torch's own checkpoint runs the region. A model of forces takes
# it: positions, and the distances that were made of them outside, are both arguments.


SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE


def to_another(a, b, w, x):
    (force,) = torch.autograd.grad(b.sin().sum(), a, create_graph=True)
    return force * 2 + b.sum()


def as_numbers(a, b, w, x):
    (force,) = torch.autograd.grad((b.sin() * a).sum(), a, retain_graph=True)
    return force * 2 * b


def of_what_is_linear(a, b, w, x):
    y = b @ w
    (force,) = torch.autograd.grad(y.sum(), a, create_graph=True)
    return force.exp() + y


def to_a_leaf_before(a, b, w, x):
    (force,) = torch.autograd.grad((b.sin() * a).sum(), x, create_graph=True)
    return force * 2 + b


def not_leaving(a, b, w, x):
    (force,) = torch.autograd.grad(a.exp().sum(), a, create_graph=True)
    return force * b


FUNCTIONS = [to_another, as_numbers, of_what_is_linear, to_a_leaf_before, not_leaving]


REGIONS = {
    "plain": remat.checkpoint(),
    "nothing": remat.checkpoint(policy=lambda *args, **kwargs: RECOMPUTE),
    "all": remat.checkpoint(policy=lambda *args, **kwargs: SAVE),
    "some": remat.checkpoint(
        policy=lambda ctx, op, *args, **kwargs: op in (torch.ops.aten.sin.default, torch.ops.aten.mm.default)
    ),
    "torch": full,
    "on cpu": lambda function: on_cpu(remat.checkpoint()(function)),
}


def program(function, wrap, given, is_leaf):
    torch.manual_seed(0)
    w, x = leaf(4, 4), leaf(4, 4)
    a = x if is_leaf else x * 1.5
    b = a.cos() * a
    if given == "both":
        y = wrap(lambda a, b: function(a, b, w, x))(a, b)
    elif given == "first":
        y = wrap(lambda a: function(a, b, w, x))(a)
    else:
        y = wrap(lambda b: function(a, b, w, x))(b)
    first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True, allow_unused=True)
    return y, first, torch.autograd.grad(first[0].square().sum(), [x, w], allow_unused=True)


REFUSING = {"nothing", "all", "some"}  # their policies watch ops


@pairwise(function=FUNCTIONS, region=REGIONS)
def test_gradient_that_leaves_the_region(function, region):
    for given, is_leaf in itertools.product(["both", "first", "second"], [False, True]):
        expected = program(function, plain, given, is_leaf)
        with refused_if(region in REFUSING or function is not not_leaving):
            assert_same(expected, program(function, REGIONS[region], given, is_leaf), f"{given}, leaf: {is_leaf}")


def test_backward_that_comes_to_leaves_is_not_repeated_before_the_region():
    """Replay must not add to their gradients once more: it does not leave the region, as elsewhere."""

    def run(wrap):
        torch.manual_seed(0)
        x = leaf(4)
        a = x * 1.5

        def function(a, b):
            h = (a * b).sin()
            h.exp().sum().backward(retain_graph=True)
            return h.cos() * 2

        y = wrap(function)(a, a.cos())
        y.sum().backward()
        return y, x.grad

    assert_same(run(plain), run(checkpointed))


@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize(
    "function", [to_another, as_numbers, of_what_is_linear], ids=lambda function: function.__name__
)
def test_gradient_that_comes_back_by_another_argument_is_an_error_in_forward(function, is_leaf):
    x = leaf(4, 4)
    a = x if is_leaf else x * 1.5
    w = leaf(4, 4)
    with pytest.raises(remat.UsageError, match="leaves the region by one argument or variable and comes back by"):
        remat.checkpoint()(lambda a, b: function(a, b, w, x))(a, a.cos() * a)
