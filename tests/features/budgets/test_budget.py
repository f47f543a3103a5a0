"""Budgets: gradients are those of plain autograd bit for bit, bytes are counted truly, and nothing outlives its use."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_remat as remat
from benchmarks.memory import allocations
from tests.helpers import (
    CountOps,
    LiveStorages,
    Mlp,
    Stack,
    assert_same,
    checkpointed,
    collector_off,
    in_threads,
    leaf,
    no_other_regions,
    parameter_gradients,
    plain,
    watch,
)
from torch_remat import _compat
from torch_remat._kept import kept_by
from torch_remat.budgets import group
from torch_remat.budgets.kept import KeptRegion
from torch_remat.budgets.reserve import Reserve
from torch_remat.dispatch.region.region import live_regions
from torch_remat.ladders import kinds


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings(), no_other_regions():
        warnings.filterwarnings("ignore", message="the budget")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


def kept_without_limit(program):
    """Return the most bytes that a program's regions keep as plain code."""
    with remat.budget(2**40, reserve=0) as budget:
        for _ in range(RECORDED + 1):
            program()
    return max(step.most_bytes for step in budget.steps)


RECORDED = 3  # so many forwards of a kind of region are recorded, and keep nothing


class Chain(nn.Module):
    """Blocks, each of which runs as ``wrap`` says."""

    def __init__(self, wrap=plain, depth=3, width=8, compile_with=None):
        super().__init__()
        blocks = [Mlp(width) for _ in range(depth)]
        self.blocks = nn.ModuleList(torch.compile(one, backend=compile_with) if compile_with else one for one in blocks)
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


def bytes_there(budget):
    """Return the bytes of the storages that a budget's regions keep, found by looking at each; plain code as known."""
    sizes = {id(entry): entry.counted._size for entry in budget._plain if entry() is not None and not entry().is_over}
    for kept in budget.alive():
        region = kept.region()
        values = [row.value for row in kept_by(region) if row.kind in ("refilled", "saved", "kept for replay")]
        values += [] if region.inputs is None else region.inputs.held()
        for value in values:
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(sizes.values())


# Gradients


def stack_step(stack, x, wrap=checkpointed, seed=2):
    stack.wrap = wrap
    stack.zero_grad()
    torch.manual_seed(seed)
    stack(x).square().mean().backward()
    return [gradient.clone() for gradient in parameter_gradients(stack)]


@pytest.mark.parametrize("share", [0, 0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0])
def test_every_share_gives_equal_gradients_within_the_budget(share):
    stack, x = Stack(depth=3), torch.randn(4, 8, 8)
    expected = stack_step(stack, x, plain)
    most = kept_without_limit(lambda: stack_step(stack, x))
    with remat.budget(max(int(share * most), 1), reserve=0) as budget:
        for _ in range(RECORDED + 2):
            assert_same(expected, stack_step(stack, x))
    floor = 6 * x.nbytes  # where everything is recomputed
    assert all(step.most_bytes <= max(share * most, floor + x.nbytes) or step.has_backward for step in budget.steps)
    assert all(step.forward_bytes <= max(share * most, floor) for step in budget.steps)
    assert bool(budget.steps[-1].sum_of("recomputed_bytes")) == (share < 1)
    assert all(row.is_plain == (share == 1) or share > 0.05 for row in budget.steps[-1].rows)


@pytest.mark.parametrize("limit", [1, "0%", "10%", "25%", "50%", "75%", "100%", 3000, 6000, 12_000, 30_000, "1 GiB"])
def test_gradients_are_equal_over_many_steps_whose_lengths_change(limit):
    stack, rng = Stack(depth=2), random.Random(4)
    with remat.budget(limit, reserve=0 if limit in (1, 3000, 6000, 12_000, 30_000, "1 GiB") else "auto") as budget:
        for number in range(24):
            x = torch.randn(2, rng.choice([2, 3, 5, 8, 13, 16, 24]), 8)
            assert_same(stack_step(stack, x, plain, number), stack_step(stack, x, checkpointed, number))
            assert budget.kept_bytes == 0
    assert budget.step_count == 24


