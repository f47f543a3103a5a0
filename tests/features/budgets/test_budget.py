"""Budgets: gradients are those of plain autograd bit for bit, bytes are counted truly, and nothing outlives its use."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from benchmarks.memory import allocations
from tests.contract import test_nesting
from tests.helpers import (
    Mlp,
    Stack,
    assert_same,
    checkpointed,
    collector_off,
    in_threads,
    leaf,
    no_other_regions,
    pairwise,
    parameter_gradients,
    plain,
    watch,
)
from tests.ways import RECOMPUTED
from torch_remat import _compat
from torch_remat._kept import kept_by
from torch_remat.budgets.reserve import Reserve
from torch_remat.dispatch.region.region import live_regions

KIB = 2**10


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings(), no_other_regions():
        warnings.filterwarnings("ignore", message="the budget")
        yield


def kept_without_limit(program):
    """Return the most bytes that a program's regions keep where nothing is given up."""
    with remat.budget(2**40, reserve=0) as budget:
        program()
    return max(step.most_bytes for step in budget.steps)


# Gradients


def stack_step(wrap, x, seed=1):
    torch.manual_seed(seed)
    stack = Stack(wrap, depth=3)
    torch.manual_seed(seed + 1)
    stack(x).square().mean().backward()
    return parameter_gradients(stack)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8, 1.0])
def test_every_share_gives_equal_gradients_within_the_budget(share):
    x = torch.randn(4, 8, 8)
    expected = stack_step(plain, x)
    most = kept_without_limit(lambda: stack_step(checkpointed, x))
    with remat.budget(int(share * most), reserve=0) as budget:
        for _ in range(3):
            assert_same(expected, stack_step(checkpointed, x))
    floor = max(sum(row.fixed_bytes for row in step.rows) for step in budget.steps)
    largest_result = 4 * 8 * 8 * 4 * 3
    assert all(step.forward_bytes <= max(share * most, floor + largest_result) for step in budget.steps)
    assert any(row.evicted_bytes for row in budget.steps[-1].rows) == (share < 1)


def test_nothing_is_replayed_where_all_has_room():
    runs = []

    def block(x):
        runs.append(remat.is_recomputing())
        return (x.sin() @ x).exp()

    with remat.budget("1 GiB"):
        checkpointed(block)(leaf(4, 4)).sum().backward()
    assert runs == [False]


def test_outside_of_the_block_everything_is_recomputed_again():
    x = leaf(4, 4)
    with remat.budget("1 GiB", reserve=0) as budget:
        inside = checkpointed(lambda x: x.sin().exp())(x)
    outside = checkpointed(lambda x: x.sin().exp())(x)
    kept = budget.kept_bytes
    assert kept == 2 * x.nbytes  # the input, and the exponential's result
    del inside
    assert budget.kept_bytes == 0
    assert outside is not None


@pytest.mark.parametrize("limit", [1, 400, 10**6])
def test_second_order_gradients_are_equal(limit):
    x = leaf(4, 8)
    block = Mlp()

    def second(wrap):
        (first,) = torch.autograd.grad(wrap(block)(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *block.parameters()], allow_unused=True)[:-1]

    expected = second(plain)
    with remat.budget(limit, reserve=0):
        assert_same(expected, second(checkpointed))


@pytest.mark.parametrize("limit", [1, 500, 10**6])
def test_nested_regions_are_equal(limit):
    inner, outer, x = Mlp(), Mlp(), leaf(4, 8)

    def program(wrap):
        def block(x):
            return wrap(inner)(outer(x).sin()) + wrap(inner)(x)

        return torch.autograd.grad(wrap(block)(x).square().sum(), [x, *inner.parameters(), *outer.parameters()])

    expected = program(plain)
    with remat.budget(limit, reserve=0) as budget:
        assert_same(expected, program(checkpointed))
    assert budget.kept_bytes == 0


