"""What budgets report: totals, pictures, plans, frontiers, traces, also of what they offload."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch

import torch_remat as remat
from tests.features.budgets.test_budget import RECORDED, Chain, kept_without_limit, step
from tests.helpers import (
    CountOps,
    LiveStorages,
    Mlp,
    assert_same,
    checkpointed,
    leaf,
    no_other_regions,
    plain,
)
from tests.offloaders import Counting
from torch_remat.budgets.fill import Filler

pytestmark = pytest.mark.filterwarnings("ignore:the budget")


@pytest.fixture(autouse=True)
def _alone():
    with no_other_regions():
        yield


def run_steps(budget, steps=2, blocks=None):
    blocks = blocks or [Mlp() for _ in range(3)]
    with budget:
        for _ in range(steps):
            x = leaf(16, 8)
            for place, block in enumerate(blocks):
                x = checkpointed(block, region_name=f"layers.{place}")(x)
            x.sum().backward()


def test_report_and_totals_have_each_region():
    budget = remat.budget("5 KiB", reserve=0)
    assert "0 steps" in budget.report()
    run_steps(budget)
    report = budget.report()
    assert all(part in report for part in ("budget of 5.0 KiB", "2 steps", *(f"layers.{at}" for at in range(3))))
    data = json.loads(budget.to_json())
    assert data == json.loads(json.dumps(budget.to_dict()))
    assert re.search(r"^  step  +kept at most  +recomputed  +replay ms$", report, re.MULTILINE)
    assert re.search(r"^  2  +", report, re.MULTILINE)
    assert "not measured" not in report
    assert "not known" not in report
    assert "reserve" not in report
    assert repr(budget) == "<budget of 5.0 KiB; 2 steps>"
    first, second = data["steps"]
    assert [row["region"] for row in second["regions"]] == ["layers.0", "layers.1", "layers.2"]
    assert first["recomputed_bytes"] > second["recomputed_bytes"] > 0
    assert second["replay_seconds"] > 0
    assert first["most_kept_bytes"] <= 2 * 2**10


@pytest.mark.filterwarnings("ignore:the budget of:torch_remat.RematWarning")
def test_report_says_that_a_limit_is_less_than_what_is_needed():
    for limit, is_said in ((64, True), ("5 KiB", False)):
        budget = remat.budget(limit, reserve=0)
        run_steps(budget, 3, [Mlp() for _ in range(3)])
        assert ("the limit is less than what is needed" in budget.report()) is is_said
        assert ("more would spare" in budget.report()) is not is_said


def test_report_tells_the_price_and_what_the_next_bytes_buy():
    """Of three equal blocks one fits as plain code, and another keeps its first linear's result."""
    budget, blocks = remat.budget("5 KiB", reserve=0), [Mlp() for _ in range(3)]
    run_steps(budget, 1, blocks)
    assert budget.to_dict()["steps"][0]["price_ms_per_mib"] is None
    run_steps(budget, 1, blocks)
    rungs = budget.steps[-1].rows[0].part.ladder.rungs
    assert [rungs.index(row.rung) for row in budget.steps[-1].rows] == [0, 1, 2]
    data = budget.to_dict()["steps"][-1]
    assert data["next_bytes"] == rungs[1].bytes - rungs[0].bytes == 16 * 16 * 4
    spared = (rungs[0].ns - rungs[1].ns) / 1e6
    assert data["price_ms_per_mib"] == pytest.approx(spared * 2**20 / data["next_bytes"])
    report = budget.report()
    assert f"price: {data['price_ms_per_mib']:.3g} ms for a MiB; 1.0 KiB more would spare {spared:.3g} ms" in report
    assert "everything: it runs as plain code" in report
    assert re.search(r"up.linear_0; again: gelu_0 0.1 ms$", report, re.MULTILINE)
    budget.limit = 2**20
    run_steps(budget, 1, blocks)
    assert "all fits: nothing is recomputed" in budget.report()
    assert budget.to_dict()["steps"][-1]["next_bytes"] == 0


