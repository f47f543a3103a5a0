"""Custom autograd Functions and in-place ops inside a region."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.helpers import assert_same, assert_same_program, checkpointed, leaf


class Double(Function):
    """Doubles its input in place and says so."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class SortWithIndex(Function):
    """Returns values and indices; the indices are not differentiable."""

    @staticmethod
    def forward(ctx, x):
        values, index = x.sort()
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        return values, index

    @staticmethod
    def backward(ctx, grad, grad_index):
        (index,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, index, grad)


class Mixed(Function):
    """Takes numbers, text, None and a callable between its tensors."""

    @staticmethod
    def forward(ctx, x, power, name, w, nothing, function):
        assert name == "name"
        assert nothing is None
        ctx.save_for_backward(x, w, None)
        ctx.power, ctx.function = power, function
        return function(x) ** power * w

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, w, none = ctx.saved_tensors
        assert none is None
        value = ctx.function(x)
        return grad * w * ctx.power * value ** (ctx.power - 1) * 3, None, None, grad * value**ctx.power, None, None


def run(block, *shape):
    def program(wrap):
        x = leaf(*(shape or (3, 4)))
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    return program


def test_function_that_marks_its_input_dirty_is_equal():
    assert_same_program(run(lambda x: (Double.apply(x.sin() * 1) * 3).exp()), replays=1)


def test_function_with_an_output_that_is_not_differentiable_is_equal():
    def block(x):
        values, index = SortWithIndex.apply(x.sin())
        return values.exp() * index

    assert_same_program(run(block), replays=1)


def test_function_with_arguments_that_are_no_tensors_is_equal():
    def program(wrap):
        x, w = leaf(3), leaf(3)
        y = wrap(lambda x, w: Mixed.apply(x.sin(), 2, "name", w.exp(), None, lambda t: t * 3))(x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_program(program, replays=1)


def test_function_that_runs_a_backward_of_its_own_is_equal():
    class Inner(Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                out = inner.sin().exp()
            ctx.inner, ctx.out = inner, out
            return out.detach()

        @staticmethod
        def backward(ctx, grad):
            return torch.autograd.grad(ctx.out, ctx.inner, grad)[0]

    assert_same_program(run(lambda x: Inner.apply(x.cos()).tanh()))


def test_in_place_ops_on_intermediates_are_equal():
    def block(x):
        h = x * 2
        h += 1
        h.mul_(x)
        g = h.sin()
        g.add_(x)
        return nn.functional.relu(g, inplace=True).clone().sub_(1).exp_()

    assert_same_program(run(block), replays=1)


def test_saved_input_that_is_changed_before_the_region_ends_by_an_op_that_allows_it_is_equal():
    """`relu_` saves its result; the addition after it saves nothing; plain autograd allows both."""

    def block(x):
        h = x.sin()
        y = (h * 2).relu_()
        h.add_(1)
        return y.exp()

    assert_same_program(run(block), replays=1)


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
