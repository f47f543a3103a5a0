"""Explanations: states and reasons of named tensors, what replay did, costs that a real change of policy confirms."""

from __future__ import annotations

import copy
import json
import threading

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_remat as remat
from tests.contract.test_bytes_handles import BYTES, SIDE, expected, programs
from tests.contract.test_bytes_handles import run as run_program
from tests.handle_ops import RECOMPUTE, SAVE, Affine, Both, Inner, Noise, Result, SinCos, Trace, call
from tests.helpers import Mlp, alive, assert_same, checkpointed, collector_off, leaf, no_other_regions, watch


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


FLOPS = 2 * 8**3
WEIGHT = nn.Parameter(torch.randn(8, 8))


def op(kernel, name, policy, *inputs, style="auto"):
    return call(style, kernel, Trace(), name, policy, *inputs)


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


def bytes_told(region):
    """Return the bytes of what a region keeps by name, each storage once."""
    tensors = [*region.by_policy, *(tensor for op in region.ops for tensor in op.tensors)]
    return sum(tensor.bytes for tensor in tensors if tensor.state == "kept" and tensor.shared_with is None)


def states(explanation):
    return {
        f"{op.name}.{tensor.label}": (tensor.state, tensor.why)
        for op in explanation.regions[0].ops
        for tensor in op.tensors
    }


def test_each_named_tensor_has_a_state_and_a_reason():
    told = states(remat.explain(region())(leaf(8, 8)))
    assert told["a.x"] == ("kept", "the backward of a reads it; it is the region's input args[0], kept anyway")
    assert told["a.out"] == ("kept", "the replay of mlp/up reads it")
    assert told["mlp/up.x"] == ("recomputed", "the replay of mlp/up makes it for its backward")
    assert told["mlp/up.w"] == ("not kept", "a parameter: it exists anyway")
    assert told["mlp/down.x"] == ("elided", "replay has it as input 0 of mlp/down")
    assert told["mlp/down.w"] == ("not kept", "a parameter: it exists anyway")
    assert told["mlp/down.out"] == ("kept", "no replay reads it, but its memory is kept")
    assert told["pair.x"] == ("kept", "the backward of pair reads it")
    assert told["pair.0"] == ("kept", "the replay of mix reads it")
    assert told["pair.1"] == ("not kept", "nothing reads it in replay: a placeholder stands for it")
    assert told["mix.out"] == ("recomputed", "the replay of mix recomputes it")
    elided = remat.explain(checkpointed(lambda x: op(Both, "b", SAVE, op(Inner, "a", RECOMPUTE, x))))(leaf(2, 2))
    assert states(elided)["b.x"] == ("elided", "replay has it as input 1 of b")


def test_what_shares_the_memory_of_an_input_is_told_with_its_name_as_in_the_report():
    weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def function(x, y, *, w):
        h = op(Affine, "mix", RECOMPUTE, op(Both, "a", SAVE, x), op(Both, "b", SAVE, y["z"].t()))
        return matmul("mm", SAVE, h, w)

    x, z = leaf(4, 4) * 2, leaf(4, 4) * 2
    function = checkpointed(function, region_name="r", preserve_rng_state=False)
    (told,) = remat.explain(function, alternatives=False)(x, {"z": z}, w=weight.t()).regions
    with no_other_regions():
        y = function(x, {"z": z}, w=weight.t())
        (report,) = remat.memory_report(y).regions
    shared = {tensor.name: tensor.shared_with for op in told.ops for tensor in op.tensors if tensor.state == "kept"}
    rows = {row.name: row.shared_with for op in report.ops for row in op.tensors}
    assert rows == {name: shared[name] for name in rows}
    assert (rows["r::a.x"], rows["r::b.x"]) == ("r::args[0]", "r::args[1]['z']")
    assert told.kept_bytes == report.bytes == told.input_bytes + bytes_told(told)
    del y


