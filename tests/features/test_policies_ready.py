"""`remat.policies`: the ready-made policies, alone, combined with `|`, and without what `& ~save_names` excludes."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat
from tests.helpers import assert_equal_gradients, leaf
from tests.native_programs import (
    ATTENTION,
    MATMULS,
    TransformerBlock,
    aten,
    region,
    replayed_ops,
    retained_bytes,
)
from tests.offloaders import Counting
from torch_remat import policies

MM = [aten.mm.default]
VIEWS = Counter(_unsafe_view=99)
"""As which the result of a linear ends, which is an op of its own or, by function from torch 2.15 on, none."""


def sine_chain(x, w):
    """Six times a matmul and a sine."""
    for _ in range(6):
        x = (x @ w).sin()
    return x


# Each alone


@pytest.mark.parametrize(
    ("policy", "ops", "retained"),
    [(policies.save_attention, ATTENTION, 1_056_768), (policies.save_matmuls, MATMULS, 4_718_592)],
)
def test_ready_policy_is_the_list_of_its_ops(policy, ops, retained):
    x, block = leaf(2, 8, 16), TransformerBlock(16, 2)
    parameters = list(block.parameters())
    assert_equal_gradients(block, region(policy)(block), [x])
    by_function, by_op = (Counter(replayed_ops(block, region(one), [x], parameters)) for one in (policy, ops))
    assert by_function - VIEWS == by_op - VIEWS
    assert retained_bytes(region(policy)(TransformerBlock()), [leaf(4, 128, 256)]) == retained


def test_save_matmuls_saves_products_of_every_form():
    def function(x, w):
        b = x.expand(2, 4, 4)
        products = [x @ w, torch.addmm(x, x, w), torch.bmm(b, b * 2), torch.baddbmm(b, b, b)]
        products += [b @ w, F.linear(b, w, x[0]), torch.linalg.matmul(x, w), torch.inner(x, w)]
        return sum(y.sin().exp().sum() for y in products)

    inputs, wrap = (leaf(4, 4), leaf(4, 4)), region(policies.save_matmuls)
    assert_equal_gradients(function, wrap(function), inputs)
    assert not {"mm", "addmm", "bmm", "baddbmm"} & set(replayed_ops(function, wrap, inputs))


def odd_chain(x, w):
    for _ in range(3):
        x = (x @ w).sin()
    return x


def test_save_every_other_matmul_saves_half_of_them_and_always_the_same():
    """With an odd number of products a counter would alternate from region to region."""
    inputs, wrap = (leaf(4, 4), leaf(4, 4)), region(policies.save_every_other_matmul)
    assert_equal_gradients(sine_chain, wrap(sine_chain), inputs)
    for _ in range(3):
        assert replayed_ops(sine_chain, wrap, inputs)["mm"] == 3
        assert replayed_ops(odd_chain, wrap, inputs)["mm"] == 1


def test_save_every_other_matmul_alternates_over_the_whole_region():
    """Each module here runs one product, so that a count for each module would save all or none."""
    asked = []

    def policy(ctx, op, *args, **kwargs):
        if (said := policies.save_every_other_matmul(ctx, op, *args, **kwargs)) or policies.save_matmuls(ctx, op):
            asked.append(said)
        return said

    for module in (nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), TransformerBlock(8, 2)):
        asked.clear()
        x = leaf(2, 4, 8)
        assert_equal_gradients(module, region(policies.save_every_other_matmul)(module), [x])
        region(policy)(module)(x).sum().backward()
        assert len(asked) >= 4
        assert asked == [place % 2 == 0 for place in range(len(asked))]
        table = remat.list_names(module, policy=policies.save_every_other_matmul)(x)
        assert any(row.kept for row in table)


def test_save_every_other_matmul_counts_anew_in_the_replay_of_an_outer_region():
    inner = region(policies.save_every_other_matmul)(odd_chain)

    def outer(x, w):
        return inner(inner(x, w).cos(), w).exp()

    inputs = leaf(4, 4), leaf(4, 4)
    for wrap in (region(), region(policies.save_every_other_matmul)):
        assert_equal_gradients(lambda x, w: odd_chain(odd_chain(x, w).cos(), w).exp(), wrap(outer), inputs)


CHOICES = {
    "topk": lambda h, flat: h.topk(2)[0],
    "sort": lambda h, flat: h.sort(-1)[0],
    "argsort": lambda h, flat: h.gather(-1, flat.argsort(-1)),
    "argmax": lambda h, flat: h[flat.argmax(-1)],
    "argmin": lambda h, flat: h[flat.argmin(-1)],
    "unique": lambda h, flat: h * torch.unique((flat > 0).long(), return_inverse=True)[1],
    "nonzero": lambda h, flat: h[(flat > 0).nonzero(as_tuple=True)],
}


@pytest.mark.parametrize("op", CHOICES)
def test_save_discrete_does_not_choose_again(op):
    def function(x):
        h = x * 2
        return CHOICES[op](h, h.detach()).sin().exp()

    x, wrap = leaf(4, 4), region(policies.save_discrete)
    replayed = replayed_ops(function, wrap, [x])
    assert not {*CHOICES, "_unique2"} & set(replayed), replayed
    assert_equal_gradients(function, wrap(function), [x])


# Combined


def test_combination_saves_what_either_saves():
    x, block = leaf(2, 8, 16), TransformerBlock(16, 2)
    parameters = list(block.parameters())
    ways = policies.save_attention | policies.save_matmuls, policies.save_matmuls | policies.save_attention
    for policy in (*ways, ATTENTION + MATMULS):
        ran = Counter(replayed_ops(block, region(policy), [x], parameters)) - VIEWS
        assert set(ran) == {"native_layer_norm", "add", "gelu"}
        assert ran == Counter(replayed_ops(block, region(ways[0]), [x], parameters)) - VIEWS


def sines(ctx, op, *args, **kwargs):
    return op is aten.sin.default


def test_policies_of_every_kind_combine():
    inputs = leaf(4, 4), leaf(4, 4)
    kinds = {
        "list": MM,
        "function": sines,
        "names": remat.save_names("sin_*"),
        "ready": policies.save_matmuls,
    }
    saved = {"list": {"mm"}, "function": {"sin"}, "names": {"sin"}, "ready": {"mm"}}
    for left in kinds:
        for right in kinds:
            if not {left, right} & {"names", "ready"}:
                continue  # two plain lists are added, two plain functions have no `|`
            replayed = set(replayed_ops(sine_chain, region(kinds[left] | kinds[right]), inputs))
            assert replayed == {"mm", "sin"} - saved[left] - saved[right], (left, right)


def test_combination_with_something_else_is_an_error():
    with pytest.raises(TypeError):
        policies.save_matmuls | 3
    with pytest.raises(TypeError):
        "mm" | policies.save_matmuls
    with pytest.raises(remat.RematError, match="attention"):
        region(policies.save_matmuls | remat.save_names("attention.*"))(sine_chain)(leaf(4, 4), leaf(4, 4))


@pytest.mark.parametrize("copied", [lambda policy: pickle.loads(pickle.dumps(policy)), copy.deepcopy])
def test_policies_say_what_they_are_and_can_be_copied(copied):
    for name in policies.__all__:
        assert copied(getattr(policies, name)) is getattr(policies, name)
    policy = policies.save_matmuls | remat.save_names("a.*", "b") | MM | remat.offload_names("c")
    text = "save_matmuls | save_names('a.*', 'b') | [aten.mm.default] | offload_names('c')"
    assert repr(copied(policy)) == repr(policy) == text
    policy = policies.save_matmuls & ~remat.save_names("gate.*", "x") | remat.save_names("y")
    assert repr(copied(policy)) == repr(policy) == "save_matmuls & ~save_names('gate.*', 'x') | save_names('y')"
    assert kept(copied(policies.save_matmuls & ~remat.save_names("gate.*"))) == ["up.addmm_0_0"]
    inputs, policy = (leaf(4, 4), leaf(4, 4)), policies.save_matmuls | [aten.sin.default]
    assert replayed_ops(sine_chain, region(copied(policy)), inputs) == replayed_ops(sine_chain, region(policy), inputs)


# Without results that are excluded by name


class Experts(nn.Module):
    """A gate and a layer, each a product under an activation that saves its own result."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 8)
        self.up = nn.Linear(4, 8)

    def forward(self, x):
        return (self.gate(x).tanh() * self.up(x).tanh()).sin().exp()


