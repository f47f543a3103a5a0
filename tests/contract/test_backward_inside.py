"""Backward inside forward, saved tensors looked at from outside, hooks on tensors and nodes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import (
    Mlp,
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    leaf,
    pairwise,
    parameter_gradients,
    plain,
    refused_if,
)


def forces(energy, positions, create_graph):
    (grad,) = torch.autograd.grad(energy.sum(), positions, create_graph=create_graph)
    return -grad


CHECKS = ["default", "bitwise", lambda tensor: tensor.sum()]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("early_stop", [True, False])
def test_gradient_taken_inside_a_region_with_create_graph_is_equal(early_stop, check):
    def program(wrap):
        model = Mlp(4)

        def block(x):
            h = x.sin()
            return h + forces(model(h), h, create_graph=True)

        x = leaf(2, 4)
        y = wrap(block)(x)
        y.square().sum().backward()
        return y, x.grad, *parameter_gradients(model)

    assert_same_program(program, early_stop=early_stop, determinism_check=check)


@pytest.mark.parametrize("early_stop", [True, False])
def test_gradient_taken_inside_a_region_without_create_graph_is_equal(early_stop):
    def program(wrap):
        w = leaf(4, 4)

        def block(x):
            inner = x.detach().requires_grad_()
            step = forces((inner @ w).sin().exp(), inner, create_graph=False)
            return (x + step) @ w

        x = leaf(2, 4)
        y = wrap(block)(x).sin()
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_program(program, early_stop=early_stop)


def test_backward_of_an_inner_region_inside_an_outer_forward_is_equal():
    def program(wrap):
        def outer(x):
            h = wrap(chain)(x)
            return h.tanh() + forces(h, x, create_graph=True)

        x = leaf(5)
        y = wrap(outer)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


@pytest.mark.parametrize("policy", [[torch.ops.aten.mm.default], remat.policies.save_attention])
def test_backward_of_an_inner_region_inside_a_region_with_a_policy_is_equal(policy):
    def program(wrap):
        w, x = leaf(3, 3), leaf(3, 3)

        def outer(x, w):
            h = (x @ w).sin()
            q = wrap(lambda h: (h @ w).tanh())(h)
            q.sum().backward(inputs=[w], retain_graph=True)
            return (h * q).exp()

        y = remat.checkpoint(policy=policy)(outer)(x, w) if wrap is not plain else outer(x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    with pytest.raises(remat.UsageError, match="before the region's forward ends, through an op that is not kept"):
        program(checkpointed)


def _grad_of(output, *inputs, **options):
    return torch.autograd.grad(output.sum(), inputs, **options)[0]


WHOLE_CALLS = {
    "alone": lambda run, h, w: h.cos() * _grad_of(run("n", torch.exp, h), h),
    "linear": lambda run, h, w: h.cos() * _grad_of(run("n", torch.neg, h), h),
    "one of two ways": lambda run, h, w: (h.cos() * _grad_of(run("n", torch.exp, h) + h.sin(), h)).sin(),
    "one of two linear ways": lambda run, h, w: (h.cos() * _grad_of(run("n", torch.neg, h) + h * 3, h)).sin(),
    "product": lambda run, h, w: (h.cos() * _grad_of(run("n", torch.mm, h, w), h)).sin(),
    "random": lambda run, h, w: (h * _grad_of(run("n", torch.dropout, h, 0.5, True) * 2, h)).sin() * torch.rand(3),
    "two": lambda run, h, w: h.exp() * _grad_of(run("b", torch.sigmoid, run("a", torch.exp, h)), h),
    "create_graph": lambda run, h, w: h.cos() * _grad_of(run("n", torch.exp, h).sin() + h, h, create_graph=True),
    "watched": lambda run, h, w: h.cos() * _grad_of(run("n", lambda: h.exp() * 2) + h.sin(), h),
    "of its result": lambda run, h, w: (lambda q: q * _grad_of(q.sin(), q, create_graph=True))(run("n", torch.exp, h)),
}


@pairwise(name=WHOLE_CALLS, early_stop=[True, False])
def test_gradient_taken_inside_a_region_through_a_call_of_torchs_own_is_refused(name, early_stop):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        run = remat.native_save_region if wrap is not plain else lambda name, function, *args: function(*args)
        y = wrap(lambda x: WHOLE_CALLS[name](run, x.sin(), w))(x)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y, first, torch.autograd.grad(y.sum(), x)

    if name == "of its result":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.RematWarning)
            assert_same_program(program, early_stop=early_stop)
    else:
        with pytest.raises(remat.UsageError, match="through this call before the region's forward ends") as caught:
            program(remat.checkpoint(early_stop=early_stop))
        assert caught.value.op in ("n", "a", "b")


INSIDE_A_NATIVE_REGION = {
    "native region": lambda run, inner, h: (
        run("inner", lambda: _grad_of((h.detach().requires_grad_() * h).sin(), h)) * h
    ),
    "native region before": lambda run, inner, h: run("inner", torch.exp, h) * _grad_of((h * h).sin(), h),
    "region": lambda run, inner, h: inner(torch.exp)(h) * _grad_of((h * h).sin(), h),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", INSIDE_A_NATIVE_REGION)
def test_gradient_taken_inside_a_native_region_through_what_is_recomputed_is_refused(name, early_stop):
    def program(wrap):
        x = leaf(3, 3)
        run = remat.native_save_region if wrap is not plain else lambda name, function, *args: function(*args)
        inner = remat.checkpoint() if wrap is not plain else plain
        inside = INSIDE_A_NATIVE_REGION[name]
        y = wrap(lambda x: (lambda h: run("outer", lambda: inside(run, inner, h)).sin())(x.cos()))(x)
        return y, torch.autograd.grad(y.sum(), x)

    with pytest.raises(
        remat.UsageError, match="inside this call, through what the region would have to recompute"
    ) as e:
        program(remat.checkpoint(early_stop=early_stop))
    assert e.value.op == "outer"


@pytest.mark.parametrize("early_stop", [True, False])
def test_gradient_that_is_refused_and_swallowed_is_an_error_at_the_end_of_forward(early_stop):
    count = torch.zeros(())

    def inside(h):
        try:
            gradient = _grad_of((h * h).sin(), h)
        except RuntimeError:
            gradient = 1
        count.add_(1)
        return gradient * h

    with pytest.raises(remat.UsageError, match="inside this call") as caught:
        remat.checkpoint(early_stop=early_stop)(lambda x: remat.native_save_region("n", inside, x.cos()))(leaf(3, 3))
    assert (caught.value.op, count) == ("n", 1)


class ReadTwice(torch.autograd.Function):
    """Reads its saved tensors twice in backward, and checks that both reads agree."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        first, second = ctx.saved_tensors, ctx.saved_tensors
        assert len(first) == len(second) == 2
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
        return grad * second[1], grad * first[0]