@pytest.mark.filterwarnings("ignore:(?s).*starts over")
@pytest.mark.parametrize("limit", [1, 100, 300, 10**6])
def test_replay_that_starts_over_fills_what_was_kept_too(limit):
    """Torch's checkpoint reads a skipped call's result after all: replay begins again, with all holders empty."""
    linear, x = nn.Linear(4, 4), leaf(4, 4)

    def program(wrap, keep):
        def block(x):
            with torch.autocast("cpu", torch.bfloat16):
                h = keep("linear", linear, x)
            return torch_checkpoint(lambda h, x: x.detach() * x, h.float(), x, use_reentrant=False)

        return torch.autograd.grad(wrap(block)(x).sum(), x)

    expected = program(plain, lambda name, function, x: function(x))
    with remat.budget(limit, reserve=0) as budget:
        assert_same(expected, program(checkpointed, remat.native_save_region))
    assert budget.kept_bytes == 0


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
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo])
@pytest.mark.parametrize("limit", [1, 500, 10**6])
def test_sparse_tensors_are_counted_with_all_their_parts(layout, limit):
    matrix, w = torch.eye(4).to_sparse(layout=layout), leaf(4, 4)

    def product(matrix, w):
        return torch.sparse.mm(matrix, w).sin()

    expected = torch.autograd.grad(product(matrix, w).sum(), w)
    with remat.budget(limit, reserve=0) as budget:
        for _ in range(3):
            y = remat.checkpoint()(product)(matrix, w)
            assert_same(expected, torch.autograd.grad(y.sum(), w))
            del y
            assert budget.kept_bytes == 0


@pytest.mark.parametrize("limit", [1, 300, 10**6])
def test_change_in_place_after_the_save_is_noticed_as_in_plain_autograd(limit):
    x = leaf(4, 8)

    def block(x):
        h = x.sin()
        y = h.exp() * h
        h.add_(1)
        return y

    with pytest.raises(RuntimeError, match=r"in-?place"):
        block(x).sum().backward()
    with remat.budget(limit, reserve=0):
        y = checkpointed(block)(x)
        with pytest.raises(remat.MutationError, match="modified in place"):
            y.sum().backward()


def test_change_in_place_after_forward_is_noticed_whether_or_not_it_is_given_up():
    for limit in (1, 10**6):
        kept = []

        def block(x, kept=kept):
            kept.append(h := x.sin())
            return h.exp() * h

        with remat.budget(limit, reserve=0):
            y = checkpointed(block)(leaf(4, 8))
            kept[0].add_(1)
            if limit == 1:
                kept.clear()
            with pytest.raises(remat.MutationError, match="modified in place"):
                y.sum().backward()


@pytest.mark.parametrize("limit", [300, 400, 10**6])
def test_full_tensors_beside_given_ones_are_compared_with_what_replay_makes(limit):
    held, first = [], [torch.sin]

    def block(x):
        h = first[0](x)
        held.append(h)  # frees nothing: it stays full, and replay passes it
        return h.exp() * h.cos().exp()

    x = leaf(4, 8)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    with remat.budget(limit, reserve=0):
        assert torch.equal(expected, torch.autograd.grad(checkpointed(block)(x).sum(), x)[0])
        y = checkpointed(block)(x)
        first[0] = torch.tanh
        if limit == 10**6:
            assert torch.equal(expected, torch.autograd.grad(y.sum(), x)[0])
        else:
            with pytest.raises(remat.MismatchError, match="TanhBackward"):
                y.sum().backward()
    held.clear()


def test_exceptions_leave_no_bytes_behind():
    class Failed(Exception):
        pass

    def block(x):
        h = x.sin().exp()
        if fails:
            raise Failed
        return h

    with remat.budget(10**6, reserve=0) as budget:
        fails = True
        with pytest.raises(Failed):
            checkpointed(block)(leaf(4, 8))
        assert budget.kept_bytes == 0
        fails = False
        checkpointed(block)(leaf(4, 8)).sum().backward()
    assert budget.kept_bytes == 0


