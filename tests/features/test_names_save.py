"""Names of op outputs, `save_names` and `checkpoint_name`: saving by name."""

from __future__ import annotations

import contextlib
import operator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import (
    Stack,
    assert_clean_state,
    assert_equal_gradients,
    assert_same,
    assert_same_program,
    leaf,
)
from tests.native_programs import Marks, aten, kept, region, replayed_ops, uncollected


def block():
    """Return attention, which draws no random numbers, and an MLP, as `blocks.0` and `blocks.1`."""
    return Stack(depth=1).eval()


def chain(x, w):
    for _ in range(3):
        x = (x @ w).sin()
    return x


def names_of(function, *inputs):
    """Return the names under which a policy sees the ops of a function, in order, each with its op."""
    seen = []

    def policy(ctx, op, *args, **kwargs):
        if not ctx.is_recompute:
            seen.append((ctx.name, op))
        return False

    region(policy)(function)(*inputs)
    return seen


# The automatic names


def test_name_is_path_op_count_and_output():
    names = [name for name, _ in names_of(chain, leaf(4, 4), leaf(4, 4))]
    assert names == ["mm_0_0", "sin_0_0", "mm_1_0", "sin_1_0", "mm_2_0", "sin_2_0"]
    assert replayed_ops(chain, region(remat.save_names("mm_1_0")), (leaf(4, 4), leaf(4, 4)))["mm"] == 2


def test_name_begins_with_the_path_of_the_module_below_the_root_of_the_region():
    stack, x = block(), leaf(2, 3, 8)
    views = {"t", "view", "transpose", "split", "expand", "_unsafe_view"}
    names = [name for name, op in names_of(stack, x) if op.overloadpacket.__name__ not in views]
    assert names == [
        "blocks.0.norm.native_layer_norm_0_0",
        "blocks.0.qkv.addmm_0_0",
        "blocks.0.bmm_0_0",
        "blocks.0.div_0_0",
        "blocks.0._softmax_0_0",
        "blocks.0.bmm_1_0",
        "blocks.0.add_0_0",
        "blocks.1.up.addmm_0_0",
        "blocks.1.gelu_0_0",
        "blocks.1.down.addmm_0_0",
        "blocks.1.add_0_0",
    ]
    assert names_of(stack, x) == names_of(block(), leaf(2, 3, 8))  # the same each time
    inner = [name for name, _ in names_of(stack.blocks[0], x)]
    assert [name for name, _ in names_of(stack, x)][: len(inner)] == [f"blocks.0.{name}" for name in inner]


def test_hooks_an_exception_and_a_second_call_of_a_module_leave_names_as_they_are():
    class Fails(nn.Module):
        def forward(self, x):
            x.cos()
            raise KeyError

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails, self.linear = Fails(), nn.Linear(8, 8)
            self.linear.register_forward_hook(lambda module, args, output: output.tanh())

        def forward(self, x):
            with contextlib.suppress(KeyError):
                self.fails(x)
            return self.linear(self.linear(x).sin())

    names = [name for name, op in names_of(Outer(), leaf(3, 8)) if op is not aten.t.default]
    assert names == [
        "fails.cos_0_0",
        "linear.addmm_0_0",
        "linear.tanh_0_0",
        "sin_0_0",
        "linear.addmm_1_0",
        "linear.tanh_1_0",
    ]


def test_name_of_an_op_in_a_module_outside_of_the_regions_begins_with_its_class():
    outside = nn.Linear(8, 8)
    names = [name for name, op in names_of(lambda x: outside(x.sin()), leaf(3, 8)) if op is not aten.t.default]
    assert names == ["sin_0_0", "Linear.addmm_0_0"]


# Saving by them


@pytest.mark.parametrize(
    ("patterns", "not_again"),
    [
        (["blocks.0.*"], {"bmm", "_softmax", "native_layer_norm"}),
        (["*.gelu_*", "*mm_*"], {"gelu", "bmm", "addmm"}),
        (["*.[ab]*_?_0"], {"addmm", "bmm"}),
        (["*"], {"bmm", "_softmax", "addmm", "gelu", "native_layer_norm", "add", "div"}),
    ],
)
def test_patterns_save_what_they_match(patterns, not_again):
    model, x = block(), leaf(2, 3, 8)
    parameters = list(model.parameters())
    policy = remat.save_names(*patterns)
    assert_equal_gradients(model, region(policy)(model), [x])
    replayed = replayed_ops(model, region(policy), [x], parameters)
    assert not not_again & set(replayed)
    nothing = replayed_ops(model, region(lambda ctx, op, *args, **kwargs: False), [x], parameters)
    for op, count in nothing.items():
        assert replayed.get(op, 0) <= count


# Patterns that match nothing


def test_pattern_that_matches_nothing_is_an_error_with_near_matches():
    for pattern, near in (
        ("bloks.0.*", "blocks.0."),
        ("blocks.0.norm.layer_norm_0_0", "blocks.0.norm.native_layer_norm"),
    ):
        with pytest.raises(remat.RematError) as caught:
            region(remat.save_names("*.addmm_*", pattern), region_name="block")(block())(leaf(2, 3, 8))
        text = str(caught.value)
        assert pattern in text
        assert near in text
        assert caught.value.region == "block"
    assert_clean_state()


def test_error_comes_at_the_end_of_forward_and_frees():
    ran, x, w = [], leaf(4, 4), leaf(4, 4)
    with uncollected(), pytest.raises(remat.RematError, match="nowhere"):
        region(remat.save_names("nowhere.*"))(lambda x: (ran.append(1), chain(x, w))[1])(x)
    assert ran == [1]