@pytest.mark.parametrize("policy", [SAVE, RECOMPUTE])
def test_outputs_have_the_same_names_with_each_policy(policy):
    def function(x):
        s, c = op(SinCos, "several", policy, x.tan())
        (only,) = remat.op(lambda s: [s.exp()], "list", policy=policy)(s)
        return op(Both, "one", policy, op(Affine, "mix", RECOMPUTE, only, c))

    for options in ({}, {"policy": [torch.ops.aten.tan.default]}):
        (told,) = remat.explain(checkpointed(function, **options), alternatives=False)(leaf(2, 2)).regions
        labels = {op.name: [tensor.label for tensor in op.tensors] for op in told.ops}
        assert labels["several"][-2:] == ["0", "1"]
        assert labels["list"][-1] in ("0", "exp_0_0")  # what a policy keeps is told by aten op
        assert labels["one"][-1] == "out"


def test_elided_tensor_is_told_with_the_input_that_it_comes_from():
    def function(x):
        _, c = op(SinCos, "pair", RECOMPUTE, x.exp())
        return op(Both, "b", SAVE, c)

    assert states(remat.explain(checkpointed(function))(leaf(2, 2)))["b.x"] == (
        "elided",
        "replay has it as input 1 of b",
    )


def test_explanation_as_text():
    assert_expected_inline(
        str(remat.explain(region())(leaf(8, 8))),
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
    if save: not possible: aten.tanh.default at test_explain.py:56 reads mlp/up.out
    if offload: not possible: aten.tanh.default at test_explain.py:56 reads mlp/up.out
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


def test_ops_and_flops_are_counted_by_phase():
    explanation = remat.explain(region(), alternatives=False)(leaf(8, 8)).regions[0]
    assert (explanation.forward_flops, explanation.replay_flops) == (2 * FLOPS, FLOPS)
    flops = {op.name: (op.forward_flops, op.replay_flops) for op in explanation.ops}
    assert flops["mlp/up"] == (FLOPS, FLOPS)
    assert flops["mlp/down"] == (FLOPS, 0)
    assert [op.replay for op in explanation.ops] == ["skipped", "ran", "skipped", "skipped", "ran"]
    assert all(op.alternatives == () for op in explanation.ops)


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


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_kept_bytes_and_those_of_alternatives_are_what_the_rules_say(ops):
    x = leaf(SIDE, SIDE)
    function = checkpointed(lambda x: run_program(ops, Trace(), x), preserve_rng_state=False)
    (explanation,) = remat.explain(function)(x).regions
    assert explanation.kept_bytes - explanation.input_bytes == BYTES * len(expected(ops))
    assert explanation.kept_bytes - explanation.input_bytes == bytes_told(explanation)
    for place, told in enumerate(explanation.ops):
        (other,) = (one for one in told.alternatives if one.policy != "offload")
        flipped = copy.deepcopy(ops)
        flipped[place].policy = RECOMPUTE if ops[place].policy is SAVE else SAVE
        assert other.policy == flipped[place].policy.value
        assert other.error is None
        assert other.bytes_change == BYTES * (len(expected(flipped)) - len(expected(ops))), told.name


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_flops_of_alternatives_are_those_of_a_real_run(layers):
    def make(policies):
        def function(x):
            for place, (policy, (_, native)) in enumerate(zip(policies, layers, strict=True)):
                x = matmul(f"mm{place}", policy, x, WEIGHT)
                x = x.tanh() @ WEIGHT if native and policy is RECOMPUTE else x.t()
            return x

        return checkpointed(function, preserve_rng_state=False)

    def replay_flops(policies):
        x = leaf(8, 8)
        with FlopCounterMode(display=False) as plain:
            torch.autograd.grad(make(policies).__wrapped__(x).sum(), [x, WEIGHT])
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(make(policies)(x).sum(), [x, WEIGHT])
        return counter.get_total_flops() - plain.get_total_flops()

    policies = [SAVE if saved else RECOMPUTE for saved, _ in layers]
    (explanation,) = remat.explain(make(policies))(leaf(8, 8)).regions
    assert explanation.replay_flops == replay_flops(policies)
    for place, told in enumerate(explanation.ops):
        if policies[place] is SAVE or not layers[place][1]:
            flipped = [*policies]
            flipped[place] = RECOMPUTE if policies[place] is SAVE else SAVE
            if policies[place] is SAVE and layers[place][1]:
                continue  # the flipped program would run a product more
            assert told.alternatives[0].flops_change == replay_flops(flipped) - explanation.replay_flops


def test_policy_that_is_not_possible_says_which_consumer_is_in_the_way():
    (explanation,) = remat.explain(region())(leaf(8, 8)).regions
    other, _ = explanation.ops[1].alternatives
    assert "aten.tanh.default at test_explain.py:" in other.error
    assert other.error.endswith("reads mlp/up.out")


def test_function_runs_once_and_gradients_are_not_accumulated():
    calls = []
    module = Mlp()

    def model(x):
        calls.append(1)
        return checkpointed(module)(x).sum()

    explanation = remat.explain(model)(leaf(2, 8))
    assert calls == [1]
    assert all(parameter.grad is None for parameter in module.parameters())
    assert explanation.regions[0].unnamed == 3
    assert explanation.regions[0].replays == 1


def test_training_step_that_runs_backward_itself():
    module = Mlp()

    def step(x):
        checkpointed(module, region_name="mlp")(x).sum().backward()
        return "done"

    (explanation,) = remat.explain(step)(leaf(2, 8)).regions
    assert explanation.replays == 1
    assert all(parameter.grad is not None for parameter in module.parameters())


def drops(x):
    h = op(Noise, "noise", SAVE, torch.dropout(x, 0.5, True))
    return torch.dropout(op(Inner, "inner", RECOMPUTE, h), 0.5, True)


def test_results_random_numbers_and_module_state_are_not_disturbed():
    def function(x):
        h = checkpointed(drops)(x)
        results.append(h.detach())
        return h + torch.rand(())

    results = []
    x = leaf(6, 6)
    torch.manual_seed(5)
    function(x)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    remat.explain(function)(x)
    assert torch.equal(results[0], results[1])
    assert torch.equal(torch.get_rng_state(), state)


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


def test_nested_regions_are_told_apart():
    def outer(x):
        h = op(Both, "a", SAVE, x)
        return checkpointed(lambda h: op(Affine, "b", RECOMPUTE, h, h).exp(), region_name="inner")(h)

    explanation = remat.explain(checkpointed(outer, region_name="outer"))(leaf(4, 4))
    assert [region.name for region in explanation.regions] == ["outer", "inner"]
    outer_told, inner_told = explanation.regions
    assert outer_told.ops[0].tensors[-1].why == "the replay of an inner region reads it"
    assert inner_told.ops[0].alternatives == ()
    assert outer_told.ops[0].alternatives[0].bytes_change == -64


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


def test_ops_of_a_region_inside_another_are_recomputed_by_that_one():
    def inner(x):
        return op(Inner, "r", RECOMPUTE, op(Both, "s", SAVE, x.sin()))

    for around in (
        lambda x: checkpointed(lambda x: checkpointed(inner, region_name="inner")(x.cos()))(x),
        lambda x: torch_checkpoint(lambda x: checkpointed(inner, region_name="inner")(x.cos()), x, use_reentrant=False),
    ):
        regions = remat.explain(around)(leaf(4, 4)).regions
        explained = next(region for region in regions if region.name == "inner")
        assert explained.kept_bytes == 0
        assert {tensor.state for op in explained.ops for tensor in op.tensors} <= {"recomputed", "elided", "not kept"}
        assert explained.ops[0].tensors[-1].why == "the replay of r reads it; the enclosing checkpoint recomputes it"


def test_tensors_that_hooks_around_have_taken_away_are_offloaded():
    away = {}

    def pack(tensor):
        away[len(away)] = tensor.detach()
        return str(len(away) - 1)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda name: away[int(name)]):
        (region,) = remat.explain(checkpointed(lambda x: op(Both, "s", SAVE, x.sin())))(leaf(4, 4)).regions
    assert [tensor.state for tensor in region.ops[0].tensors if tensor.state != "elided"] == ["offloaded", "offloaded"]


