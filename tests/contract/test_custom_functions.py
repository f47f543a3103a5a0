"""Custom autograd Functions and in-place ops inside a region."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function

from tests.helpers import assert_same, assert_same_program, checkpointed, leaf


class DoubleAndSave(Function):
    """Doubles in place, saves the changed input, which is also its output, and squares it on the side."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        square = x * x
        ctx.save_for_backward(x)
        return x, square

    @staticmethod
    def backward(ctx, grad, grad_square):
        (x,) = ctx.saved_tensors
        return 2 * grad + 4 * x * grad_square


class Split(Function):
    """Two outputs; a gradient that is missing arrives as None."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.seen = seen
        return x * 2, x * x

    @staticmethod
    def backward(ctx, grad, grad_square):
        (x,) = ctx.saved_tensors
        ctx.seen.append((grad is None, grad_square is None))
        total = torch.zeros_like(x)
        if grad is not None:
            total = total + 2 * grad
        if grad_square is not None:
            total = total + 2 * x * grad_square
        return total, None


class SetupContext(Function):
    """The form with `setup_context`; saves an input, an output and a tensor that is neither."""

    @staticmethod
    def forward(x):
        scale = x.detach().abs().amax()
        return (x / scale).tanh(), scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[0], output[1])

    @staticmethod
    def backward(ctx, grad, grad_scale):
        x, y, scale = ctx.saved_tensors
        return grad * (1 - y * y) / scale + 0 * x


def run(block, *shape):
    def program(wrap):
        x = leaf(*(shape or (3, 4)))
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    return program


def test_function_that_saves_its_dirty_input_is_equal():
    def block(x):
        changed, square = DoubleAndSave.apply(x.sin() * 1)
        return changed.exp() * square.cos()

    assert_same_program(run(block), replays=1)


@pytest.mark.parametrize(("use", "missing"), [((True, False), (False, True)), ((False, True), (True, False))])
def test_function_without_materialized_gradients_sees_none(use, missing):
    seen = []

    def program(wrap):
        x = leaf(3)
        outputs = wrap(lambda x: Split.apply(x.sin(), seen))(x)
        sum(y.sum() for y, used in zip(outputs, use, strict=True) if used).backward()
        return x.grad

    assert_same_program(program, replays=1)
    assert seen == [missing, missing]


def test_function_with_setup_context_is_equal():
    assert_same_program(run(lambda x: SetupContext.apply(x.sin())[0].exp()), replays=1)


def test_saved_parameter_is_the_parameter_itself_and_not_a_copy():
    pointers = []

    class Scale(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            pointers.append(w.data_ptr())
            return grad * w, grad * x

    w = nn.Parameter(torch.randn(3))
    x = leaf(3)
    checkpointed(lambda x: Scale.apply(x.sin(), w).exp())(x).sum().backward()
    assert pointers == [w.data_ptr()]
    gradient = w.grad
    assert_same(gradient, torch.autograd.grad((x.sin() * w).exp().sum(), w)[0])
