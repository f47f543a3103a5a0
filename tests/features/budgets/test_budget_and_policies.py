"""What the author says of regions in a budget stays: what a policy, a name or a handle decides goes by no price."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_remat as remat
from tests.features.budgets.test_budget import RECORDED, bytes_there
from tests.helpers import CountOps, assert_same, leaf

pytestmark = pytest.mark.filterwarnings("ignore:the budget", "ignore:.*replay started over")

LIMITS = [1, 4000, 8000, 12_000, 16_000, 24_000, 10**7]


class Block(nn.Module):
    """A residual branch with a norm, a gate and dropout, as in Llama."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), 0.1)


def gradients_of(function, x, parameters=()):
    torch.manual_seed(7)
    return torch.autograd.grad(function(x).square().mean(), [x, *parameters])


def run_with(block, options, limit, x, around=contextlib.nullcontext):
    """Return the budget in which a block has run some steps, each with right gradients, and what the last one kept."""
    parameters = list(block.parameters()) if isinstance(block, nn.Module) else []
    expected = gradients_of(block, x, parameters)
    region = remat.checkpoint(**options)(block)
    with remat.budget(limit, reserve=0) as budget:
        for _ in range(RECORDED + 2):
            with around():
                assert_same(expected, gradients_of(region, x, parameters))
            assert budget.kept_bytes == 0
    return budget


# Policies


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("policy", [[F.linear], [F.silu], [F.dropout, F.silu]], ids=["linear", "silu", "two"])
def test_functions_that_a_policy_selects_are_kept_in_any_case(policy, limit):
    x, block = leaf(32, 16), Block()
    budget = run_with(block, {"policy": policy}, limit, x)
    with budget:
        torch.manual_seed(7)
        loss = remat.checkpoint(policy=policy)(block)(x).square().mean()
        with CountOps() as ops:
            torch.autograd.grad(loss, x)
    row = budget.steps[-1].rows[-1]
    if not row.is_plain:
        for function in policy:
            name = {F.linear: "mm", F.silu: "silu", F.dropout: "native_dropout"}[function]
            assert ops.counts[name] == {"mm": 3}.get(name, 0)  # those of the gradient


def test_a_region_that_keeps_all_by_its_own_budget_is_counted():
    x, block = leaf(32, 16), Block()
    policy = remat.policies.memory_budget(1)
    budget = run_with(block, {"policy": policy}, 10**7, x)
    with budget:
        loss = remat.checkpoint(policy=policy)(block)(x).square().mean()
        assert budget.kept_bytes > x.nbytes
        torch.autograd.grad(loss, x)
    assert budget.kept_bytes == 0


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("selected", [remat.policies.save_matmuls, remat.policies.memory_budget(0.9)], ids=repr)
def test_calls_that_a_policy_excludes_are_never_kept(selected, limit):
    x, block = leaf(32, 16), Block()
    policy = selected & ~remat.save_names("up.*")
    budget = run_with(block, {"policy": policy}, limit, x)
    assert not budget.steps[-1].rows[-1].is_plain
    with budget, CountOps() as ops:
        gradients_of(remat.checkpoint(policy=policy)(block), x)
    assert ops.counts["mm"] >= 3 + 3 + 1  # of forward, of the gradient, and of `up`


@pytest.mark.parametrize("limit", LIMITS)
def test_what_a_policy_leaves_over_goes_by_price(limit):
    x, block = leaf(32, 16), Block()
    budget = run_with(block, {"policy": [F.silu]}, limit, x)
    alone = run_with(block, {"policy": [F.silu]}, 1, x)
    row = budget.steps[-1].rows[-1]
    most = max(limit, alone.steps[-1].rows[-1].kept_bytes)
    assert alone.steps[-1].rows[-1].kept_bytes <= row.kept_bytes <= most


