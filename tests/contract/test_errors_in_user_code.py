"""Exceptions in forward, replay and backward, and user code that catches them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import (
    alive,
    assert_clean_state,
    assert_same_program,
    chain,
    checkpointed,
    collector_off,
    leaf,
    pairwise,
    watch,
)
from tests.ways import WAYS


class OwnError(BaseException):
    """Not an `Exception`, as `KeyboardInterrupt` is not."""


def raised(kind, function, *args):
    """Return the text of the exception that a function must raise, of exactly this kind; hold nothing of it."""
    try:
        function(*args)
    except kind as error:
        return str(error) if type(error) is kind else f"another kind: {type(error)}"
    return "nothing"


def assert_next_region_works():
    """Assert that a fresh region, with random numbers in it, is right."""
    assert_clean_state()
    assert not remat.is_recomputing()

    def program(wrap):
        x = leaf(5)
        y = wrap(lambda x: F.dropout(chain(x), 0.5))(x)
        y.sum().backward()
        return y, x.grad, torch.rand(2)

    assert_same_program(program)


KINDS = [ValueError, remat.RematError, OwnError, torch.OutOfMemoryError]


@pairwise(kind=KINDS, way=WAYS, where=["in what is kept", "after it"])
def test_exception_in_forward_passes_and_leaves_nothing_behind(kind, way, where):
    inner = []

    def kept(x):
        h = x.sin().exp()
        inner.extend(watch(h))
        if where == "in what is kept":
            raise kind("in forward")
        return h

    def block(x):
        way.keep("kept", kept, x)
        with torch.autocast("cpu"), torch.no_grad():
            raise kind("in forward")

    with collector_off():
        x = leaf(3) * 1
        references = watch(x)
        assert raised(kind, way.region(block), x).startswith("in forward")
        assert alive(inner) == 0
        del x
        assert alive(references) == 0
    assert_next_region_works()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
def test_exception_in_replay_passes_and_leaves_nothing_behind(kind, depth):
    inner = []

    def block(x):
        h = x.sin().exp()
        inner.extend(watch(h))
        h = h.cos()
        if remat.is_recomputing():
            raise kind("in replay")
        return h.tanh()

    for _ in range(depth - 1):
        block = (lambda f: lambda x: checkpointed(f)(x.sin()).tanh())(block)
    with collector_off():
        x = leaf(3) * 1
        references = watch(x)
        y = checkpointed(block)(x)
        torch.rand(3)
        before = torch.get_rng_state()
        assert "in replay" in raised(kind, y.sum().backward)
        assert torch.equal(torch.get_rng_state(), before)
        assert len(inner) >= 2
        del x, y
        assert alive(inner) == 0
        assert alive(references) == 0
    assert_next_region_works()


def caught(x):
    """Wrong, with a visible shift, wherever `except Exception` catches something."""
    try:
        h = x.sin().exp()
    except Exception:
        h = x.cos() + 100
    try:
        h = h.tanh() * x
    except Exception:
        h = h * x + 100
    return h


def with_finally_at_the_end(x):
    try:
        return x.sin().exp()
    finally:
        (x.cos().exp().tanh() * x).sum()


@contextlib.contextmanager
def scope():
    try:
        yield
    except Exception as error:
        raise RuntimeError("the scope saw an exception") from error
    finally:
        torch.ones(2, requires_grad=True).sin().exp()


def with_scope(x):
    with scope():
        h = x.sin().exp()
        with scope():
            return h.tanh() * x


@pairwise(
    block=[caught, with_finally_at_the_end, with_scope],
    early_stop=[True, False],
    nested=[False, True],
)
def test_code_that_catches_exceptions_is_right_under_early_stop(block, early_stop, nested):
    def program(wrap):
        x = leaf(4)
        y = wrap(wrap(block))(x) if nested else wrap(block)(x)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        y.sum().backward()
        return y, first, x.grad

    assert_same_program(program, early_stop=early_stop)
