"""Native regions that touch what lives outside of them: buffers, counters, caches, region inputs; custom ops."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import (
    assert_equal_gradients,
    assert_same,
    assert_same_program,
    leaf,
    parameter_gradients,
    plain,
)
from tests.native_programs import Experts, keep, region, replayed_ops


@torch.library.custom_op("remat_native_tests::scaled_sine", mutates_args=())
def scaled_sine(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x.sin() * scale, x.cos()


def _scaled_sine_setup(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.scale = inputs[1]


def _scaled_sine_backward(ctx, grad, grad_cos):
    (cosine,) = ctx.saved_tensors
    return grad * cosine * ctx.scale, None


scaled_sine.register_autograd(_scaled_sine_backward, setup_context=_scaled_sine_setup)


@scaled_sine.register_fake
def _(x, scale):
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("remat_native_tests::count", mutates_args=("counter",))
def count(x: Tensor, counter: Tensor) -> Tensor:
    counter.add_(1)
    return x.abs()


@torch.library.custom_op("remat_native_tests::draw", mutates_args=())
def draw(x: Tensor) -> Tensor:
    return torch.rand(x.shape)


# Writes to tensors outside


def test_outside_tensor_is_changed_once():
    counter, log, w = torch.zeros(()), torch.zeros(4), leaf(4, 4)

    def body(x):
        h = x @ w
        counter.add_(1)
        log.copy_(h.detach().sum(-1))
        log[1:].mul_(2)
        log[0] = 7.0
        log.view(2, 2).t()[0].sub_(1)
        return h.sin()

    def function(x):
        return keep("a", body, x * 2).exp()

    x = leaf(4, 4)
    function(x)
    expected = log.clone()
    log.zero_(), counter.zero_()
    y = region()(function)(x)
    assert_same([expected, torch.ones(())], [log, counter])
    version = log._version, counter._version
    for retain in (True, False):
        torch.autograd.grad(y.sum(), [x, w], retain_graph=retain)
        assert_same([expected, torch.ones(())], [log, counter])
        assert (log._version, counter._version) == version


@pytest.mark.parametrize("change", ["out", "foreach", "index_put", "set_", "resize_", "scatter_add_", "data", "method"])
def test_outside_tensor_is_changed_once_in_every_way(change):
    buffer = torch.ones(4, 4)

    def body(x):
        h = x.detach().sin()
        with torch.no_grad():
            if change == "out":
                torch.mm(h, h, out=buffer)
            elif change == "foreach":
                torch._foreach_add_([buffer, buffer[0]], 1.0)
            elif change == "index_put":
                buffer[h > 0] += 2
            elif change == "set_":
                buffer.add_(buffer.t().clone())
            elif change == "resize_":
                buffer.resize_(2, 2).fill_(h[0, 0].item())
            elif change == "scatter_add_":
                buffer.scatter_add_(0, (h > 0).long(), h)
            elif change == "data":
                buffer.data.add_(1)
            else:
                buffer.bernoulli_(0.5)
        return x.sin() * 2

    def function(x):
        return F.dropout(keep("a", body, x * 2).exp(), 0.3)

    x, results = leaf(4, 4), []
    for wrap in (plain, region()):
        torch.manual_seed(5)
        buffer.resize_(4, 4).fill_(1)
        y = wrap(function)(x)
        after_forward = buffer.clone()
        results.append([y, *torch.autograd.grad(y.sum(), x), buffer.clone(), torch.rand(2)])
        assert_same(after_forward, buffer)
    assert_same(*results)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_updates_its_buffers_once(momentum):
    def program(wrap):
        module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=momentum), nn.ReLU(), nn.Conv2d(3, 1, 2))
        x = leaf(2, 2, 6, 6)
        y = wrap(lambda x: keep("module", module, x * 2).sin())(x)
        y.sum().backward()
        z = wrap(lambda x: keep("module", module, x * 3).sin())(x)
        z.sum().backward()
        assert int(module[1].num_batches_tracked) == 2
        return y, z, x.grad, parameter_gradients(module), list(module.buffers())

    assert_same_program(program)


def test_cache_written_and_read_inside():
    """As in generation: keys go to a cache that outlives the region, attention reads the part that is filled."""

    def program(wrap):
        torch.manual_seed(6)
        cache, position = torch.zeros(6, 4), torch.zeros((), dtype=torch.long)
        w, x = leaf(4, 4), leaf(2, 4)

        def attend(h):
            start = int(position)
            cache[start : start + len(h)] = h.detach()
            position.add_(len(h))
            keys = cache[: int(position)].clone()
            return (h @ keys.t()).softmax(-1) @ keys + h @ w

        outputs = []
        for step in range(3):
            y = wrap(lambda x, step=step: keep("attend", attend, x * (step + 1)).exp())(x)
            outputs.append(y)
        return *outputs, *torch.autograd.grad(sum(y.sum() for y in outputs), [x, w]), cache, position

    assert_same_program(program)


def test_python_side_effects_are_the_users_but_tensors_are_right():
    def program(wrap):
        calls, x = [], leaf(3, 3)

        def body(h):
            calls.append(h.shape)
            return (h @ h).sin()

        y = wrap(lambda x: keep("a", body, x * 2).exp())(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")  # it runs whole
def test_outside_intermediate_changed_in_place_inside_is_right_or_refused():
    def make(change, reader):
        def function(x, w):
            g = x * 2
            y = keep("a", change, g, w)
            return y.exp() * reader(g)

        return function

    for change in (
        lambda g, w: g.mul_(3) @ w,
        lambda g, w: (g[0].add_(1), g @ w)[1],
        lambda g, w: (g @ w, g.detach().zero_())[0],
        lambda g, w: g.copy_(w),
    ):
        for reader in (torch.sin, torch.clone):
            function = make(change, reader)
            inputs = leaf(3, 3), leaf(3, 3)
            try:
                torch.manual_seed(0)
                expected = torch.autograd.grad(function(*inputs).sum(), inputs, allow_unused=True)
            except RuntimeError as error:
                assert "inplace" in str(error)  # noqa: PT017
                with pytest.raises(RuntimeError, match=r"in[- ]?place"):
                    torch.autograd.grad(region()(function)(*inputs).sum(), inputs, allow_unused=True)
                continue
            try:
                actual = torch.autograd.grad(region()(function)(*inputs).sum(), inputs, allow_unused=True)
            except remat.RematError as error:
                assert re.search("in[- ]?place", str(error))  # noqa: PT017
                continue
            assert_same([g for g in expected if g is not None], [g for g in actual if g is not None])


@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")  # it runs whole
def test_returned_tensor_changed_in_place_outside_is_right_or_refused():
    def function(x, w):
        h = keep("a", torch.mm, x, w)
        h.add_(1)
        h[0].mul_(2)
        return h.sin().exp()

    def saved_first(x, w):
        h = keep("a", lambda: (x @ w).exp())
        h.mul_(2)
        return h.sin()

    inputs = leaf(3, 3), leaf(3, 3)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    try:
        assert_same(expected, torch.autograd.grad(region()(function)(*inputs).sum(), inputs))
    except remat.RematError as error:
        assert "a" in (error.op, None)  # noqa: PT017
    with pytest.raises(remat.MutationError):
        region()(saved_first)(*inputs).sum().backward()


@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")  # it runs whole
def test_tensor_kept_for_a_reader_and_then_changed_by_the_region_is_right_or_refused():
    """The reader's saved value is of before the change."""

    def function(x, w):
        h = keep("a", torch.mm, x, w)
        y = (h * 2).sin()
        h.zero_()
        return y * (h + w).cos()

    inputs = leaf(3, 3), leaf(3, 3)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    try:
        actual = torch.autograd.grad(region()(function)(*inputs).sum(), inputs)
    except remat.RematError as error:
        assert re.search("in[- ]?place", str(error))  # noqa: PT017
    else:
        assert_same(expected, actual)