@pytest.mark.parametrize("retain_graph", [False, True])
def test_saved_tensors_may_be_read_twice(retain_graph):
    def program(wrap):
        x = leaf(4)
        y = wrap(lambda x: ReadTwice.apply(x.sin(), x.cos()).tanh())(x)
        for _ in range(1 + retain_graph):
            y.sum().backward(retain_graph=retain_graph)
        return x.grad

    assert_same_program(program)


def test_saved_tensor_looked_at_before_backward_is_right_and_harms_nothing():
    x = leaf(4)
    y = checkpointed(lambda x: x.sin().exp())(x)
    assert_same(y.grad_fn._saved_result, x.sin().exp())
    assert_same(y.grad_fn._saved_result, x.sin().exp())
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(x.sin().exp().sum(), x))


def test_hooks_on_outputs_inputs_and_inner_tensors_see_equal_gradients():
    def program(wrap):
        seen = []

        def block(x):
            h = x.sin()
            if not seen_inner:
                h.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
                seen_inner.append(True)
            return h.exp()

        seen_inner = []
        x = leaf(4)
        x.register_hook(lambda grad: grad + 1)
        y = wrap(block)(x)
        y.retain_grad()
        y.register_hook(lambda grad: grad * 3)
        y.sum().backward()
        return x.grad, y.grad, *seen

    assert_same_program(program)