def test_region_that_needs_no_gradient_keeps_nothing():
    function = checkpointed(lambda x: op(Inner, "r", RECOMPUTE, op(Both, "s", SAVE, x.sin())), region_name="block")
    explanation = remat.explain(function)(torch.ones(4))
    (region,) = explanation.regions
    assert (region.kept_bytes, region.input_bytes, region.replays) == (0, 0, 0)
    tensors = [tensor for op in region.ops for tensor in op.tensors]
    assert tensors
    assert {(tensor.state, tensor.why) for tensor in tensors} == {("not kept", "no backward of block is to come")}
    assert not any(op.alternatives for op in region.ops)


def test_what_changes_outside_changes_as_in_one_step():
    norm, counter, cache = torch.nn.BatchNorm1d(4), torch.zeros(1), torch.zeros(3, 4)

    def body(x):
        counter.add_(1)
        cache[1].copy_(x.detach()[0])
        return op(Inner, "r", RECOMPUTE, op(Both, "s", SAVE, norm(x)))

    x = leaf(8, 4)
    expected = copy.deepcopy((norm, counter, cache))
    remat.explain(checkpointed(body), alternatives=False)(x)
    once = copy.deepcopy((norm, counter, cache))
    norm, counter, cache = expected
    remat.explain(checkpointed(body))(x)
    assert_same([*once[0].state_dict().values(), *once[1:]], [*norm.state_dict().values(), counter, cache])