@pytest.fixture
def _often_switched():
    """Have threads take turns as often as can be."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("_often_switched")
@pytest.mark.parametrize("limit", [1, 1500, 10**6])
def test_threads_share_one_budget(limit):
    blocks = [Mlp() for _ in range(6)]
    xs = [leaf(4, 8) for _ in blocks]
    expected = [torch.autograd.grad(block(x).sum(), x)[0] for block, x in zip(blocks, xs, strict=True)]
    found, budget = [[] for _ in blocks], remat.budget(limit, reserve=0)

    def work(place):
        with budget:
            for _ in range(40):
                y = checkpointed(blocks[place])(xs[place])
                found[place].append(torch.autograd.grad(y.sum(), xs[place])[0])

    in_threads(work, len(blocks))
    for one, gradients in zip(expected, found, strict=True):
        assert len(gradients) == 40
        assert all(torch.equal(one, gradient) for gradient in gradients)
    assert budget.kept_bytes == 0
    assert budget.ledger.counts == {}


@pytest.mark.parametrize("limit", [1, 10**6])
def test_tensor_subclasses_keep_and_give_up(limit):
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    x = two_tensor(torch.randn(4, 8), torch.randn(4, 8)).requires_grad_()

    def block(x):
        return x.sin().exp().exp() * x.sin()

    expected = torch.autograd.grad(block(x).sum(), x)[0]
    with remat.budget(limit, reserve=0) as budget:
        y = checkpointed(block)(x)
        assert budget.kept_bytes % (2 * x.a.nbytes) == 0
        assert budget.steps[-1].rows[0].evicted_bytes == (6 * x.a.nbytes if limit == 1 else 0)
        (actual,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(expected.a, actual.a)
    assert torch.equal(expected.b, actual.b)
    del y
    assert budget.kept_bytes == 0


# What the author decides


def test_saved_results_are_counted_and_never_given_up():
    runs = []

    def product(x, w):
        runs.append(1)
        return x @ w

    w = leaf(8, 8)

    def block(x):
        return remat.native_save_region("mm", lambda: product(x.sin(), w)).exp()

    x = leaf(4, 8)
    (expected,) = torch.autograd.grad((x.sin() @ w).exp().sum(), x)
    runs.clear()
    with remat.budget(1, reserve=0) as budget:
        y = checkpointed(block)(x)
        assert budget.kept_bytes >= x.nbytes
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert budget.kept_bytes in (0, expected.nbytes)
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
    runs = []

    class Exp(torch.autograd.Function):
        @staticmethod
        @remat.auto_forward("y")
        def forward(ctx, x):
            runs.append(1)
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    x = leaf(4, 8)
    with remat.budget("1 GiB", reserve=0):
        y = checkpointed(lambda x: remat.op(Exp.apply, "exp", policy=policy)(x.sin()) * 2)(x)
        (actual,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(actual, torch.autograd.grad((x.sin().exp() * 2).sum(), x)[0])
    assert len(runs) == (2 if policy is remat.CheckpointPolicy.RECOMPUTE else 1)


def test_native_region_named_recompute_is_never_kept():
    runs = []

    def block(x):
        def inner(x):
            runs.append(remat.is_recomputing())
            return x.sin().exp()

        return remat.op(inner, "inner", policy=remat.CheckpointPolicy.RECOMPUTE)(x) * 2

    x = leaf(4, 8)
    with remat.budget("1 GiB", reserve=0) as budget:
        y = checkpointed(block)(x)
        assert budget.kept_bytes == x.nbytes
        (actual,) = torch.autograd.grad(y.sum(), x)
    assert runs == [False, True]
    assert torch.equal(actual, torch.autograd.grad((x.sin().exp() * 2).sum(), x)[0])


# Bytes


def test_parameters_and_buffers_are_not_counted():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.register_buffer("mask", torch.ones(4, 8))

        def forward(self, x):
            return (x @ self.weight) * self.mask

    x = leaf(4, 8)
    with remat.budget("1 MiB", reserve=0) as budget:
        y = checkpointed(Masked())(x)
        assert budget.kept_bytes == x.nbytes
    assert y is not None


def bytes_there(budget):
    """Return the bytes of the storages that a budget's regions keep, found by looking at each of them."""
    sizes = {}
    for kept in budget.alive():
        region = kept.region()
        values = [row.value for row in kept_by(region) if row.what in ("refilled", "saved", "slot", "result")]
        values += [] if region.inputs is None else region.inputs.held()
        for value in values:
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize("limit", [1, 2000, 5000, 10**9])
def test_count_equals_the_profilers(limit):
    blocks = [Mlp(16) for _ in range(4)]
    x = torch.randn(32, 16)
    with remat.budget(limit, reserve=0) as budget:
        h = x
        with allocations() as events:
            for block in blocks:
                h = checkpointed(block)(h)
        # What only the caller holds is not counted, an input counts also if the caller holds it.
        assert budget.kept_bytes == sum(events) - h.nbytes + x.nbytes
        with allocations() as events:
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
    return [row.value for row in kept_by(region) if isinstance(row.value, torch.Tensor) and row.what != "input"]


def test_region_that_a_backward_does_not_come_to_keeps_its_inputs():
    x = leaf(8, 8)
    with remat.budget("1 MiB", reserve=0) as budget:
        one = checkpointed(lambda x: (x + 1).sin())(x * 2)
        kept = budget.kept_bytes
        checkpointed(lambda x: (x + 1).sin())(x * 3).sum().backward()
        assert budget.kept_bytes == kept == 2 * x.nbytes
        budget.limit = 0
        two = checkpointed(lambda x: x.sin())(x)
        assert budget.kept_bytes == 2 * x.nbytes  # the inputs of both
        budget.limit = 2**20
        assert torch.equal(torch.autograd.grad(one.sum(), x)[0], 2 * (x * 2 + 1).cos())
        del two


