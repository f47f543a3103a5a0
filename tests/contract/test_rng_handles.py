"""Random numbers around ops that replay skips: everything after them draws what it drew in forward."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn

from tests.handle_ops import POLICIES, RECOMPUTE, SAVE, STYLES, Affine, Both, Kernel, Noise, Trace, call, policy_ids
from tests.helpers import assert_same, assert_same_program, checkpointed, collector_off, leaf, pairwise, plain

ORDERS = list(itertools.product(POLICIES, repeat=3))


def dropout(x):
    return nn.functional.dropout(x, 0.5)


def program_with(block, *, width=24):
    """Return a program: two regions of the block, backward, and what the generator gives next."""

    def program(wrap):
        x, w = leaf(4, width), leaf(4, width)
        y = wrap(lambda x: block(x, w))(x)
        y = wrap(lambda x: block(x, w))(y)
        torch.rand(5)
        y.square().sum().backward()
        return y, x.grad, w.grad, torch.rand(3)

    return program


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policies", ORDERS, ids=policy_ids)
def test_dropout_before_inside_and_after_ops_is_equal(policies, style):
    def block(x, w):
        trace = Trace()
        h = call(style, Noise, trace, "a", policies[0], dropout(x.sin()))
        r = call(style, Affine, trace, "b", RECOMPUTE, h, w)
        h = call(style, Noise, trace, "c", policies[1], dropout(r) * torch.rand_like(r))
        h = call(style, Noise, trace, "d", policies[2], h)
        r = call(style, Affine, trace, "e", RECOMPUTE, h, dropout(w))
        return dropout(r) * torch.randn_like(r).sin()

    assert_same_program(program_with(block), replays=2)


@pytest.mark.parametrize("style", STYLES)
def test_saved_op_that_draws_at_the_start_or_the_end_of_a_region_is_equal(style):
    def start(x, w):
        h = call(style, Noise, Trace(), "first", SAVE, x)
        return call(style, Affine, Trace(), "reader", RECOMPUTE, h, dropout(w))

    def end(x, w):
        return call(style, Noise, Trace(), "last", SAVE, dropout(x.exp() * w).tanh())

    assert_same_program(program_with(start), replays=2)
    assert_same_program(program_with(end), replays=2)


def test_saved_op_that_draws_and_whose_output_nobody_uses_is_equal():
    def block(x, w):
        call("handle", Noise, Trace(), "unused", SAVE, x)
        with torch.no_grad():
            call("handle", Noise, Trace(), "no graph", SAVE, x)
        call("handle", Noise, Trace(), "no gradient", SAVE, x.detach())
        return dropout(x.sin() * w).exp() * torch.rand_like(x)

    assert_same_program(program_with(block), replays=2)


def custom(forward):
    """Return a kernel that multiplies by what `forward` draws, and saves that."""

    def run(ctx, x, *generator):
        noise = forward(x, *generator)
        return x * noise, {"noise": noise}

    return Kernel("custom", ("noise",), run, lambda ctx, saved, grad: grad * saved[0])


SOME_STATE = torch.Generator().manual_seed(3).get_state()
DRAWS = {
    "nothing": lambda x: torch.ones_like(x) * 2,
    "uniform": lambda x: torch.rand_like(x),
    "normal of odd size": lambda x: torch.randn(3).sum() + torch.zeros_like(x),
    "one number": lambda x: torch.rand(()) + torch.zeros_like(x),
    "permutation": lambda x: torch.randperm(x.shape[-1]).float() + torch.zeros_like(x),
    "many numbers": lambda x: torch.rand(5000).mean() + torch.zeros_like(x),
    "seeded": lambda x: (torch.manual_seed(7), torch.rand_like(x))[1],
    "forked": lambda x: draw_forked(x),
    "set and drawn": lambda x: (torch.set_rng_state(SOME_STATE), torch.rand_like(x))[1],
}


def draw_forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.rand_like(x)


@pairwise(style=STYLES, name=DRAWS)
def test_generator_stands_after_a_skipped_op_where_forward_left_it(style, name):
    kernel = custom(DRAWS[name])

    def block(x, w):
        h = call(style, kernel, Trace(), "draws", SAVE, dropout(x))
        r = call(style, Affine, Trace(), "reader", RECOMPUTE, h, w)
        return dropout(r).sin() * torch.randn(x.shape[-1])

    assert_same_program(program_with(block), replays=2)


@pytest.mark.parametrize("policies", list(itertools.product(POLICIES, repeat=2)), ids=policy_ids)
def test_generator_among_the_inputs_stands_where_forward_left_it(policies):
    def program(wrap):
        generator = torch.Generator().manual_seed(5)
        kernel = custom(lambda x: torch.rand(x.shape, generator=generator))

        def block(x, generator):
            h = call("handle", kernel, Trace(), "a", policies[0], x.sin())
            h = call("handle", kernel, Trace(), "b", policies[1], h)
            r = call("handle", Both, Trace(), "reader", RECOMPUTE, h)
            return (r * torch.rand(r.shape, generator=generator)).sin()

        x = leaf(4, 5)
        y = wrap(block)(x, generator)
        y = wrap(block)(y, generator)
        before = generator.get_state()
        y.sum().backward()
        assert torch.equal(before, generator.get_state())
        return y, x.grad, torch.rand(3, generator=generator), torch.rand(3)

    assert_same_program(program, replays=2)


def test_kept_graph_second_order_and_nesting_draw_equally():
    def program(wrap):
        w = leaf(4, 6)

        def inner(x):
            h = call("auto", Noise, Trace(), "a", SAVE, dropout(x))
            return call("auto", Affine, Trace(), "b", RECOMPUTE, h, dropout(w)) * torch.rand_like(x)

        def outer(x):
            h = call("handle", Noise, Trace(), "a", SAVE, x.sin())
            h = wrap(inner)(h)
            h = call("handle", Noise, Trace(), "b", SAVE, dropout(h))
            return wrap(inner)(call("handle", Affine, Trace(), "c", RECOMPUTE, h, w))

        x = leaf(4, 6)
        y = wrap(outer)(x)
        results = [torch.autograd.grad(y.sum(), [x, w], retain_graph=True) for _ in range(2)]
        first = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
        torch.rand(2)
        second = torch.autograd.grad(first.square().sum(), [x, w])
        return y, results, first, second, torch.rand(3)

    assert_same_program(program)


@pytest.mark.parametrize("fails", [False, True])
def test_callers_generator_is_where_it_was_after_the_replay(fails):
    broken = []

    def block(x):
        h = call("handle", Noise, Trace(), "a", SAVE, dropout(x.sin()))
        if broken:
            raise ValueError("replay fails")
        return call("handle", Noise, Trace(), "b", RECOMPUTE, h)

    y = checkpointed(block)(leaf(4, 5))
    torch.rand(7)
    before = torch.get_rng_state()
    if fails:
        broken.append(True)
        with pytest.raises(ValueError, match="replay fails"):
            y.sum().backward()
    else:
        y.sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_saved_op_that_draws_is_right_without_preserve_rng_state_if_nothing_else_draws():
    def program(wrap):
        x = leaf(4, 5)

        def block(x):
            h = call("handle", Noise, Trace(), "a", SAVE, x.sin())
            return call("handle", Both, Trace(), "b", RECOMPUTE, h)

        wrap(block)(x).sum().backward()
        return x.grad

    assert_same_program(program, replays=1, preserve_rng_state=False)


def rng_states():
    """Return how many tensors that could be a CPU generator's state are alive."""
    size = torch.get_rng_state().numel()
    return sum(type(x) is torch.Tensor and x.dtype == torch.uint8 and x.numel() == size for x in gc.get_objects())