@pytest.mark.parametrize("limit", ["3 KiB", 5632, "60%", "0%", 1, "1 GiB"])
def test_the_picture_has_the_curve_and_the_point_where_the_budget_stands(limit, tmp_path):
    pytest.importorskip("matplotlib")
    budget = remat.budget(limit)
    with pytest.raises(remat.UsageError, match="needs steps"):
        budget.plot(tmp_path / "kept.png")
    run_steps(budget, steps=4)
    if limit in ("0%", 1):  # where nothing is recorded
        assert "not known" in budget.report()
        with pytest.raises(remat.UsageError, match="needs steps"):
            budget.plot(tmp_path / "kept.png")
        return
    figure = budget.plot(tmp_path / "kept.png")
    assert (tmp_path / "kept.png").stat().st_size > 1000
    (axes,) = figure.axes
    _, by_price, point, *rest = axes.lines
    last = budget.steps[-1]
    kept = last.sum_of("kept_bytes") / 2**20
    assert point.get_xdata() == [kept]
    assert sorted(by_price.get_xdata()) == list(by_price.get_xdata())
    assert sorted(by_price.get_ydata(), reverse=True) == list(by_price.get_ydata())
    assert by_price.get_ydata()[-1] == 0
    at = list(by_price.get_xdata()).index(kept)
    assert point.get_ydata()[0] == pytest.approx(by_price.get_ydata()[at])
    assert len(rest) == (limit != "1 GiB")


# Plans


def test_plan_keeps_what_the_budget_kept():
    model, x = Chain(depth=6, width=64), leaf(32, 64)
    expected = step(model, x)
    runs = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: runs.append(remat.is_recomputing()))

    def replays_and_bytes(plan):
        runs.clear()
        with remat.checkpoint_modules(model, "blocks.*", plan=plan):
            assert_same(expected, step(model, x))
            replays = sum(runs)
            with LiveStorages() as live:
                h = model(x)
            return replays, live.bytes() - h.nbytes + x.nbytes

    with remat.checkpoint_modules(model, "blocks.*"):
        most = kept_without_limit(lambda: step(model, x))
        with remat.budget(int(0.6 * most), reserve=0) as budget:
            for _ in range(RECORDED + 1):
                step(model, x)
    last = budget.steps[-1]
    plan = remat.budgets.Plan.from_json(budget.plan().to_json())
    assert plan == budget.plan()
    assert list(plan) == [f"blocks.{at}" for at in range(6)]
    assert [entry.kept_bytes for entry in plan.values()] == [row.kept_bytes for row in last.rows]
    assert "blocks.3: keeps" in str(plan)
    run_again = sum(not entry.is_plain for entry in plan.values())
    assert 0 < run_again < 6
    assert replays_and_bytes(plan) == (run_again, last.forward_bytes)
    for name in plan:
        plan.keep(name)
    assert replays_and_bytes(plan) == (0, most)
    plan.drop("blocks.0")
    assert replays_and_bytes(plan)[0] == 1
    for name in plan:
        plan.drop(name)
    assert replays_and_bytes(plan) == (6, 6 * x.nbytes)
    with pytest.raises(remat.UsageError, match="the plan has no region"):
        plan.drop("blocks.6")


class Parts(torch.nn.Module):
    """A chain of layers in each block, so that ladders have several rungs."""

    def __init__(self, width=16, depth=3):
        super().__init__()
        layers = [Mlp(width), torch.nn.Tanh(), torch.nn.Dropout(0.1), Mlp(width), torch.nn.GELU()]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*copy.deepcopy(layers)) for _ in range(depth))
        self.wrap = plain

    def forward(self, x):
        torch.manual_seed(0)
        for place, block in enumerate(self.blocks):
            x = self.wrap(block, region_name=f"blocks.{place}")(x) if self.wrap is checkpointed else block(x)
        return x


