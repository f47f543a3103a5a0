"""Regions in regions: their own kind to any depth, recursion, and `torch.utils.checkpoint` inside and outside."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.handle_ops import POLICIES, RECOMPUTE, SAVE, STYLES, Both, Inner, Kernel, Trace, call
from tests.helpers import (
    Calls,
    alive,
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    collector_off,
    leaf,
    pairwise,
    plain,
    watch,
)
from tests.ways import BY_HANDLE, WAYS, assert_same_in

TORCH = functools.partial(torch_checkpoint, use_reentrant=False)
REENTRANT = functools.partial(torch_checkpoint, use_reentrant=True)


@pairwise(
    way=WAYS, depth=[1, 2, 5], before=[True, False], after=[True, False], twice=[False, True], early_stop=[True, False]
)
def test_nested_regions_have_equal_gradients(way, depth, before, after, twice, early_stop):
    """With what is kept before and after the inner regions, or nothing; with one or two inner regions at a level."""

    def program(way):
        x, w = leaf(3, 3), leaf(3, 3)

        def level(x, left):
            h = way.keep("before", lambda x, w: (x @ w).sin(), x, w) if before else x
            for index in range(1 + (twice and left < 3)):
                h = way.region(level)(h, left - 1) if left > 1 else way.keep(f"chain{index}", chain, h)
            return way.keep("after", lambda h, w: (h @ w).tanh(), h, w) if after else h

        y = way.region(level)(x * 1, depth)
        inputs = [x, w] if before or after else [x]
        results = [torch.autograd.grad(y.sum(), inputs, retain_graph=True) for _ in range(2)]
        y.sum().backward()
        return y, results, x.grad, w.grad if before or after else w

    assert_same_in(way, program, early_stop=early_stop)


@pytest.mark.parametrize("early_stop", [True, False])
def test_nested_regions_are_right_in_second_order(early_stop):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)

        def level(x, left):
            h = (x @ w).sin()
            return (wrap(level)(h, left - 1) if left else chain(h)) @ w

        y = wrap(level)(x, 3)
        (gx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gx.square().sum().backward()
        return gx, x.grad, w.grad

    assert_same_program(program, early_stop=early_stop)


@pytest.mark.parametrize("depth", [3, 9])
def test_innermost_function_runs_at_most_once_more_than_the_depth(depth):
    innermost = Calls(chain)

    def level(x, left):
        inner = checkpointed(innermost)(x.sin()) if left == 1 else checkpointed(level)(x.sin(), left - 1)
        return inner.exp()

    checkpointed(level)(leaf(3), depth - 1).sum().backward()
    assert 2 <= innermost.total <= depth + 1


@pairwise(
    way=WAYS,
    pattern=["ot", "to", "oto", "tot", "ooto", "ttoo", "or", "ro"],
    early_stop=[True, False],
    possible=lambda way, pattern, **_: way is not BY_HANDLE or pattern in ("to", "ttoo", "ro"),  # torch's reads nothing
)
def test_regions_and_torch_checkpoints_in_each_other_have_equal_gradients(way, pattern, early_stop):
    """A letter a level: `o` for ours, `t` for torch's, `r` for torch's that is reentrant."""

    def program(way):
        wraps = {
            "o": way.region,
            "t": lambda function: functools.partial(TORCH, function),
            "r": lambda function: functools.partial(REENTRANT, function),
        }
        x, w = leaf(3, 3), leaf(3, 3)

        def level(x, left):
            h = way.keep(f"before {left}", lambda x, w: (x @ w).sin(), x, w)
            h = wraps[left[0]](level)(h, left[1:]) if left else h
            return way.keep(f"after {left}", lambda h, w: (h @ w).tanh(), h, w)

        y = wraps[pattern[0]](level)(x * 1, pattern[1:])
        if "r" not in pattern:
            return y, [torch.autograd.grad(y.sum(), [x, w], retain_graph=True) for _ in range(2)]
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_in(way, program, early_stop=early_stop)


def test_inner_region_that_takes_another_tensor_for_its_argument_in_replay_is_an_error():
    def outer(x):
        h, other = x.sin(), x.cos()
        return remat.checkpoint()(lambda p: p * (other if remat.is_recomputing() else p))(h).exp()

    with pytest.raises(remat.MismatchError, match=r"made by|other values"):
        remat.checkpoint()(outer)(leaf(4)).sum().backward()


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


def test_argument_with_a_history_that_a_call_in_an_inner_region_reads_as_a_variable():
    """In the outer replay it must be no leaf either, of which nothing is kept: nor would be what the call returns."""

    def program(outer, inner, call):
        torch.manual_seed(0)
        x, w = leaf(4, 4), leaf(4, 4)

        def function(a, b):
            return inner(lambda h: call(lambda h, b: b.sin())(h, b) + b)(a)

        y = outer(function)(x.sin(), w * 1.0)
        y.square().mean().backward()
        return y, x.grad, w.grad

    actual = program(checkpointed, checkpointed, lambda function: remat.op(function, "kept"))
    assert_same(program(plain, plain, plain), actual)


@pairwise(style=STYLES, outer=POLICIES, inner=POLICIES, ids=str)
def test_op_in_the_body_of_an_op(style, outer, inner):
    """The inner one belongs to a saved outer one; the body of a recomputed one reads a placeholder of a saved one."""

    def program(wrap):
        x = leaf(3)

        def forward(ctx, x):
            y = call(style, Inner, Trace(), "inner", inner, x)
            return y.sin() if inner is RECOMPUTE else y, {"x": x, "y": y}

        kernel = Kernel("outer", ("x", "y"), forward, lambda ctx, saved, grad: grad * saved[0] * saved[1])

        def block(x):
            h = call(style, Both, Trace(), "before", SAVE, x.sin())
            h = call(style, kernel, Trace(), "outer", outer, h)
            return call(style, Both, Trace(), "after", RECOMPUTE, h)

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    if (outer, inner) == (RECOMPUTE, SAVE):
        with pytest.raises(remat.PlaceholderError) as caught:
            program(checkpointed)
        assert (caught.value.region, caught.value.op) == ("block", "inner")
    else:
        assert_same_program(program)


def test_saved_op_in_torchs_checkpoint_whose_input_the_next_checkpoint_saves():
    """Its own saved tensors are torch's; what torch saves next is no saved tensor of the op."""

    def block(x):
        TORCH(lambda x: call("handle", Both, Trace(), "op", SAVE, x), x)
        return TORCH(torch.sin, x).sin()

    x = leaf(3)
    expected = torch.autograd.grad(x.sin().sin().sum(), x)
    assert_same(expected, torch.autograd.grad(checkpointed(block)(x).sum(), x))