def test_inner_budget_counts_towards_the_outer():
    x = leaf(16, 16)
    with remat.budget("1 MiB", reserve=0) as outer:
        one = checkpointed(torch.exp)(x)
        with remat.budget("1 MiB", reserve=0) as inner:
            other = checkpointed(torch.exp)(x)
            assert inner.kept_bytes == 2 * x.nbytes
        assert outer.kept_bytes == 3 * x.nbytes
    del one, other
    assert outer.kept_bytes == inner.kept_bytes == 0


# Steps


class Blocks(nn.Module):
    def __init__(self, depth=6, width=64):
        super().__init__()
        self.layers = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.head = nn.Linear(width, 200)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.int64))


def test_replay_holds_nothing_that_is_there_already():
    held, gone = [], []

    def block(x):
        h = x * 2
        (storage,) = watch(h)
        if not remat.is_recomputing():
            held.append(h)  # stays full
        y = h.sin()
        del h
        if remat.is_recomputing():
            gone.append(storage.expired())
        return y.exp().exp().sin()

    x = leaf(16, 16)
    with remat.budget(3 * x.nbytes, reserve=0) as budget:
        y = checkpointed(block)(x) * 2
        assert budget.steps[-1].rows[0].evicted_bytes == x.nbytes
        (actual,) = torch.autograd.grad(y.sum(), x)
    held.clear()
    assert gone == [True]
    assert torch.equal(actual, torch.autograd.grad(((x * 2).sin().exp().exp().sin() * 2).sum(), x)[0])


@pytest.mark.parametrize("percent", [0, 30, 60, 100])
def test_a_share_is_measured_in_the_first_steps(percent):
    x = torch.randn(4, 8, 8)
    expected = stack_step(plain, x)
    with remat.budget(2**40) as whole:
        stack_step(checkpointed, x)
    (step,) = whole.steps
    most, least = step.most_bytes, step.sum_of("fixed_bytes")
    with remat.budget(f"{percent}%") as budget:
        for _ in range(4):
            assert_same(expected, stack_step(checkpointed, x))
    assert budget.share == percent / 100
    if 0 < percent < 100:
        assert budget.steps[0].most_bytes == most
        assert budget.limit == budget.budget_bytes == least + int((most - least) * percent / 100)
        assert f"budget of {percent}% (" in budget.report()
    largest_result = 4 * 8 * 8 * 4 * 3
    limit = least + (most - least) * percent / 100
    assert all(step.forward_bytes <= limit + largest_result for step in list(budget.steps)[1:])
    assert bool(budget.steps[-1].sum_of("evicted_bytes")) == (percent < 100)


def test_a_share_grows_with_a_longer_batch():
    block, limits = Mlp(), []
    with remat.budget("50%") as budget:
        for length in (4, 4, 32, 4):
            checkpointed(block)(leaf(length, 8)).sum().backward()
            limits.append(budget.limit)
    assert limits[1] < limits[3] == pytest.approx(8 * limits[1], rel=0.01)


def test_a_budget_in_which_no_region_ran_warns_once():
    budget = remat.budget("1 GiB")
    with pytest.warns(remat.RematWarning, match=r"(?s)no region ran.*checkpoint_modules") as caught, budget:
        Mlp()(leaf(4, 8)).sum().backward()
    assert Path(caught[0].filename) == Path(__file__)
    with budget:
        Mlp()(leaf(4, 8)).sum().backward()
    with pytest.raises(ValueError, match="on purpose"), remat.budget("1 GiB"):
        raise ValueError("on purpose")