@pytest.mark.parametrize("limit", [1, 500, 10**6])
def test_gradient_taken_in_an_inner_region_is_equal(limit):
    """A replay around it runs it outside of budgets: what it saves in forward must be the same."""
    x = leaf(4, 4)

    def program(wrap, keep):
        def slope(x):
            t = x.detach().requires_grad_()
            return torch.autograd.grad((t.sin() * x).sum(), t, create_graph=True)[0]

        def inner(x):
            return slope(x) * x.tanh()

        return torch.autograd.grad(wrap(lambda x: keep("sin", torch.sin, wrap(inner)(x)).exp())(x).sum(), x)

    expected = program(plain, lambda name, function, x: function(x))
    with remat.budget(limit, reserve=0) as budget:
        assert_same(expected, program(checkpointed, remat.native_save_region))
    assert budget.kept_bytes == 0


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("limit", [1, 10**6])
def test_sparse_tensors_are_counted_with_all_their_parts(limit):
    def product(matrix, w):
        return torch.sparse.mm(matrix, w).sin()

    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo):
        matrix, w = torch.eye(4).to_sparse(layout=layout), leaf(4, 4)
        expected = torch.autograd.grad(product(matrix, w).sum(), w)
        with remat.budget(limit, reserve=0) as budget:
            for _ in range(3):
                y = remat.checkpoint()(product)(matrix, w)
                assert_same(expected, torch.autograd.grad(y.sum(), w), str(layout))
                del y
                assert budget.kept_bytes == 0


@pytest.mark.parametrize(("limit", "then"), [(10**6, 10**6), (3500, 3500), (3500, 1)])
def test_change_in_place_after_forward_is_noticed_whether_or_not_it_is_given_up(limit, then):
    kept = []

    def block(x):
        h = x.sin()
        kept.append(t := (h.exp() * h).tanh())
        return t.exp()

    with remat.budget(limit, reserve=0) as budget:
        for _ in range(RECORDED + 1):
            checkpointed(block)(leaf(16, 16)).sum().backward()
        kept.clear()
        y = checkpointed(block)(leaf(16, 16))
        row = budget.steps[-1].rows[-1]
        assert row.is_plain == (limit == 10**6)
        kept[0].add_(1)
        budget.limit = then
        checkpointed(torch.exp)(leaf(4, 8))  # makes room
        assert bool(row.lowered_bytes) == (then == 1)
        with pytest.raises((remat.MutationError, RuntimeError), match="modified"):
            y.sum().backward()


def test_region_that_gives_up_in_the_middle_of_a_step_is_replayed_exactly():
    """Step by step down its ladder, after its forward: what it keeps falls, and gradients are equal."""
    block, x = nn.Sequential(Mlp(16), nn.Tanh(), nn.Dropout(0.1), Mlp(16), nn.GELU()), leaf(32, 16)
    torch.manual_seed(3)
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    with remat.budget(10**9, reserve=0) as budget:
        for _ in range(RECORDED + 1):
            torch.autograd.grad(checkpointed(block)(x).square().sum(), x)
        rungs = budget.steps[-1].rows[0].part.ladder.rungs
    assert len(rungs) > 3
    for start in range(1, len(rungs) - 1):
        for end in range(start):
            with remat.budget(10**9, reserve=0) as budget:
                budget.limit = rungs[start].bytes
                for _ in range(2):
                    torch.manual_seed(3)
                    y = checkpointed(block)(x)
                    if budget.step_count == 1:
                        torch.autograd.grad(y.square().sum(), x)
                (row,) = budget.steps[-1].rows
                assert row.rung is rungs[start]
                assert budget.kept_bytes == rungs[start].bytes
                budget.limit = rungs[end].bytes
                budget.make_room()
                assert row.rung is rungs[end]
                assert budget.kept_bytes == bytes_there(budget) == rungs[end].bytes
                assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)


def test_region_that_nobody_expects_keeps_what_can_be_evicted_where_not_everything_fits():
    small, large = (lambda x: x.sin().exp().tanh()), (lambda x: (x.exp().sin() * x).tanh())

    def forward(smalls):
        x = leaf(8, 8)
        loss = checkpointed(large)(leaf(64, 64)).sum()
        return sum((checkpointed(small)(x).sum() for _ in range(smalls)), loss)

    with remat.budget(40_000, reserve=0) as budget:
        for _ in range(RECORDED + 1):
            forward(2).backward()
        assert [row.is_plain for row in budget.steps[-1].rows] == [False, True, True]
        forward(4).backward()
        assert [row.is_plain for row in budget.steps[-1].rows] == [False, True, True, False, False]


