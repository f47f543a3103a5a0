"""Explanations: what regions keep, the rungs that a budget would buy, and where there are none."""

from __future__ import annotations

import copy
import json
from itertools import count

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.features.reports.blocks import native_block, op
from tests.handle_ops import RECOMPUTE, SAVE, Both, Inner
from tests.helpers import alive, assert_same, checkpointed, collector_off, leaf, watch
from tests.offloaders import OFFLOAD, Counting
from torch_remat.dispatch.call.survey import Survey
from torch_remat.dispatch.region.region import keeping
from torch_remat.ladders.kinds import forget_kinds

BLOCK = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Sigmoid())


@pytest.fixture(autouse=True)
def _clock(monkeypatch):
    """Let each op take a millisecond, so that the rungs do not depend on the machine."""
    ticks = count(step=1_000_000)
    monkeypatch.setattr("torch_remat.dispatch.call.survey.perf_counter_ns", lambda: next(ticks))


def layers(x, **options):
    for index in range(3):
        x = checkpointed(BLOCK, region_name=f"layers.{index}", **options)(x)
    return x.sum()


def explained(function, *args, **options):
    (region, *_) = remat.explain(checkpointed(function, **options))(*args).regions
    return region


def test_explanation_as_text_has_equal_regions_once():
    assert_expected_inline(
        str(remat.explain(layers)(leaf(128, 64))),
        """\
layers.0-2 (each of 3)
  keeps 32.0 KiB, of which 32.0 KiB inputs; as plain code 320.0 KiB; replay: 6.000 ms

  call             bytes     ms  from rung
  0.linear_0   128.0 KiB  2.000          2
  1.gelu_0     128.0 KiB  1.000          2
  2.linear_0              2.000
  3.sigmoid_0   32.0 KiB  1.000          1

  rung      keeps  replay ms  ms for a MiB  keeps also
     0   32.0 KiB      6.000
     1   64.0 KiB      3.000        86.336  3.sigmoid_0
     2  320.0 KiB      0.000        14.872  all""",
    )


def test_equal_regions_are_one_table_whatever_their_names_and_what_is_between_them():
    def model(x):
        for name in ("encoder", "middle", "decoder.0", "decoder.1", "head", "tail"):
            x = checkpointed(torch.sin if name == "middle" else BLOCK, region_name=name)(x)
        return x

    lines = str(remat.explain(model)(leaf(128, 64))).splitlines()
    assert [line for line in lines if line[:1].strip()] == ["encoder, decoder.0-1 and 2 more (each of 5)", "middle"]


def test_explanation_of_what_a_policy_keeps():
    policy = {F.linear: OFFLOAD, F.gelu: SAVE}
    function = checkpointed(BLOCK, region_name="r", policy=policy)
    assert_expected_inline(
        str(remat.explain(function)(leaf(128, 64))),
        """\
r
  keeps 160.0 KiB + 160.0 KiB offloaded, of which 32.0 KiB inputs; as plain code 320.0 KiB; replay: 1.000 ms

  call             bytes     ms  from rung
  0.linear_0   128.0 KiB  2.000          0  offload
  1.gelu_0     128.0 KiB  1.000          0  save
  2.linear_0    32.0 KiB  2.000          0  offload
  3.sigmoid_0   32.0 KiB  1.000          1

  rung      keeps  replay ms  ms for a MiB  keeps also
     0  320.0 KiB      1.000
     1  320.0 KiB      0.000                all""",
    )


@pytest.mark.parametrize(
    "policy",
    [
        None,
        [F.linear],
        [F.gelu],
        [F.linear, F.gelu, torch.sigmoid],
        remat.save_modules("1"),
        [torch.ops.aten.addmm.default],
        remat.policies.save_matmuls,
    ],
)
def test_bytes_are_those_that_the_region_keeps(policy):
    x = leaf(128, 64) * 2
    y = checkpointed(BLOCK, policy=policy)(x)
    assert explained(BLOCK, x, policy=policy).kept_bytes == remat.memory_report(y).regions[0].bytes


def test_offloaded_bytes_are_apart():
    offloader, x = Counting(), leaf(128, 64) * 2
    policy = {F.linear: OFFLOAD, torch.sigmoid: SAVE}
    region = explained(BLOCK, x, policy=policy, offloader=offloader)
    y = checkpointed(BLOCK, policy=policy, offloader=offloader)(x)
    report = remat.memory_report(y).regions[0]
    assert (region.kept_bytes, region.offloaded_bytes) == (report.bytes, report.offloaded_bytes)


def test_rungs_are_those_of_a_budget():
    x = leaf(128, 64)
    (region, *_) = remat.explain(layers)(x).regions
    forget_kinds()
    with remat.budget("50%") as budget:
        layers(x).backward()
        layers(x).backward()
    ladder = budget.steps[-1].rows[0].part.ladder
    assert [rung.bytes for rung in region.rungs] == [rung.bytes for rung in ladder.rungs]
    assert [rung.is_plain for rung in region.rungs] == [rung.is_plain for rung in ladder.rungs]
    assert len(region.rungs) > 2


