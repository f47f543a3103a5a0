"""Regions in regions: their own kind to any depth, recursion, and `torch.utils.checkpoint` inside and outside."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import (
    Calls,
    Mlp,
    Stack,
    alive,
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    collector_off,
    leaf,
    parameter_gradients,
    plain,
    watch,
)

DEPTHS = [1, 2, 3, 5, 10]


def nested(wrap, depth, before=True, after=True):
    """Return a function that is `depth` regions deep, with ops before and after each inner region."""

    def level(x, w):
        h = (x @ w).sin() if before else x
        h = nested(wrap, depth - 1, before, after)(h, w) if depth > 1 else chain(h)
        return (h @ w).tanh() if after else h

    return wrap(level)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True), (False, False)])
def test_nested_regions_have_equal_gradients(depth, before, after):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        y = nested(wrap, depth, before, after)(x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    if not (before or after):
        program = only_gradient_of_x(depth)
    assert_same_program(program)


def only_gradient_of_x(depth):
    """Nothing but regions around one chain: the weight is passed on and never used."""

    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        y = nested(wrap, depth, False, False)(x, w)
        y.sum().backward()
        assert w.grad is None
        return y, x.grad

    return program


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [2, 4])
def test_nested_regions_are_right_with_retain_graph_and_second_order(depth, early_stop):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        y = nested(wrap, depth)(x, w)
        results = [torch.autograd.grad(y.sum(), [x, w], retain_graph=True) for _ in range(2)]
        (gx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gx.square().sum().backward()
        return *results, gx, x.grad, w.grad

    assert_same_program(program, early_stop=early_stop)


@pytest.mark.parametrize("depth", [3, 6, 9])
def test_innermost_function_runs_at_most_once_more_than_the_depth(depth):
    innermost = Calls(chain)

    def level(x, left):
        inner = checkpointed(innermost)(x.sin()) if left == 1 else checkpointed(level)(x.sin(), left - 1)
        return inner.exp()

    checkpointed(level)(leaf(3), depth - 1).sum().backward()
    assert 2 <= innermost.total <= depth + 1


def test_recursive_region_has_equal_gradients():
    def program(wrap):
        def tree(x, low, high):
            if high - low == 1:
                return (x + low).sin().exp().tanh()
            middle = (low + high) // 2
            return wrap(tree)(wrap(tree)(x, low, middle), middle, high)

        x = leaf(4)
        y = wrap(tree)(x, 0, 8)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


def test_recursive_region_with_two_branches_has_equal_gradients():
    def program(wrap):
        def tree(x, depth):
            if depth == 0:
                return chain(x)
            left, right = wrap(tree)(x.sin(), depth - 1), wrap(tree)(x.cos(), depth - 1)
            return left * right

        x = leaf(4)
        wrap(tree)(x, 3).sum().backward()
        return x.grad

    assert_same_program(program)


def test_inner_region_may_take_an_inference_tensor():
    with torch.inference_mode():
        scale = torch.full((4,), 3.0)

    def program(wrap):
        def inner(x, scale):
            with torch.inference_mode():
                factor = (scale * 2).sum().item()
            return (x.sin() * factor).exp()

        x = leaf(4)
        wrap(lambda x: wrap(inner)(x.cos(), scale).tanh())(x).sum().backward()
        return x.grad

    assert_same_program(program)


def test_inner_regions_in_a_row_inside_an_outer_one_have_equal_gradients():
    def program(wrap):
        model = Stack(wrap, depth=3)
        x = leaf(2, 4, 8)
        y = wrap(model)(x)
        y.square().mean().backward()
        return y, x.grad, *parameter_gradients(model)

    assert_same_program(program)


def test_inner_region_that_needs_no_gradient_is_harmless():
    def program(wrap):
        def outer(x):
            with torch.no_grad():
                scale = wrap(chain)(x.detach())
            return (x * scale).sin() + wrap(chain)(x.detach())

        x = leaf(3)
        wrap(outer)(x).sum().backward()
        return x.grad

    assert_same_program(program)


TORCH = functools.partial(torch_checkpoint, use_reentrant=False)
REENTRANT = functools.partial(torch_checkpoint, use_reentrant=True)


@pytest.mark.parametrize("theirs", [TORCH, REENTRANT], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_torch_checkpoint_inside_a_region_has_equal_gradients(theirs, early_stop):
    def program(wrap):
        mlp = Mlp(4)
        x = leaf(2, 4)
        y = wrap(lambda x: theirs(mlp, x.sin()).exp())(x)
        y.sum().backward()
        return y, x.grad, *parameter_gradients(mlp)

    assert_same_program(program, early_stop=early_stop)


@pytest.mark.parametrize("theirs", [TORCH, REENTRANT], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("early_stop", [True, False])
def test_region_inside_torch_checkpoint_has_equal_gradients(theirs, early_stop):
    def program(wrap):
        mlp = Mlp(4)
        x = leaf(2, 4)
        y = theirs(lambda x: wrap(mlp)(x.sin()).exp(), x)
        y.sum().backward()
        return y, x.grad, *parameter_gradients(mlp)

    assert_same_program(program, early_stop=early_stop)


@pytest.mark.parametrize("outermost", ["ours", "torch", "none"])
def test_region_given_one_tensor_twice_inside_torch_checkpoint_is_equal(outermost):
    """Torch's replay gives the region two tensor objects where forward gave it one."""

    def program(wrap):
        w = leaf(3, 3)

        def middle(a, b):
            return (wrap(lambda p, q: p.sin() * q)(a, b) @ w).tanh()

        def outer(x):
            h = x * 1.5
            return TORCH(middle, h, h) * 1

        x = leaf(3, 3)
        run = {"ours": wrap(outer), "torch": functools.partial(TORCH, outer), "none": outer}[outermost]
        y = run(x)
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_program(program)