def test_regions_that_lost_all_in_two_steps_begin_empty_until_there_is_room():
    blocks, x = [Mlp() for _ in range(4)], torch.randn(16, 8)

    def step(wrap):
        h = x
        for place, block in enumerate(blocks):
            h = wrap(block, region_name=f"layers.{place}")(h) if wrap is checkpointed else block(h)
        return torch.autograd.grad(h.sum(), [p for block in blocks for p in block.parameters()])

    expected = step(plain)
    most = kept_without_limit(lambda: step(checkpointed))
    with remat.budget(most // 2, reserve=0) as budget:
        for _ in range(4):
            assert_same(expected, step(checkpointed))
        first, *_, last = budget.steps
        assert not any(row.is_empty_from_start for row in first.rows)
        assert [last.rows[place].is_empty_from_start for place in (0, -1)] == [True, False]
        assert last.rows[0].evicted_bytes == first.rows[0].evicted_bytes > 0
        assert last.most_bytes <= most // 2
        budget.limit = most
        for _ in range(2):
            assert_same(expected, step(checkpointed))
        assert not any(row.is_empty_from_start or row.evicted_bytes for row in budget.steps[-1].rows)
    assert budget.kept_bytes == 0


def test_what_a_replay_fills_of_a_region_that_began_empty_is_counted():
    block, x = Mlp(), leaf(16, 8)
    with remat.budget(1, reserve=0) as budget:
        for _ in range(4):
            y = checkpointed(block)(x)
            assert budget.kept_bytes == x.nbytes
            other = checkpointed(block)(x * 2)
            first = torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert budget.kept_bytes == bytes_there(budget) == 2 * x.nbytes  # what was read is dropped again
            assert_same(first, torch.autograd.grad(y.sum(), x))
            assert_same(torch.autograd.grad(block(x * 2).sum(), x), torch.autograd.grad(other.sum(), x))
            del y, other
            assert budget.kept_bytes == 0
        assert all(row.is_empty_from_start for row in budget.steps[-1].rows)


def test_on_an_accelerator_the_allocators_peaks_tell_the_reserve(monkeypatch):
    """Played on the CPU: an allocator that has seen 500 B more than the step's regions kept."""
    allocated = {"now": 1000, "peak": 0}
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: allocated["now"])
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: allocated["peak"])
    budget, block, x = remat.budget("1 MiB"), Mlp(), leaf(4, 8)
    budget._reserve = Reserve(budget.budget_bytes)
    with budget:
        for _ in range(4):
            y = checkpointed(block)(x)
            allocated["peak"] = 1500 + budget.kept_bytes
            y.sum().backward()
            del y
    peaks = [step.peak_bytes - step.forward_bytes for step in budget.steps]
    assert peaks == [500] * 4
    reserves = [budget.budget_bytes - step.limit_bytes for step in budget.steps]
    assert reserves[0] == 0
    assert reserves[1] == 500 + budget.steps[0].rows[0].saved_bytes
    assert reserves[2] == reserves[3] == 500 + budget.budget_bytes // 32


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


@pytest.mark.parametrize(
    "limit", [0, -1, 0.0, -0.5, "", "six", "6 XiB", None, True, float("nan"), [1], 0.6, 1.5, "52", "101%", "-1%"]
)
def test_nonsense_is_an_error_at_once(limit):
    with pytest.raises(remat.UsageError, match=r'(?s)budget.*"6 GiB".*"0%" to "100%".*device_share=0.6'):
        remat.budget(limit)


def test_other_nonsense_is_an_error_at_once():
    with pytest.raises(remat.UsageError, match="reserve"):
        remat.budget(100, reserve=200)
    with pytest.raises(remat.UsageError):
        remat.budget(100, reserve=-1)
    with pytest.raises(remat.UsageError, match="reserve"):
        remat.budget("60%", reserve=10)
    with pytest.raises(remat.UsageError, match="two budgets"):
        remat.budget(100, device_share=0.5)
    for share in (0, 1.5, -0.5, True, "60%"):
        with pytest.raises(remat.UsageError, match="device_share"):
            remat.budget(device_share=share)
    with pytest.raises(remat.UsageError, match="offload"):
        remat.budget(100, offload="all")


def test_sizes_are_read_as_they_are_written():
    assert remat.budget("6 GiB").budget_bytes == 6 * 2**30
    assert remat.budget(12345).budget_bytes == 12345
    assert 2**20 < remat.budget(device_share=0.5).budget_bytes < remat.budget(device_share=1.0).budget_bytes


@pytest.fixture
def built_for_cuda(monkeypatch):
    """Play a build of torch for CUDA on a machine without a driver."""
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    _compat.accelerator_type.cache_clear()
    yield
    _compat.accelerator_type.cache_clear()


@pytest.mark.usefixtures("built_for_cuda")
def test_without_a_driver_a_build_for_cuda_counts_what_is_on_the_cpu():
    block, x = Mlp(8), torch.randn(4, 8)
    with remat.budget(2**20) as budget:
        remat.checkpoint()(block)(x).sum().backward()
    assert budget.steps[0].most_bytes > x.nbytes
    remat.budgets.frontier(lambda: remat.checkpoint()(block)(x).sum().backward(), budgets=2, steps=1)