@pytest.mark.parametrize("limit", [1, 4000, 10**6])
def test_graph_kept_and_differentiated_twice(limit):
    model, x = Chain(), leaf(4, 8)

    def program():
        loss = model(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        return [first.detach(), *second, *torch.autograd.grad(loss, x)]

    expected, model.wrap = program(), checkpointed
    with remat.budget(limit, reserve=0) as budget:
        for _ in range(2):
            assert_same(expected, program())
            assert budget.kept_bytes == 0


# Compiled code, generation, threads, errors


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_are_equal_and_counted_as_the_profiler_counts(backend):
    torch._dynamo.reset()
    model, xs = Chain(width=16, compile_with=backend), [leaf(length, 16) for length in (32, 8, 32)]
    for x in xs:
        step(model, x)  # compiles
    expected = [step(model, x) for x in xs]
    model.wrap = checkpointed
    most = kept_without_limit(lambda: step(model, xs[0]))
    for share in (0.01, 0.5, 1):
        with remat.budget(int(share * most), reserve=0) as budget:
            for x, gradients in zip(xs, expected, strict=True):
                assert_same(gradients, step(model, x))
                assert budget.steps[-1].forward_bytes <= max(share * most, 3 * x.nbytes)
                with allocations() as events:
                    h = model(x)
                assert budget.kept_bytes == bytes_there(budget) == sum(events) - h.nbytes + x.nbytes
                del h
                assert budget.kept_bytes == 0
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_generation_between_forward_and_backward_changes_nothing(mode):
    model, x = Chain(), leaf(8, 8)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    model.wrap = checkpointed
    with remat.budget(3000, reserve=0) as budget:
        loss = model(x).sum()
        kept = budget.kept_bytes
        with mode():
            model(torch.zeros(3, 8))
            assert budget.kept_bytes == kept
        assert torch.equal(expected, torch.autograd.grad(loss, x)[0])
        del loss
        assert budget.kept_bytes == 0
    assert budget.step_count == 1


@pytest.mark.parametrize("limit", [1, 1500, 10**6])
def test_threads_share_one_budget_and_errors_in_one_leave_the_others_right(limit):
    model, xs = Chain(checkpointed), [leaf(4, 8) for _ in range(6)]
    expected = [torch.autograd.grad(model(x).sum(), x)[0] for x in xs]
    budget, found = remat.budget(limit, reserve=0), [[] for _ in xs]

    def fail(h):
        raise ValueError("on purpose")

    def work(place):
        for turn in range(30):
            with budget:
                if turn % 3 == place % 3:
                    with pytest.raises(ValueError, match="on purpose"):
                        checkpointed(fail)(model(xs[place]))
                else:
                    found[place].append(torch.autograd.grad(model(xs[place]).sum(), xs[place])[0])

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # let threads take turns as often as can be
    try:
        in_threads(work, len(xs))
    finally:
        sys.setswitchinterval(usual)
    for one, gradients in zip(expected, found, strict=True):
        assert len(gradients) == 20
        assert all(torch.equal(one, gradient) for gradient in gradients)
    assert budget.kept_bytes == 0
    assert budget.ledger.counts == {}


@pytest.mark.parametrize("limit", [1, 10**6])
def test_errors_in_forward_replay_and_backward_leave_nothing_behind(limit):
    fails = ""

    def block(x):
        h = x.sin().exp()
        if fails == ("replay" if remat.is_recomputing() else "forward"):
            raise ValueError("on purpose")
        return h.exp().tanh()

    def fail(gradient):
        raise ValueError("on purpose")

    x = leaf(16, 16)
    (expected,) = torch.autograd.grad(block(block(x)).sum(), x)
    with collector_off(), remat.budget(limit, reserve=0) as budget:
        fails = "forward"
        with pytest.raises(ValueError, match="on purpose"):
            checkpointed(block)(x)
        assert budget.kept_bytes == 0
        fails = "replay"
        y = checkpointed(block)(x)
        with pytest.raises(ValueError, match="on purpose"):
            y.sum().backward()
        del y
        assert budget.kept_bytes == 0
        fails = ""
        h = checkpointed(block)(x)
        hook = h.register_hook(fail)
        loss = checkpointed(block)(h).sum()
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward(retain_graph=True)
        assert budget.kept_bytes == bytes_there(budget)
        hook.remove()
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        del h, loss, hook
        assert budget.kept_bytes == 0
        assert budget.ledger.counts == {}


# What the author decides


def test_saved_results_are_counted_and_never_evicted():
    x, w = leaf(4, 8), leaf(8, 8)
    with remat.budget(1, reserve=0) as budget:
        y = checkpointed(lambda x: remat.native_save_region("mm", torch.mm, x.sin(), w).exp())(x)
        assert budget.kept_bytes >= 2 * x.nbytes
        with CountOps() as ops:
            (actual,) = torch.autograd.grad(y.sum(), x)
    assert ops.counts["mm"] == 1  # the gradient's
    assert torch.equal(actual, torch.autograd.grad((x.sin() @ w).exp().sum(), x)[0])
    del y
    assert budget.kept_bytes == 0


@pytest.mark.parametrize("limit", [1, 10**6])
def test_policy_alone_decides_in_its_region(limit):
    x, w = leaf(4, 8), leaf(8, 8)
    mm = torch.ops.aten.mm.default
    with remat.budget(limit, reserve=0) as budget:
        y = checkpointed(lambda x: (x.sin() @ w).exp(), policy=[mm])(x)
        # the input, and the product
        assert budget.kept_bytes <= 2 * x.nbytes
        y.sum().backward()
    del y
    assert budget.kept_bytes == 0


@pytest.mark.parametrize("policy", [remat.CheckpointPolicy.RECOMPUTE, remat.CheckpointPolicy.SAVE])
def test_op_named_recompute_is_never_kept(policy):
    runs, x = [], leaf(4, 8)

    def exp(x):
        runs.append(1)
        return x.exp()

    with remat.budget("1 GiB", reserve=0) as budget:
        y = checkpointed(lambda x: remat.op(exp, "exp", policy=policy)(x) * 2)(x)
        is_recomputed = policy is remat.CheckpointPolicy.RECOMPUTE
        assert (budget.kept_bytes == x.nbytes) == is_recomputed
        (actual,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(actual, torch.autograd.grad((x.exp() * 2).sum(), x)[0])
    assert len(runs) == 1 + is_recomputed


# Bytes


def test_parameters_and_buffers_are_not_counted():
    norm, x = nn.BatchNorm1d(8), leaf(4, 8)
    with remat.budget("1 MiB", reserve=0) as budget:
        y = checkpointed(lambda x, mean: norm(x) * mean)(x, norm.running_mean)
        assert budget.kept_bytes == x.nbytes
    assert y is not None


def test_count_equals_the_profilers_in_budgets_that_change_from_step_to_step():
    rng, model = random.Random(0), Chain(checkpointed, depth=4, width=16)
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


@pytest.mark.parametrize("limit", [1, 3000, 10**9])
def test_nothing_outlives_its_use_with_or_without_backward(limit):
    stack = Stack(checkpointed)
    x = torch.randn(2, 4, 8)
    with collector_off(), remat.budget(limit, reserve=0) as budget:
        for backward in (True, False, True):
            y = stack(x)
            values = [value for kept in budget.alive() for value in _values(kept) if value.data_ptr() != x.data_ptr()]
            references = watch(*values)
            del values
            if backward:
                y.sum().backward()
            del y
            gc.collect(0)
            assert all(reference.expired() for reference in references)
            assert budget.kept_bytes == 0
            assert not list(budget.alive())


def _values(kept):
    region = kept.region()
    return [row.value for row in kept_by(region) if isinstance(row.value, torch.Tensor) and row.kind != "input"]


def test_inner_budget_counts_towards_the_outer_and_what_is_outside_of_both_towards_none():
    x, outer, inner = leaf(16, 16), remat.budget("1 MiB", reserve=0), remat.budget("1 MiB", reserve=0)
    for turn in range(RECORDED + 2):
        with outer:
            one = checkpointed(torch.exp)(x)
            with inner:
                other = checkpointed(torch.tanh)(x)
        kept, kept_inside = outer.kept_bytes, inner.kept_bytes
        if turn < RECORDED + 1:
            torch.autograd.backward([one.sum(), other.sum()])
            del one, other
            assert outer.kept_bytes == inner.kept_bytes == 0
    assert kept_inside == x.nbytes
    assert kept == 2 * x.nbytes
    outside = checkpointed(lambda x: x.sin().exp())(x)
    assert outer.kept_bytes == kept
    del one, other
    assert outer.kept_bytes == inner.kept_bytes == 0
    assert outside is not None


def test_inner_budget_does_not_pass_the_outer():
    block, outer_block = Mlp(16), Mlp(16)
    x, outer, inner = leaf(32, 16), remat.budget(2**20, reserve=0), remat.budget(2**20, reserve=0)

    def program():
        with outer:
            h = checkpointed(outer_block)(x)
            with inner:
                return checkpointed(block)(h).sum()

    expected = torch.autograd.grad(block(outer_block(x)).sum(), x)
    for _ in range(RECORDED + 1):
        loss, kept = program(), outer.kept_bytes
        assert_same(expected, torch.autograd.grad(loss, x))
        del loss
    assert kept > 8 * x.nbytes
    outer.limit = 3 * x.nbytes
    for _ in range(2):
        loss = program()
        assert outer.kept_bytes <= outer.limit
        assert_same(expected, torch.autograd.grad(loss, x))
        del loss


# Steps


@pytest.mark.parametrize("percent", [0, 30, 60, 100])
def test_a_share_is_measured_in_the_first_steps(percent):
    stack, x = Stack(depth=3), torch.randn(4, 8, 8)
    expected = stack_step(stack, x, plain)
    most = kept_without_limit(lambda: stack_step(stack, x))
    kinds.forget_kinds()
    with remat.budget(f"{percent}%") as budget:
        for _ in range(RECORDED + 2):
            assert_same(expected, stack_step(stack, x))
    least = budget.steps[0].forward_bytes
    assert least == 6 * x.nbytes  # nothing is kept before it is known what there is
    assert budget.share == percent / 100
    if 0 < percent < 100:
        assert budget.limit == budget.budget_bytes == least + int((most - least) * percent / 100)
        assert f"budget of {percent}% (" in budget.report()
    assert budget.steps[-1].forward_bytes <= least + (most - least) * percent / 100
    assert bool(budget.steps[-1].sum_of("replays")) == (percent < 100)


def test_a_share_that_is_not_measured_yet_keeps_nothing_of_what_is_known_already():
    """The first layers are alike, and known after one step; the last one is alone, and is not known before three."""
    first, last, x = [Mlp() for _ in range(4)], nn.Sequential(nn.Linear(8, 8), nn.Tanh()), leaf(16, 8)
    with remat.budget("50%") as budget:
        for _ in range(RECORDED + 1):
            h = x
            for block in (*first, last):
                h = checkpointed(block)(h)
            h.sum().backward()
            del h
    least = 5 * x.nbytes
    assert [step.forward_bytes == least for step in budget.steps] == [True] * RECORDED + [False]


def test_a_share_grows_with_a_longer_batch():
    block, limits = Mlp(), []
    with remat.budget("50%") as budget:
        for length in [4] * 4 + [32] * 4 + [4]:
            checkpointed(block)(leaf(length, 8)).sum().backward()
            limits.append(budget.limit)
    assert limits[3] < limits[-1] == pytest.approx(8 * limits[3], rel=0.01)


def test_a_budget_in_which_no_region_ran_warns_once():
    budget = remat.budget("1 GiB")
    with pytest.warns(remat.RematWarning, match=r"(?s)no region ran.*checkpoint_modules") as caught, budget:
        Mlp()(leaf(4, 8)).sum().backward()
    assert Path(caught[0].filename) == Path(__file__)
    with budget:
        Mlp()(leaf(4, 8)).sum().backward()
    with pytest.raises(ValueError, match="on purpose"), remat.budget("1 GiB"):
        raise ValueError("on purpose")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_step_settles_in_two_steps_of_its_shapes_and_does_not_swing(share):
    model, xs = Chain(depth=6, width=16), [leaf(32, 16), leaf(48, 16)]
    expected = [step(model, x) for x in xs]
    model.wrap = checkpointed
    most = kept_without_limit(lambda: step(model, xs[0]))
    kinds.forget_kinds()
    with remat.budget(int(share * most), reserve=0) as budget:
        for _ in range(10):
            for x, gradients in zip(xs, expected, strict=True):
                assert_same(gradients, step(model, x))
    for lasting in (list(budget.steps)[4::2], list(budget.steps)[5::2]):
        assert len({step.forward_bytes for step in lasting}) == 1
        assert len({tuple(id(row.rung) for row in step.rows) for step in lasting}) == 1
        assert not any(step.sum_of("lowered_bytes") or step.over_bytes for step in lasting)


def test_a_limit_that_changes_between_steps_holds_from_the_next_one_on():
    model, x = Chain(depth=4, width=16), leaf(32, 16)
    expected = step(model, x)
    model.wrap = checkpointed
    most = kept_without_limit(lambda: step(model, x))
    with remat.budget(most, reserve=0) as budget:
        for _ in range(RECORDED):
            step(model, x)
        for share in (1, 0.4, 0.9, 0.2, 1):
            budget.limit = int(share * most)
            assert_same(expected, step(model, x))
            last = budget.steps[-1]
            assert last.forward_bytes <= max(budget.limit, 4 * x.nbytes)
            assert all(row.is_plain for row in last.rows) == (share == 1)
            assert not last.sum_of("lowered_bytes")


def test_on_an_accelerator_the_allocators_peaks_tell_the_reserve(monkeypatch):
    """Played on the CPU: an allocator that has seen 500 B more than the step's regions kept."""
    allocated = {"now": 1000, "peak": 0}
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: allocated["now"])
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: allocated["peak"])
    budget, block, x = remat.budget("1 MiB"), Mlp(), leaf(4, 8)
    budget._reserve = Reserve(budget.budget_bytes)
    with budget:
        for _ in range(RECORDED + 2):
            y = checkpointed(block)(x)
            allocated["peak"] = 1500 + budget.kept_bytes
            y.sum().backward()
            del y
    peaks = [step.peak_bytes - step.forward_bytes for step in budget.steps]
    assert peaks == [500] * 5
    reserves = [budget.budget_bytes - step.limit_bytes for step in budget.steps]
    assert reserves[0] == 0
    assert reserves[-1] == 500 + budget.budget_bytes // 32


