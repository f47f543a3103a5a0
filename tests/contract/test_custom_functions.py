"""Custom autograd Functions and in-place ops inside a region."""

from __future__ import annotations

import pytest
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


def test_function_that_marks_its_input_dirty_is_equal():
    assert_same_program(run(lambda x: (Double.apply(x.sin() * 1) * 3).exp()), replays=1)


def test_function_that_saves_its_dirty_input_is_equal():
    def block(x):
        changed, square = DoubleAndSave.apply(x.sin() * 1)
        return changed.exp() * square.cos()

    assert_same_program(run(block), replays=1)


def test_function_that_marks_a_view_dirty_is_equal():
    def block(x):
        h = x.sin() * 1
        Double.apply(h[0])
        return h.exp()

    assert_same_program(run(block), replays=1)


def test_function_with_an_output_that_is_not_differentiable_is_equal():
    def block(x):
        values, index = SortWithIndex.apply(x.sin())
        return values.exp() * index

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


def test_function_with_arguments_that_are_no_tensors_is_equal():
    def program(wrap):
        x, w = leaf(3), leaf(3)
        y = wrap(lambda x, w: Mixed.apply(x.sin(), 2, "name", w.exp(), None, lambda t: t * 3))(x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_program(program, replays=1)


def test_function_with_setup_context_is_equal():
    assert_same_program(run(lambda x: SetupContext.apply(x.sin())[0].exp()), replays=1)


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


def test_in_place_ops_on_views_of_intermediates_are_equal():
    def block(x):
        h = x * 2
        h[0] = x[1].sin()
        h[:, 1].mul_(3)
        h.view(-1)[::2].add_(x.reshape(-1)[::2].exp())
        h.t().diagonal().zero_()
        return h.cos() * h

    assert_same_program(run(block, 4, 4), replays=1)


def test_buffer_filled_slice_by_slice_is_equal():
    def block(x):
        out = torch.zeros(4, 3)
        for row in range(3):
            out[row] = x[row, :3].sin().exp()
        out[3] = out[:3].sum(0).tanh()
        return out

    assert_same_program(run(block, 3, 4), replays=1)


def test_saved_input_that_is_changed_before_the_region_ends_by_an_op_that_allows_it_is_equal():
    """`relu_` saves its result; the addition after it saves nothing; plain autograd allows both."""

    def block(x):
        h = x.sin()
        y = (h * 2).relu_()
        h.add_(1)
        return y.exp()

    assert_same_program(run(block), replays=1)


def test_batch_norm_in_training_is_equal():
    def program(wrap):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4))
        x = leaf(5, 4)
        first, second = torch.randn(2, 5, 4)
        y = wrap(model)(x) * first + wrap(model)(x + 1) * second
        y.sum().backward()
        return y, x.grad, *(parameter.grad for parameter in model.parameters())

    assert_same_program(program, replays=2)


def test_lstm_convolution_pooling_and_attention_kernels_are_equal():
    def program(wrap):
        lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)
        conv = nn.Conv1d(5, 5, 3, padding=1)

        def block(x):
            h, (state, cell) = lstm(x)
            h = nn.functional.max_pool1d(conv(h), 2)
            h = nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True)
            return (h.cumsum(1) * cell.mean()).logsumexp(-1) + state.std()

        x = leaf(2, 5, 4)
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad, *(parameter.grad for parameter in (*lstm.parameters(), *conv.parameters()))

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_matrix_product_is_equal(layout):
    matrix = torch.eye(4)[:, [1, 0, 2, 3]]
    matrix = matrix.to_sparse() if layout == "coo" else matrix.to_sparse_csr()

    def block(x):
        return torch.sparse.mm(matrix * 1 if layout == "coo" else matrix, x.sin()).exp()

    assert_same_program(run(block, 4, 4), replays=1)


def test_sparse_gradient_and_cross_entropy_are_equal():
    def program(wrap):
        table = nn.Embedding(7, 4, sparse=True)
        head = nn.Linear(4, 7)
        index = torch.randint(7, (6,))
        loss = wrap(lambda i: nn.functional.cross_entropy(head(table(i).tanh()), i))(index)
        loss.backward()
        assert table.weight.grad.is_sparse
        return loss, table.weight.grad.to_dense(), head.weight.grad

    assert_same_program(program, replays=1)


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
