"""Explanations: states and reasons of named tensors, what replay did, costs that a real change of policy confirms."""

from __future__ import annotations

import copy
import json
import re
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_remat as remat
from tests.features.reports.blocks import native_block, op
from tests.handle_ops import RECOMPUTE, SAVE, Affine, Both, Inner, Result, SinCos
from tests.helpers import Mlp, alive, assert_same, checkpointed, collector_off, leaf, watch
from tests.offloaders import OFFLOAD, Counting
from torch_remat.offload.sender import default_offloader


class MatMul(torch.autograd.Function):
    """A product that saves both factors."""

    @staticmethod
    @remat.auto_forward("x", "w")
    def forward(ctx, x, w, op_name, remat_policy):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad, None, None


def matmul(name, policy, x, w):
    return MatMul.apply(x, w, name, policy)


WEIGHT = nn.Parameter(torch.randn(8, 8))


def block(x):
    h = op(Both, "a", SAVE, x)
    with remat.name_scope("mlp"):
        h = matmul("up", RECOMPUTE, h, WEIGHT)
        h = h.tanh()
        h = matmul("down", SAVE, h, WEIGHT)
    s, _ = op(SinCos, "pair", SAVE, h)
    return op(Affine, "mix", RECOMPUTE, s, x)


def region(**options):
    return checkpointed(block, region_name="layers.0", preserve_rng_state=False, **options)


def test_explanation_as_text():
    assert_expected_inline(
        re.sub(r"(\.py):\d+", r"\1:LINE", str(remat.explain(region())(leaf(8, 8)))),
        """\
layers.0
  keeps 1.0 KiB, of which 256 B inputs; without recomputing 1.2 KiB
  forward: 11 ops, 2.0 kFLOP; replay: 5 ops, 1.0 kFLOP
  4 saved tensors without a name: recomputed
  a: save, replay: skipped, 0 FLOP in forward, 0 FLOP in replay
    x    kept  256 B  the backward of a reads it; it is the region's input args[0], kept anyway
    y    kept  256 B  the backward of a reads it
    out  kept  256 B  the replay of mlp/up reads it (same memory as a.y)
    if recompute: -256 B kept, +-0 FLOP in replay
    if offload: +-0 B kept, +-0 FLOP in replay
  mlp/up: recompute, replay: ran, 1.0 kFLOP in forward, 1.0 kFLOP in replay
    x    recomputed  256 B  the replay of mlp/up makes it for its backward
    w    not kept    256 B  a parameter: it exists anyway
    out  recomputed  256 B  the replay of mlp/up recomputes it
    if save: not possible: aten.tanh.default at test_explain.py:LINE reads mlp/up.out
    if offload: not possible: aten.tanh.default at test_explain.py:LINE reads mlp/up.out
  mlp/down: save, replay: skipped, 1.0 kFLOP in forward, 0 FLOP in replay
    x    elided    256 B  replay has it as input 0 of mlp/down
    w    not kept  256 B  a parameter: it exists anyway
    out  kept      256 B  no replay reads it, but its memory is kept (same memory as pair.x)
    if recompute: -256 B kept, +1.0 kFLOP in replay
    if offload: +-0 B kept, +-0 FLOP in replay
  pair: save, replay: skipped, 0 FLOP in forward, 0 FLOP in replay
    x  kept      256 B  the backward of pair reads it
    0  kept      256 B  the replay of mix reads it
    1  not kept  256 B  nothing reads it in replay: a placeholder stands for it
    if recompute: -256 B kept, +-0 FLOP in replay
    if offload: +-0 B kept, +-0 FLOP in replay
  mix: recompute, replay: ran, 0 FLOP in forward, 0 FLOP in replay
    x    recomputed  256 B  the replay of mix makes it for its backward
    w    recomputed  256 B  the replay of mix makes it for its backward
    out  recomputed  256 B  the replay of mix recomputes it
    if save: +-0 B kept, +-0 FLOP in replay
    if offload: +-0 B kept, +-0 FLOP in replay""",
    )