def test_too_small_a_budget_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with remat.budget(1, reserve=0) as budget:
            for _ in range(3):
                checkpointed(Mlp(), region_name="layers.0")(torch.randn(4, 8)).sum().backward()
    (warning,) = caught
    assert issubclass(warning.category, remat.RematWarning)
    assert "budget" in str(warning.message)
    assert "127 B" in str(warning.message)
    assert "layers.0" in str(warning.message)
    assert Path(warning.filename).parent == Path(__file__).parent  # where the region is called, or in what it runs
    assert budget.step_count == 3


def test_nonsense_is_an_error_at_once():
    for limit in (0, -1, 0.0, "", "six", "6 XiB", "1.5", None, True, float("nan"), [1], 0.6, "52", "101%", "-1%"):
        with pytest.raises(remat.UsageError, match=r'(?s)budget.*"6 GiB".*"0%" to "100%".*device_share=0.6'):
            remat.budget(limit)
    for reserve, limit, match in ((200, 100, "reserve"), (-1, 100, "-1 is not"), (10, "60%", "reserve")):
        with pytest.raises(remat.UsageError, match=match):
            remat.budget(limit, reserve=reserve)
    with pytest.raises(remat.UsageError, match="two budgets"):
        remat.budget(100, device_share=0.5)
    for share in (0, 1.5, True, "60%"):
        with pytest.raises(remat.UsageError, match="device_share"):
            remat.budget(device_share=share)
    with pytest.raises(remat.UsageError, match="offload"):
        remat.budget(100, offload="all")


