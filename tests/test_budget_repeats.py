"""Steps that repeat: what stays full runs without holders, is counted, and has holders where it is not as before."""

from __future__ import annotations

import importlib
import itertools
import random
import warnings

import pytest
import torch
from helpers import (
    Mlp,
    assert_same,
    checkpointed,
    collector_off,
    in_threads,
    leaf,
    no_other_regions,
    parameter_gradients,
    plain,
)
from torch import nn
from torch.profiler import profile

import torch_remat as remat

ALIKE = 3  # steps with holders before


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the budget")
        yield


class Block(nn.Module):
    """A network whose inside may change from step to step."""

    def __init__(self, width=8):
        super().__init__()
        self.body = Mlp(width)
        self.inside = lambda x: x

    def forward(self, x):
        return self.inside(x + self.body(x).exp())


def blocks_of(count=3):
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def forward(blocks, x, wrap=checkpointed):
    for place, block in enumerate(blocks):
        x = wrap(block, region_name=f"block.{place}")(x) if wrap is checkpointed else wrap(block)(x)
    return x


def gradients(blocks, x, wrap=checkpointed):
    for block in blocks:
        block.zero_grad(set_to_none=True)
    y = forward(blocks, x, wrap)
    return y, [
        *torch.autograd.grad(y.square().sum(), [p for block in blocks for p in block.parameters() if p.requires_grad])
    ]


def without_holders(budget):
    """Return how many regions that are alive run without holders."""
    return sum(entry() is not None for entry in budget.without_holders)


def warm_up(budget, blocks, x, steps=ALIKE):
    with budget:
        for _ in range(steps):
            gradients(blocks, x)
            assert not without_holders(budget)


def saved_by_autograd(y):
    """Return the bytes that the graph below a tensor keeps itself, parameters not counted."""
    return sum(node.bytes for node in remat.memory_report(y).outside)


def test_after_three_steps_that_are_alike_full_regions_are_plain_autograds():
    blocks, x = blocks_of(), torch.randn(4, 8)
    _, expected = gradients(blocks, x, plain)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    for _ in range(5):
        with budget:
            y, actual = gradients(blocks, x)
        assert without_holders(budget) == len(blocks)
        assert budget.kept_bytes == 0
        assert_same(expected, actual)
        del y
    assert budget.kept_bytes == without_holders(budget) == 0


def test_their_bytes_are_those_that_autograd_keeps_until_the_graph_is_gone():
    blocks, x = blocks_of(), torch.randn(4, 8)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    with collector_off(), budget:
        y = forward(blocks, x)
        assert budget.kept_bytes == saved_by_autograd(y) > 0
        del y
        assert budget.kept_bytes == 0


def test_reports_and_plans_have_a_row_for_each_region():
    blocks, x = blocks_of(), torch.randn(4, 8)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    before = budget.to_dict()["steps"][-1]
    with budget:
        gradients(blocks, x)
    after = budget.to_dict()["steps"][-1]
    assert [row["region"] for row in after["regions"]] == ["block.0", "block.1", "block.2"]
    assert [row["kept_bytes"] for row in after["regions"]] == [row["kept_bytes"] for row in before["regions"]]
    assert "block.1" in budget.report()
    assert set(budget.plan()) == {"block.0", "block.1", "block.2"}


def test_what_was_given_up_has_holders_and_the_limit_holds_while_the_others_run():
    blocks, x = blocks_of(6), torch.randn(4, 8)
    _, expected = gradients(blocks, x, plain)
    most = saved_by_autograd(forward(blocks, x, plain))
    seen = []

    def look(x):
        seen.append((budget.kept_bytes, budget.limit))
        return x

    budget = remat.budget(int(0.6 * most), reserve=0)
    with budget:
        for _ in range(ALIKE + 3):
            _, actual = gradients(blocks, x)
            assert_same(expected, actual)
        assert 0 < without_holders(budget) < 6
        for block in blocks:
            block.inside = look
        for _ in range(2):
            y, actual = gradients(blocks, x)
            assert_same(expected, actual)
    result = 4 * 16 * 4
    assert all(kept <= limit + result for kept, limit in seen)
    assert all(step.forward_bytes <= budget.limit and step.most_bytes <= budget.limit + result for step in budget.steps)
    assert y is not None


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_bytes_are_exact_where_some_regions_have_holders_and_some_have_none(share):
    blocks, x = blocks_of(5), leaf(4, 8)
    budget = remat.budget(int(share * saved_by_autograd(forward(blocks, x, plain))), reserve=0)
    warm_up(budget, blocks, x)
    seen = set()
    with no_other_regions(), budget:
        for _ in range(5):
            y = forward(blocks, x)
            assert budget.kept_bytes == remat.memory_report(y).bytes <= budget.limit
            seen.add(without_holders(budget))
            y.sum().backward()
    assert max(seen) in range(1, 5) if share > 0.3 else max(seen) == 0


