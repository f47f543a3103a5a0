"""Random numbers: replay draws what forward drew, and leaves no trace in any generator."""

from __future__ import annotations

import functools
import gc
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import (
    Stack,
    assert_same,
    assert_same_program,
    checkpointed,
    collector_off,
    leaf,
    pairwise,
    parameter_gradients,
    plain,
)
from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.region.region import Region


def noisy(x):
    return nn.functional.dropout(x.sin(), 0.5) * torch.randn(x.shape) + torch.rand_like(x).mul(x).exp()


def test_dropout_is_equal():
    def program(wrap):
        x = leaf(40)
        y = wrap(noisy)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, replays=1)


def test_model_with_dropout_in_several_regions_is_equal():
    def program(wrap):
        model = Stack(wrap, depth=3)
        x = leaf(2, 6, 8)
        y = model(x)
        y.square().sum().backward()
        return y, x.grad, *parameter_gradients(model), torch.rand(3)

    assert_same_program(program, replays=6)


def test_replay_leaves_the_generator_of_the_caller_where_it_was():
    y = checkpointed(noisy)(leaf(40))
    torch.rand(7)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("early_stop", [True, False])
def test_draws_after_the_last_saved_tensor_do_not_matter_to_the_caller(early_stop):
    def block(x):
        y = x.sin().exp()
        torch.rand(5)
        return y + torch.rand(3)

    y = checkpointed(block, early_stop=early_stop)(leaf(3))
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_between_forward_and_backward_and_retained_graphs_are_equal():
    def program(wrap):
        x = leaf(40)
        y = wrap(noisy)(x)
        results = []
        for _ in range(3):
            torch.rand(11)
            results += torch.autograd.grad(y.sum(), x, retain_graph=True)
        return results, torch.rand(3)

    assert_same_program(program)


def test_nested_regions_that_draw_are_equal():
    def program(wrap):
        def outer(x):
            h = noisy(x)
            h = wrap(noisy)(h)
            return noisy(h) * wrap(lambda h: wrap(noisy)(h).tanh())(h)

        x = leaf(20)
        y = wrap(outer)(x)
        y.sum().backward()
        return y, x.grad, torch.rand(3)

    assert_same_program(program)


def test_seeding_inside_a_region_is_equal():
    def program(wrap):
        def block(x):
            torch.manual_seed(5)
            return noisy(x)

        x = leaf(20)
        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


def with_generator(x, generator):
    keep = torch.empty_like(x).bernoulli_(0.5, generator=generator)
    return (x * keep).sin() * torch.rand(x.shape, generator=generator) + x.exp()


PLACES = {
    "args": lambda wrap, x, g: wrap(with_generator)(x, g),
    "kwargs": lambda wrap, x, g: wrap(with_generator)(x, generator=g),
    "list": lambda wrap, x, g: wrap(lambda x, items: with_generator(x, items[0][1]))(x, [(None, g)]),
    "dict": lambda wrap, x, g: wrap(lambda x, *, options: with_generator(x, options["g"]))(x, options={"g": g}),
}


@pytest.mark.parametrize("place", PLACES)
def test_generator_among_the_inputs_is_equal(place):
    def program(wrap):
        generator = torch.Generator().manual_seed(3)
        x = leaf(20)
        first = PLACES[place](wrap, x, generator)
        second = PLACES[place](wrap, first, generator)
        after_forward = generator.get_state()
        torch.rand(3, generator=generator)
        before = generator.get_state()
        second.sum().backward()
        assert torch.equal(generator.get_state(), before)
        return first, second, x.grad, after_forward

    assert_same_program(program, replays=2)


def test_several_generators_among_the_inputs_are_equal():
    def program(wrap):
        one, two = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
        x = leaf(20)
        y = wrap(lambda x, g, h: with_generator(x, g) * with_generator(x, h) * noisy(x))(x, one, two)
        y = wrap(with_generator)(y, one)
        results = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(2)]
        return y, results, torch.rand(2, generator=one), torch.rand(2, generator=two), torch.rand(2)

    assert_same_program(program)


