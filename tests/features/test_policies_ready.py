"""`remat.policies`: the ready-made policies, alone, combined with `|`, and without what `& ~save_names` excludes."""

from __future__ import annotations

import copy
import itertools
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
    """With an odd number of products a counter would alternate from region to region."""
    for _ in range(3):
        x = (x @ w).sin()
    return x


@pytest.mark.parametrize("chain", [sine_chain, odd_chain])
def test_save_every_other_matmul_saves_half_of_them_and_always_the_same(chain):
    inputs, wrap = (leaf(4, 4), leaf(4, 4)), region(policies.save_every_other_matmul)
    for _ in range(3):
        assert replayed_ops(chain, wrap, inputs)["mm"] == (3 if chain is sine_chain else 1)
    for outer in (region(), wrap):

        def nested(x, w, run):
            return run(run(x, w).cos(), w).exp()

        assert_equal_gradients(partial(nested, run=chain), outer(partial(nested, run=wrap(chain))), inputs)


@pytest.mark.parametrize("module", [nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]), TransformerBlock(8, 2)])
def test_save_every_other_matmul_alternates_over_the_whole_region(module):
    """Each module here runs one product, so that a count for each module would save all or none."""
    policy, x = policies.save_every_other_matmul, leaf(2, 4, 8)
    assert_equal_gradients(module, region(policy)(module), [x])
    kept = [row.kept for row in remat.list_names(module, policy=policy)(x) if row.op == "aten.addmm.default"]
    assert kept == [place % 2 == 0 for place in range(len(kept))]
    assert len(kept) >= 4


def test_policy_function_may_ask_a_ready_policy():
    def policy(ctx, op, *args, **kwargs):
        asked = policies.save_every_other_matmul(ctx, op, *args, **kwargs), policies.save_matmuls(ctx, op)
        return asked[0] or (op is aten.sin.default and not asked[1])

    assert replayed_ops(sine_chain, region(policy), (leaf(4, 4), leaf(4, 4))) == {"mm": 3}


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


def sines(ctx, op, *args, **kwargs):
    return op is aten.sin.default


def test_combination_saves_what_either_saves():
    inputs = leaf(4, 4), leaf(4, 4)
    kinds = {"mm": [MM, policies.save_matmuls], "sin": [sines, remat.save_names("sin_*")]}
    pairs = itertools.product([(op, kind) for op in kinds for kind in kinds[op]], repeat=2)
    for (op, left), (other, right) in pairs:
        if {id(left), id(right)} <= {id(MM), id(sines)}:
            continue  # two plain lists are added, two plain functions have no `|`
        assert set(replayed_ops(sine_chain, region(left | right), inputs)) == {"mm", "sin"} - {op, other}, (left, right)


@pytest.mark.parametrize("copied", [lambda policy: pickle.loads(pickle.dumps(policy)), copy.deepcopy])
def test_policies_say_what_they_are_and_can_be_copied(copied):
    for name in policies.__all__:
        assert copied(getattr(policies, name)) is getattr(policies, name)
    policy = policies.save_matmuls | remat.save_names("a.*", "b") | MM | remat.offload_names("c")
    text = "save_matmuls | save_names('a.*', 'b') | [aten.mm.default] | offload_names('c')"
    assert repr(copied(policy)) == repr(policy) == text
    policy = policies.save_matmuls & ~remat.save_names("gate.*", "x") | remat.save_names("y")
    assert repr(copied(policy)) == repr(policy) == "save_matmuls & ~save_names('gate.*', 'x') | save_names('y')"
    assert kept(copied(policies.save_matmuls & WITHOUT_GATE), EXPERTS) == [UP]
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


def kept(policy, function):
    return [row.name for row in remat.list_names(function, policy=policy)(leaf(4, 4)) if row.kept]


def preferred(ctx, op, *args, **kwargs):
    is_one = op is aten.addmm.default
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_SAVE if is_one else None


def in_place(x):
    h = (x @ x).relu_()
    return h.sin() * h


def named(x):
    h = remat.checkpoint_name(x @ x, "hidden")
    return h.sin() * remat.checkpoint_name(h @ x, "other").sin()


def named_late(x):
    return remat.checkpoint_name(x.exp(), "hidden").sin()


