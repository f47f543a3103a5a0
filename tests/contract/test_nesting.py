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

TORCH = functools.partial(torch_checkpoint, use_reentrant=False)


@pytest.mark.parametrize("depth", [3, 9])
def test_innermost_function_runs_at_most_once_more_than_the_depth(depth):
    innermost = Calls(chain)

    def level(x, left):
        inner = checkpointed(innermost)(x.sin()) if left == 1 else checkpointed(level)(x.sin(), left - 1)
        return inner.exp()

    checkpointed(level)(leaf(3), depth - 1).sum().backward()
    assert 2 <= innermost.total <= depth + 1


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