def test_region_that_needs_no_replay_and_op_that_replay_does_not_reach():
    def early(x):
        h = op(Inner, "a", RECOMPUTE, x).exp()
        return op(Result, "b", SAVE, op(Result, "c", SAVE, h))

    first, second = remat.explain(lambda x: checkpointed(early)(checkpointed(lambda x: op(Both, "only", SAVE, x))(x)))(
        leaf(4, 4)
    ).regions
    assert first.replays == 0
    assert first.ops[0].replay == "no replay"
    assert [one.replay for one in second.ops] == ["ran", "not reached", "not reached"]


def test_regions_run_as_often_as_in_training_and_those_that_are_alike_are_told_once():
    runs = []

    def layer(x):
        runs.append(1)
        return matmul("mm", SAVE, x, WEIGHT)

    def model(x):
        for index in range(4):
            x = checkpointed(layer, region_name=f"layers.{index}", preserve_rng_state=False)(x.sin())
        return x

    explanation = remat.explain(model)(leaf(8, 8))
    assert len(runs) == 4  # replay skips the product
    assert len({region.ops[0].alternatives for region in explanation.regions}) == 1
    assert str(explanation).startswith("layers.0-3 (each of 4)\n")


def test_explanation_as_data_keeps_nothing_alive():
    remat.explain(region())(leaf(8, 8))
    with collector_off():
        x = leaf(8, 8)
        storages = watch(x)
        explanation = remat.explain(region())(x)
        del x
        assert alive(storages) == 0
    data = json.loads(explanation.to_json())
    assert data["regions"][0]["ops"][0]["tensors"][0]["name"] == "layers.0::a.x"
    assert explanation._repr_html_().startswith("<table>")


def test_wrong_uses_are_errors():
    with pytest.raises(remat.UsageError, match="cannot run a int"):
        remat.explain(3)
    with pytest.raises(remat.UsageError, match="inside a region"):
        checkpointed(lambda x: remat.explain(torch.sin)(x))(leaf(2))
    assert str(remat.explain(lambda: None)()) == "no region ran"


def saved_and_recomputed(x):
    return op(Inner, "r", RECOMPUTE, op(Both, "s", SAVE, x.sin()))


def test_ops_of_a_region_inside_another_are_recomputed_by_that_one():
    inner = checkpointed(saved_and_recomputed, region_name="inner")
    for around in (
        checkpointed(lambda x: inner(x.cos())),
        lambda x: torch_checkpoint(lambda x: inner(x.cos()), x, use_reentrant=False),
    ):
        explained = next(region for region in remat.explain(around)(leaf(4, 4)).regions if region.name == "inner")
        assert explained.kept_bytes == 0
        assert {tensor.state for op in explained.ops for tensor in op.tensors} <= {"recomputed", "elided", "not kept"}
        assert explained.ops[0].tensors[-1].why == "the replay of r reads it; the enclosing checkpoint recomputes it"
        assert [one.alternatives for one in explained.ops] == [()] * 2


def test_region_that_needs_no_gradient_keeps_nothing():
    function = checkpointed(saved_and_recomputed, region_name="block")
    explanation = remat.explain(function)(torch.ones(4))
    (region,) = explanation.regions
    assert (region.kept_bytes, region.input_bytes, region.replays) == (0, 0, 0)
    tensors = [tensor for op in region.ops for tensor in op.tensors]
    assert tensors
    assert {(tensor.state, tensor.why) for tensor in tensors} == {("not kept", "no backward of block is to come")}
    assert not any(op.alternatives for op in region.ops)


def test_what_changes_outside_and_random_numbers_are_those_of_one_step():
    norm, counter, cache = torch.nn.BatchNorm1d(4), torch.zeros(1), torch.zeros(3, 4)

    def body(x):
        counter.add_(1)
        cache[1].copy_(torch.dropout(x.detach(), 0.5, True)[0])
        return saved_and_recomputed(norm(x)) + torch.rand(())

    x, states, fresh = leaf(8, 4), [], copy.deepcopy((norm, counter, cache))
    for alternatives in (None, True, False):
        torch.manual_seed(5)
        norm, counter, cache = copy.deepcopy(fresh)
        if alternatives is None:
            checkpointed(body)(x).sum().backward()
        else:
            remat.explain(checkpointed(body), alternatives=alternatives)(x)
        states.append([*norm.state_dict().values(), counter, cache, torch.get_rng_state()])
    assert_same(states[0], states[1])
    assert_same(states[0], states[2])