@pytest.mark.parametrize("nested_in", [0, 1, 2])
@pytest.mark.parametrize("order", ["base, view", "view, base", "view, view", "view, view, base", "base, base, view"])
def test_region_given_a_tensor_and_views_of_it_inside_other_regions_is_equal(order, nested_in):
    def program(wrap):
        def inner(*tensors):
            total = sum((tensor * (index + 2)).sin() * tensors[0] for index, tensor in enumerate(tensors))
            return total * wrap(torch.mul)(tensors[0] * 1.5, tensors[-1]).square()

        def outer(x):
            base = x * 1.5
            view = base.t()
            return wrap(inner)(*(base if name == "base" else view for name in order.split(", "))).exp()

        for _ in range(nested_in):
            outer = (lambda f: lambda x: wrap(f)(x.cos()).tanh())(outer)
        x = leaf(3, 3)
        y = outer(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


@pytest.mark.parametrize("pattern", ["ot", "to", "oto", "tot", "ooto", "ttoo", "totot"])
def test_regions_and_torch_checkpoints_in_each_other_have_equal_gradients(pattern):
    def program(wrap):
        def level(x, w, left):
            h = (x @ w).sin()
            if left:
                inner = wrap(level) if left[0] == "o" else functools.partial(TORCH, level)
                h = inner(h, w, left[1:])
            return (h @ w).tanh()

        x, w = leaf(3, 3), leaf(3, 3)
        first = wrap(level) if pattern[0] == "o" else functools.partial(TORCH, level)
        y = first(x, w, pattern[1:])
        gradients = [torch.autograd.grad(y.sum(), [x, w], retain_graph=True) for _ in range(2)]
        y.sum().backward()
        return y, gradients, x.grad, w.grad

    assert_same_program(program)


IN_CLOSURES = {
    "itself": lambda wrap, h: wrap(lambda p: (p * h).sin())(h),
    "views": lambda wrap, h: wrap(lambda p: (p * h.view(4) + h.t() * p).sin())(h),
    "deeper": lambda wrap, h: wrap(lambda p: wrap(lambda q: (q * p * h).sin())(p) * h)(h),
}


@pytest.mark.parametrize("options", [{}, {"determinism_check": "bitwise"}, {"policy": lambda *_, **__: True}])
@pytest.mark.parametrize("name", IN_CLOSURES)
def test_inner_region_may_have_its_argument_in_its_closure_too(name, options):
    def program(wrap):
        x = leaf(4)
        y = wrap(lambda x: IN_CLOSURES[name](wrap, x.sin()))(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, **options)


def test_inner_region_that_takes_another_tensor_for_its_argument_in_replay_is_an_error():
    def outer(x):
        h, other = x.sin(), x.cos()
        return remat.checkpoint()(lambda p: p * (other if remat.is_recomputing() else p))(h).exp()

    with pytest.raises(remat.MismatchError, match="made by"):
        remat.checkpoint()(outer)(leaf(4)).sum().backward()


def test_context_of_is_recomputing_follows_the_outer_region():
    seen = []

    def inner(x):
        seen.append(remat.is_recomputing())
        return x.sin().exp()

    y = checkpointed(lambda x: checkpointed(inner)(x.sin()).tanh())(leaf(3))
    assert seen == [False]
    y.sum().backward()
    assert len(seen) >= 2
    assert all(seen[1:])


def test_outer_region_does_not_pin_the_inputs_of_inner_regions():
    between = []

    def outer(x):
        for _ in range(3):
            x = checkpointed(chain)(x)
            between.extend(watch(x))
        return x.sin()

    with collector_off():
        x = leaf(4)
        y = checkpointed(outer)(x)
        assert len(between) == 3
        assert alive(between) == 0
        y.sum().backward()
        assert len(between) == 6
        del y
        assert alive(between) == 0


@pytest.mark.parametrize("theirs", ["ours", "torch"])
def test_outermost_region_does_not_pin_what_passes_between_deeper_levels(theirs):
    between = []

    def level(x, depth):
        h = x.sin()
        between.extend(watch(h))
        if depth:
            inner = checkpointed(level) if theirs == "ours" or depth % 2 else functools.partial(TORCH, level)
            h = inner(h, depth - 1)
        return h.exp() + 1

    with collector_off():
        x = leaf(4)
        y = checkpointed(level)(x, 4)
        assert len(between) == 5
        assert alive(between) == 0
        del y


def test_backward_of_nested_regions_holds_the_values_of_one_inner_region_at_a_time():
    made: dict[int, list] = {}
    others_alive = []

    class Boundary(torch.autograd.Function):
        """Identity whose backward, after that of its region's ops, counts what other regions' ops left alive."""

        @staticmethod
        def forward(ctx, x, index):
            ctx.index = index
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            others = [ref for index, refs in made.items() if index != ctx.index for ref in refs]
            others_alive.append(alive(others))
            return grad, None

    def inner(x, index):
        h = x.sin()
        hh = h.exp()
        made.setdefault(index, []).extend(watch(h, hh))
        return Boundary.apply(hh * h, index)

    def outer(x):
        for index in range(4):
            x = checkpointed(inner)(x, index)
        return x.sin()

    with collector_off():
        x = leaf(4)
        y = checkpointed(outer)(x)
        y.sum().backward()
        del y
    assert others_alive == [0, 0, 0, 0]
    assert {len(refs) for refs in made.values()} <= {4, 6}


@pytest.mark.parametrize("around", ["region", "checkpoint"])
@pytest.mark.parametrize("how", [remat.native_save_region, lambda name, *call: remat.op(call[0], name)(*call[1:])])
@pytest.mark.parametrize("op", [torch.sin, torch.mul, torch.mm, lambda a: a.sin() * a])
def test_a_tensor_that_is_argument_and_variable_of_an_inner_region(op, how, around):
    """The checkpoint in between is replayed with two tensors in place of the one."""

    def program(outer, checkpoint, inner, call):
        def middle(one, other):
            return inner(lambda x: call("op", op, *((x, one) if op in (torch.mul, torch.mm) else (one,))).sin())(other)

        def block(x):
            y = x.softmax(-1)
            return checkpoint(middle)(y, y)

        x = leaf(4, 4)
        return torch.autograd.grad(outer(block)(x).sum(), x)[0]

    def torchs(function):
        return lambda *args: torch_checkpoint(function, *args, use_reentrant=False)

    def plainly(function):
        return function

    wrap = remat.checkpoint() if around == "region" else torchs
    torch.manual_seed(0)
    expected = program(plainly, plainly, plainly, lambda name, function, *args: function(*args))
    torch.manual_seed(0)
    assert torch.equal(expected, program(wrap, torchs, remat.checkpoint(), how))


@pytest.mark.parametrize("given", ["as a variable", "as an argument, too"])
def test_inner_region_reads_an_argument_of_the_outer_one_which_is_a_leaf_only_in_replay(given):
    """What the inner one keeps must be the same in both phases of the outer one."""

    def program(wrap):
        x = leaf(4, 4)

        def outer(a, b):
            def inner(q):
                scale = remat.native_save_region("order", torch.argsort, q).float() + 1
                (scale * 3).sum()
                b.sin()
                b.gather(1, remat.native_save_region("sort", torch.sort, b)[1])
                return q * 2

            h = wrap(inner)(a)
            (g,) = torch.autograd.grad((h.detach().requires_grad_() * h).sum(), h, retain_graph=True)
            return (h * 1.5).exp() + g

        y = x * 2
        out = wrap(outer)(y, y if given == "as an argument, too" else y.sin())
        out.sum().backward()
        return out, x.grad

    assert_same_program(program)


def test_call_in_an_inner_region_returns_a_view_of_a_placeholder_in_the_replay_of_the_outer_one():
    def program(wrap):
        x = leaf(4, 4)

        def outer(a):
            h = a * 2

            def inner(q):
                rolled = remat.op(torch.roll, "rolled")(q, 1, 0)
                wrap(lambda r: remat.op(torch.unsqueeze, "view")(r, 0)[0] * 2)(rolled)
                return remat.op(torch.detach, "detached")(q) * rolled

            return wrap(inner)(h).exp() * h

        y = wrap(outer)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, policy=lambda ctx, op, *args, **kwargs: False)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("opaque", [True, False])
