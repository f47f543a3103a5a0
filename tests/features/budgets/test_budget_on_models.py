"""Budgets on small models: peaks, layers of two kinds, two lengths in a batch, and nothing that stays behind."""

from __future__ import annotations

import gc
import weakref
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_remat as remat
from benchmarks.memory import allocations
from tests.features.budgets.test_budget import RECORDED, kept_without_limit, step
from tests.helpers import LiveStorages, Mlp, assert_same, checkpointed, collector_off, leaf, plain
from torch_remat.budgets import budget as budgets_room
from torch_remat.ladders import kinds

pytestmark = pytest.mark.filterwarnings("ignore:the budget")


class LlamaBlock(nn.Module):
    """Attention with rotated heads, and a gated branch, each after a norm."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).unbind(2)
        angles = torch.arange(length).view(1, -1, 1, 1) * 0.01
        q, k = (one * angles.cos() + one.flip(-1) * angles.sin() for one in (q, k))
        mixed = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Blocks, each of which runs as ``wrap`` says, and a head."""

    def __init__(self, blocks, width=32):
        super().__init__()
        self.blocks, self.head, self.wrap = nn.ModuleList(blocks), nn.Linear(width, 8), plain

    def forward(self, x):
        for block in self.blocks:
            x = self.wrap(block)(x)
        return self.head(x)


# Peaks


def peak_of(model, x, budget):
    """Return the most that is allocated in one step at once, after some steps in a budget."""
    with budget:
        for _ in range(RECORDED):
            step(model, x)
        model.zero_grad(set_to_none=False)  # gradients are there before, as in training
        with allocations() as events:
            model(x).square().mean().backward()
    return max(accumulate(events))


def test_a_lower_budget_never_raises_the_peak_of_a_step():
    model, x = Model(LlamaBlock() for _ in range(8)), torch.randn(2, 16, 32, requires_grad=True)
    expected = step(model, x)
    model.wrap = checkpointed
    whole = kept_without_limit(lambda: step(model, x))
    limits = [1, *(int(whole * place / 16) for place in range(1, 17))]
    peaks = [peak_of(model, x, remat.budget(limit, reserve=0)) for limit in limits]
    for lower, higher in pairwise(peaks):
        assert lower <= 1.02 * higher
    assert peaks[0] < 0.6 * peaks[-1]
    least = None
    for limit in limits:
        with remat.budget(limit, reserve=0) as budget:
            for _ in range(2):
                assert_same(expected, step(model, x))
        choice = budget.steps[-1].choice
        least = choice.peak_bytes if least is None else least
        assert choice.peak_bytes <= max(limit, least)  # with what a replay fills


def test_least_budget_peaks_as_full_recomputation_does_and_one_that_suffices_keeps_as_plain_code_does():
    model, x = Model(LlamaBlock() for _ in range(4)), torch.randn(2, 16, 32, requires_grad=True)
    with LiveStorages() as live:
        h = model(x)
        whole = live.bytes()
    model.wrap = checkpointed
    step(model, x)
    with allocations() as events:
        model(x).square().mean().backward()
    least = max(accumulate(events))
    assert peak_of(model, x, remat.budget(1, reserve=0)) <= 1.01 * least
    del h
    with remat.budget(2**40, reserve=0) as budget:
        for _ in range(RECORDED):
            step(model, x)
        with LiveStorages() as live:
            h = model(x)
            assert live.bytes() == whole
        assert all(row.is_plain for row in budget.steps[-1].rows)
        del h


# Layers


class Cheap(nn.Module):
    """One op for what it keeps."""

    def forward(self, x):
        return x.sin()


class Dear(nn.Module):
    """Many ops for what it keeps."""

    def forward(self, x):
        with torch.no_grad():
            scale = x
            for _ in range(12):
                scale = scale.tanh()
        return x * scale.contiguous()


@pytest.mark.parametrize("order", ["dear first", "cheap first", "in turn"])
def test_of_layers_of_two_kinds_the_dearer_for_a_byte_is_kept_first(order):
    dear, cheap = (
        [nn.Sequential(Dear(), nn.Tanh()) for _ in range(3)],
        [nn.Sequential(Cheap(), nn.Tanh()) for _ in "abc"],
    )
    blocks = {
        "dear first": [*dear, *cheap],
        "cheap first": [*cheap, *dear],
        "in turn": [block for pair in zip(dear, cheap, strict=True) for block in pair],
    }[order]
    model, x = Model(blocks), torch.randn(16, 32, requires_grad=True)
    expected = step(model, x)
    model.wrap = checkpointed
    most, least = kept_without_limit(lambda: step(model, x)), len(blocks) * x.nbytes
    with remat.budget("50%") as budget:
        for _ in range(RECORDED + 1):
            assert_same(expected, step(model, x))
    rows = dict(zip(blocks, budget.steps[-1].rows, strict=True))
    assert least < budget.limit < most
    assert any(rows[block].kept_bytes > x.nbytes for block in dear)
    assert all(rows[block].is_plain for block in dear) or all(rows[block].kept_bytes <= x.nbytes for block in cheap)