def test_sizes_are_read_as_they_are_written():
    assert remat.budget("6 GiB").budget_bytes == 6 * 2**30
    assert remat.budget(12345).budget_bytes == 12345
    for text, size in [
        ("6 GB", 6 * 10**9),
        ("6GB", 6 * 10**9),
        ("6g", 6 * 10**9),
        ("1.5 MB", 15 * 10**5),
        ("2K", 2000),
    ]:
        assert remat.budget(text).budget_bytes == size
    assert 2**20 < remat.budget(device_share=0.5).budget_bytes < remat.budget(device_share=1.0).budget_bytes


def test_without_a_driver_a_build_for_cuda_counts_what_is_on_the_cpu(monkeypatch):
    def current(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    _compat.accelerator_type.cache_clear()
    x = torch.randn(4, 8)
    with remat.budget(2**20) as budget:
        checkpointed(Mlp())(x).sum().backward()
    assert budget.steps[0].most_bytes == x.nbytes
    monkeypatch.undo()
    _compat.accelerator_type.cache_clear()


# Regions without holders, where all fits


def regions_in(budget, program):
    """Return how many regions a program leaves alive before its backward, in a budget."""
    with budget:
        loss = program()
    count = sum(region.inputs is not None for region in live_regions())
    return count, loss


def test_where_all_fits_regions_run_as_plain_autograd_and_are_counted_all_the_same():
    model, x = Chain(checkpointed, width=16), torch.randn(4, 16)
    model(x).sum().backward()
    expected = parameter_gradients(model)
    budget, counts, kept = remat.budget(2**30, reserve=0), [], []
    for _ in range(5):
        model.zero_grad()
        count, loss = regions_in(budget, lambda: model(x).sum())
        counts.append(count)
        kept.append(budget.kept_bytes)
        loss.backward()
        assert_same(expected, parameter_gradients(model))
        del loss
    assert counts == [3, 0, 0, 0, 0]
    assert kept[0] == 3 * x.nbytes
    assert len(set(kept[1:])) == 1
    assert [len(step.rows) for step in budget.steps] == [3] * 5
    assert [row.is_plain for row in budget.steps[-1].rows] == [True] * 3
    assert "all fits: nothing is recomputed" in budget.report()


def test_plain_regions_are_counted_as_the_profiler_counts():
    model, x, budget = Chain(checkpointed, width=16, depth=5), torch.randn(24, 16), remat.budget(2**30, reserve=0)
    for _ in range(RECORDED):
        regions_in(budget, lambda: model(x).square().sum())[1].backward()
    count, loss = regions_in(budget, lambda: model(x).square().sum())
    kept = budget.kept_bytes
    loss.backward()
    del loss
    model.wrap = plain
    with allocations() as events:
        h = model(x)
    assert count == 0
    assert kept == sum(events) - h.nbytes + x.nbytes


@pytest.mark.parametrize("lengths", [[16], [8, 12, 16]])
def test_a_longer_batch_than_any_before_stays_within_the_limit(lengths):
    """It comes when all of the shorter ones fits. Of a kind of region three shapes are recorded, others are scaled."""
    model, large = Chain(depth=4, width=16), torch.randn(64, 16)
    (expected,) = torch.autograd.grad(model(large).square().sum(), model.blocks[0].up.weight)
    model.wrap = checkpointed
    most = kept_without_limit(lambda: model(torch.randn(lengths[-1], 16)).sum().backward())
    budget, kept = remat.budget(2 * most, reserve=0), []
    for length in lengths * 4:
        count, loss = regions_in(budget, lambda length=length: model(torch.randn(length, 16)).sum())
        loss.backward()
        del loss
    assert count == 0
    for _ in range(4):
        with budget, LiveStorages() as live:
            h = model(large)
            kept.append(budget.kept_bytes)
            assert kept[-1] == live.bytes() - h.nbytes + large.nbytes
        (actual,) = torch.autograd.grad(h.square().sum(), model.blocks[0].up.weight)
        assert torch.equal(expected, actual)
        del h
    assert all(4 * large.nbytes < size <= budget.limit for size in kept[len(lengths) == 1 :])
    assert len(set(kept[1:])) == 1


def test_regions_give_up_the_cheapest_where_others_take_their_room(monkeypatch):
    """What comes when the regions have kept what they bought, and does not go by price."""
    lower, prices = KeptRegion.lower, []

    def noting(kept, at):
        before, after, total = kept.row.rung, kept.row.part.ladder.rungs[at], kept.counted.bytes
        done = lower(kept, at)
        prices.append((after.ns - before.ns) / (total - kept.counted.bytes))
        return done

    monkeypatch.setattr(KeptRegion, "lower", noting)

    class Blocks(Chain):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(Mlp(16), nn.Tanh(), Mlp(16), nn.GELU()) for _ in range(4))

    model, x, w = Blocks(), leaf(32, 16), leaf(16, 88)
    expected = step(model, x)
    saved = remat.checkpoint(policy=[torch.ops.aten.mm.default])(lambda x: (x @ w).sin())
    model.wrap = checkpointed
    budget = remat.budget(2**40, reserve=0)
    for _ in range(RECORDED):
        regions_in(budget, lambda: step(model, x))
    rungs = budget.steps[-1].rows[0].part.ladder.rungs
    budget.limit = sum(rungs[at].bytes for at in (1, 2, -2, -2))
    with budget:
        for turn in range(4):
            model.zero_grad()
            x.grad = None
            h = model(x)
            if turn == 3:
                before = budget.kept_bytes
                other = saved(torch.randn(32, 16))
                assert budget.kept_bytes == bytes_there(budget) <= budget.limit < before + 32 * 88 * 4
                assert budget.steps[-1].sum_of("lowered_bytes") > 0
                assert prices == sorted(prices)
                assert len(prices) > 1
                del other
            h.square().mean().backward()
            del h
    assert_same(expected, [*parameter_gradients(model), x.grad])
    assert budget.kept_bytes == 0