@pytest.mark.parametrize("share", [0.45, 0.5, 0.55, 0.7, 0.85])
def test_plan_with_rungs_between_keeps_the_same_bytes(share):
    model, x = Parts(), leaf(32, 16)
    expected = step(model, x)
    model.wrap = checkpointed
    most = kept_without_limit(lambda: step(model, x))
    with remat.budget(int(share * most), reserve=0) as budget:
        for _ in range(RECORDED + 1):
            assert_same(expected, step(model, x))
    plan = remat.budgets.Plan.from_json(budget.plan().to_json())
    assert any(entry.acts for entry in plan.values())
    model.wrap = plain
    with remat.checkpoint_modules(model, "blocks.*", plan=plan):
        assert_same(expected, step(model, x))
        with LiveStorages() as live:
            h = model(x)
        assert live.bytes() - h.nbytes + x.nbytes == budget.steps[-1].forward_bytes


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("version"),
        lambda data: data.update(version=1),
        lambda data: data.pop("regions"),
        lambda data: data.update(regions=[1]),
        lambda data: data["regions"]["blocks.0"].pop("acts"),
        lambda data: data["regions"]["blocks.0"].update(acts={"no.such_function": {"0": [0]}}),
        lambda data: data["regions"]["blocks.0"].update(acts={"F.linear": [0]}),
        lambda data: data["regions"]["blocks.0"].update(acts={"F.linear": {"first": [0]}}),
        lambda data: data["regions"]["blocks.0"].update(acts={"F.linear": {"0": 0}}),
        lambda data: data["regions"]["blocks.0"].update(kept_bytes="much"),
    ],
)
def test_text_that_is_no_plan_is_an_error(change):
    entry = remat.budgets.Planned(False, {"F.linear": {0: (0,), 1: ()}}, 100, 0.5)
    data = json.loads(remat.budgets.Plan({"blocks.0": entry}).to_json())
    assert remat.budgets.Plan.from_json(json.dumps(data))["blocks.0"] == entry
    change(data)
    with pytest.raises(remat.UsageError, match="not a plan"):
        remat.budgets.Plan.from_json(json.dumps(data))


def test_plan_that_fits_no_region_is_an_error():
    with pytest.raises(remat.UsageError, match="names none of these regions"):
        remat.checkpoint_modules(Chain(), "blocks.*", plan=remat.budgets.Plan({}))
    with pytest.raises(remat.UsageError, match="cannot use"):
        remat.checkpoint_modules(Chain(), "blocks.*", plan="all")
    with pytest.raises(remat.UsageError, match="not a plan"):
        remat.budgets.Plan.from_json("{}")
    with pytest.raises(remat.UsageError, match="needs a step"):
        remat.budget(100).plan()


def test_frontier_goes_from_full_recomputation_to_none(tmp_path):
    model, x = Chain(depth=6, width=64), leaf(32, 64)
    remat.checkpoint_modules(model, "blocks.*")
    runs = []
    measured = remat.budgets.frontier(lambda: [runs.append(1), step(model, x)], budgets=4)
    assert len(runs) <= 5
    kept = [point.kept_bytes for point in measured.points]
    assert kept == sorted(kept)
    for field in ("seconds", "replay_seconds"):
        times = [getattr(point, field) for point in measured.points]
        assert times == sorted(times, reverse=True)
    assert measured.points[0].replay_seconds > 0
    assert measured.points[-1].replay_seconds == 0
    assert kept[0] == 6 * x.nbytes
    assert kept[-1] == kept_without_limit(lambda: step(model, x))
    assert all(point.peak_bytes >= point.kept_bytes for point in measured.points)
    assert "a GiB buys" in str(measured)
    assert len(measured.to_dict()["points"]) == 4
    pytest.importorskip("matplotlib")
    measured.plot(tmp_path / "frontier.png")
    with pytest.raises(remat.UsageError, match="no region"):
        remat.budgets.frontier(lambda: None)
    with pytest.raises(remat.UsageError, match="budgets=2 or more"):
        remat.budgets.frontier(lambda: step(model, x), budgets=1)