def test_argument_with_a_history_that_a_call_in_an_inner_region_reads_as_a_variable(opaque, early_stop):
    """In the outer replay it must be no leaf either, of which nothing is kept: nor would be what the call returns."""

    def program(outer, inner, call):
        torch.manual_seed(0)
        x, w = leaf(4, 4), leaf(4, 4)

        def function(a, b):
            return inner(lambda h: call(lambda h, b: b.sin())(h, b) + b)(a)

        y = outer(function)(x.sin(), w * 1.0)
        y.square().mean().backward()
        return y, x.grad, w.grad

    def call(function):
        return remat.op(function, "kept", opaque=opaque)

    actual = program(remat.checkpoint(), remat.checkpoint(early_stop=early_stop), call)
    assert_same(program(plain, plain, plain), actual)


@pytest.mark.parametrize(
    "policy", [None, [torch.ops.aten.mm.default], lambda *args, **kwargs: remat.CheckpointPolicy.SAVE]
)
def test_argument_with_a_history_that_an_inner_region_casts_under_autocast(policy):
    """Autocast keeps the casts of leaves, which an argument is in no phase."""

    def program(outer, inner):
        torch.manual_seed(0)
        x = leaf(4, 4)

        def function(h):
            with torch.autocast("cpu", torch.bfloat16):
                return torch.linalg.cholesky(h @ h.T + torch.eye(4)).float()

        y = outer(lambda a: inner(function)(a))(x.cos())
        y.square().sum().backward()
        return y, x.grad

    assert_same(program(plain, plain), program(remat.checkpoint(), remat.checkpoint(policy=policy)))
