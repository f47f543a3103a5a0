"""`name_scope`: a prefix that keeps the names of a repeated sub-block apart."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, STYLES, Both, Inner, Trace, call
from tests.helpers import assert_same, assert_same_program, checkpointed, leaf


def block(style, trace, x):
    """Two ops with fixed names."""
    return call(style, Both, trace, "down", RECOMPUTE, call(style, Both, trace, "up", SAVE, x))


def name_of_error(function, x=None):
    """Return the op that a duplicate-name error names."""
    with pytest.raises(remat.UsageError) as caught:
        checkpointed(function, region_name="model")(leaf(3) if x is None else x)
    assert caught.value.region == "model"
    return caught.value.op


def twice(name="op"):
    """Return a function that uses one name twice."""

    def function(x):
        return call("handle", Inner, Trace(), name, SAVE, call("handle", Inner, Trace(), name, SAVE, x))

    return function


def scoped(*names, inside):
    """Return a function that runs `inside` under nested scopes."""

    def function(x):
        if not names:
            return inside(x)
        with remat.name_scope(names[0]):
            return scoped(*names[1:], inside=inside)(x)

    return function


@pytest.mark.parametrize("style", STYLES)
def test_scopes_keep_the_names_of_a_repeated_block_unique(style):
    traces = []

    def program(wrap):
        trace = Trace()
        traces.append(trace)

        def stack(x):
            for index in range(3):
                with remat.name_scope(f"block.{index}"):
                    x = block(style, trace, x)
            return block(style, trace, x)

        x = leaf(3)
        y = wrap(stack)(x.sin())
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, replays=1)
    assert traces[1].runs == {"up": 4, "down": 8}


def left_by_an_exception(x):
    with contextlib.suppress(ValueError), remat.name_scope("a"):
        raise ValueError
    return twice()(x)


def ended(x):
    with remat.name_scope("a"):
        with remat.name_scope("b"):
            x = call("handle", Inner, Trace(), "op", SAVE, x)
        x = call("handle", Inner, Trace(), "op", SAVE, x)
    x = call("handle", Inner, Trace(), "op", SAVE, x)
    return twice()(x)


def test_name_is_prefixed_with_its_scopes_and_no_others():
    for function, name in (
        (twice(), "op"),
        (scoped("block.0", inside=twice()), "block.0/op"),
        (scoped("model", "block.0", "attention", inside=twice()), "model/block.0/attention/op"),
        (ended, "op"),
        (left_by_an_exception, "op"),
    ):
        assert name_of_error(function) == name


def test_another_scope_in_replay_is_an_error_that_names_the_op():
    def function(x):
        with remat.name_scope("replay" if remat.is_recomputing() else "forward"):
            h = call("handle", Both, Trace(), "op", SAVE, x.sin())
        return call("handle", Both, Trace(), "reader", RECOMPUTE, h)

    with pytest.raises(remat.MismatchError) as caught:
        checkpointed(function)(leaf(3)).sum().backward()
    assert caught.value.op in ("forward/op", "replay/op")
    assert caught.value.op in str(caught.value)


@pytest.mark.parametrize("left", [True, False])
def test_scope_around_a_region_does_not_matter_to_its_replay(left):
    """Backward runs after the scope ended, or in another scope."""
    trace, x = Trace(), leaf(3)
    with remat.name_scope("outside"):
        y = checkpointed(lambda x: block("handle", trace, x.sin()))(x)
    if left:
        y.sum().backward()
    else:
        with remat.name_scope("elsewhere"):
            y.sum().backward()
    assert_same(x.grad, torch.autograd.grad(block("plain", Trace(), x.sin()).sum(), x)[0])
    assert trace.runs == {"up": 1, "down": 2}


@pytest.mark.parametrize("name", ["", None, 3, b"a"], ids=str)
def test_scope_that_is_empty_or_no_string_is_an_error(name):
    with pytest.raises(remat.UsageError), remat.name_scope(name):
        pass


def test_names_of_a_decorated_method_begin_below_its_module():
    def decorated(function):
        @functools.wraps(function)
        def call(*args):
            return function(*args)

        return call

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4, bias=False)

        @decorated
        def forward(self, x):
            return self.up(x).sin()

    layer, x = Layer(), torch.randn(2, 4)
    names = remat.list_names(layer)(x).names
    assert names == ["up.t_0_0", "up.mm_0_0", "sin_0_0"]
    assert remat.list_names(layer.forward)(x).names == names