# Reports


def run_steps(budget, steps=2):
    blocks = [Mlp() for _ in range(3)]
    with budget:
        for _ in range(steps):
            x = leaf(16, 8)
            for place, block in enumerate(blocks):
                x = checkpointed(block, region_name=f"layers.{place}")(x)
            x.sum().backward()


def test_report_has_a_line_for_each_region():
    budget = remat.budget("3 KiB", reserve=0)
    assert "0 steps" in budget.report()
    run_steps(budget)
    report = budget.report()
    assert "budget of 3.0 KiB" in report
    assert all(f"layers.{place}" in report for place in range(3))
    assert "2 steps" in report


def test_totals_are_plain_data():
    budget = remat.budget("3 KiB", reserve=0)
    run_steps(budget)
    data = json.loads(budget.to_json())
    assert data == json.loads(json.dumps(budget.to_dict()))
    (first, second) = data["steps"]
    assert [row["region"] for row in second["regions"]] == ["layers.0", "layers.1", "layers.2"]
    assert second["evicted_bytes"] > 0
    assert second["replay_seconds"] > 0
    assert first["most_kept_bytes"] <= 3 * KIB + 1024


@pytest.mark.parametrize("limit", ["3 KiB", "60%", 1, "1 GiB"])
def test_the_picture_tells_which_region_was_evicted_when_and_why_without_text_over_text(limit, tmp_path):
    pytest.importorskip("matplotlib")
    budget = remat.budget(limit)
    run_steps(budget, steps=4)
    figure = budget.plot(tmp_path / "kept.png")
    assert (tmp_path / "kept.png").stat().st_size > 1000
    _, lanes = figure.axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["layers.0", "layers.1", "layers.2"]
    step = budget.steps[-1]
    for row, said in zip(step.rows, lanes.texts, strict=True):
        assert ("evicted" in said.get_text()) == bool(row.evicted_bytes)
    marks = [x for line in lanes.lines for x in line.get_xdata()]
    assert sorted(marks) == sorted(one.seconds * 1e3 for one in step.evictions)
    texts = [text for axes in figure.axes for text in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())]
    texts += [figure._suptitle, lanes.title, lanes.xaxis.label, *(axes.yaxis.label for axes in figure.axes)]
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:place])


# Plans


def trained(model, x, handle):
    for parameter in model.parameters():
        parameter.grad = None
    model(x).backward()
    handle.remove()
    return [gradient.clone() for gradient in parameter_gradients(model)]


def test_plan_keeps_what_the_budget_kept():
    model, x = Blocks(), torch.randn(32, 64)
    expected = trained(model, x, remat.checkpoint_modules(model, "layers.*"))
    handle = remat.checkpoint_modules(model, "layers.*")
    most = kept_without_limit(lambda: model(x).backward())
    with remat.budget(int(0.6 * most), reserve=0) as budget:
        for _ in range(2):
            model(x).backward()
    handle.remove()
    plan = remat.budgets.Plan.from_json(budget.plan().to_json())
    assert plan == budget.plan()
    assert "layers.3: keeps" in str(plan)
    assert any(entry.evicted_tensors for entry in plan.values())
    runs = []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda *_: runs.append(remat.is_recomputing()))
    assert_same(expected, trained(model, x, remat.checkpoint_modules(model, "layers.*", plan=plan)))
    assert sum(runs) == sum(entry.evicted_tensors > 0 for entry in plan.values())
    for name in plan:
        plan.keep(name)
    runs.clear()
    assert_same(expected, trained(model, x, remat.checkpoint_modules(model, "layers.*", plan=plan)))
    assert sum(runs) == 0
    plan.evict("layers.0")
    assert_same(expected, trained(model, x, remat.checkpoint_modules(model, "layers.*", plan=plan)))
    assert sum(runs) == 1


def test_plan_that_fits_no_region_is_an_error():
    with pytest.raises(remat.UsageError, match="names none of these regions"):
        remat.checkpoint_modules(Blocks(), "layers.*", plan=remat.budgets.Plan({}))
    with pytest.raises(remat.UsageError, match="cannot use"):
        remat.checkpoint_modules(Blocks(), "layers.*", plan="all")
    with pytest.raises(remat.UsageError, match="not a plan"):
        remat.budgets.Plan.from_json("{}")
    with pytest.raises(remat.UsageError, match="needs a step"):
        remat.budget(100).plan()


