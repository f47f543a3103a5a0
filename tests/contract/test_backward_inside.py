"""Backward inside forward, saved tensors looked at from outside, hooks on tensors and nodes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import (
    Calls,
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
    shown,
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


@pytest.mark.parametrize("check", CHECKS)
def test_gradient_of_what_the_region_goes_on_with_is_equal(check):
    def program(wrap):
        def block(x):
            h = x.sin()
            return h * forces(h.exp(), h, create_graph=False)

        x = leaf(3)
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, determinism_check=check)


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


@pytest.mark.parametrize("check", ["bitwise", torch.sum], ids=shown)
def test_gradient_taken_inside_a_region_whose_values_are_compared_is_equal(check):
    """The replay in it comes before forward has the value of what it saved last."""

    def program(wrap):
        x = leaf(4)

        def block(x):
            y = x.sin().exp()
            (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return y * gradient

        wrap(block)(x).sum().backward()
        return x.grad

    assert_same_program(program, determinism_check=check)


def test_gradient_taken_inside_a_region_again_and_again_is_equal():
    def program(wrap):
        def descend(x):
            point = x.detach()
            for _ in range(4):
                point = point.requires_grad_()
                point = (point + 0.1 * forces(chain(point), point, create_graph=False)).detach()
            return (x * point).sin().exp()

        x = leaf(5)
        y = wrap(descend)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


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


def test_backward_of_an_earlier_region_inside_a_later_forward_is_equal():
    def program(wrap):
        x = leaf(5)
        earlier = wrap(chain)(x)

        def later(h):
            return h.sin() * torch.autograd.grad(earlier.sum(), x, retain_graph=True)[0].detach()

        y = wrap(later)(earlier)
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


@pytest.mark.parametrize(
    "policy", [[torch.ops.aten.mul.Tensor], lambda *args, **kwargs: remat.CheckpointPolicy.RECOMPUTE]
)
def test_gradient_inside_by_a_multiplication_with_a_complex_number(policy):
    """Backward multiplies with its conjugate, a view of no tensor of the region."""

    def program(wrap):
        def function(p):
            z = torch.view_as_complex(p.reshape(4, 2, 2).contiguous())
            h = torch.view_as_real(z * 1j).sin()
            (gradient,) = torch.autograd.grad(h.sum(), p, create_graph=True)
            return gradient.exp() * h.sum()

        torch.manual_seed(0)
        p = leaf(4, 4)
        y = wrap(function)(p)
        y.square().sum().backward()
        return y, p.grad

    with refused_if(policy is not None):
        assert_same(program(plain), program(remat.checkpoint(policy=policy)))


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


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", [None, lambda *_, **__: False], ids=["native", "policy"])
def test_gradient_taken_inside_what_is_watched_in_regions_in_each_other_is_equal(policy, depth):
    """It replays the outer regions, whose ops are none of those that are watched."""

    def gradients(wrap):
        def inside(x):
            s = x.detach().requires_grad_()
            return x * forces(s.sin().square(), s, create_graph=False)

        def block(x):
            return (remat.native_save_region("inside", inside, x) if policy is None else inside(x)).exp()

        function = wrap(block, policy=policy)
        for _ in range(depth):
            function = wrap(lambda x, function=function: function(x * 1.5) * 1)
        x = torch.linspace(0.1, 1, 4).requires_grad_()
        y = function(x)
        y.sum().backward()
        return y, x.grad

    with refused_if(policy is not None):
        assert_same(gradients(lambda function, policy=None: function), gradients(checkpointed))


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


def test_saved_tensors_may_be_read_twice_with_create_graph():
    def program(wrap):
        x = leaf(4)
        y = wrap(lambda x: ReadTwice.apply(x.sin(), x.cos()))(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        grad.square().sum().backward()
        return grad, x.grad

    assert_same_program(program)


def test_saved_tensor_looked_at_before_backward_is_right_and_harms_nothing():
    x = leaf(4)
    y = checkpointed(lambda x: x.sin().exp())(x)
    assert_same(y.grad_fn._saved_result, x.sin().exp())
    assert_same(y.grad_fn._saved_result, x.sin().exp())
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(x.sin().exp().sum(), x))


def test_saved_tensor_looked_at_between_two_backwards_is_right():
    x = leaf(4)
    y = checkpointed(lambda x: x.sin().exp())(x)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert_same(y.grad_fn._saved_result, x.sin().exp())
    (second,) = torch.autograd.grad(y.sum(), x)
    assert_same(first, second)


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


def test_module_hooks_inside_a_region_run_as_without_checkpointing():
    def program(wrap):
        seen = []
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
        x = leaf(2, 4)
        wrap(model)(x).sum().backward()
        assert len(seen) == 1
        return x.grad, *seen, *parameter_gradients(model)

    assert_same_program(program)


def test_post_accumulate_hooks_may_drop_each_gradient_at_once():
    def program(wrap):
        model = nn.Sequential(Mlp(4), Mlp(4))
        seen = []

        def take(parameter):
            seen.append(parameter.grad)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(take)
        x = leaf(2, 4)
        for block in model:
            x = wrap(block)(x)
        x.sum().backward()
        return seen

    assert_same_program(program, replays=2)


def test_region_used_as_a_step_of_a_recurrence_is_equal():
    def program(wrap):
        cell = nn.GRUCell(3, 4)
        h = torch.zeros(2, 4)
        x = leaf(6, 2, 3)
        states = [h := wrap(cell)(step, h) for step in x]
        torch.stack(states).square().sum().backward()
        return x.grad, *parameter_gradients(cell)

    assert_same_program(program, replays=6)


def test_replay_inside_reentrant_backward_is_equal():
    def program(wrap):
        x = leaf(4)
        y = wrap(lambda x: torch_checkpoint(chain, x.sin(), use_reentrant=True).tanh())(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


def test_function_that_runs_other_code_in_replay_only_may_ask_is_recomputing():
    metrics = []

    def block(x):

        if not remat.is_recomputing():
            metrics.append(x.detach().mean())
        return x.sin().exp()

    function = Calls(block)
    checkpointed(function)(leaf(3)).sum().backward()
    assert function.total == 2
    assert len(metrics) == 1


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


@pytest.mark.parametrize("early_stop", [True, False])
def test_native_region_in_which_a_gradient_is_refused_updates_running_statistics_once(early_stop):
    def function(x, mean, variance):
        def normalized():
            y = remat.native_save_region("norm", nn.functional.batch_norm, x, mean, variance, training=True)
            inner = y.detach().requires_grad_()
            (slope,) = torch.autograd.grad((inner.sin() * x + x.exp() * inner * inner).sum(), inner)
            return y * slope.detach()

        return remat.native_save_region("block", normalized) * x

    x, expected = leaf(4, 4), [torch.zeros(4), torch.ones(4)]
    function(x, *expected)
    found = [torch.zeros(4), torch.ones(4)]
    with pytest.raises(remat.UsageError, match="inside this call"):
        remat.checkpoint(early_stop=early_stop)(function)(x, *found)
    assert_same(found, expected)


def test_gradient_taken_inside_a_module_that_is_a_region_is_equal():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp(4)

        def forward(self, x):
            energy = self.mlp(x).sin().exp()
            (grad,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
            return energy * grad

    def program(wrap):
        model, x = Energy(), leaf(2, 4)
        wrap(model)(x).sum().backward()
        return x.grad, *parameter_gradients(model)

    assert_same_program(program)


def by_an_argument(x):
    (gradient,) = torch.autograd.grad((x.sin() * x.cos()).sum(), x, create_graph=True)
    return gradient * x


@pytest.mark.parametrize(
    "wrap", [checkpointed, lambda f: checkpointed(checkpointed(f)), lambda f: torchs(checkpointed(f))]
)
def test_gradient_inside_by_an_argument_that_has_a_history(wrap):
    x = leaf(4, 4)
    for given in (x * 2, (x * 2).T, (x * 2)[:2]):
        expected = torch.autograd.grad(by_an_argument(given).sum(), x, retain_graph=True)
        assert_same(expected, torch.autograd.grad(wrap(by_an_argument)(given).sum(), x, retain_graph=True))


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


@pytest.mark.parametrize("call", ["region", "native", "none"])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")
def test_gradient_inside_a_call_in_a_checkpoint_in_a_region_with_a_policy(call, keeps):
    """The checkpoint recomputes inside the call, in both phases."""
    calls = {
        "region": lambda f, *args: remat.op(f, "inner")(*args),
        "native": lambda f, *args: remat.native_save_region("inner", f, *args),
        "none": lambda f, *args: f(*args),
    }

    def program(wrap):
        x = leaf(4, 4)

        def block(x):
            inner = torchs if wrap is not plain else plain
            h = inner(lambda a, b: calls[call](inner_gradient, a, b) * b)(x * 2, x.cos())
            return h.exp() * x

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    with refused_if(not keeps):
        assert_same_program(program, policy=lambda ctx, op, *args, **kwargs: keeps)


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


class HandledSin(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def test_gradient_inside_by_an_op_with_a_handle_before_an_inner_region():
    """The replay that it causes ends before the inner region, which forward has not begun."""

    def program(op, outer, inner):
        torch.manual_seed(0)
        x = leaf(4)

        def function(a):
            p = a.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(op(p).sum(), p)
            return inner(torch.sin)(a + gradient)

        y = outer(function)(x.cos())
        y.square().sum().backward()
        return y, x.grad

    def handled(x):
        return remat.op(HandledSin.apply, "sin", policy=remat.CheckpointPolicy.RECOMPUTE)(x)

    assert_same(program(torch.sin, plain, plain), program(handled, remat.checkpoint(), remat.checkpoint()))


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


CALLS = {
    "torch's": lambda function: remat.op(function, "k"),
    "of Python": lambda function: remat.op(lambda *args: function(*args), "k"),
    "opaque": lambda function: remat.op(lambda *args: function(*args), "k", opaque=True),
}


@pytest.mark.parametrize(
    "options", [{}, {"policy": [torch.ops.aten.sin.default]}, {"policy": lambda *args, **kwargs: False}]
)
@pytest.mark.parametrize("call", CALLS)
def test_gradient_inside_through_a_call_that_saves_leaves_alone(call, options):
    """Nothing of the region is read but a leaf that it has made; the call is noticed and refused."""

    def program(wrap, call):
        torch.manual_seed(0)
        x = leaf(4, 4)

        def function(a):
            p = a.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((p.sin() + call(torch.mul)(p, p) * 0.1).sum(), p)
            return (a + gradient).sin()

        y = wrap(function)(x.cos())
        y.square().sum().backward()
        return y, x.grad

    with pytest.raises(remat.UsageError, match="gradient is taken") as caught:
        program(remat.checkpoint(**options), CALLS[call])
    assert caught.value.op == "k" or "policy" in options