def test_graphs_that_are_not_done_stay_counted():
    model, x, budget = Chain(checkpointed, width=16), torch.randn(4, 16), remat.budget(2**30, reserve=0)
    for _ in range(3):
        regions_in(budget, lambda: model(x).sum())[1].backward()
    first = regions_in(budget, lambda: model(x).sum())[1]
    one = budget.kept_bytes
    second = regions_in(budget, lambda: model(x).sum())[1]
    assert budget.kept_bytes == 2 * one > 0
    second.backward()
    third = regions_in(budget, lambda: model(x).sum())[1]
    assert budget.kept_bytes == 2 * one  # the second is done, the first is not
    third.backward(retain_graph=True)
    fourth = regions_in(budget, lambda: model(x).sum())[1]
    assert budget.kept_bytes == 3 * one
    del first, second, third, fourth
    assert budget.kept_bytes == 0


@pytest.mark.parametrize("what", ["named", "policy", "training", "trace"])
def test_what_a_region_asks_for_besides_is_not_passed_over(what):
    module, x, budget = nn.Dropout(0.5).eval(), leaf(4, 4), remat.budget(2**30, reserve=0)
    block = {"named": lambda x: remat.op(torch.sin, "sin")(x).exp(), "training": module}.get(what, torch.exp)
    region = remat.checkpoint(policy=[torch.ops.aten.exp.default] if what == "policy" else None)(block)
    for at in range(5):
        module.train(at == 4)
        with remat.trace() if what == "trace" and at == 4 else contextlib.nullcontext():
            count, y = regions_in(budget, lambda: region(x))
        y.sum().backward()
        del y
    assert count == 1


