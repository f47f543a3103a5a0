"""``policy & ~save_names(...)``: results that a policy leaves out by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import assert_equal_gradients, leaf
from tests.native_programs import aten, region, replayed_ops, retained_bytes
from tests.offloaders import Counting
from torch_remat import policies


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


def test_bytes_are_those_of_the_rest():
    module, x = Experts(), leaf(3, 4)
    policy = policies.save_matmuls & ~remat.save_names("gate.*")
    both, one, nothing = (retained_bytes(region(p)(module), [x]) for p in (policies.save_matmuls, policy, [aten.cos]))
    assert both - one == one - nothing == 3 * 8 * 4  # each is what replay makes the tanh of


def test_one_of_several_results_is_left_out():
    def function(x):
        return F.layer_norm(x.sin(), [4]).exp().sin()

    policy = [aten.native_layer_norm.default] & ~remat.save_names("native_layer_norm_0_1")
    assert_equal_gradients(function, region(policy)(function), [leaf(3, 4)])
    assert "native_layer_norm_0_1" not in kept(policy, function)


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


@pytest.mark.parametrize("copied", [lambda policy: pickle.loads(pickle.dumps(policy)), copy.deepcopy])
def test_it_says_what_it_is_and_can_be_copied(copied):
    policy = policies.save_matmuls & ~remat.save_names("gate.*", "x") | remat.save_names("y")
    assert repr(copied(policy)) == repr(policy) == "save_matmuls & ~save_names('gate.*', 'x') | save_names('y')"
    assert kept(copied(policies.save_matmuls & ~remat.save_names("gate.*"))) == ["up.addmm_0_0"]