def test_default_generator_given_as_an_input_is_equal():
    def program(wrap):
        x = leaf(20)
        y = wrap(with_generator)(x, torch.default_generator)
        y.sum().backward()
        return y, x.grad, torch.rand(2)

    assert_same_program(program, replays=1)


def test_generators_are_restored_even_if_the_replay_raises():
    generator = torch.Generator().manual_seed(3)
    fail = []

    def block(x, generator):
        y = with_generator(x, generator) * noisy(x)
        if fail:
            raise ValueError("replay fails")
        return y.sin()

    y = checkpointed(block)(leaf(5), generator)
    fail.append(True)
    torch.rand(3, generator=generator)
    before = generator.get_state(), torch.get_rng_state()
    with pytest.raises(ValueError, match="replay fails"):
        y.sum().backward()
    assert_same(before, (generator.get_state(), torch.get_rng_state()))


def test_without_preserve_rng_state_replay_draws_anew_from_the_callers_generator():
    drawn = []

    def block(x):
        noise = torch.rand(8)
        drawn.append(noise)
        return (x * noise).sin()

    y = checkpointed(block, preserve_rng_state=False)(leaf(8))
    before = torch.get_rng_state()
    y.sum().backward()
    assert len(drawn) == 2
    assert not torch.equal(*drawn)
    assert not torch.equal(torch.get_rng_state(), before)


def rng_states():
    """Return how many tensors that could be a CPU generator's state are alive."""
    size = torch.get_rng_state().numel()
    return sum(type(x) is torch.Tensor and x.dtype == torch.uint8 and x.numel() == size for x in gc.get_objects())


def test_region_that_draws_nothing_keeps_no_generator_state():
    with collector_off():
        before = rng_states()
        outputs = [checkpointed(lambda x: x.sin().exp())(leaf(3)) for _ in range(5)]
        assert rng_states() == before
        del outputs


@pytest.mark.parametrize("function", [noisy, torch.sin])
def test_without_preserve_rng_state_generators_are_not_touched(monkeypatch, function):
    def refuse(*args, **kwargs):
        raise AssertionError("a generator's state was read or set")

    y = checkpointed(function, preserve_rng_state=False)
    x = leaf(3)
    for name in ("get_rng_state", "set_rng_state", "fork_rng"):
        monkeypatch.setattr(torch.random, name, refuse)
        if hasattr(torch, name):
            monkeypatch.setattr(torch, name, refuse)
    calls = []
    generator = torch.default_generator

    class Watched:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(generator, name)

    monkeypatch.setattr(torch, "default_generator", Watched())
    monkeypatch.setattr(torch.random, "default_generator", Watched())
    y(x).sum().backward()
    assert calls == []
    assert x.grad.shape == (3,)


class Owner(torch.nn.Module):
    """A module with a generator, in itself or in a module of its own."""

    def __init__(self, generator, depth=0):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        if depth:
            self.inner = torch.nn.Sequential(Owner(generator, depth - 1))
        else:
            self.generator = generator

    def forward(self, x):
        return with_generator(x, self.generator) if hasattr(self, "generator") else self.inner(x)

    def lambda_over_self(self, wrap, x):
        return wrap(lambda x: self(x))(x)


class NoModule:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, x):
        return with_generator(x, self.generator)


def decorated(generator):
    @functools.wraps(with_generator)
    def call(x):
        return inner(x)

    def inner(x, generator=generator):
        return with_generator(x, generator)

    call.__wrapped__ = inner
    return call


def in_file(x):
    return with_generator(x, GENERATOR)


