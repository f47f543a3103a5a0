"""Gradients of gradients, and gradients for a part of the graph."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import (
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    leaf,
    tensors_in,
)


def test_second_order_gradients_are_equal():
    def program(wrap):
        x, w = leaf(4, 3), leaf(3, 3)
        y = wrap(lambda x: chain(x @ w))(x)
        (gx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gx.square().sum().backward()
        return y, gx, x.grad, w.grad

    assert_same_program(program)


def test_numerical_first_and_second_derivatives_agree():
    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    w = torch.randn(3, 3, dtype=torch.double, requires_grad=True)
    function = checkpointed(lambda x, w: (chain(x @ w).tanh(), x.sigmoid()))
    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))


def test_hessian_and_jacobian_are_equal():
    x = torch.randn(4)
    scalar = lambda x: chain(x).prod()  # noqa: E731
    hessian, jacobian = torch.autograd.functional.hessian, torch.autograd.functional.jacobian
    assert_same(hessian(scalar, x), hessian(checkpointed(scalar), x))
    assert_same(jacobian(chain, x, create_graph=True), jacobian(checkpointed(chain), x, create_graph=True))


@pytest.mark.parametrize("chosen", [[0], [1, 3], [2]])
def test_gradients_for_a_subset_of_inputs_and_parameters_are_equal(chosen):
    def program(wrap):
        leaves = [leaf(3, 3) for _ in range(4)]
        y = wrap(lambda x, w: ((x @ w).sin() @ leaves[2]).exp() @ leaves[3])(*leaves[:2])
        return torch.autograd.grad(y.sum(), [leaves[i] for i in chosen])

    assert_same_program(program, replays=1)


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