@pytest.mark.parametrize("outer", [None, [torch.ops.aten.sin.default]], ids=["plain", "policy"])
def test_what_an_inner_region_keeps_and_lets_go_passes_the_outer_one_in_both_phases(outer):
    """The log of an outer policy holds a result, and so the graph behind it, in forward alone."""
    w = leaf(4, 4)

    def inner(x):
        unused = (x @ w).sin().neg()
        del unused
        v = x.cos()
        remat.native_save_region("write", lambda v: v.mul_(torch.tensor(0.5)), v)
        return v

    region = remat.checkpoint(policy=[torch.ops.aten.mm.default])(inner)
    x = leaf(4, 4)
    expected = torch.autograd.grad((x.sin().cos() * 0.5).sin().exp().sum(), x)
    found = torch.autograd.grad(remat.checkpoint(policy=outer)(lambda x: region(x.sin()).sin().exp())(x).sum(), x)
    assert_same(expected, found)


def test_variable_that_an_inner_call_modifies_is_saved_in_the_outer_replay_too():
    """The outer replay skips the op that modifies it, so that its version does not tell."""

    def gradient(outer, inner, op):
        torch.manual_seed(0)
        x, scale = leaf(4, 4), torch.rand(4, 4)

        def write(a):
            with torch.no_grad():
                scale.mul_(0.5)
            a * scale
            return a

        def function(a):
            passed = op(write, "write")(op(torch.sin, "sin")(a))
            return passed * passed

        y = outer(lambda x: inner(function)(x))(x)
        return torch.autograd.grad(y.sum(), x)

    expected = gradient(plain, plain, lambda function, name: function)
    policy = remat.checkpoint(policy=[torch.ops.aten.mul.Tensor])
    assert_same(expected, gradient(policy, remat.checkpoint(), remat.op))


class Copied(torch.autograd.Function):
    """A copy by a handle, if there is a region."""

    @staticmethod
    def forward(ctx, x):
        handle = remat.get_handle(ctx, "copied", SAVE)
        if (saved := handle.maybe_load_saved()) is not None:
            return saved
        x = handle.save_or_load_inputs(x)
        handle.save_for_backward({"x": x})
        return handle.record_outputs(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.saved_tensors[0] == ctx.saved_tensors[0])


@pytest.mark.filterwarnings("error::torch_remat.RematWarning")
def test_output_of_a_handle_that_is_a_placeholder_in_the_outer_replay_is_known_there_too():
    """The call that reads it saves as many tensors as in forward, so that no replay starts over."""

    def gradient(outer, inner, op):
        torch.manual_seed(0)
        x, w = leaf(4, 4), leaf(4, 4)

        def function(a, b):
            product = op(torch.mm, "product")(Copied.apply(a * 1.0), w)
            clamped = op(torch.relu, "relu")(b.clamp(-1, 1))
            del product
            return clamped

        return torch.autograd.grad(outer(lambda x: inner(function)(x.sin(), x.cos()))(x).sum(), x)

    expected = gradient(plain, plain, lambda function, name: function)
    policy = remat.checkpoint(policy=[torch.ops.aten.mm.default])
    assert_same(expected, gradient(policy, remat.checkpoint(), remat.op))


@pytest.mark.parametrize("around", [plain, remat.checkpoint(), remat.checkpoint(early_stop=False)])
@pytest.mark.parametrize("hooks", [torch.autograd.graph.save_on_cpu, contextlib.nullcontext])
def test_output_of_a_handle_has_its_history_for_a_recomputed_call_under_hooks(around, hooks):
    def gradient(around, inner, op):
        torch.manual_seed(0)
        x = leaf(4, 4)
        with hooks():
            y = around(lambda x: inner(lambda x: op(torch.tanh, "tanh", policy=RECOMPUTE)(Copied.apply(x * 1.0)))(x))(x)
        return torch.autograd.grad(y.cos().sum(), x)

    expected = gradient(plain, plain, lambda function, *_, **__: function)
    assert_same(expected, gradient(around, remat.checkpoint(), remat.op))