GENERATOR = torch.Generator()
REACHED = {
    "cell": lambda wrap, x, g: wrap(lambda x: with_generator(x, g))(x),
    "default": lambda wrap, x, g: wrap(lambda x, g=g: with_generator(x, g))(x),
    "keyword default": lambda wrap, x, g: wrap(lambda x, *, g=g: with_generator(x, g))(x),
    "partial": lambda wrap, x, g: wrap(functools.partial(with_generator, generator=g))(x),
    "partial of a function": lambda wrap, x, g: wrap(functools.partial(lambda x: with_generator(x, g)))(x),
    "wrapped": lambda wrap, x, g: wrap(decorated(g))(x),
    "nested": lambda wrap, x, g: wrap(wrap(lambda x: with_generator(x, g)))(x),
    "module": lambda wrap, x, g: wrap(Owner(g))(x),
    "submodule": lambda wrap, x, g: wrap(Owner(g, 2))(x),
    "method": lambda wrap, x, g: wrap(Owner(g).forward)(x),
    "module in a cell": lambda wrap, x, g: Owner(g).lambda_over_self(wrap, x),
    "object": lambda wrap, x, g: wrap(NoModule(g))(x),
    "method of an object": lambda wrap, x, g: wrap(NoModule(g).__call__)(x),
    "several ways": lambda wrap, x, g: wrap(lambda x, h, k=g: with_generator(x, g))(x, g),
    "file": lambda wrap, x, g: wrap(in_file)(x),
    "default generator": lambda wrap, x, g: wrap(lambda x, g=torch.default_generator: with_generator(x, g))(x),
}


@pytest.mark.parametrize("way", REACHED)
def test_generator_that_the_function_reaches_by_itself_is_equal(way):
    def program(wrap):
        torch.manual_seed(5)
        generator = GENERATOR.manual_seed(3) if way == "file" else torch.Generator().manual_seed(3)
        x = leaf(5)
        y = REACHED[way](lambda f: f if wrap is plain else checkpointed(f), x, generator)
        torch.rand(3, generator=generator)
        before = generator.get_state()
        y.sum().backward()
        assert torch.equal(generator.get_state(), before)
        return y, x.grad

    assert_same(program(plain), program(checkpointed))


def test_generator_that_the_function_reaches_is_kept_only_if_it_drew_and_only_if_asked_for():
    generator = torch.Generator()
    for draws, preserves in ((False, True), (True, False), (True, True)):

        def block(x, draws=draws):
            return (x * torch.rand(5, generator=generator) if draws else x + (generator is None)).sin().exp()

        before = sys.getrefcount(generator)
        y = checkpointed(block, preserve_rng_state=preserves)(leaf(5))
        assert sys.getrefcount(generator) - before == (draws and preserves)
        del y


def test_function_with_a_variable_that_is_not_set_yet_runs():
    def block(x):
        return x.sin().exp() if x is not None else later

    y = checkpointed(block)(leaf(5))
    later = None
    y.sum().backward()


def forked(x):
    with torch.random.fork_rng():
        scale = torch.rand(8)
    return x * scale


def seeded_in_between(x):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        scale = torch.rand(8)
    return x * scale


def put_back_by_hand(x):
    state = torch.get_rng_state()
    scale = torch.rand(8)
    torch.set_rng_state(state)
    return x * scale


@pytest.mark.parametrize("aside", [forked, seeded_in_between, put_back_by_hand])
@pytest.mark.parametrize("native", [False, True])
def test_code_that_puts_the_generator_back_after_a_draw_that_a_policy_saved_is_equal(aside, native):
    def function(x):
        order = remat.native_save_region("order", torch.randperm, 8) if native else torch.randperm(8)
        return F.dropout(F.dropout(aside(x.sin())[:, order]).exp()).sin()

    def train(wrap):
        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        y = wrap(function)(x)
        y.sum().backward()
        return y.detach(), x.grad, torch.get_rng_state()

    policy = remat.policies.never_replay_effects if native else [torch.ops.aten.randperm.default]
    assert_same(train(remat.checkpoint(policy=policy)), train(lambda function: function))


def with_a_generator(x, generator):
    first = torch.rand(4, 4, generator=generator)
    return (x * first).sin() * torch.rand(4, 4, generator=generator)