def preferred(ctx, op, *args, **kwargs):
    is_one = op is aten.addmm.default
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_SAVE if is_one else None


POLICIES = {
    "list": [aten.addmm.default],
    "weak function": preferred,
    "names": remat.save_names("*.addmm_*"),
    "offloaded": remat.offload_names("*.addmm_*"),
    "combined": [aten.sin.default] | remat.save_names("gate.addmm_*") | policies.save_matmuls,
}
GATE = "gate.addmm_0_0"


def kept(policy, function=None):
    inputs = leaf(3, 4) if function is None else leaf(4, 4)
    table = remat.list_names(function or Experts(), policy=policy)(inputs)
    return [row.name for row in table if row.kept]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_left_out_runs_again_whatever_kind_the_policy_is(policy):
    module, x = Experts(), leaf(4, 4)
    leaves = list(module.parameters())
    without = policy & ~remat.save_names("gate.*")
    with remat.offload_to(Counting()):
        assert_equal_gradients(module, region(without)(module), [x])
        everything, some = ({*kept(one, module)} for one in (policy, without))
        assert everything - some == {GATE}
        assert some
        assert [replayed_ops(module, region(one), [x], leaves).get("addmm", 0) for one in (policy, without)] == [0, 1]


@pytest.mark.parametrize(
    "policy",
    [
        policies.save_matmuls & ~remat.save_names("gate.*") | [aten.sin.default],
        [aten.sin.default] | policies.save_matmuls & ~remat.save_names("gate.*"),
        ([aten.sin.default] | policies.save_matmuls) & ~remat.save_names("gate.*") & ~remat.save_names("gate.add*"),
        policies.save_matmuls & ~remat.save_names("gate.*") | remat.save_names("sin_0_0", GATE),
    ],
    ids=repr,
)
def test_leaving_out_is_the_strongest_decision_wherever_it_stands(policy):
    assert kept(policy) == ["up.addmm_0_0", "sin_0_0"]