@pytest.mark.parametrize("limit", [1, 10**7])
def test_modules_that_a_policy_saves_are_kept(limit):
    x, block = leaf(32, 16), Block()
    options = {"policy": remat.save_modules("down", "gate")}
    budget = run_with(block, options, limit, x)
    with budget, CountOps() as ops:
        gradients_of(remat.checkpoint(**options)(block), x)
    assert ops.counts["mm"] <= 3 + 3 + (limit == 1)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": [torch.ops.aten.mm.default]},
        {"policy": lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default},
        {"policy": remat.save_names("*.mm_*")},
        {
            "context_fn": lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(
                [torch.ops.aten.mm.default]
            )
        },
    ],
    ids=["list", "callable", "names", "contexts"],
)
def test_policy_by_op_alone_decides(options):
    x, block = leaf(32, 16), Block()
    kept = {run_with(block, options, limit, x).steps[-1].forward_bytes for limit in (1, 10**7)}
    if "context_fn" not in options:
        assert len(kept) == 1


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("decision", ["SAVE", "RECOMPUTE", "OFFLOAD"])
def test_calls_and_handles_inside_keep_what_their_author_says(decision, limit, tmp_path):
    x, block = leaf(32, 16), Block()
    policy = getattr(remat.CheckpointPolicy, decision)
    ran = []

    def product(x):
        ran.append(remat.is_recomputing())
        return block.up(x).sin()

    def function(x):
        h = remat.op(product, "product", policy=policy)(block.norm(x))
        return remat.native_save_region("down", block.down, F.silu(block.gate(x)) * h).tanh() + x

    with remat.offload_to(remat.DiskOffloader(tmp_path, min_bytes=0)):
        budget = run_with(function, {}, limit, x)
    assert not budget.steps[-1].rows[-1].is_plain  # the author decides
    assert any(ran) == (decision == "RECOMPUTE")


@pytest.mark.parametrize("limit", [1, 10**7])
def test_determinism_check_debug_and_early_stop_of_tensors_are_not_passed_over(limit):
    x, block = leaf(32, 16), Block()
    for options in ({"determinism_check": "bitwise"}, {"debug": True}, {"early_stop": False}):
        budget = run_with(block, options, limit, x)
        assert not budget.steps[-1].rows[-1].is_plain or "early_stop" in options


# Regions in others, hooks around


@pytest.mark.parametrize("limit", LIMITS)
def test_inner_regions_are_equal_and_counted(limit):
    block, other, x = Block(), Block(), leaf(32, 16)

    def function(x):
        return remat.checkpoint()(other)(block(x).sin()).exp()

    budget = run_with(function, {}, limit, x)
    with budget:
        y = remat.checkpoint()(function)(x)
        if not budget.steps[-1].rows[-1].is_plain:
            assert budget.kept_bytes == bytes_there(budget)
        del y


@pytest.mark.parametrize("limit", LIMITS)
def test_hooks_around_get_what_they_would_get(limit):
    block, x, packed = Block(), leaf(32, 16), []

    def pack(tensor):
        packed.append(tensor.nbytes)
        return tensor

    run_with(block, {}, limit, x, around=torch.autograd.graph.save_on_cpu)
    run_with(block, {}, limit, x, around=lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))


@pytest.mark.parametrize("limit", LIMITS)
def test_regions_in_checkpoints_of_torch_and_the_other_way_round(limit):
    block, other, x = Block(), Block(), leaf(32, 16)

    def inside(x):
        return torch.utils.checkpoint.checkpoint(remat.checkpoint()(block), x, use_reentrant=False).sin()

    def around(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sin() + other(x)

    expected = gradients_of(lambda x: block(x).sin(), x)
    with remat.budget(limit, reserve=0) as budget:
        for _ in range(RECORDED + 2):
            assert_same(expected, gradients_of(inside, x))
    assert budget.kept_bytes == 0
    run_with(around, {}, limit, x)


@pytest.mark.parametrize("limit", LIMITS)
def test_several_graphs_are_alive_and_end_in_any_order(limit):
    block, xs = Block(), [leaf(length, 16) for length in (8, 32, 16, 24)]
    expected = [gradients_of(block, x) for x in xs]
    region = remat.checkpoint()(block)
    with remat.budget(limit, reserve=0) as budget:
        for turn in range(8):
            losses = []
            for x in xs:
                torch.manual_seed(7)
                losses.append(region(x).square().mean())
            assert budget.kept_bytes <= max(limit, sum(x.nbytes for x in xs))
            for at in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3))[turn % 3]:
                assert_same(expected[at], torch.autograd.grad(losses[at], [xs[at]]), f"turn {turn}, {at}")
            del losses
            assert budget.kept_bytes == 0
    assert budget.ledger.counts == {}