def test_frontier_goes_from_full_recomputation_to_none(tmp_path):
    model, x = Blocks(), torch.randn(32, 64)
    remat.checkpoint_modules(model, "layers.*")
    measured = remat.budgets.frontier(lambda x: model(x).backward(), x, budgets=3, steps=1)
    kept = [point.kept_bytes for point in measured.points]
    assert kept == sorted(kept)
    assert measured.points[0].replay_seconds > 0
    assert measured.points[-1].replay_seconds == 0
    assert all(point.peak_bytes == 0 for point in measured.points)  # which an accelerator's allocator alone tells
    assert "a GiB buys" in str(measured)
    assert len(measured.to_dict()["points"]) == 3
    pytest.importorskip("matplotlib")
    measured.plot(tmp_path / "frontier.png")
    with pytest.raises(remat.UsageError, match="no region"):
        remat.budgets.frontier(lambda: None)


# Offloading


def test_what_would_be_given_up_is_offered_to_the_offloader_first(tmp_path):
    stack, x = Stack(plain, depth=2, width=64), torch.randn(8, 32, 64)
    torch.manual_seed(3)
    stack(x).square().mean().backward()
    expected = [gradient.clone() for gradient in parameter_gradients(stack)]
    stack.wrap = checkpointed
    most = kept_without_limit(lambda: stack(x).sum().backward())
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    for _ in range(2):
        stack.zero_grad()
        torch.manual_seed(3)
        with remat.budget(most // 2, reserve=0, offload="fill") as budget, remat.offload_to(offloader):
            loss = stack(x).square().mean()
            assert budget.kept_bytes <= most // 2
            loss.backward()
            del loss
        assert_same(expected, parameter_gradients(stack))
        assert sum(row.offloaded_bytes for row in budget.steps[-1].rows) > 0
        assert budget.kept_bytes == 0
    offloader.close() if hasattr(offloader, "close") else None


@pairwise(pattern=["to", "oto", "ttoo", "totot"], limit=[1, 100, 200, 300, 500, 1000, 10**6])
def test_regions_and_torch_checkpoints_in_each_other_are_equal(pattern, limit):
    with remat.budget(limit, reserve=0):
        test_nesting.test_regions_and_torch_checkpoints_in_each_other_have_equal_gradients(RECOMPUTED, pattern, True)


def test_trace_shows_what_a_budget_gave_up_and_how_it_stood(tmp_path):
    def step(h):
        for place in range(3):
            h = checkpointed(lambda h: h.exp().sin().exp(), region_name=f"layers.{place}")(h)
        return h.sum()

    x = leaf(16, 16)
    with no_other_regions(), remat.budget(6 * x.nbytes, reserve=0) as budget:
        step(x).backward()
        with remat.trace() as trace:
            loss = step(x)
            loss.backward()
    rows = budget.steps[-1].rows
    assert sum(one.bytes for one in trace.given_up) == sum(row.evicted_bytes for row in rows) > 0
    by_region = {(one.region, one.call) for one in trace.given_up}
    assert by_region <= {("layers.0", 0), ("layers.1", 1), ("layers.2", 2)}
    for one in trace.given_up:
        assert 0 < one.bytes <= len(one.saved_tensors) * x.nbytes  # two may be one storage
        assert one.kept_bytes <= 6 * x.nbytes
        assert any(span.phase == "forward" for span in trace.spans_at(one.time_us))
    (state,) = trace.budgets
    assert (state.kept_bytes, state.limit_bytes, state.budget_bytes) == (0, 6 * x.nbytes, 6 * x.nbytes)
    text = str(trace)
    assert "budget of 6.0 KiB, limit 6.0 KiB: 0 B kept by its regions at the end" in text
    assert "evicted:" in text
    assert trace.given_up[0].region in text
    assert "saved tensor" in text
    assert "budget of 6.0 KiB" in trace._repr_html_()
    data = json.loads(trace.to_json())
    assert data["given_up"][0]["saved_tensors"] == list(trace.given_up[0].saved_tensors)
    assert data["budgets"] == [{"kept_bytes": 0, "limit_bytes": 6144, "budget_bytes": 6144}]
    trace.to_chrome_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    marked = sum(event["args"]["bytes"] for event in events if event["ph"] == "i")
    assert marked == sum(row.evicted_bytes for row in rows)
    pytest.importorskip("matplotlib")
    trace.plot(tmp_path / "step.png")


def test_trace_shows_what_a_budget_offloaded(tmp_path):
    x = leaf(32, 32)
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    with remat.budget(40 * x.nbytes, reserve=0, offload="fill") as budget, remat.offload_to(offloader):
        budget.limit = 2 * x.nbytes
        with remat.trace() as trace:
            y = checkpointed(lambda h: h.exp().sin().exp() * 2, region_name="block")(x)
    assert sum(one.offloaded_bytes for one in trace.given_up) == budget.steps[-1].rows[0].offloaded_bytes > 0
    assert "offloaded" in str(trace)
    assert trace.budgets[0].kept_bytes <= 2 * x.nbytes
    y.sum().backward()


# Regions without holders, where all fits


def model_of_blocks(count=3, width=16):
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp(width) for _ in range(count)))
    remat.checkpoint_modules(model, [str(place) for place in range(count)])
    return model