def with_attention(x, generator):
    h = x[None, None]
    for _ in range(2):  # an op that draws, were it asked to
        h = F.scaled_dot_product_attention(h, h, h)
    return h.sin()


@pytest.mark.parametrize("function", [with_a_generator, with_attention])
def test_policy_leaves_generators_alone_that_the_region_did_not_draw_from(function):
    """Of two ops that may draw, replay runs the second one alone, on the state that it had."""
    made = []

    def first_one(ctx, op, *args, **kwargs):
        if torch.Tag.nondeterministic_seeded not in op.tags or ctx.is_recompute:
            return False
        made.append(op)
        return len(made) == 1

    generator = torch.Generator().manual_seed(0)
    x = leaf(4, 4)
    y = remat.checkpoint(policy=first_one)(function)(x, generator)
    assert len(made) == 2
    torch.rand(7)
    before = torch.get_rng_state(), generator.get_state()
    y.sum().backward()
    assert_same(before, (torch.get_rng_state(), generator.get_state()))
    torch.testing.assert_close(
        x.grad, torch.autograd.grad(function(x, generator.manual_seed(0)).sum(), x)[0], rtol=0, atol=0
    )


def run(name, function, *args):
    return function(*args)


DRAWING_CALLS = {
    "op": lambda name, f, *args: remat.op(f, name)(*args),
    "opaque": lambda name, f, *args: remat.op(f, name, opaque=True)(*args),
    "native": remat.native_save_region,
    "recomputed": lambda name, f, *args: remat.op(f, name, policy=remat.CheckpointPolicy.RECOMPUTE)(*args),
    "inner region": lambda name, f, *args: remat.checkpoint()(f)(*args),
}


@pairwise(earlier=[0, 1, 3], torch_own=[False, True], way=DRAWING_CALLS)
@pytest.mark.filterwarnings("ignore:.*replay recomputes this call:torch_remat.RematWarning")
def test_call_that_runs_whole_draws_what_it_drew_after_ops_that_a_policy_skips(way, torch_own, earlier):
    dropout = torch.dropout if torch_own else lambda x, p, train: F.dropout(x, p, train)

    def train(wrap, call):
        def function(x):
            for _ in range(earlier):
                skipped = F.dropout(x, 0.3)  # nothing reads it, or the policy saves what is read
                x = x + skipped.sum() if earlier == 3 else x
            h = call("dropped", dropout, x, 0.3, True)
            y = h.softmax(-1)
            h.mul_(0.9)  # so the call runs whole
            return y * F.dropout(x, 0.3)

        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        y = wrap(function)(x)
        (y * torch.arange(16.0).reshape(4, 4)).sum().backward()
        return y.detach(), x.grad, torch.get_rng_state()

    policy = [torch.ops.aten.mul.Tensor, torch.ops.aten.sum.default]
    checkpointed = train(remat.checkpoint(policy=policy), DRAWING_CALLS[way])
    assert_same(checkpointed, train(lambda function: function, run))


@pytest.mark.filterwarnings("ignore:.*replay recomputes this call:torch_remat.RematWarning")
def test_random_state_of_calls_is_gone_after_backward():
    def function(x):
        F.dropout(x, 0.3)  # replay skips it
        h = remat.op(lambda x: F.dropout(x, 0.3), "dropped")(x)
        y = h.softmax(-1)
        h.mul_(0.9)
        return y * x

    def alive(cls):
        return [one for one in gc.get_objects() if type(one) is cls]

    gc.collect()
    others = alive(RngState)  # of tests that ran before in this process; held, so that no new one has their ids
    y = remat.checkpoint(policy=[torch.ops.aten.mul.Tensor, torch.ops.aten.sum.default])(function)(leaf(4, 4))
    states = {id(one) for one in alive(RngState)} - {id(one) for one in others}
    assert len(states) == 3, "at the start, before the call, after it"
    regions = alive(Region)  # which something else may hold
    y.sum().backward()
    assert regions
    assert not states & {id(one) for one in alive(RngState)}