def test_regions_of_other_threads_are_not_explained():
    def block(x):
        return op(Inner, "r", RECOMPUTE, op(Both, "s", SAVE, x.sin()))

    def elsewhere():
        checkpointed(block, region_name="elsewhere")(leaf(4, 4) * 2).sum().backward()

    def function(x):
        def with_company(x):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return block(x)

        return checkpointed(with_company, region_name="here")(x)

    explanation = remat.explain(function)(leaf(4, 4) * 2)
    assert [region.name for region in explanation.regions] == ["here"]
    assert all(
        len(op.alternatives) == 2 and not any(one.error for one in op.alternatives) for op in explanation.regions[0].ops
    )


class Layer(nn.Module):
    """Two calls of methods, between plain ops, as in a transformer."""

    def __init__(self, policies):
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 32), nn.Linear(32, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.policies = policies

    def attend(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    def mlp(self, x):
        h = self.up(x)
        return self.down(nn.functional.gelu(h) * h.detach().sigmoid())  # of two like factors one is saved

    def forward(self, x):
        for name, norm in zip(("attend", "mlp"), self.norms, strict=True):
            x = x + remat.op(getattr(self, name), name, policy=self.policies[name])(norm(x))
        return x


@pytest.mark.parametrize("attend", [SAVE, RECOMPUTE])
@pytest.mark.parametrize("mlp", [SAVE, RECOMPUTE])
def test_prices_of_calls_that_name_nothing_are_those_of_a_real_run(attend, mlp):
    layer, x = Layer({"attend": attend, "mlp": mlp}), leaf(2, 4, 8)

    def run(**changed):
        layer.policies = {"attend": attend, "mlp": mlp} | changed
        with FlopCounterMode(display=False) as counter:
            loss = checkpointed(layer, preserve_rng_state=False)(x * 1).sum()
            kept = sum(region.bytes for region in remat.memory_report(loss, layer).regions)
            loss.backward()
        return kept, counter.get_total_flops()

    now = run()
    (told,) = remat.explain(checkpointed(layer, preserve_rng_state=False))(x * 1).regions
    for one in told.ops:
        (other,) = (other for other in one.alternatives if other.policy in ("save", "recompute"))
        kept, flops = run(**{one.name: remat.CheckpointPolicy(other.policy)})
        assert (other.bytes_change, other.flops_change) == (kept - now[0], flops - now[1])


def test_calls_under_a_policy_for_aten_ops_have_no_prices():
    function = checkpointed(Layer({"attend": SAVE, "mlp": RECOMPUTE}), policy=[torch.ops.aten.addmm.default])
    (told,) = remat.explain(function)(leaf(2, 4, 8)).regions
    assert [one.alternatives for one in told.ops] == [(), ()]
