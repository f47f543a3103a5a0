"""Budgets around compiled code, generation, threads, errors, graphs that are kept, dropped or differentiated twice."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings

import pytest
import torch
from torch import nn

import torch_remat as remat
from benchmarks.memory import allocations
from tests.features.budgets.test_budget import bytes_there
from tests.helpers import Mlp, assert_same, checkpointed, collector_off, in_threads, leaf, parameter_gradients, plain

LIMITS = [1, 3000, 8000, 10**6]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the budget")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Chain(nn.Module):
    """Blocks, each of which runs as ``wrap`` says."""

    def __init__(self, blocks, wrap):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.wrap = wrap

    def forward(self, x):
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


def step(model, x):
    """Return the gradients of one step, of the parameters and of the input."""
    model.zero_grad()
    x.grad = None
    model(x).square().mean().backward()
    return [*(gradient.clone() for gradient in parameter_gradients(model)), x.grad]


# Compiled code


def compiled_chain(backend, depth=3):
    return Chain([torch.compile(Mlp(16), backend=backend) for _ in range(depth)], plain)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_in_regions_are_equal_within_the_budget(backend):
    model = compiled_chain(backend)
    xs = [leaf(length, 16) for length in (32, 8, 24, 32)]
    for x in xs:
        step(model, x)  # compiles
    expected = [step(model, x) for x in xs]
    model.wrap = checkpointed
    with remat.budget(2**40, reserve=0) as budget:
        for x, gradients in zip(xs, expected, strict=True):
            assert_same(gradients, step(model, x))
    most = max(step_.most_bytes for step_ in budget.steps)
    assert budget.kept_bytes == 0
    for share in (0.01, 0.4, 0.8):
        with remat.budget(int(share * most), reserve=0) as budget:
            for x, gradients in zip(xs, expected, strict=True):
                assert_same(gradients, step(model, x))
                kept, inputs = budget.steps[-1].forward_bytes, 3 * x.nbytes
                assert kept <= max(share * most, inputs)
                assert budget.kept_bytes == 0
        assert any(row.evicted_bytes for step_ in budget.steps for row in step_.rows)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("limit", LIMITS)
def test_count_with_compiled_blocks_equals_the_profilers(limit):
    model, x = compiled_chain("aot_eager"), torch.randn(32, 16)
    model(x).sum().backward()
    model.wrap = checkpointed
    with remat.budget(limit, reserve=0) as budget:
        for _ in range(2):
            with allocations() as events:
                h = model(x)
            assert budget.kept_bytes == bytes_there(budget) == sum(events) - h.nbytes + x.nbytes
            h.sum().backward()
            del h
            assert budget.kept_bytes == 0


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("limit", LIMITS)
def test_compiled_parts_of_a_region_are_equal_within_the_budget(limit):
    inner, outer = torch.compile(Mlp(16), backend="aot_eager"), Mlp(16)
    x = leaf(32, 16)

    def program(wrap):
        def block(x):
            return inner(outer(x).sin()) * x.cos()

        return torch.autograd.grad(wrap(block)(x).square().sum(), [x, *inner.parameters(), *outer.parameters()])

    program(plain)
    expected = program(plain)
    with remat.budget(limit, reserve=0) as budget:
        for _ in range(2):
            assert_same(expected, program(checkpointed))
            assert budget.kept_bytes == 0


# Generation


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("limit", LIMITS)
def test_generation_between_forward_and_backward_changes_nothing(mode, limit):
    model, x = Chain([Mlp() for _ in range(3)], plain), leaf(8, 8)
    expected = step(model, x)
    model.wrap = checkpointed
    with remat.budget(limit, reserve=0) as budget:
        for _ in range(2):
            model.zero_grad()
            x.grad = None
            loss = model(x).square().mean()
            kept = budget.kept_bytes
            with mode():
                tokens = torch.zeros(1, 8)
                for _ in range(3):
                    tokens = torch.cat([tokens, model(tokens)[-1:]])
                assert budget.kept_bytes == kept
            loss.backward()
            assert_same(expected, [*parameter_gradients(model), x.grad])
            del loss
            assert budget.kept_bytes == 0
    assert budget.step_count == 2


# Threads


@pytest.mark.parametrize("limit", LIMITS)
def test_backward_may_run_in_another_thread_that_has_not_entered(limit):
    model, x = Chain([Mlp() for _ in range(3)], plain), leaf(8, 8)
    expected = step(model, x)
    model.wrap = checkpointed
    model.zero_grad()
    x.grad = None
    with remat.budget(limit, reserve=0) as budget:
        loss = model(x).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert_same(expected, [*parameter_gradients(model), x.grad])
        del loss, thread
        assert budget.kept_bytes == 0


def test_errors_in_one_thread_leave_the_others_budget_true():
    model, xs = Chain([Mlp() for _ in range(3)], checkpointed), [leaf(8, 8) for _ in range(4)]
    expected = [torch.autograd.grad(model(x).sum(), x)[0] for x in xs]
    budget, found = remat.budget(3000, reserve=0), [[] for _ in xs]

    def fail(h):
        raise ValueError("on purpose")

    def work(place):
        for turn in range(15):
            with budget:
                if turn % 3 == place % 3:
                    with pytest.raises(ValueError, match="on purpose"):
                        checkpointed(fail)(model(xs[place]))
                else:
                    found[place].append(torch.autograd.grad(model(xs[place]).sum(), xs[place])[0])

    in_threads(work, len(xs))
    for one, gradients in zip(expected, found, strict=True):
        assert len(gradients) == 10
        assert all(torch.equal(one, gradient) for gradient in gradients)
    assert budget.kept_bytes == 0
    assert budget.ledger.counts == {}


# Errors


@pytest.mark.parametrize("limit", LIMITS)
def test_error_in_backward_leaves_nothing_behind_and_another_backward_is_equal(limit):
    model, x = Chain([Mlp() for _ in range(3)], plain), leaf(8, 8)
    expected = step(model, x)
    model.wrap = checkpointed

    def fail(gradient):
        raise ValueError("on purpose")

    with collector_off(), remat.budget(limit, reserve=0) as budget:
        h = checkpointed(model.blocks[0])(x)
        hook = h.register_hook(fail)
        loss = checkpointed(model.blocks[2])(checkpointed(model.blocks[1])(h)).square().mean()
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward(retain_graph=True)
        assert budget.kept_bytes == bytes_there(budget)
        hook.remove()
        model.zero_grad()
        x.grad = None
        loss.backward()
        assert_same(expected, [*parameter_gradients(model), x.grad])
        del h, loss, hook
        assert budget.kept_bytes == 0
        assert budget.ledger.counts == {}


@pytest.mark.parametrize("limit", LIMITS)
def test_error_in_a_replay_leaves_nothing_behind(limit):
    def block(x):
        if remat.is_recomputing():
            raise ValueError("on purpose")
        return x.sin().exp().tanh()

    x = leaf(16, 16)
    with remat.budget(limit, reserve=0) as budget:
        y = checkpointed(block)(x)
        try:
            y.sum().backward()
        except ValueError as error:
            assert "on purpose" in str(error)  # noqa: PT017
        del y
        assert budget.kept_bytes == 0
        assert budget.ledger.counts == {}


# Graphs


@pytest.mark.parametrize("limit", LIMITS)
def test_graph_that_is_dropped_in_part_counts_what_is_left(limit):
    def block(x):
        return x.sin().exp(), (x.cos() * x).tanh()

    x = leaf(16, 16)
    with collector_off(), remat.budget(limit, reserve=0) as budget:
        one, other = checkpointed(block)(x)
        one = checkpointed(lambda h: h.exp().exp())(one)
        assert budget.kept_bytes == bytes_there(budget)
        del one
        assert budget.kept_bytes == bytes_there(budget)
        expected = torch.autograd.grad(block(x)[1].sum(), x)
        assert_same(expected, torch.autograd.grad(other.sum(), x))
        assert budget.kept_bytes == bytes_there(budget)
        del other
        assert budget.kept_bytes == 0


@pytest.mark.parametrize("inner_limit", [1, 4000, 10**6])
@pytest.mark.parametrize("limit", [1, 4000, 10**6])
def test_graph_kept_and_differentiated_twice_in_nested_budgets(limit, inner_limit):
    blocks, x = [Mlp() for _ in range(3)], leaf(4, 8)
    parameters = [parameter for block in blocks for parameter in block.parameters()]

    def program(wrap, inner):
        h = wrap(blocks[0])(x)
        with inner:
            h = wrap(lambda h: wrap(blocks[1])(h.sin()) + h)(h)
        loss = wrap(blocks[2])(h).square().sum()
        found = [*torch.autograd.grad(loss, parameters[-1:], retain_graph=True)]
        first = torch.autograd.grad(loss, [x, *parameters], create_graph=True)
        second = sum(gradient.square().sum() for gradient in first)
        found += torch.autograd.grad(second, [x, *parameters], retain_graph=True, allow_unused=True)
        return [*found, *torch.autograd.grad(loss, [x, *parameters])]

    expected = program(plain, contextlib.nullcontext())
    inner = remat.budget(inner_limit, reserve=0)
    with remat.budget(limit, reserve=0) as outer:
        for _ in range(2):
            for one, other in zip(expected, program(checkpointed, inner), strict=True):
                assert one is other is None or torch.equal(one, other)
            assert outer.kept_bytes == inner.kept_bytes == 0
    assert outer.ledger.counts == inner.ledger.counts == {}


def test_count_equals_the_profilers_in_budgets_that_change_from_step_to_step():
    rng, model = random.Random(0), Chain([Mlp(16) for _ in range(4)], checkpointed)
    budget = remat.budget(2**40, reserve=0)
    for _ in range(25):
        budget.limit = rng.choice([1, 1000, 5000, 10_000, 20_000, 10**6])
        x = torch.randn(rng.randint(1, 48), 16)
        with budget:
            with allocations() as events:
                h = model(x)
            assert budget.kept_bytes == bytes_there(budget) == sum(events) - h.nbytes + x.nbytes
            assert budget.kept_bytes <= max(budget.limit, 4 * x.nbytes)
            if rng.random() < 0.7:
                h.sum().backward()
            del h
        assert budget.kept_bytes == 0