@pytest.mark.parametrize("limit", LIMITS)
def test_second_backward_of_a_kept_graph_is_equal(limit):
    block, x = Block(), leaf(32, 16)
    expected = gradients_of(block, x)
    region = remat.checkpoint()(block)
    with remat.budget(limit, reserve=0) as budget:
        for _ in range(RECORDED + 2):
            torch.manual_seed(7)
            loss = region(x).square().mean()
            for keeps in (True, True, False):
                assert_same(expected, torch.autograd.grad(loss, [x], retain_graph=keeps))
            del loss
            assert budget.kept_bytes == 0


@pytest.mark.parametrize("limit", LIMITS)
def test_evaluation_between_steps_and_graphs_without_backward_change_nothing(limit):
    block, x = Block(), leaf(32, 16)
    expected = gradients_of(block, x)
    region = remat.checkpoint()(block)
    with remat.budget(limit, reserve=0) as budget:
        for turn in range(RECORDED + 4):
            with torch.no_grad():
                region(torch.randn(64, 16))
            if turn % 2:
                region(x)  # a graph that nobody differentiates
                assert budget.kept_bytes == 0
            assert_same(expected, gradients_of(region, x))
    assert budget.kept_bytes == 0
    assert budget.step_count == RECORDED + 4


@pytest.mark.parametrize("limit", LIMITS)
def test_gradient_taken_in_a_region_is_equal(limit):
    block, x = Block(), leaf(32, 16)

    def function(x):
        t = x.detach().requires_grad_()
        slope = torch.autograd.grad(F.silu(block.gate(t)).sum(), t, create_graph=True)[0]
        return block.down(F.silu(block.up(x + slope))).sin()

    run_with(function, {}, limit, x)


@pytest.mark.parametrize("limit", LIMITS)
def test_branches_that_change_from_step_to_step_are_equal(limit):
    """Acts that were bought for one branch meet the other one."""
    block, x, turn = Block(), leaf(32, 16), [0]

    def function(x):
        h = block.norm(x)
        if turn[0] % 3 == 2:
            h = F.silu(block.up(block.down(block.up(h)))).cumsum(0)
            return block.down(h)
        return block.down(F.silu(block.gate(h)) * block.up(h).sin())

    region = remat.checkpoint()(function)
    with remat.budget(limit, reserve=0) as budget:
        for turn[0] in range(14):
            assert_same(gradients_of(function, x), gradients_of(region, x))
    assert budget.kept_bytes == 0


@pytest.mark.parametrize("limit", LIMITS)
def test_autocast_is_equal(limit):
    block, x = Block(), leaf(32, 16)
    parameters = list(block.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients_of(block, x, parameters)
        with remat.budget(limit, reserve=0) as budget:
            for _ in range(RECORDED + 2):
                assert_same(expected, gradients_of(remat.checkpoint()(block), x, parameters))
    assert budget.kept_bytes == 0


@pytest.mark.parametrize("limit", LIMITS)
def test_frozen_weights_and_buffers_that_a_region_modifies_are_equal(limit):
    def make():
        torch.manual_seed(1)
        block = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 16), nn.Tanh())
        block[0].requires_grad_(False)
        return block

    one, other, x = make(), make(), leaf(32, 16)
    region = remat.checkpoint()(other)
    with remat.budget(limit, reserve=0) as budget:
        for _ in range(RECORDED + 3):
            assert_same(gradients_of(one, x), gradients_of(region, x))
            assert_same(list(one.buffers()), list(other.buffers()))
    assert budget.kept_bytes == 0


@pytest.mark.parametrize("kind", ["op", "native"])
def test_region_that_has_not_kept_what_a_call_returned_is_not_lowered(kind):
    """Nothing needs it in a replay that stops before; one of a lower rung would go on, and read it."""
    block, x = Block(), leaf(32, 16)
    product = {
        "op": lambda x: remat.op(torch.sin, "sin")(x),
        "native": lambda x: remat.native_save_region("sin", torch.sin, x),
    }[kind]

    def function(x):
        return (F.silu(block.gate(block.norm(x))) * product(block.up(x))).tanh().sin()

    expected = gradients_of(function, x)
    with remat.budget(10**9, reserve=0) as budget:
        for _ in range(RECORDED + 1):
            gradients_of(remat.checkpoint()(function), x)
        torch.manual_seed(7)
        loss = remat.checkpoint()(function)(x).square().mean()
        row = budget.steps[-1].rows[-1]
        assert not row.is_plain
        for limit in range(30_000, 0, -1000):
            budget.limit = limit
            budget.make_room()
        assert_same(expected, torch.autograd.grad(loss, [x]))