def four_ops(policies):
    """A block of matrix products and other ops, each with a policy of its own."""
    a, b, c, d = policies

    def function(x):
        h = matmul("a", a, op(Both, "b", b, x.sin()), WEIGHT)
        h = remat.op(lambda h: F.gelu(h @ WEIGHT) * h.detach().sigmoid(), "c", policy=c)(h)
        return matmul("d", d, op(Affine, "e", RECOMPUTE, h, h.t()), WEIGHT)

    return function


@pytest.mark.parametrize(
    "policies",
    [(SAVE, SAVE, SAVE, SAVE), (SAVE, OFFLOAD, RECOMPUTE, OFFLOAD)],
    ids=lambda policies: "".join(policy.name[0] for policy in policies),
)
def test_prices_of_named_ops_are_those_of_a_real_run(policies):
    def run(policies):
        offloader = Counting()
        with FlopCounterMode(display=False) as counter:
            y = offloading(offloader, four_ops(policies))(x).sum()
            (report,) = remat.memory_report(y).regions
            assert report.offloaded_bytes == offloader.bytes
            y.backward()
        return report.bytes, report.offloaded_bytes, counter.get_total_flops()

    x = leaf(8, 8)
    now = run(policies)
    explanation = remat.explain(offloading(Counting(), four_ops(policies)))(x)
    (told,) = explanation.regions
    assert " kept, +256 B offloaded, +-0 FLOP in replay" in str(explanation)
    assert (told.kept_bytes, told.offloaded_bytes) == now[:2]
    places, priced = {"a": 0, "b": 1, "c": 2, "d": 3}, 0
    for one in told.ops:
        for other in one.alternatives if one.name in places else ():
            changed = list(policies)
            changed[places[one.name]] = remat.CheckpointPolicy(other.policy)
            assert other.error is None
            change = other.bytes_change, other.offloaded_bytes_change, other.flops_change
            real = tuple(after - before for after, before in zip(run(changed), now, strict=True))
            assert change == real, (one.name, other.policy)
            priced += 1
    assert priced == 8


def test_calls_under_a_policy_for_aten_ops_have_no_prices():
    function = offloading(Counting(), four_ops([SAVE] * 4), policy=[torch.ops.aten.mm.default])
    (told,) = remat.explain(function)(leaf(8, 8)).regions
    assert [one.alternatives for one in told.ops] == [()] * 5


@dataclass
class Output:
    """What models return that name their results."""

    loss: torch.Tensor
    logits: object = None


class Opaque:
    """The same, as an object that nobody can look into."""

    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize("form", [lambda y: Output(None, [y]), lambda y: SimpleNamespace(a={"b": y})])
def test_backward_starts_from_what_lies_in_dataclasses_and_containers(form):
    function = checkpointed(Mlp(), region_name="mlp")
    explanation = remat.explain(lambda x: form(function(x).sum()))(leaf(2, 8))
    assert explanation.no_backward is None
    assert explanation.regions == remat.explain(lambda x: function(x).sum())(leaf(2, 8)).regions
    assert explanation.regions[0].replays == 1


@pytest.mark.parametrize("form", [Opaque, lambda y: None])
def test_explanation_says_that_no_backward_ran(form):
    function = checkpointed(lambda x: op(Inner, "a", RECOMPUTE, x.sin()), region_name="r")
    explanation = remat.explain(lambda x: form(function(x).sum()), alternatives=False)(leaf(2, 8))
    assert "found no tensor that needs a gradient" in explanation.no_backward
    assert str(explanation).startswith("explain() ran no backward: it found no tensor that needs a gradient in what")
    assert "no replay: no backward came to it" in str(explanation)
    assert "nothing has to be recomputed" not in str(explanation)
    assert explanation.to_dict()["no_backward"] == explanation.no_backward


