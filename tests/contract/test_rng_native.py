"""Random ops before, inside and after native regions: draws and generators as in plain autograd, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import assert_same, assert_same_program, leaf, pairwise
from tests.native_programs import ComputeOps, keep, region

DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.4),
    "rand": lambda h: h * torch.rand(3, 3),
    "in_place": lambda h: h * torch.empty(3, 3).normal_().bernoulli_(0.5),
    "permutation": lambda h: h[torch.randperm(3)],
    "several": lambda h: F.alpha_dropout(h * torch.randn_like(h), 0.2) + torch.randint(0, 5, (3,)),
    "multinomial": lambda h: h * torch.multinomial(torch.ones(3, 3), 3),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "nothing": lambda h: h * 2,
}


@pairwise(outside=["dropout", "rand", "nothing"], inside=DRAWS, early_stop=[True, False])
def test_draws_around_and_inside_are_those_of_plain_autograd(inside, outside, early_stop):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)
        around = DRAWS[outside]

        def function(x):
            h = around(x).sin()
            h = keep("a", lambda: DRAWS[inside]((h @ w).sin()))
            h = around(h).cos()
            h = keep("b", lambda: DRAWS[inside](h) * h)
            return around(h).exp()

        y = wrap(function)(x)
        after_forward = torch.get_rng_state()
        between = torch.rand(2)
        for retain in (True, False):
            torch.autograd.backward(y.sum(), retain_graph=retain)
        return y, x.grad, w.grad, between, torch.rand(2), after_forward

    assert_same_program(program, early_stop=early_stop)


@pytest.mark.parametrize("drawn", list(itertools.product([True, False], repeat=3)))
def test_generator_is_left_where_forward_left_it(drawn):
    def function(x):
        for index, inside in enumerate(drawn):
            h = (lambda x=x: F.dropout(x, 0.3).exp()) if inside else (lambda x=x: x * 2)
            x = keep(f"n{index}", h) if index != 1 else h()
        return F.dropout(x, 0.5).exp()

    torch.manual_seed(4)
    x = leaf(3)
    y = region()(function)(x)
    state = torch.get_rng_state()
    for retain in (True, False):
        torch.autograd.backward(y.sum(), retain_graph=retain)
        assert torch.equal(torch.get_rng_state(), state)


def test_own_generator_among_the_inputs_draws_inside():
    def program(wrap):
        generator = torch.Generator().manual_seed(7)
        x = leaf(3, 3)

        def function(x, generator):
            h = x * torch.rand(3, 3, generator=generator)
            h = keep("a", lambda: h.sin() * torch.rand(3, 3, generator=generator))
            return (h * torch.rand(3, 3, generator=generator)).exp()

        y = wrap(function)(x, generator)
        between = torch.rand(2, generator=generator)
        y.sum().backward()
        return y, x.grad, between, torch.rand(2, generator=generator)

    assert_same_program(program, replays=1)


def test_random_op_inside_is_not_drawn_again():
    def function(x):
        return keep("a", lambda: F.dropout(x, 0.5) * torch.rand(3)).exp()

    y = region()(function)(leaf(3))
    with ComputeOps() as ops:
        y.sum().backward()
    assert not {"bernoulli_", "rand", "native_dropout"} & set(ops.counts)
    assert ops.counts["exp"] == 1


def test_without_preserved_state_saved_draws_are_still_the_same():
    """What the native region drew is kept, so nothing depends on the state."""
    x = leaf(3, 3)
    torch.manual_seed(5)
    function = lambda x: keep("a", lambda: F.dropout(x.sin(), 0.5).exp()) * 2  # noqa: E731
    expected = torch.autograd.grad(function(x).sum(), x)
    torch.manual_seed(5)
    y = region(preserve_rng_state=False)(function)(x)
    torch.rand(7)
    assert_same(expected, torch.autograd.grad(y.sum(), x))


def test_seed_set_inside_holds_for_later_draws():
    def program(wrap):
        x = leaf(3)

        def function(x):
            h = F.dropout(x, 0.5)
            h = keep("a", lambda: (torch.manual_seed(11), F.dropout(h, 0.5).sin())[1])
            return F.dropout(h, 0.5).exp()

        y = wrap(function)(x)
        y.sum().backward()
        return y, x.grad, torch.rand(2)

    assert_same_program(program)


def test_draw_in_a_nested_region_inside_a_native_region():
    def program(wrap):
        x = leaf(3, 3)

        def inner(h):
            return F.dropout(h.sin(), 0.4).exp()

        def function(x):
            h = F.dropout(x, 0.2)
            h = keep("a", lambda: F.dropout(wrap(inner)(h), 0.2))
            h = F.dropout(wrap(lambda h: F.dropout(keep("a", inner, h), 0.3).sin())(h), 0.2)
            return h.exp()

        y = wrap(function)(x)
        y.sum().backward()
        return y, x.grad, torch.rand(2)

    assert_same_program(program)


@pytest.mark.gpu
def test_draws_on_the_device():
    def program(wrap):
        x = torch.randn(64, device="cuda", requires_grad=True)

        def function(x):
            h = F.dropout(x, 0.4).sin()
            h = keep("a", lambda: F.dropout(h, 0.4).sin() * torch.rand(64, device="cuda"))
            return F.dropout(h, 0.4).exp()

        y = wrap(function)(x)
        y.sum().backward()
        return y, x.grad, torch.rand(2, device="cuda")

    assert_same_program(program, replays=1)


def test_policy_of_the_region_is_seen_by_is_recomputing():
    seen = []

    def body(h):
        seen.append(remat.is_recomputing())
        return h.sin()

    region()(lambda x: keep("a", body, x * 2).exp())(leaf(3)).sum().backward()
    assert seen[0] is False
    assert seen[1:] in ([], [True])