def test_replay_inside_reentrant_backward_is_equal():
    def program(wrap):
        x = leaf(4)
        y = wrap(lambda x: torch_checkpoint(chain, x.sin(), use_reentrant=True).tanh())(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


@pytest.mark.parametrize("policy", [lambda *_, **__: False, lambda *_, **__: True, remat.policies.save_matmuls])
@pytest.mark.parametrize("native", [False, True])
def test_policy_region_changes_a_buffer_once_where_a_gradient_is_taken_inside(policy, native):
    buffer = torch.zeros(3)

    def count(x):
        buffer.add_(x.detach())
        return x * 2

    def function(x):
        x = x * 1.5
        y = remat.native_save_region("count", count, x) if native else count(x)
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((inner.sin() * buffer).square().sum(), inner)
        return x * slope * y

    x = leaf(3)
    expected = torch.autograd.grad(function(x).sum(), x)
    buffer.zero_()
    with refused_if(policy is not None):
        y = remat.checkpoint(policy=policy)(function)(x)
        assert_same(torch.autograd.grad(y.sum(), x), expected)
    assert torch.equal(buffer, x.detach() * 1.5)


def torchs(function):
    return lambda *args: torch_checkpoint(function, *args, use_reentrant=False)


@pytest.mark.parametrize("outer", [torchs, checkpointed])
@pytest.mark.parametrize("options", [{}, {"opaque": True}])
def test_gradient_inside_a_call_in_a_region_under_a_checkpoint(outer, options):
    def through(value, other):
        with torch.enable_grad():
            t = value.detach().requires_grad_()
            return torch.autograd.grad((t.sin() * other).sum(), t, create_graph=True)[0]

    def program(outer, inner, call):
        def block(value, other):
            return call(through)(value, other) @ other

        return outer(lambda x: inner(block)(x + 1, x * 3))

    x = leaf(4, 4)
    expected = torch.autograd.grad(program(plain, plain, plain)(x).sum(), x)
    actual = program(outer, checkpointed, lambda f: remat.op(f, "through", **options))(x)
    assert_same(expected, torch.autograd.grad(actual.sum(), x))


def inner_gradient(value, other):
    t = value.detach().requires_grad_()
    return torch.autograd.grad((t.sin() * other).sum(), t)[0]


def test_gradient_inside_an_inner_region_whose_views_are_of_placeholders_in_the_outer_replay():
    def program(wrap):
        x, w = leaf(4, 4), leaf(4, 4)

        def inner(h):
            scale = inner_gradient(h, h)
            kept = remat.op(torch.sin, "kept")(h.detach()) * scale
            remat.op(lambda: kept.unbind(0), "views")()
            return h * w

        y = wrap(lambda x: wrap(inner)(x) * w)(x)
        y.sum().backward()
        return y, x.grad

    with pytest.raises(remat.UsageError, match="through an op that is not kept"):
        program(remat.checkpoint(policy=lambda ctx, op, *args, **kwargs: False))


@pytest.mark.parametrize("options", [{}, {"determinism_check": "bitwise"}, {"policy": lambda *args, **kwargs: False}])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradient_inside_by_a_leaf_of_its_own_under_autocast(create_graph, options):
    """Replay has another leaf, of which autocast makes the copy."""

    def program(wrap):
        torch.manual_seed(0)
        x = leaf(4, 4)

        def function(a):
            p = a.detach().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = (p @ p.T).sin()
            (gradient,) = torch.autograd.grad(y.float().sum(), p, create_graph=create_graph)
            return (a + gradient).sin()

        y = wrap(function)(x.cos())
        y.square().sum().backward()
        return y, x.grad

    with refused_if("policy" in options):
        assert_same(program(plain), program(remat.checkpoint(**options)))