def regions_in(budget, program):
    """Return how many regions a program leaves alive before its backward, in a budget."""
    with budget:
        loss = program()
    count = sum(region.inputs is not None for region in live_regions())
    return count, loss


def test_where_all_fits_regions_run_as_plain_autograd_and_are_counted_all_the_same():
    model, x = model_of_blocks(), torch.randn(4, 16)
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
    assert counts == [3, 3, 0, 0, 0]
    assert len(set(kept)) == 1
    assert [len(step.rows) for step in budget.steps] == [3] * 5
    assert "0.0" in budget.report()


def test_a_larger_input_has_holders_and_what_does_not_fit_is_evicted():
    model, small, large = model_of_blocks(), torch.randn(4, 16), torch.randn(64, 16)
    with remat.budget(2**40, reserve=0) as free:
        model(small).sum().backward()
    budget = remat.budget(4 * max(step.most_bytes for step in free.steps), reserve=0)
    for _ in range(4):
        count, loss = regions_in(budget, lambda: model(small).sum())
        loss.backward()
        del loss
    assert count == 0
    model.zero_grad()
    count, loss = regions_in(budget, lambda: model(large).sum())
    assert count == 3
    assert budget.steps[-1].evictions
    loss.backward()
    actual = parameter_gradients(model)
    model.zero_grad()
    model(large).sum().backward()
    assert_same(parameter_gradients(model), actual)


def test_graphs_that_are_not_done_stay_counted():
    model, x = model_of_blocks(), torch.randn(4, 16)
    budget = remat.budget(2**30, reserve=0)
    for _ in range(3):
        regions_in(budget, lambda: model(x).sum())[1].backward()
    _, first = regions_in(budget, lambda: model(x).sum())
    one = budget.kept_bytes
    _, second = regions_in(budget, lambda: model(x).sum())
    assert budget.kept_bytes == 2 * one > 0
    second.backward()
    _, third = regions_in(budget, lambda: model(x).sum())
    assert budget.kept_bytes == 2 * one  # the second is done, the first is not
    third.backward(retain_graph=True)
    _, fourth = regions_in(budget, lambda: model(x).sum())
    assert budget.kept_bytes == 3 * one
    del first, second, third, fourth
    assert budget.kept_bytes == 0


@pytest.mark.parametrize("what", ["named", "policy", "training", "trace"])
def test_what_a_region_asks_for_besides_is_not_passed_over(what):
    def block(x):
        return remat.op(torch.sin, "sin")(x).exp() if what == "named" else x.sin().exp()

    options = {"policy": [torch.ops.aten.sin.default]} if what == "policy" else {}
    x, budget = leaf(4, 4), remat.budget(2**30, reserve=0)
    module = nn.Dropout(0.5)
    counts = []
    for step in range(5):
        run = block
        if what == "training":
            module.train(step == 4)
            run = module
        with remat.trace() if what == "trace" and step == 4 else nullcontext():
            count, y = regions_in(budget, lambda run=run: remat.checkpoint(**options)(run)(x))
        counts.append(count)
        y.sum().backward()
        del y
    assert counts[4] == 1


def test_region_with_another_switch_is_not_like_the_one_before():
    class Block(nn.Module):
        def forward(self, x, wide):
            return (x.sin().exp().tanh() if wide else x.sin()) * x

    block, x, budget = Block(), leaf(4, 4), remat.budget(2**30, reserve=0)
    for wide, expected in ((False, 1), (False, 1), (False, 0), (True, 1), (True, 1), (True, 0), (False, 0)):
        count, y = regions_in(budget, lambda wide=wide: remat.checkpoint()(block)(x, wide))
        assert count == expected, wide
        y.sum().backward()
        del y