def test_what_was_modified_in_place_is_left_out():
    def function(x):
        h = (x @ x).relu_()
        return h.sin() * h

    for pattern, found in (("relu__0_0", []), ("mm_0_0", []), ("sin_*", ["relu__0_0"])):
        policy = policies.save_matmuls & ~remat.save_names(pattern)
        assert_equal_gradients(function, region(policy)(function), [leaf(4, 4)])
        assert kept(policy, function) == found


def named(x):
    h = remat.checkpoint_name(x @ x, "hidden")
    return h.sin() * remat.checkpoint_name(h @ x, "other").sin()


@pytest.mark.parametrize("left_out", ["hidden", "mm_0_0"])
@pytest.mark.parametrize("policy", [policies.save_matmuls, remat.save_names("hidden", "other")])
def test_names_by_hand_and_automatic_ones_are_left_out(policy, left_out):
    without = policy & ~remat.save_names(left_out)
    assert_equal_gradients(named, region(without)(named), [leaf(4, 4)])
    assert kept(without, named) == ["other"]
    assert replayed_ops(named, region(without), [leaf(4, 4)])["mm"] == 1


def test_name_that_comes_after_the_result_was_kept_is_an_error():
    def function(x):
        return remat.checkpoint_name(x.exp(), "hidden").sin()

    with pytest.raises(remat.PolicyError, match=r"'hidden' cannot be excluded.*\n.*'exp_0_0'"):
        region([aten.exp.default] & ~remat.save_names("hidden"))(function)(leaf(3))
    policy = [aten.exp.default] & ~remat.save_names("exp_0_0")
    assert_equal_gradients(function, region(policy)(function), [leaf(3)])
    assert kept(policy, function) == []


def test_calls_are_kept_as_their_author_says():
    def function(x):
        h = remat.checkpoint_name(remat.op(torch.exp, "exp")(x), "hidden")
        return h.sin() @ h

    policy = policies.save_matmuls & ~remat.save_names("hidden")
    assert_equal_gradients(function, region(policy)(function), [leaf(4, 4)])
    assert "exp" not in replayed_ops(function, region(policy), [leaf(4, 4)])