class Double(torch.autograd.Function):
    """Saves nothing, as the sum does: a second backward could run through both."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_training_step_that_returns_its_loss_after_backward():
    def step(x):
        h = checkpointed(Mlp())(x)
        loss = (h + Double.apply(h)).exp().sum()
        loss.backward()
        return {"loss": loss, "hidden": h}

    explanation = remat.explain(step)(leaf(2, 8))
    assert [region.replays for region in explanation.regions] == [1]
    assert "ran no backward" not in str(explanation)


def native_run(policy):
    return checkpointed(lambda x: native_block(x, policy), region_name="block")(leaf(4, 8) * 3).sum()


def test_explanation_of_native_regions():
    (region,) = remat.explain(lambda: native_run(SAVE))().regions
    attn, two = region.ops
    assert (attn.policy, attn.replay, two.replay) == ("save", "skipped", "skipped")
    assert (attn.forward_flops, attn.replay_flops) == (2 * 2 * 4 * 8 * 16, 0)
    told = {tensor.label: (tensor.state, tensor.why) for tensor in attn.tensors}
    read = {f"saved_{place}": ("kept", "the backward of attn reads it") for place in (1, 2, 3)}  # saved_0: the input
    assert told == read | {"out": ("kept", "an op in replay (exp) reads it")}
    assert [tensor.label for tensor in two.tensors] == ["exp_0_0", "div__0_0", "0", "1"]
    other, away = attn.alternatives
    assert away.policy == "offload"
    assert other.policy == "recompute"
    assert other.flops_change == attn.forward_flops
    recomputed = remat.memory_report(native_run(RECOMPUTE)).regions[0].bytes
    assert other.bytes_change == recomputed - region.kept_bytes


def reasons_of(function, *args, **options):
    (region, *_) = remat.explain(checkpointed(function, **options), alternatives=False)(*args).regions
    return {f"{op.name}.{one.label}": one.why for op in region.ops for one in op.tensors} | {
        one.label: one.why for one in region.by_policy
    }


@pytest.mark.parametrize(
    ("read", "reader"),
    [
        (lambda h: h.cos(), "a backward outside of it reads it"),
        (lambda h: h.view(-1)[:3].t().tan(), "an op in replay (tan) reads it"),
        (lambda h: op(Both, "o", RECOMPUTE, h), "the replay of o reads it"),
        (lambda h: checkpointed(torch.tan)(h).cos(), "the replay of an inner region reads it"),
        (lambda h: remat.op(lambda h: h.tan().cos(), "r", policy=RECOMPUTE)(h), "the replay of r reads it"),
    ],
)
def test_reader_of_what_a_native_region_returns_is_named(read, reader):
    told = reasons_of(lambda x: read(remat.native_save_region("n", torch.exp, x.sin())), leaf(4, 4) * 2)
    assert told["n.out"] == reader


def offloaded_block(x):
    s, _ = op(SinCos, "c", OFFLOAD, x.sin())
    return op(Both, "d", RECOMPUTE, s)


def offloading(offloader, function=offloaded_block, **options):
    options = {"region_name": "r", "preserve_rng_state": False, "offload_inputs": True, **options}
    return lambda x: checkpointed(function, offloader=offloader, **options)(x * 2)


def test_prices_of_offloading_send_nothing_to_the_offloader_that_all_share():
    before, said = default_offloader().offloaded_bytes, set(default_offloader()._notices._told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (told,) = remat.explain(checkpointed(lambda x: op(Both, "b", SAVE, x.sin())))(leaf(200, 200)).regions
    other = told.ops[0].alternatives[1]
    assert (other.policy, other.bytes_change, other.offloaded_bytes_change) == ("offload", -160_000, 160_000)
    assert (default_offloader().offloaded_bytes, default_offloader()._notices._told) == (before, said)


def test_what_a_policy_keeps_as_an_op_left_it_has_a_reader():
    def function(x):
        return (torch.zeros(4, 8).add_(x.detach()).exp() + x).tanh() * x

    told = reasons_of(function, leaf(4, 8), policy=remat.save_names("add__0_0"))
    assert told["add__0_0"] == "an op in replay (exp) reads it"