def test_points_of_a_frontier_are_what_budgets_of_their_size_keep():
    model, x = Parts(), leaf(32, 16)
    expected, model.wrap = step(model, x), checkpointed
    measured = remat.budgets.frontier(lambda: step(model, x), budgets=8)
    assert len({point.kept_bytes for point in measured.points}) > 4
    for point in measured.points:
        with remat.budget(max(point.peak_bytes, point.kept_bytes), reserve=0) as budget:
            for _ in range(2):
                assert_same(expected, step(model, x))
        last = budget.steps[-1]
        assert last.forward_bytes >= point.kept_bytes
        assert last.choice.ns / 1e9 <= point.replay_seconds
        share = (point.kept_bytes - measured.points[0].kept_bytes) / (
            measured.points[-1].kept_bytes - measured.points[0].kept_bytes
        )
        with remat.budget(f"{min(100 * share + 1e-6, 100):.6f}%") as budget:  # which does not count what replays fill
            for _ in range(2):
                assert_same(expected, step(model, x))
        if share > 0:
            assert budget.steps[-1].forward_bytes == point.kept_bytes


# Offloading and traces


@pytest.mark.parametrize("kind", ["disk", "host"])
def test_what_is_not_bought_is_offered_to_the_offloader_first(kind, tmp_path):
    model, x = Parts(width=32, depth=6), leaf(64, 32)
    expected = step(model, x)
    model.wrap = checkpointed
    limit = kept_without_limit(lambda: step(model, x)) // 3
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0) if kind == "disk" else Counting()
    recomputed = {}
    for offload in (None, "fill"):
        with remat.budget(limit, reserve=0, offload=offload) as budget, remat.offload_to(offloader):
            for _ in range(RECORDED + 3):
                with CountOps() as ops:
                    loss = model(x).square().mean()
                    sent = remat.memory_report(loss).offloaded_bytes
                    assert budget.kept_bytes <= limit
                    assert_same(expected, torch.autograd.grad(loss, [*model.parameters(), x]))
                    del loss
        recomputed[offload] = sum(ops.counts.values())
        assert (sent > 0) == (offload == "fill")
        assert budget.kept_bytes == 0
    assert recomputed["fill"] < recomputed[None]


def test_what_may_be_sent_away_is_asked_anew_in_each_step(monkeypatch):
    model, x = Parts(width=32, depth=6), leaf(64, 32)
    model.wrap = checkpointed
    limit = kept_without_limit(lambda: step(model, x)) // 3
    with remat.budget(limit, reserve=0, offload="fill"), remat.offload_to(Counting()):
        for _ in range(RECORDED + 1):
            step(model, x)
        for allowed in (0, 2**30, 0, 2**30):
            monkeypatch.setattr(Filler, "look", lambda filler, _, allowed=allowed: setattr(filler, "bytes", allowed))
            step(model, x)
            loss = model(x).square().mean()
            assert bool(remat.memory_report(loss).offloaded_bytes) == bool(allowed)
            loss.backward()
            del loss


def test_memory_report_tells_how_the_budget_stands():
    budget, blocks = remat.budget("5 KiB", reserve=0), [Mlp() for _ in range(3)]
    run_steps(budget, 2, blocks)
    with budget:
        y = checkpointed(blocks[0], region_name="layers.0")(leaf(16, 8))
        kept = f"by regions: {budget.kept_bytes} B of a budget of 5.0 KiB, 2.0 KiB recomputed in this step"
        assert kept in str(remat.memory_report(y))


def test_plan_in_a_budget_is_counted():
    model, x = Chain(depth=3, width=64), leaf(64, 64)
    expected = step(model, x)
    with remat.checkpoint_modules(model, "blocks.*"), remat.budget("100%") as budget:
        for _ in range(3):
            step(model, x)
    plan = budget.plan()
    with remat.checkpoint_modules(model, "blocks.*", plan=plan), remat.budget("1 GiB") as other:
        y = model(x)
        assert other.kept_bytes == budget.steps[-1].most_bytes > 0
        del y
        assert other.kept_bytes == 0
        assert_same(expected, step(model, x))
        assert "plain code" in other.report()
