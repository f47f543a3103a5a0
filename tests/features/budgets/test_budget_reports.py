"""What budgets report: totals, pictures, plans, frontiers, traces, also of what they offload."""

from __future__ import annotations

import json
import re

import pytest
import torch

import torch_remat as remat
from tests.features.budgets.test_budget import Chain, kept_without_limit, step
from tests.helpers import Mlp, assert_same, checkpointed, leaf, no_other_regions

pytestmark = pytest.mark.filterwarnings("ignore:the budget")


@pytest.fixture(autouse=True)
def _alone():
    with no_other_regions():
        yield


def run_steps(budget, steps=2):
    blocks = [Mlp() for _ in range(3)]
    with budget:
        for _ in range(steps):
            x = leaf(16, 8)
            for place, block in enumerate(blocks):
                x = checkpointed(block, region_name=f"layers.{place}")(x)
            x.sum().backward()


def test_report_and_totals_have_each_region():
    budget = remat.budget("3 KiB", reserve=0)
    assert "0 steps" in budget.report()
    run_steps(budget)
    report = budget.report()
    assert all(part in report for part in ("budget of 3.0 KiB", "2 steps", *(f"layers.{at}" for at in range(3))))
    data = json.loads(budget.to_json())
    assert data == json.loads(json.dumps(budget.to_dict()))
    assert re.search(r"^  step  +kept at most  +evicted  +replay ms$", report, re.MULTILINE)
    assert re.search(r"^  2  +", report, re.MULTILINE)
    assert "not measured" not in report
    assert "reserve" not in report
    assert repr(budget) == "<budget of 3.0 KiB; 2 steps>"
    first, second = data["steps"]
    assert [row["region"] for row in second["regions"]] == ["layers.0", "layers.1", "layers.2"]
    assert second["evicted_bytes"] > 0
    assert second["replay_seconds"] > 0
    assert first["most_kept_bytes"] <= 4 * 2**10


def test_report_says_by_how_much_a_step_passed_the_limit():
    budget = remat.budget("1 KiB", reserve="24 B")
    run_steps(budget, steps=8)
    step = budget.steps[-1]
    assert step.over_bytes == step.most_bytes - 1000 > 0
    assert f"{step.over_bytes / 10:.1f} % over 1000 B\n" in budget.report()
    assert "24 B of it in reserve" in budget.report()
    assert [line.split()[0] for line in budget.report().splitlines()[3:9]] == ["3", "4", "5", "6", "7", "8"]


def test_report_of_the_least_there_can_be_says_nothing_of_a_limit():
    budget = remat.budget("0%")
    run_steps(budget, steps=2)
    assert budget.steps[-1].most_bytes > 1
    assert " over " not in budget.report()


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


def test_plan_keeps_what_the_budget_kept():
    model, x = Chain(depth=6, width=64), leaf(32, 64)
    expected = step(model, x)
    runs = []
    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: runs.append(remat.is_recomputing()))

    def replays(plan):
        runs.clear()
        with remat.checkpoint_modules(model, "blocks.*", plan=plan):
            assert_same(expected, step(model, x))
        return sum(runs)

    with remat.checkpoint_modules(model, "blocks.*"):
        most = kept_without_limit(lambda: step(model, x))
        with remat.budget(int(0.6 * most), reserve=0) as budget:
            for _ in range(2):
                step(model, x)
    plan = remat.budgets.Plan.from_json(budget.plan().to_json())
    assert plan == budget.plan()
    assert "blocks.3: keeps" in str(plan)
    assert replays(plan) == sum(entry.evicted_tensors > 0 for entry in plan.values()) > 0
    for name in plan:
        plan.keep(name)
    assert replays(plan) == 0
    plan.evict("blocks.0")
    assert replays(plan) == 1


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
    measured = remat.budgets.frontier(lambda x: step(model, x), x, budgets=3, steps=1)
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


# Offloading and traces


def test_what_would_be_evicted_is_offered_to_the_offloader_first(tmp_path):
    model, x = Chain(depth=8, width=64), leaf(64, 64)
    expected = step(model, x)
    model.wrap = checkpointed
    limit = kept_without_limit(lambda: step(model, x)) // 2
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    for _ in range(2):
        with remat.budget(limit, reserve=0, offload="fill") as budget, remat.offload_to(offloader):
            with remat.trace() as trace:
                loss = model(x).square().mean()
            assert budget.kept_bytes <= limit
            assert_same(expected, torch.autograd.grad(loss, [*model.parameters(), x]))
            del loss
        offloaded = sum(row.offloaded_bytes for row in budget.steps[-1].rows)
        assert sum(one.offloaded_bytes for one in trace.given_up) == offloaded > 0
        assert "offloaded" in str(trace)
        assert budget.kept_bytes == 0


def test_trace_shows_what_a_budget_evicted_and_how_it_stood(tmp_path):
    budget = remat.budget("3 KiB", reserve=0)
    run_steps(budget, steps=1)
    with remat.trace() as trace:
        run_steps(budget, steps=1)
    evicted_bytes = sum(row.evicted_bytes for row in budget.steps[-1].rows)
    assert sum(one.bytes for one in trace.given_up) == evicted_bytes > 0
    assert {(one.region, one.call) for one in trace.given_up} <= {(f"layers.{at}", at) for at in range(3)}
    assert all(0 < one.kept_bytes <= 3 * 2**10 for one in trace.given_up)
    first = trace.given_up[0]
    assert first.region == "layers.0"
    before = [span for span in trace.spans if span.end_us <= first.time_us]
    assert (before[-1].region, before[-1].phase) == ("layers.1", "forward")
    (state,) = trace.budgets
    assert (state.kept_bytes, state.limit_bytes, state.budget_bytes) == (0, 3 * 2**10, 3 * 2**10)
    text = str(trace)
    assert "budget of 3.0 KiB, limit 3.0 KiB: 0 B kept by its regions at the end" in text
    assert "evicted:" in text
    assert trace.given_up[0].region in text
    assert "budget of 3.0 KiB" in trace._repr_html_()
    data = json.loads(trace.to_json())
    assert data["given_up"][0]["saved_tensors"] == list(trace.given_up[0].saved_tensors)
    assert data["budgets"] == [{"kept_bytes": 0, "limit_bytes": 3072, "budget_bytes": 3072}]
    trace.to_chrome_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert sum(event["args"]["bytes"] for event in events if event["ph"] == "i") == evicted_bytes
    pytest.importorskip("matplotlib")
    trace.plot(tmp_path / "step.png")