@pytest.fixture
def even_clock(monkeypatch):
    """Time goes on by the same at each look at the clock: decisions do not depend on how busy the machine is."""
    looks = itertools.count()
    for module in ("budget", "kept", "packing"):
        monkeypatch.setattr(
            importlib.import_module(f"torch_remat.budgets.{module}"), "perf_counter", lambda: next(looks) * 1e-6
        )


@pytest.mark.usefixtures("even_clock")
def test_regions_that_gave_up_all_begin_empty():
    blocks, x, first = blocks_of(4), leaf(4, 8), []
    budget = remat.budget(int(0.4 * saved_by_autograd(forward(blocks, x, plain))), reserve=0)
    warm_up(budget, blocks, x)
    blocks[0].inside = lambda x: first.append(budget.kept_bytes) or x
    with budget:
        y = forward(blocks, x)
    assert first == [x.nbytes]
    row = budget.to_dict()["steps"][-1]["regions"][0]
    assert row["given_up_tensors"] == row["saved_tensors"] > 0
    assert row["given_up_bytes"] > 0
    _, expected = gradients(blocks, x, plain)
    with budget:
        for _ in range(3):
            assert_same(expected, gradients(blocks, x)[1])
    assert y is not None


@pytest.mark.parametrize("change", ["shape", "nodes", "gradient", "more regions", "keyword"])
def test_what_is_not_as_before_has_holders(change):
    blocks, x = blocks_of(), torch.randn(4, 8)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x, ALIKE)
    if change == "shape":
        blocks[1].inside = lambda x: x[:2]
    elif change == "nodes":
        blocks[1].inside = lambda x: x.sin().cos()
    elif change == "gradient":
        x.requires_grad_()
    elif change == "more regions":
        blocks.append(Block())
    _, expected = gradients(blocks, x, plain)
    with budget:
        if change == "keyword":
            y = checkpointed(blocks[0], region_name="block.0")(x=x)
            assert without_holders(budget) == 1  # the same value
        else:
            found = []
            for _ in range(20):
                y, actual = gradients(blocks, x)
                assert_same(expected, actual)
                found.append(without_holders(budget))
            assert found[0] < len(blocks)  # from the change on
            assert found[1:ALIKE] == [0] * (ALIKE - 1)
            assert found[-1] == len(blocks)
    assert y is not None


def test_a_later_region_that_gets_something_else_has_holders_at_once():
    blocks, x, lengths = blocks_of(4), torch.randn(4, 8), [4]
    blocks[1].inside = lambda x: x[: lengths[-1]]
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    lengths.append(2)
    with budget:
        y = forward(blocks, x)
    assert without_holders(budget) == 2
    assert {kept.row.name for kept in budget.alive()} == {"block.2", "block.3"}
    assert y is not None


def nested(x):
    return checkpointed(torch.sin)(x.exp()).cos()


def with_a_call(x):
    return remat.op(torch.sin, "sin")(x.exp()).cos()


def with_an_offloaded_call(x):
    return remat.op(torch.exp, "exp", policy=remat.CheckpointPolicy.OFFLOAD)(x)


def with_a_native_region(x):
    return remat.native_save_region("sin", torch.sin, x.exp()).cos()


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (nested, {}),
        (with_a_call, {}),
        (with_a_native_region, {}),
        (with_an_offloaded_call, {}),
        (torch.sin, {"policy": remat.save_names("*")}),
        (torch.sin, {"determinism_check": "bitwise"}),
        (torch.sin, {"debug": True}),
    ],
)
def test_regions_that_keep_by_rules_of_their_own_always_have_holders(function, options):
    x = leaf(4, 8)
    with remat.budget("1 MiB", reserve=0) as budget:
        for _ in range(ALIKE + 3):
            y = checkpointed(function, **options)(x)
            assert without_holders(budget) == 0
            y.sum().backward()


@pytest.mark.parametrize("function", [nested, with_a_call, with_a_native_region])
def test_the_others_of_a_step_run_without_holders_all_the_same(function):
    blocks, x = blocks_of(3), leaf(4, 8)
    blocks[1] = Between(function)
    budget = remat.budget("1 MiB", reserve=0)
    _, expected = gradients(blocks, x, plain)
    warm_up(budget, blocks, x)
    with budget:
        _, actual = gradients(blocks, x)
    assert without_holders(budget) == 2
    assert_same(expected, actual)