def test_a_policy_for_the_calls_of_a_rung_keeps_its_bytes():
    x = leaf(128, 64) * 2
    region = explained(BLOCK, x)
    by_name = {"0.linear_0": F.linear, "1.gelu_0": F.gelu, "3.sigmoid_0": torch.sigmoid}
    assert [rung.is_plain for rung in region.rungs] == [False, False, True]
    for number, rung in enumerate(region.rungs[:-1]):
        kept = [by_name[call.name] for call in region.calls if call.rung is not None and call.rung <= number]
        y = checkpointed(BLOCK, policy=kept)(x)
        assert remat.memory_report(y).regions[0].bytes == rung.bytes


def test_function_runs_once_and_its_effects_are_those_of_one_forward():
    norm, counter = nn.BatchNorm1d(4), torch.zeros(1)

    def body(x):
        counter.add_(1)
        return torch.dropout(norm(x), 0.5, True).sin() + torch.rand(())

    x, states, fresh = leaf(8, 4), [], copy.deepcopy((norm, counter))
    for run in (checkpointed(body), remat.explain(checkpointed(body))):
        torch.manual_seed(5)
        norm, counter = copy.deepcopy(fresh)
        run(x)
        states.append([*norm.state_dict().values(), counter, torch.get_rng_state()])
    assert_same(*states)
    assert x.grad is None


def test_explanation_as_data_keeps_nothing_alive():
    remat.explain(layers)(leaf(8, 64))
    with collector_off():
        x = leaf(8, 64)
        storages = watch(x)
        explanation = remat.explain(layers)(x)
        del x
        assert alive(storages) == 0
    data = json.loads(explanation.to_json())
    assert data["regions"][0]["calls"][0]["name"] == "0.linear_0"
    assert explanation._repr_html_().startswith("<table>")


def test_wrong_uses_are_errors_and_leave_nothing_behind():
    with pytest.raises(remat.UsageError, match="cannot run a int"):
        remat.explain(3)
    with pytest.raises(remat.UsageError, match="inside a region"):
        checkpointed(lambda x: remat.explain(torch.sin)(x))(leaf(2))
    with pytest.raises(ZeroDivisionError):
        remat.explain(checkpointed(lambda x: 1 / 0))(leaf(2))
    assert keeping.get() is None
    assert str(remat.explain(lambda: None)()) == "no region ran"


def saved_and_recomputed(x):
    return op(Inner, "r", RECOMPUTE, op(Both, "s", SAVE, x.sin())).exp().exp()


def test_calls_with_names_are_apart_and_what_they_keep_counts_in_each_rung():
    region = explained(saved_and_recomputed, leaf(64, 64))
    assert [(one.name, one.policy, one.bytes) for one in region.ops] == [("s", "save", 16384), ("r", "recompute", 0)]
    assert region.rungs[0].bytes == region.kept_bytes == 2 * 16384
    assert not any(rung.is_plain for rung in region.rungs)  # which would not keep what the author says
    assert region.whole_bytes == 0
    native = explained(native_block, leaf(4, 8) * 3)
    assert [one.name for one in native.ops] == ["attn", "s/two"]


@pytest.mark.parametrize(
    ("around", "said"),
    [
        (lambda inner: checkpointed(lambda x: inner(x.cos())), "inside another region"),
        (lambda inner: lambda x: torch_checkpoint(inner, x, use_reentrant=False), "under saved-tensor hooks"),
    ],
)
def test_regions_inside_others_have_no_prices(around, said):
    inner = checkpointed(BLOCK, region_name="inner")
    told = next(one for one in remat.explain(around(inner))(leaf(4, 64)).regions if one.name == "inner")
    assert said in told.no_prices
    assert (told.kept_bytes, told.calls, told.rungs) == (0, (), ())


def communicating(finish):
    def finish_and_say_so(self, tape):
        self._kind.communicates = "runs collectives"
        finish(self, tape)

    return finish_and_say_so


def test_where_there_are_no_prices_the_text_says_why(monkeypatch):
    x = leaf(4, 64)
    assert "decides about aten ops" in explained(BLOCK, x, policy=[torch.ops.aten.mm]).no_prices
    assert "needs nothing" in explained(torch.sin, torch.ones(4)).no_prices
    with monkeypatch.context() as patch:
        patch.setattr(Survey, "finish", communicating(Survey.finish))
        told = explained(BLOCK, x, policy=[F.gelu])
    assert "all or nothing is kept: it runs collectives" in told.no_prices
    assert (len(told.rungs), told.kept_bytes) == (2, 4 * (64 + 256) * 4)
    taken = lambda x: torch.autograd.grad(x.sin().sum(), x)[0].sum() * x  # noqa: E731
    assert "a gradient is taken" in explained(taken, x).no_prices
    forget_kinds()
    half = checkpointed(BLOCK, region_name="half", policy=remat.policies.memory_budget(0.5))
    assert "goes by price, and records it first" in str(remat.explain(half)(x))
    for _ in range(3):
        half(x)
    assert len(remat.explain(half)(x).regions[0].rungs) > 1


def test_training_step_that_runs_its_own_backward():
    def step(x):
        loss = layers(x)
        loss.backward()
        return {"loss": loss}

    x = leaf(8, 64)
    assert remat.explain(step)(x).regions == remat.explain(layers)(x).regions
    assert x.grad is not None


def test_explanation_in_a_budget_records_and_buys_nothing():
    x = leaf(128, 64)
    with remat.budget("50%") as budget:
        for _ in range(3):
            layers(x).backward()
        steps = budget.step_count
        told = remat.explain(layers)(x)
        assert budget.step_count == steps
    assert told.regions[0].kept_bytes == told.regions[0].input_bytes