def test_patterns_that_are_none_are_an_error():
    for patterns in ((), ("",), (3,), (["mm_*"],)):
        with pytest.raises(remat.PolicyError):
            remat.save_names(*patterns)


# Names by hand


def named(x, w):
    h = remat.checkpoint_name((x @ w).exp(), "hidden")
    return (h * 2).sin()


def test_name_by_hand_outside_of_regions_or_without_a_policy_changes_nothing():
    inputs = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(((inputs[0] @ inputs[1]).exp() * 2).sin().sum(), inputs)
    assert_same(expected, torch.autograd.grad(named(*inputs).sum(), inputs))
    assert_equal_gradients(named, region()(named), inputs)
    assert kept(region()(named), inputs).bytes == 0


def test_name_by_hand_is_saved_by_that_name():
    inputs, marks = (leaf(4, 4), leaf(4, 4)), Marks()
    policy = remat.save_names("hidden")
    assert_equal_gradients(named, region(policy)(named), inputs)
    assert replayed_ops(named, region(policy), inputs) == {"mul": 1}

    def marked(x, w):
        h = remat.checkpoint_name(marks("h", (x @ w).exp()), "hidden")
        return (h * 2).sin()

    after = kept(region(policy)(marked), inputs, marks)
    assert after.names == {"h"}
    assert after.bytes == inputs[0].nbytes


def test_name_by_hand_that_nothing_has_is_an_error():
    with pytest.raises(remat.RematError) as caught:
        region(remat.save_names("hiden"))(named)(leaf(4, 4), leaf(4, 4))
    assert "hiden" in str(caught.value)
    assert "hidden" in str(caught.value)


def test_name_by_hand_that_is_empty_or_no_string_is_an_error():
    for name in ("", None, 3):
        with pytest.raises(remat.UsageError):
            region()(lambda x, name=name: remat.checkpoint_name(x * 2, name))(leaf(3))


def test_name_by_hand_of_an_input_keeps_nothing_more():
    inputs, policy = (leaf(4, 4), leaf(4, 4)), remat.save_names("input")

    def function(x, w):
        return (remat.checkpoint_name(x, "input") @ w).sin()

    assert_equal_gradients(function, region(policy)(function), inputs)
    assert kept(region(policy)(function), inputs).bytes == 0


def test_name_given_to_a_view_keeps_the_whole_as_it_is():
    def program(view):
        def run(wrap):
            x = torch.randn(4, 4, dtype=torch.cfloat, requires_grad=True)

            def function(x):
                h = x @ x
                v = remat.checkpoint_name(view(h), "v")
                v = v if v.is_complex() else torch.view_as_complex(v)
                return (v * 2).sin() + h.exp()[: v.shape[0]]

            y = wrap(function)(x)
            return y, torch.autograd.grad(y.abs().sum(), x)

        return run

    for view in (torch.conj, torch.t, torch.view_as_real, lambda t: t[1:]):
        assert_same_program(program(view), policy=remat.save_names("v"))


def _named(tensor):
    return remat.checkpoint_name(tensor, "act")


def _written_through_a_view(x, w):
    h = x @ w
    h.view(16).relu_()
    return _named(h).sin()


IN_PLACE = {
    "relu": lambda x, w: _named(F.relu(x @ w, inplace=True)).sin(),
    "sigmoid": lambda x, w: _named((x @ w).sigmoid_()).sin() @ w,
    "named view": lambda x, w: _named(F.relu(x @ w, inplace=True)[1:]).sin(),
    "named base": _written_through_a_view,
    "two": lambda x, w: _named((_named((x @ w).exp_()) @ w).tanh_()).sin(),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_name_by_hand_after_an_op_in_place_that_saves_its_own_result(name):
    function, inputs = IN_PLACE[name], (leaf(4, 4), leaf(4, 4))
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    for policy in (remat.save_names("act"), remat.offload_names("act")):
        y = region(policy)(function)(*inputs).sum()
        for keep in (True, False):
            assert_same(expected, torch.autograd.grad(y, inputs, retain_graph=keep))
    if name in ("relu", "sigmoid"):
        assert "mm" not in replayed_ops(function, region(remat.save_names("act")), inputs)
        assert kept(region(remat.save_names("act"))(function), inputs).bytes == inputs[0].nbytes


def _by_helper(ctx):
    return ctx.name.startswith("sin_1")


def test_policy_function_that_reads_names_indirectly_sees_those_of_list_names():
    def block(x):
        return (x.sin().cos().sin().exp() * 2).cos()

    for policy in (
        lambda ctx, op, *args, **kwargs: _by_helper(ctx),
        partial(lambda test, ctx, op, *args, **kwargs: test(ctx), _by_helper),
        lambda ctx, op, *args, **kwargs: getattr(ctx, "name").startswith("sin_1"),  # noqa: B009
        type("Policy", (), {"__call__": lambda self, ctx, op, *args, **kwargs: _by_helper(ctx)})(),
    ):
        remat.checkpoint(policy=policy)(block)(leaf(3)).sum().backward()
        table = remat.list_names(block, policy=policy)(leaf(3))
        assert [row.name for row in table if row.kept] == ["sin_1_0"]


def test_names_that_code_out_of_sight_reads_are_an_error():
    readers = {"it": operator.attrgetter("name")}
    with pytest.raises(remat.PolicyError, match="was not found in time"):
        remat.checkpoint(policy=lambda ctx, op, *_, **__: bool(readers["it"](ctx)))(torch.sin)(leaf(3))
