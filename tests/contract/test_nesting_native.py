"""Native regions among nested regions, torch's checkpoint, saved-tensor hooks, second-order gradients and threads."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, Inner, Trace, call
from tests.helpers import (
    LiveStorages,
    assert_same,
    assert_same_program,
    leaf,
)
from tests.native_programs import keep, region, uncollected, wrapped_natively


@pytest.fixture(autouse=True)
def _warm():
    with LiveStorages():
        leaf(1).detach().sin()


def body(h, w):
    return (h @ w).sin() * h.cos()


def block(x, w, name="a"):
    h = keep(name, body, x * 2, w)
    h = F.dropout(h.exp(), 0.2)
    return keep(f"{name}2", lambda: (h @ w).tanh()) * h


# Graphs


def test_second_order_gradients():
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        y = wrap(lambda x: block(x, w))(x)
        first = torch.autograd.grad(y.sin().sum(), [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first) + y.sum(), [x, w])
        return y, first, second

    assert_same_program(program)


def test_gradient_taken_in_the_region_through_a_native_region_is_right_or_refused():
    def function(x, w):
        h = keep("a", torch.mm, x, w)
        (gradient,) = torch.autograd.grad(keep("b", lambda: (w * w).sin()).sum(), w)
        return (h * gradient).sin().exp()

    x, w = leaf(3, 3), leaf(3, 3)
    expected = torch.autograd.grad(function(x, w).sum(), [x, w])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.RematWarning)
            actual = torch.autograd.grad(region()(function)(x, w).sum(), [x, w])
    except remat.RematError as error:
        assert error.op == "b"  # noqa: PT017
    else:
        assert_same(expected, actual)


def test_gradient_taken_inside_a_native_region_is_right_or_refused():
    def function(x, w):
        def penalty():
            h = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((h @ w).sin().sum(), h, create_graph=True)
            return gradient.square()

        return keep("penalty", penalty).sum() * x.exp()

    x, w = leaf(3, 3), leaf(3, 3)
    expected = torch.autograd.grad(function(x, w).sum(), [x, w])
    try:
        actual = torch.autograd.grad(region()(function)(x, w).sum(), [x, w])
    except remat.RematError as error:
        assert "penalty" in str(error)  # noqa: PT017
    else:
        assert_same(expected, actual)


# Regions in regions


@pytest.mark.parametrize("where", ["inner", "outer", "both", "around"])
def test_nested_regions(where):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        call = keep if where != "outer" else lambda name, f, *args: f(*args)

        def inner(h):
            return call("a", body, F.dropout(h, 0.3), w).exp()

        def outer(x):
            h = (keep("o", body, x, w) if where != "inner" else x).sin()
            h = keep("around", lambda: wrap(inner)(h)) if where == "around" else wrap(inner)(h)
            h = h * wrap(inner)(h.cos())
            return F.dropout(h, 0.3)

        y = wrap(outer)(x)
        results = [torch.autograd.grad(y.sum(), [x, w], retain_graph=True)]
        results += [torch.autograd.grad(y.sum(), [x, w])]
        return y, results, torch.rand(2)

    assert_same_program(program)


# Hooks and groups around


def copies(tensor):
    return tensor.detach().clone()


@pytest.mark.parametrize("hooks", [lambda: saved_tensors_hooks(copies, lambda t: t), save_on_cpu])
def test_saved_tensor_hooks_around_the_region(hooks):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        with hooks():
            y = wrap(lambda x: block(x, w))(x)
        results = [torch.autograd.grad(y.sum(), [x, w], retain_graph=True) for _ in range(2)]
        return y, results

    assert_same_program(program)


def test_residents_pass_the_hooks_around_the_region():
    seen, x = [], leaf(3)

    def pack(tensor):
        seen.append(tensor.detach().clone())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = region()(lambda x: keep("a", lambda: x.exp()) * 2)(x)
    assert any(torch.equal(tensor, x.detach().exp()) for tensor in seen)
    y.sum().backward()
    assert_same(2 * x.detach().exp(), x.grad)


# Lifetimes


@pytest.mark.parametrize("after", ["nothing", "forward", "backward", "kept", "error"])
def test_function_and_what_it_closes_over_are_freed_by_reference_counts(after):
    class Thing:
        pass

    with uncollected():
        things = [Thing(), Thing()]
        references = [weakref.ref(thing) for thing in things]
        x, w = leaf(3, 3), leaf(3, 3)

        def function(x, things=tuple(things)):
            def inside(h, thing=things[1]):
                assert thing is not None
                if after == "error" and remat.is_recomputing():
                    raise ValueError("in replay")
                return (h @ w).sin()

            return keep("a", inside, x * 2).exp()

        y = region()(function)(x)
        del things, function
        if after == "backward":
            y.sum().backward()
        elif after == "kept":
            y.sum().backward(retain_graph=True)
        elif after == "error":
            with contextlib.suppress(ValueError):
                y.sum().backward()
        if after != "nothing":
            del y
        else:
            y = None
        assert [reference() for reference in references] == [None, None]


# Threads


def test_thread_started_inside_a_native_region_is_not_watched():
    """A dispatch mode belongs to its thread: what another thread computes is as if from outside."""
    x = leaf(3, 3)
    side = []

    def inside(h):
        thread = threading.Thread(target=lambda: side.append(torch.ones(3).sum().item()))
        thread.start()
        thread.join()
        return h.sin()

    y = region()(lambda x: keep("a", inside, x * 2).exp())(x)
    y.sum().backward()
    assert set(side) == {3.0}
    assert_same(torch.autograd.grad((x * 2).sin().exp().sum(), x)[0], x.grad)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("style", ["handle", "auto", "op"])
def test_region_with_a_handle_inside_a_native_region(style, early_stop):
    """The inner region's inputs are computed after all in the outer replay, with a gradient as in forward."""
    options = {"early_stop": early_stop}

    def program(wrap):
        trace, x = Trace(), leaf(3, 3)
        native = wrapped_natively(wrap)

        def inside(x):
            a = call(style, Inner, trace, "a", RECOMPUTE, x)
            return wrap(lambda x: call(style, Inner, trace, "b", SAVE, x * 1.5))(a.sin())

        def function(x):
            y = native("native", inside, x * 1.5)
            for index in range(2):
                y = call(style, Inner, trace, f"c{index}", RECOMPUTE, y)
            return y

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.RematWarning)  # of what runs once more
            return torch.autograd.grad(wrap(function)(x).sum(), [x])

    assert_same_program(program, **options)


def test_change_of_what_a_region_in_a_native_region_keeps_is_an_error():
    kept = []

    class Saves(torch.autograd.Function):
        @staticmethod
        @remat.auto_forward("m")
        def forward(ctx, x):
            kept.append(x.cos())
            ctx.save_for_backward(kept[-1])
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    inner = region(region_name="inner")(lambda x: remat.op(Saves.apply, "saves")(x * 2))
    y = region()(lambda x: keep("native", lambda: inner(x * 3)).exp())(leaf(3))
    kept[0].mul_(2)
    with pytest.raises(remat.MutationError, match=r"inner: a tensor of shape .* modified in place"):
        y.sum().backward()