def named_call(x):
    h = remat.checkpoint_name(remat.op(torch.exp, "exp")(x), "hidden")
    return h.sin() @ h


EXPERTS, WITHOUT_GATE, UP, SIN = Experts(), ~remat.save_names("gate.*"), "up.addmm_0_0", "sin_0_0"
PRODUCTS = policies.save_matmuls
BY_NAME, SAVE_SIN = remat.save_names("hidden", "other"), [aten.sin.default]
COMBINED = SAVE_SIN | remat.save_names("gate.addmm_*") | PRODUCTS
# A function, a policy, the names that it keeps of the function, and how many products replay runs.
EXCLUDED = {
    "of a list": (EXPERTS, [aten.addmm.default] & WITHOUT_GATE, [UP], 1),
    "of a function that prefers": (EXPERTS, preferred & WITHOUT_GATE, [UP], 1),
    "of names": (EXPERTS, remat.save_names("*.addmm_*") & WITHOUT_GATE, [UP], 1),
    "of what is offloaded": (EXPERTS, remat.offload_names("*.addmm_*") & WITHOUT_GATE, [UP], 1),
    "of a combination": (EXPERTS, COMBINED & WITHOUT_GATE, [UP, SIN], 1),
    "before a list": (EXPERTS, PRODUCTS & WITHOUT_GATE | SAVE_SIN, [UP, SIN], 1),
    "after a list": (EXPERTS, SAVE_SIN | PRODUCTS & WITHOUT_GATE, [UP, SIN], 1),
    "twice": (EXPERTS, COMBINED & WITHOUT_GATE & ~remat.save_names("gate.add*"), [UP, SIN], 1),
    "before its name": (EXPERTS, PRODUCTS & WITHOUT_GATE | remat.save_names(SIN, "gate.addmm_0_0"), [UP, SIN], 1),
    "modified in place": (in_place, PRODUCTS & ~remat.save_names("relu__0_0"), [], 1),
    "before it was modified in place": (in_place, PRODUCTS & ~remat.save_names("mm_0_0"), [], 1),
    "another": (in_place, PRODUCTS & ~remat.save_names("sin_*"), ["relu__0_0"], 0),
    "named by hand": (named, PRODUCTS & ~remat.save_names("hidden"), ["other"], 1),
    "named by hand, by the automatic name": (named, PRODUCTS & ~remat.save_names("mm_0_0"), ["other"], 1),
    "of names by hand": (named, BY_NAME & ~remat.save_names("hidden"), ["other"], 1),
    "of names by hand, by the automatic name": (named, BY_NAME & ~remat.save_names("mm_0_0"), ["other"], 1),
    "named after it was kept": (named_late, [aten.exp.default] & ~remat.save_names("exp_0_0"), [], 0),
    "a call, which is kept as its author says": (named_call, PRODUCTS & ~remat.save_names("hidden"), [], 0),
}  # fmt: skip


@pytest.mark.parametrize("case", EXCLUDED)
def test_what_is_excluded_by_name_is_recomputed_whatever_selects_it(case):
    function, policy, names, products = EXCLUDED[case]
    leaves = [*function.parameters()] if function is EXPERTS else []
    with remat.offload_to(Counting()):
        assert_equal_gradients(function, region(policy)(function), [leaf(4, 4)])
        assert kept(policy, function) == names
        replayed = replayed_ops(function, region(policy), [leaf(4, 4)], leaves)
    assert replayed.get("addmm", 0) + replayed.get("mm", 0) == products
    assert ("exp" in replayed) == (function in (EXPERTS, named_late))


def test_name_that_comes_after_the_result_was_kept_is_an_error():
    with pytest.raises(remat.PolicyError, match=r"'hidden' cannot be excluded.*\n.*'exp_0_0'"):
        region([aten.exp.default] & ~remat.save_names("hidden"))(named_late)(leaf(3))


def test_patterns_of_combinations_that_match_nothing_are_errors():
    for policy, pattern in (
        (policies.save_matmuls & ~remat.save_names("gate.*", "gates.*"), r"'gates.\*'"),
        (policies.save_matmuls | remat.save_names("attention.*"), r"'attention.\*'"),
    ):
        with pytest.raises(remat.PolicyError, match=rf"{pattern} matches nothing that the region made"):
            region(policy)(Experts())(leaf(3, 4))


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