def test_pattern_that_matches_nothing_is_an_error():
    policy = policies.save_matmuls & ~remat.save_names("gate.*", "gates.*")
    with pytest.raises(remat.PolicyError, match=r"'gates.\*' matches nothing that the region made"):
        region(policy)(Experts())(leaf(3, 4))


def test_other_forms_are_errors_and_ours_show_the_right_one():
    for make in (
        lambda: remat.checkpoint(policy=~remat.save_names("a")),
        lambda: policies.save_matmuls | ~remat.save_names("a"),
        lambda: ~remat.save_names("a") | policies.save_matmuls,
        lambda: remat.save_names("b") & ~remat.offload_names("a"),
        lambda: 3 & ~remat.save_names("a"),
    ):
        with pytest.raises(remat.PolicyError, match=r"policy & ~remat.save_names"):
            make()
    for make in (
        lambda: policies.save_matmuls & remat.save_names("a"),
        lambda: ~policies.save_matmuls,
        lambda: ~~remat.save_names("a"),
    ):
        with pytest.raises(TypeError):
            make()


class TestOfPoliciesThatSelectNothing:
    """Each is told once, with what it may have been meant to select."""

    pytestmark = pytest.mark.filterwarnings("error::torch_remat.RematWarning")

    @staticmethod
    def encoder(policy, dropout=0.1):
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        remat.checkpoint_modules(model, "layers.*", policy=policy)
        return model

    @pytest.mark.parametrize("policy", [policies.save_attention | [aten._scaled_dot_product_flash_attention]])
    def test_attention_with_dropout_on_a_cpu_is_told_once_with_two_remedies(self, policy):
        model, x = self.encoder(policy), torch.randn(2, 4, 16)
        match = r"layers\.0: the policy .*save_attention.* selected nothing.*remat\.op\(attention.*self_attn\.\*"
        with pytest.warns(remat.RematWarning, match=match) as caught:
            losses = [model(x).square().mean() for _ in range(2)]
        assert [one.filename for one in caught] == [__file__]
        report = remat.memory_report(losses[1])
        assert {region.idle_policy for region in report.regions} == {repr(policy)}
        assert f"policy: {policy!r}, selected nothing" in str(report)

    def test_the_remedies_select_something(self):
        model, x = self.encoder(remat.save_names("self_attn.*")), torch.randn(2, 4, 16)
        report = remat.memory_report(model(x).square().mean())
        assert any(tensor.policy == "save" for tensor in report.regions[0].tensors)
        model = self.encoder(policies.save_attention)
        for layer in model.layers:
            layer.self_attn.forward = remat.op(layer.self_attn.forward, "attention")
        report = remat.memory_report(model(x).square().mean())
        assert "selected nothing" not in str(report)

    def test_an_op_of_a_near_name_that_ran_is_told(self):
        region = remat.checkpoint(region_name="block", policy=[aten.mm.default, aten.relu])(nn.Linear(4, 4))
        match = r"block: the policy \[aten.mm.default, aten.relu\] selected nothing.*Ops that ran here: addmm, t\."
        with pytest.warns(remat.RematWarning, match=match):
            region(torch.randn(2, 4))

    def test_lists_that_a_library_makes_anew_for_each_call_are_told_once(self):
        make = partial(create_selective_checkpoint_contexts, [aten.mm.default])
        sine = partial(remat.drop_in(), torch.sin, use_reentrant=False, context_fn=make)
        with pytest.warns(remat.RematWarning, match="selected nothing") as caught:
            _ = [sine(torch.ones(2, requires_grad=True)) for _ in range(2)]
        assert len(caught) == 1

    @pytest.mark.parametrize(
        "policy",
        [
            lambda ctx, op, *args, **kwargs: False,
            policies.save_discrete,
            policies.never_replay_effects,
            policies.save_collectives,
            policies.save_attention | policies.save_matmuls,
            policies.save_attention | policies.save_discrete,
            policies.save_attention | remat.save_names("linear1.*"),
            [aten.addmm],
        ],
    )
    def test_functions_guards_and_what_is_combined_with_something_that_selects_are_not_told(self, policy):
        loss = self.encoder(policy)(torch.randn(2, 4, 16)).square().mean()
        assert "selected nothing" not in str(remat.memory_report(loss))