class Between(nn.Module):
    """A module around a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_what_authors_save_is_counted_where_the_rest_is_given_up():
    def block(x):
        return remat.op(torch.sin, "sin")(x.exp()).tanh().exp().tanh().sin().tanh().exp().tanh().sin()

    def run():
        y = x
        for place in range(4):
            y = checkpointed(block, region_name=f"block.{place}")(y)
        return y

    x = leaf(4, 8)
    with no_other_regions():
        with remat.budget("1 MiB", reserve=0) as budget:
            y = run()
            most = budget.kept_bytes
            del y
        with remat.budget(most * 2 // 3, reserve=0) as budget:
            for _ in range(ALIKE + 3):
                y = run()
                assert budget.kept_bytes == remat.memory_report(y).bytes
                y.sum().backward()
        assert any(row.given_bytes > 0.9 * row.saved_bytes for row in budget.steps[-1].rows)


@pytest.mark.parametrize("share", [0.4, 0.9])
def test_where_there_is_more_room_now_nothing_is_given_up_and_then_nothing_has_holders(share):
    blocks, x = blocks_of(5), leaf(4, 8)
    most = saved_by_autograd(forward(blocks, x, plain))
    budget = remat.budget(int(share * most), reserve=0)
    warm_up(budget, blocks, x)
    budget.limit = budget.budget_bytes = 2**20
    with budget:
        y, _ = gradients(blocks, x)
        assert not any(row["given_up_bytes"] for row in budget.to_dict()["steps"][-1]["regions"])
        assert (0 < without_holders(budget) < 5) == (share > 0.5)  # the others begin with more kept than before
        y = forward(blocks, x)
        assert without_holders(budget) == 5
    assert y is not None


def test_a_region_begins_empty_only_where_it_has_room_while_it_runs():
    x, seen = leaf(4, 8), []

    def first(x):
        return remat.op(torch.sin, "sin")(x.exp())

    def second(x):
        for _ in range(8):
            x = x.sin().cos()
        seen.append(budget.kept_bytes)
        return x

    with remat.budget(3 * x.nbytes, reserve=0) as budget:
        for _ in range(ALIKE + 3):
            checkpointed(second, region_name="second")(checkpointed(first, region_name="first")(x)).sum().backward()
        row = budget.steps[-1].rows[-1]
    assert row.given_bytes > 0.9 * row.saved_bytes
    assert len(set(seen)) == 1


def test_no_step_that_is_measured_runs_without_holders_nor_counts_as_enough():
    blocks, x = blocks_of(), torch.randn(4, 8)
    found = []
    with remat.budget("1 MiB") as budget:
        for _ in range(6):
            y, _ = gradients(blocks, x)
            found.append(without_holders(budget))
        measured = [step["peak_bytes"] > 0 for step in budget.to_dict()["steps"]]
    assert measured == [True] * 3 + [False] * 3
    assert found == [0, 0, 0, 0, 3, 3]
    assert y is not None


def test_where_more_is_kept_than_before_regions_have_holders():
    blocks, x = blocks_of(), torch.randn(4, 8)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    with budget:
        held = checkpointed(torch.sin, region_name="held")(leaf(64, 8))
        checkpointed(torch.sin, region_name="read")(leaf(2)).sum().backward()
        y = forward(blocks, x)
        assert without_holders(budget) == 0
    assert y is not held


def test_regions_of_a_graph_that_was_kept_have_holders():
    blocks, x = blocks_of(), torch.randn(4, 8)
    parameters = [p for block in blocks for p in block.parameters()]
    with remat.budget("1 MiB", reserve=0) as budget:
        for _ in range(ALIKE + 2):
            y = forward(blocks, x).sum()
            assert without_holders(budget) == 0
            first = torch.autograd.grad(y, parameters, retain_graph=True)
            assert_same(list(first), list(torch.autograd.grad(y, parameters)))


def test_a_sparse_argument_with_more_in_it_has_holders():
    with remat.budget("1 MiB", reserve=0) as budget:
        for count in (1, 2, 3, 4, 5):
            matrix = torch.eye(8)[:count].to_sparse()
            matrix = torch.sparse_coo_tensor(matrix.indices(), matrix.values(), (8, 8), check_invariants=True)
            y = checkpointed(torch.sparse.mm)(matrix, leaf(8, 2))
            assert without_holders(budget) == 0
            y.sum().backward()


@pytest.mark.usefixtures("even_clock")
def test_what_replays_fill_is_counted_where_regions_began_empty():
    seen = []

    def look(x):
        if not remat.is_recomputing():
            x.register_hook(lambda _: seen.append((budget.kept_bytes, remat.memory_report(y).bytes)))
        return x

    blocks, x = blocks_of(4), leaf(4, 8)
    budget = remat.budget(int(0.4 * saved_by_autograd(forward(blocks, x, plain))), reserve=0)
    warm_up(budget, blocks, x)
    with no_other_regions(), budget:
        y = forward(blocks, x)  # the same: what has begun empty is known
        assert "block.0" in [kept.row.name for kept in budget.alive() if kept.keep is None]
        y.sum().backward()
        blocks[0].body.up.register_forward_hook(lambda module, given, result: look(result))
        y = forward(blocks, x)
        assert "block.0" in [kept.row.name for kept in budget.alive() if kept.keep is None]
        y.sum().backward()
    ((kept, there),) = seen
    assert kept == there > 0


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_a_region_that_begins_inside_of_one_without_holders(where):
    x, inside = leaf(4, 8), []

    def block(x):
        if inside:
            inside.pop()()
        return x.sin().exp()

    region = checkpointed(block, region_name="block")

    def other(_=0):
        with budget:
            region(x).sum().backward()

    expected = torch.autograd.grad(block(x).sum(), x)
    budget = remat.budget("1 MiB", reserve=0)
    for _ in range(ALIKE):
        other()
    inside.append(other if where == "here" else lambda: in_threads(other, 1))
    with budget:
        for _ in range(20):
            assert_same(expected, torch.autograd.grad(region(x).sum(), x))
    assert budget.kept_bytes == 0


def test_nothing_runs_without_holders_under_hooks_and_traces():
    blocks, x = blocks_of(), torch.randn(4, 8)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    with budget:
        with torch.autograd.graph.save_on_cpu():
            y = forward(blocks, x)
        assert without_holders(budget) == 0
        y.sum().backward()
        with remat.trace():
            y = forward(blocks, x)
            assert without_holders(budget) == 0
            y.sum().backward()


def test_a_profiler_sees_what_runs_without_it_and_the_regions_names():
    blocks, x = blocks_of(), torch.randn(4, 8)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    with budget, profile() as seen:
        y = forward(blocks, x)
    assert without_holders(budget) == 3
    names = {event.name for event in seen.events()}
    assert {f"remat::block.{place} [forward]" for place in range(3)} <= names
    assert y is not None


def test_a_budget_inside_another_and_other_threads_always_have_holders():
    blocks, x = blocks_of(), torch.randn(4, 8)
    budget = remat.budget("1 MiB", reserve=0)
    with remat.budget("2 MiB", reserve=0) as outer:
        warm_up(budget, blocks, x, ALIKE + 3)
    assert without_holders(outer) == 0
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    found = []

    def work(_):
        with budget:
            y = forward(blocks[:1], x)
            found.append(without_holders(budget))
            y.sum().backward()

    with budget:
        y = forward(blocks[:1], x)
        assert without_holders(budget) == 1
        in_threads(work, 1)
    assert found == [1]
    assert y is not None


def test_a_smaller_limit_has_holders_again():
    blocks, x = blocks_of(), torch.randn(4, 8)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    budget.limit = budget.budget_bytes // 2
    with budget:
        y, _ = gradients(blocks, x)
    assert without_holders(budget) == 0
    assert y is not None


def test_a_graph_that_is_alive_leaves_no_room_that_was_there_before():
    blocks, x = blocks_of(), torch.randn(4, 8)
    _, expected = gradients(blocks, x, plain)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    with budget:
        first = forward(blocks, x)
        assert without_holders(budget) == 3
        second = forward(blocks, x)
        assert without_holders(budget) == 3
        for y in (first, second):
            parameters = [p for block in blocks for p in block.parameters()]
            assert_same(expected, list(torch.autograd.grad(y.square().sum(), parameters)))
    assert budget.kept_bytes == 0


def test_graphs_that_are_kept_are_counted_until_they_are_gone():
    blocks, x = blocks_of(), torch.randn(4, 8)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)
    parameters = [p for block in blocks for p in block.parameters()]
    with collector_off(), budget:
        y = forward(blocks, x)
        kept = budget.kept_bytes
        first = torch.autograd.grad(y.square().sum(), parameters, retain_graph=True)
        assert budget.kept_bytes == kept
        second = torch.autograd.grad(y.square().sum(), parameters)
        assert_same(list(first), list(second))
        assert budget.kept_bytes == 0


def test_gradients_of_gradients_are_equal():
    blocks, x = blocks_of(), leaf(4, 8)

    def twice(wrap):
        y = forward(blocks, x, wrap)
        (one,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(one.square().sum(), [p for block in blocks for p in block.parameters()])

    expected = twice(plain)
    with collector_off(), remat.budget("1 MiB", reserve=0) as budget:
        for _ in range(ALIKE + 3):
            assert_same(list(expected), list(twice(checkpointed)))
            assert budget.kept_bytes == 0


def test_one_step_in_32_has_holders():
    blocks, x = blocks_of(1), torch.randn(4, 8)
    found = []
    with remat.budget("1 MiB", reserve=0) as budget:
        for _ in range(ALIKE + 2 * 33):
            y = forward(blocks, x)
            found.append(without_holders(budget))
            y.sum().backward()
    assert found == [0] * ALIKE + ([1] * 32 + [0]) * 2


def test_an_error_inside_leaves_nothing_behind():
    blocks, x = blocks_of(), torch.randn(4, 8)
    _, expected = gradients(blocks, x, plain)
    budget = remat.budget("1 MiB", reserve=0)
    warm_up(budget, blocks, x)

    def fail(_):
        raise KeyError("here")

    blocks[1].inside = fail
    with collector_off(), budget:
        for _ in range(3):
            with pytest.raises(KeyError, match="here"):
                forward(blocks, x)
            assert budget.kept_bytes == without_holders(budget) == 0
        blocks[1].inside = lambda x: x
        for _ in range(2 * ALIKE):
            assert_same(expected, gradients(blocks, x)[1])
            assert budget.kept_bytes == 0


def test_a_change_in_place_is_an_error_as_in_plain_autograd():
    x = leaf(4, 8)
    with remat.budget("1 MiB", reserve=0) as budget:
        for _ in range(ALIKE):
            checkpointed(torch.exp)(x).sum().backward()
        y = checkpointed(torch.exp)(x)
        assert without_holders(budget) == 1
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("seed", range(60))
def test_random_steps_are_equal_and_leave_nothing(seed):
    rng = random.Random(seed)
    blocks, x = blocks_of(4), leaf(4, 8)
    most = saved_by_autograd(forward(blocks, x, plain))
    budget = remat.budget(max(int(rng.choice([0.3, 0.6, 1.0, 5.0]) * most), 1), reserve=rng.choice([0, 0, "auto"]))
    unusual = ["shape", "nodes", "raise", "drop", "keep", "part", "two", "freeze", "fewer"]
    with collector_off():
        for _ in range(25):
            what = rng.choice(unusual) if rng.random() < 0.2 else "usual"
            given = leaf(2, 8) if what == "shape" else x
            some = blocks[:2] if what == "fewer" else blocks
            parameters = [p for block in some for p in block.parameters()]
            if what == "nodes":
                blocks[2].inside = torch.sin
            elif what == "freeze":
                blocks[1].body.requires_grad_(False)
                parameters = [p for p in parameters if p.requires_grad]
            wanted = parameters[:2] if what == "part" else parameters
            times = 2 if what == "two" else 1
            expected = [torch.autograd.grad(forward(some, given, plain).sum(), wanted) for _ in range(times)]
            with budget:
                if what == "raise":
                    blocks[3].inside = lambda _: 1 / 0
                    with pytest.raises(ZeroDivisionError):
                        forward(blocks, given)
                    blocks[3].inside = lambda x: x
                elif what == "drop":
                    forward(blocks, given)
                else:
                    ys = [forward(some, given) for _ in range(times)]
                    for y, one in zip(ys, expected, strict=True):
                        if what == "keep":
                            again = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
                            assert_same(list(one), list(again))
                        assert_same(list(one), list(torch.autograd.grad(y.sum(), wanted)))
                    del ys, y
            blocks[2].inside = lambda x: x
            blocks[1].body.requires_grad_(True)
            assert budget.kept_bytes == without_holders(budget) == 0
            assert not list(budget.alive())


def test_gradients_of_whole_models_by_parameters_are_equal_with_an_optimizer():
    def run(wrap):
        torch.manual_seed(0)
        blocks = nn.ModuleList(blocks_of())
        optimizer = torch.optim.SGD(blocks.parameters(), 0.01)
        for _ in range(10):
            optimizer.zero_grad()
            forward(blocks, torch.randn(4, 8), wrap).square().mean().backward()
            optimizer.step()
        return parameter_gradients(blocks)

    expected = run(plain)
    with remat.budget("1 MiB") as budget:
        assert_same(expected, run(checkpointed))
    assert budget.kept_bytes == 0