def saved_and_recomputed(kernel):
    """Return a function of a SAVE op and its RECOMPUTE reader."""
    return lambda x: call("handle", Both, Trace(), "b", RECOMPUTE, call("handle", kernel, Trace(), "a", SAVE, x))


def test_ops_that_draw_nothing_keep_no_generator_state():
    with collector_off():
        before = rng_states()
        outputs = [checkpointed(saved_and_recomputed(Both))(leaf(4, 5)) for _ in range(5)]
        assert rng_states() == before
        del outputs


@pytest.mark.parametrize("backward", [False, True])
def test_generator_states_that_a_region_kept_die_with_it(backward):
    with collector_off():
        before = rng_states()
        outputs = [checkpointed(saved_and_recomputed(Noise))(leaf(4, 5)) for _ in range(5)]
        if backward:
            torch.stack(outputs).sum().backward()
        del outputs
        assert rng_states() == before


class Watched:
    """The default generator, which counts what is asked of it."""

    def __init__(self):
        self.generator, self.calls = torch.default_generator, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.generator, name)


@pytest.mark.parametrize("kernel", [Both, Noise], ids=str)
def test_without_preserve_rng_state_no_generator_is_touched(monkeypatch, kernel):
    watched = Watched()

    def refuse(*args, **kwargs):
        raise AssertionError("a generator's state was read or set")

    for name in ("get_rng_state", "set_rng_state", "fork_rng"):
        monkeypatch.setattr(torch.random, name, refuse)
        if hasattr(torch, name):
            monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr(torch, "default_generator", watched)
    monkeypatch.setattr(torch.random, "default_generator", watched)
    x = leaf(4, 5)
    checkpointed(saved_and_recomputed(kernel), preserve_rng_state=False)(x).sum().backward()
    assert watched.calls == []
    assert x.grad is not None


def test_replay_draws_nothing_for_a_saved_op():
    """The replay of a region leaves the sequence of the caller's numbers as plain autograd does."""
    drawn = []
    for wrap in (plain, checkpointed):
        torch.manual_seed(6)
        x = leaf(4, 5)
        y = wrap(saved_and_recomputed(Noise))(x)
        numbers = [torch.rand(2)]
        for _ in range(2):
            y.sum().backward(retain_graph=True)
            numbers.append(torch.rand(2))
        drawn.append([numbers, x.grad])
    assert_same(*drawn)