def test_region_with_another_switch_is_not_like_the_one_before():
    class Block(nn.Module):
        def forward(self, x, wide):
            return (x.sin().exp().tanh() if wide else x.sin()) * x

    block, x, budget = Block(), leaf(4, 4), remat.budget(2**30, reserve=0)
    for wide, expected in [(False, 1)] * 3 + [(False, 0)] + [(True, 1)] * 3 + [(True, 0), (False, 0)]:
        count, y = regions_in(budget, lambda wide=wide: remat.checkpoint()(block)(x, wide))
        assert count == expected, wide
        y.sum().backward()
        del y


# Over ranks, in one process: `tests/features/distributed/budget_checks.py` has what several do


class Work:
    """A collective that takes so many looks."""

    def __init__(self, looks):
        self.looks = looks

    def is_completed(self):
        self.looks -= 1
        return self.looks < 0


def test_a_rank_that_failed_ends_only_the_wait_that_it_did_not_join(monkeypatch):
    ranks = group.Ranks.__new__(group.Ranks)
    monkeypatch.setattr(group, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(ranks, "_failed", lambda blocks: "rank 1 raised KeyError", raising=False)
    ranks._warned = False
    ranks._wait(Work(3), [0])  # what it has sent is on its way
    with pytest.raises(remat.RematError, match="rank 1 raised KeyError in a block"):
        ranks._wait(Work(10**9), [0])


def test_region_that_must_not_be_plain_code_though_that_keeps_nothing_runs_in_a_group(tmp_path):
    x = torch.randn(64, 64, requires_grad=True)
    region = remat.checkpoint(region_name="scale", determinism_check="bitwise")(lambda x: x * 2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        budget = remat.budget("1 MiB", group=dist.group.WORLD)
        for _ in range(6):
            with budget:
                assert torch.equal(torch.autograd.grad(region(x).sum(), x)[0], torch.full_like(x, 2))
    finally:
        dist.destroy_process_group()


def test_group_that_is_none_is_an_error(tmp_path):
    with pytest.raises(remat.UsageError, match="takes no str"):
        remat.budget("1 MiB", group="tp")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        with pytest.raises(remat.UsageError, match="from rank to rank"):
            remat.budget("1 MiB", group=dist.group.WORLD, offload="fill")
        budget = remat.budget("1 MiB", group=dist.group.WORLD)
        with pytest.raises(remat.UsageError, match="have not agreed"):
            budget.plan()
        for _ in range(4):
            with budget:
                remat.checkpoint(region_name="sin")(torch.sin)(torch.randn(4, requires_grad=True)).sum().backward()
        assert list(budget.plan()) == ["sin"]
        assert budget.plan()["sin"].is_plain
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("limit", ["50%", 60_000])
def test_a_budget_made_anew_for_each_step_knows_what_those_before_it_saw(limit):
    model, x = Chain(checkpointed, width=32), leaf(64, 32)
    model.wrap, wrap = plain, model.wrap
    expected, kept = step(model, x), []
    model.wrap = wrap
    for _ in range(4):
        with remat.budget(limit, reserve=0) as budget:
            assert_same(expected, step(model, x))
        kept.append(budget.steps[0].most_bytes)
        assert budget.step_count == 1
    assert kept[0] < kept[1] == kept[2] == kept[3]
