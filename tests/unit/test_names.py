"""`name_scope`: a prefix that keeps the names of a repeated sub-block apart."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, STYLES, Both, Inner, Result, Trace, call
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


def test_name_is_prefixed_with_the_scope_and_a_slash():
    assert name_of_error(twice()) == "op"
    assert name_of_error(scoped("block.0", inside=twice())) == "block.0/op"


def test_scopes_nest():
    assert name_of_error(scoped("model", "block.0", "attention", inside=twice())) == "model/block.0/attention/op"


def test_scope_ends_with_its_block():
    def function(x):
        with remat.name_scope("a"):
            with remat.name_scope("b"):
                x = call("handle", Inner, Trace(), "op", SAVE, x)
            x = call("handle", Inner, Trace(), "op", SAVE, x)
        x = call("handle", Inner, Trace(), "op", SAVE, x)
        return twice()(x)

    assert name_of_error(function) == "op"


def test_scope_ends_where_an_exception_leaves_it():
    def function(x):
        try:
            with remat.name_scope("a"):
                raise ValueError
        except ValueError:
            pass
        return twice()(x)

    assert name_of_error(function) == "op"


def test_changed_resident_is_named_with_its_scope():
    x = leaf(3)
    y = checkpointed(scoped("block.0", inside=lambda x: call("auto", Result, Trace(), "op", SAVE, x)))(x)
    y.mul_(2)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert (caught.value.op, caught.value.tensor) == ("block.0/op", "y")
    assert "block.0/op.y: " in str(caught.value)


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


def test_scopes_around_inner_regions_are_equal():
    def program(wrap):
        def outer(x):
            for index in range(2):
                with remat.name_scope(f"inner.{index}"):
                    x = call("handle", Inner, Trace(), "before", SAVE, x)
                    x = wrap(lambda x: block("auto", Trace(), x.sin()))(x)
                    x = block("auto", Trace(), x)
            return x

        x = leaf(3)
        y = wrap(outer)(x)
        results = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(2)]
        y.sum().backward()
        return y, results, x.grad

    assert_same_program(program)


def test_scope_left_open_by_an_early_stop_does_not_leak():
    """Replay ends inside of the scope, by an exception that passes through it."""

    def function(x):
        with remat.name_scope("a"):
            return block("handle", Trace(), x.sin()) + 1

    x = leaf(3)
    checkpointed(function)(x).sum().backward()
    assert name_of_error(twice()) == "op"


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
