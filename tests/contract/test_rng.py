"""Random numbers: replay draws what forward drew, and leaves no trace in any generator."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import assert_same, checkpointed, collector_off, leaf, pairwise, plain
from tests.ways import BY_HANDLE, WAYS, assert_same_in


def draw_forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.rand_like(x)


DRAWS = {
    "nothing": lambda x: x * 2,
    "dropout": lambda x: F.dropout(x, 0.4),
    "in place": lambda x: x * torch.empty(x.shape).normal_().bernoulli_(0.5),
    "permutation": lambda x: x[torch.randperm(len(x))],
    "several": lambda x: F.alpha_dropout(x * torch.randn_like(x), 0.2) + torch.randint(0, 5, x.shape),
    "seeded": lambda x: (torch.manual_seed(7), x * torch.rand_like(x))[1],
    "forked": lambda x: x * draw_forked(x),
}


@pairwise(way=WAYS, name=DRAWS, early_stop=[True, False])
def test_draws_before_inside_and_after_what_is_kept_are_those_of_plain_autograd(way, name, early_stop):
    """Also numbers that nothing saves at the end, a kept graph, and what the caller's generator gives next."""

    def program(way):
        x, w = leaf(4, 24), leaf(4, 24)

        def block(x):
            h = way.keep("a", DRAWS[name], F.dropout(x).sin())
            way.keep("unused", DRAWS[name], x)
            h = way.keep("b", lambda h, w: DRAWS[name](h * w).exp(), h, F.dropout(w))
            return h, F.dropout(w.cos()).exp() + torch.rand_like(w)

        y, z = way.region(block)(x)
        torch.rand(5)
        y, z = way.region(block)(y * z)
        after_forward, between = torch.get_rng_state(), torch.rand(7)
        results = []
        for retain in (True, False):
            before = torch.get_rng_state()
            results += torch.autograd.grad((y * z).sum(), [x, w], retain_graph=retain)
            assert torch.equal(torch.get_rng_state(), before)
        return y, z, results, after_forward, between, torch.rand(3)

    assert_same_in(way, program, early_stop=early_stop)


def with_generator(x, generator):
    keep = torch.empty_like(x).bernoulli_(0.5, generator=generator)
    return (x * keep).sin() * torch.rand(x.shape, generator=generator) + x.exp()


@pytest.mark.parametrize("way", [way for way in WAYS if way is not BY_HANDLE], ids=str)  # whose backward would draw
def test_generators_among_the_inputs_are_equal(way):
    def program(way):
        one, two = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
        x = leaf(20)

        def block(x, first, items, *, options):
            h = with_generator(x, first) * with_generator(x, items[0][1])
            h = way.keep("kept", lambda h: with_generator(h, options["g"]), h)
            return way.keep("reads it", lambda h: with_generator(h, first), h), with_generator(x, options["g"])

        y, z = way.region(block)(x, one, [(None, two)], options={"g": torch.default_generator})
        y, z = way.region(block)(y * z, two, [(None, one)], options={"g": one})
        states = one.get_state(), two.get_state()
        results = [torch.autograd.grad((y + z).sum(), x, retain_graph=True) for _ in range(2)]
        assert_same(states, (one.get_state(), two.get_state()))
        return y, z, results, torch.rand(2, generator=one), torch.rand(2, generator=two), torch.rand(2)

    assert_same_in(way, program)


def test_without_preserve_rng_state_replay_draws_anew():
    drawn = []

    def block(x):
        drawn.append(torch.rand(8))
        return (x * drawn[-1]).sin()

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


@pairwise(way=WAYS, draws=[False, True], backward=[False, True])
def test_generator_states_are_kept_only_where_something_drew_and_die_with_the_region(way, draws, backward):
    def block(x):
        return way.keep("kept", lambda x: (F.dropout(x) if draws else x).sin(), x), x.exp()

    with collector_off():
        before = rng_states()
        outputs = [way.region(block)(leaf(4, 5)) for _ in range(5)]
        if draws:
            assert rng_states() > before
        else:
            assert rng_states() == before
        if backward:
            sum(y.sum() + z.sum() for y, z in outputs).backward()
        del outputs
        assert rng_states() == before


class Owner(nn.Module):
    """A module that has a generator."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return with_generator(x, self.generator)


class NoModule:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, x):
        return with_generator(x, self.generator)


def in_file(x):
    return with_generator(x, GENERATOR)


GENERATOR = torch.Generator()
REACHED = {
    "cell": lambda wrap, x, g: wrap(lambda x: with_generator(x, g))(x),
    "keyword default": lambda wrap, x, g: wrap(lambda x, *, g=g: with_generator(x, g))(x),
    "partial": lambda wrap, x, g: wrap(functools.partial(with_generator, generator=g))(x),
    "nested": lambda wrap, x, g: wrap(wrap(lambda x: with_generator(x, g)))(x),
    "submodule": lambda wrap, x, g: wrap(nn.Sequential(nn.Sequential(Owner(g))))(x),
    "method": lambda wrap, x, g: wrap(Owner(g).forward)(x),
    "object": lambda wrap, x, g: wrap(NoModule(g))(x),
    "file": lambda wrap, x, g: wrap(in_file)(x),
    "default generator": lambda wrap, x, g: wrap(lambda x, g=torch.default_generator: with_generator(x, g))(x),
}


def test_function_with_a_variable_that_is_not_set_yet_runs():
    def block(x):
        return x.sin().exp() if x is not None else later

    y = checkpointed(block)(leaf(5))
    later = None
    y.sum().backward()


@pytest.mark.parametrize("way", REACHED)
def test_generator_that_the_function_reaches_by_itself_is_equal(way):
    def program(wrap):
        torch.manual_seed(5)
        generator = GENERATOR.manual_seed(3) if way == "file" else torch.Generator().manual_seed(3)
        x = leaf(5)
        y = REACHED[way](wrap, x, generator)
        torch.rand(3, generator=generator)
        before = generator.get_state()
        y.sum().backward()
        assert torch.equal(generator.get_state(), before)
        return y, x.grad

    assert_same(program(plain), program(checkpointed))


def forked(x):
    with torch.random.fork_rng():
        scale = torch.rand(8)
    return x * scale


def with_a_generator(x, generator):
    first = torch.rand(4, 4, generator=generator)
    return (x * first).sin() * torch.rand(4, 4, generator=generator)


def test_policy_leaves_generators_alone_that_the_region_did_not_draw_from():
    """Of two ops that may draw, replay runs the second one alone, on the state that it had."""
    made = []

    def first_one(ctx, op, *args, **kwargs):
        if torch.Tag.nondeterministic_seeded not in op.tags or ctx.is_recompute:
            return False
        made.append(op)
        return len(made) == 1

    generator = torch.Generator().manual_seed(0)
    x = leaf(4, 4)
    y = remat.checkpoint(policy=first_one)(with_a_generator)(x, generator)
    assert len(made) == 2
    torch.rand(7)
    before = torch.get_rng_state(), generator.get_state()
    y.sum().backward()
    assert_same(before, (torch.get_rng_state(), generator.get_state()))
    assert_same(torch.autograd.grad(with_a_generator(x, generator.manual_seed(0)).sum(), x), [x.grad])


def test_generator_is_as_before_backward_where_a_call_draws_and_the_region_seeds_it():
    def block(x):
        y = remat.op(torch.dropout, "drop")(x.sin(), 0.5, True).sin().exp()
        torch.manual_seed(7)  # replay ends before
        return y

    x = leaf(4)
    torch.manual_seed(7)
    y = remat.checkpoint()(block)(x)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
