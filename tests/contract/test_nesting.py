"""Regions in regions: their own kind to any depth, recursion, and `torch.utils.checkpoint` inside and outside."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.handle_ops import POLICIES, RECOMPUTE, SAVE, STYLES, Both, Inner, Kernel, Trace, call
from tests.helpers import (
    Calls,
    alive,
    assert_same_program,
    chain,
    checkpointed,
    collector_off,
    leaf,
    pairwise,
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