# A placeholder that is read after all


READERS = {
    "abs": lambda h: h.detach().abs().amax(),
    "item": lambda h: h.detach().max().item(),
    "bool": lambda h: 2.0 if (h > 0).any() else 3.0,
    "where": lambda h: torch.where(h.detach() > 0, 1.0, -1.0),
    "no_grad": lambda h: no_grad_norm(h),
    "to": lambda h: (h > 0).to(torch.float32),
}


@torch.no_grad()
def no_grad_norm(h):
    return h.norm() + 1


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", READERS)
def test_result_read_without_a_graph_is_right_and_costs_at_most_one_more_run(name, early_stop):
    """The graph shows no reader: the native region runs once more, with one warning, or its result was kept."""
    calls = []

    def scores(x, w):
        calls.append(1)
        return x @ w

    def function(x, w):
        h = keep("scores", scores, x, w)
        return (x * READERS[name](h)).sin().exp()

    inputs = leaf(3, 3), leaf(3, 3)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs, allow_unused=True)
    y = region(region_name="block", early_stop=early_stop)(function)(*inputs)
    del calls[:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = torch.autograd.grad(y.sum(), inputs, allow_unused=True)
    assert_same(expected[0], actual[0])
    assert len(caught) <= 1
    assert len(calls) <= 1 + len(caught)
    if caught:
        assert caught[0].category is remat.RematWarning
        text = str(caught[0].message)
        assert "scores" in text
        assert "block" in text
        assert "test_effects_native.py" in text or re.search(r"abs|amax|max|norm|gt|item|bool|any|_to_copy", text)


@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")
@pytest.mark.parametrize(
    "body",
    [
        lambda x: (x.sin() if torch.is_grad_enabled() else x.cos().tan()).exp(),
        lambda x: remat.checkpoint(region_name="inner")(torch.exp)(x.sin()) * 2,
    ],
)
def test_second_run_enables_gradients_as_forward_did(body):
    """Functions of torch's own, too, choose their ops by whether gradients are wanted."""

    def function(x):
        scores = keep("scores", body, x)
        with torch.no_grad():
            mean = scores.mean()
        return (x.sin() * mean).exp().tanh()

    x = leaf(3, 3)
    y = region()(function)(x)
    assert_same(torch.autograd.grad(function(x).sum(), x), torch.autograd.grad(y.sum(), x))


def test_region_that_changed_something_outside_does_not_run_once_more():
    counter = torch.zeros(())

    def body(h):
        counter.add_(1)
        return h @ h

    def function(x):
        h = keep("scores", body, x * 2)
        return (x * h.detach().abs().amax()).sin()

    y = region()(function)(leaf(3, 3))
    with pytest.raises(remat.PlaceholderError, match=r"scores\.out"):
        y.sum().backward()
    assert counter == 1


# Custom ops of torch.library


def test_custom_op_inside_is_called_once():
    def function(x):
        y, cosine = keep("a", scaled_sine, x * 2, 3.0)
        return (y * cosine.detach()).exp()

    x = leaf(3)
    assert_equal_gradients(function, region()(function), [x])
    assert replayed_ops(function, region(), [x]) == {"mul": 2, "exp": 1}


# Models


def test_mixture_of_experts_trains_as_plain_autograd_and_routes_once():
    def program(wrap):
        torch.manual_seed(8)
        model = Experts()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        route = model.route
        model.route = lambda tokens: keep("route", route, tokens)
        losses = []
        for _ in range(4):
            x = torch.randn(2, 5, 8, requires_grad=True)
            loss = wrap(model)(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert int(model.load.sum()) == 4 * 2 * 5 * 2
        return losses, list(model.parameters()), model.load

    assert_same_program(program)