class Translation(nn.Module):
    """Two stacks for two lengths."""

    def __init__(self, wrap=plain, width=16, depth=3):
        super().__init__()
        layer = lambda: nn.Sequential(Mlp(width), nn.Tanh(), Mlp(width), nn.GELU())  # noqa: E731
        self.encoder, self.decoder = (nn.ModuleList(layer() for _ in range(depth)) for _ in range(2))
        self.wrap = wrap

    def forward(self, source, target):
        for block in self.encoder:
            source = self.wrap(block)(source)
        target = target + source.mean(0)
        for block in self.decoder:
            target = self.wrap(block)(target)
        return target


def gradients_of(model, source, target):
    model.zero_grad()
    model(source, target).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("share", [0.3, 0.45, 0.6, 0.8, 1.0])
def test_where_the_second_of_two_lengths_is_longer_than_before_regions_give_up_in_the_middle_of_the_step(share):
    model, batches = Translation(), [(16, size) for size in (8, 16, 12, 8, 64, 64, 8, 12, 40, 64, 16, 8)]
    model.wrap = checkpointed
    most = kept_without_limit(lambda: gradients_of(model, leaf(16, 16), leaf(16, 16)))
    limit, kept = int(share * most), []
    with remat.budget(limit, reserve=0) as budget:
        for source, target in batches:
            given = leaf(source, 16), leaf(target, 16)
            model.wrap = plain
            expected = [gradient.clone() for gradient in gradients_of(model, *given)]
            model.wrap = checkpointed
            assert_same(expected, gradients_of(model, *given))
            last = budget.steps[-1]
            kept.append((last.forward_bytes, sum(3 * one.nbytes for one in given)))
            assert budget.kept_bytes == 0
    over = [size - max(limit, least) for size, least in kept if size > max(limit, least)]
    # What runs as plain code gives nothing up.
    assert not over or any(row.is_plain for step in budget.steps for row in step.rows)
    assert any(step.sum_of("lowered_bytes") for step in budget.steps) or share in (0.3, 1.0)


# Nothing stays behind


def test_a_budget_holds_no_tensors_modules_or_graphs():
    references = []
    with collector_off(), remat.budget("60%") as budget:
        for turn in range(6):
            model = Model([nn.Sequential(Mlp(16), nn.Tanh(), Mlp(16)) for _ in range(3)], 16)
            model.wrap = checkpointed
            x = torch.randn(8 + turn, 16, requires_grad=True)
            for _ in range(RECORDED + 1):
                model(x).sum().backward()
            references += map(weakref.ref, (model, x, *model.modules(), *model.parameters()))
            del model, x
            gc.collect()
            assert [reference for reference in references if reference() is not None] == []
    assert budget.kept_bytes == 0
    assert budget.ledger.counts == {}


def test_what_a_budget_knows_does_not_grow_with_modules_that_are_made_anew(monkeypatch):
    monkeypatch.setattr(budgets_room, "_SHAPES", 8)
    monkeypatch.setattr(budgets_room, "_MORE", 8)
    monkeypatch.setattr(kinds, "_KINDS", 16)
    budget = remat.budget("1 MiB", reserve=0)
    with budget:
        for turn in range(100):
            block = Mlp(8)
            checkpointed(block)(leaf(2 + turn % 7, 8)).sum().backward()
    assert len(budgets_room._known) <= 8
    assert len(kinds._kinds) <= 16
    assert len(kinds._timed) <= 16
    assert len(budgets_room._more) <= 8


def test_modules_that_are_made_anew_have_equal_gradients_and_the_ladders_of_those_before():
    torch.manual_seed(0)
    weights, x = Mlp(16).state_dict(), leaf(32, 16)
    expected = None
    with remat.budget("1 MiB", reserve=0) as budget:
        for _ in range(5):
            block = Mlp(16)
            block.load_state_dict(weights)
            (actual,) = torch.autograd.grad(checkpointed(block)(x).sum(), x)
            expected = torch.autograd.grad(block(x).sum(), x)[0]
            assert torch.equal(expected, actual)
    assert budget.kept_bytes == 0


@pytest.mark.parametrize("limit", [1, 9000, 14_000, 10**7])
@pytest.mark.parametrize("where", ["forward", "replay", "backward"])
def test_errors_after_regions_are_known_leave_nothing_behind(limit, where):
    block, x, fails = nn.Sequential(Mlp(16), nn.Tanh(), Mlp(16)), leaf(32, 16), [False]

    def function(x):
        h = block(x)
        if fails[0] and where == ("replay" if remat.is_recomputing() else "forward"):
            raise ValueError("on purpose")
        return h.exp().tanh()

    def fail(gradient):
        raise ValueError("on purpose")

    region = checkpointed(function)
    (expected,) = torch.autograd.grad(function(region(x)).sum(), x)
    with collector_off(), remat.budget(limit, reserve=0) as budget:
        for turn in range(RECORDED + 6):
            fails[0] = turn > RECORDED and turn % 2 == 0
            h = None
            try:
                h = region(x)
                if fails[0] and where == "backward":
                    h.register_hook(fail)
                (actual,) = torch.autograd.grad(function(h).sum(), x)
            except ValueError:
                assert fails[0]
            else:
                assert torch.equal(expected, actual)
            fails[0] = False
            del h
            assert budget.kept_bytes == 0
    assert budget.ledger.counts == {}
