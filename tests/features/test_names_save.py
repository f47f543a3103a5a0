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
from tests.helpers import Calls, Stack, assert_equal_gradients, assert_same, leaf
from tests.native_programs import kept, region, replayed_ops, uncollected
from tests.ways import nothing


def block():
    """Return attention, which draws no random numbers, and an MLP, as `blocks.0` and `blocks.1`."""
    return Stack(depth=1).eval()


# The automatic names


class Fails(nn.Module):
    def forward(self, x):
        x.cos()
        raise KeyError


class Outer(nn.Module):
    """Catches an exception of a child, and runs another child twice, which has a hook."""

    def __init__(self):
        super().__init__()
        self.fails, self.linear = Fails(), nn.Linear(8, 8)
        self.linear.register_forward_hook(lambda module, args, output: output.tanh())

    def forward(self, x):
        with contextlib.suppress(KeyError):
            self.fails(x)
        return self.linear(self.linear(x).sin())


def chain(x):
    for _ in range(2):
        x = (x[0] @ x[1]).sin()[None].expand(2, 8, 8)
    return x


OUTSIDE = nn.Linear(8, 8)
OF_ATTENTION = ["norm.native_layer_norm_0_0", "qkv.addmm_0_0", "bmm_0_0", "div_0_0", "_softmax_0_0", "bmm_1_0"]
OF_ATTENTION += ["add_0_0"]
OF_MLP = ["up.addmm_0_0", "gelu_0_0", "down.addmm_0_0", "add_0_0"]
OF_OUTER = ["fails.cos_0_0", "linear.addmm_0_0", "linear.tanh_0_0", "sin_0_0", "linear.addmm_1_0", "linear.tanh_1_0"]
NAMES = {
    "op, count and output": (lambda: chain, ["mm_0_0", "sin_0_0", "mm_1_0", "sin_1_0"]),
    "modules": (block, [f"blocks.{at}.{name}" for at, names in enumerate((OF_ATTENTION, OF_MLP)) for name in names]),
    "a module of them, which is the root": (lambda: block().blocks[0], OF_ATTENTION),
    "an exception, a second call and a hook": (Outer, OF_OUTER),
    "a module that no region contains": (lambda: lambda x: OUTSIDE(x.sin()), ["sin_0_0", "Linear.addmm_0_0"]),
}
VIEWS = {"t", "view", "transpose", "split", "expand", "_unsafe_view", "select", "unsqueeze"}


@pytest.mark.parametrize("case", NAMES)
def test_name_is_path_op_count_and_output_each_time(case):
    make, names = NAMES[case]
    seen = []

    def policy(ctx, op, *args, **kwargs):
        if not ctx.is_recompute and op.overloadpacket.__name__ not in VIEWS:
            seen.append(ctx.name)
        return False

    for _ in range(2):
        region(policy)(make())(leaf(2, 8, 8))
    assert seen == 2 * names


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
    recomputed = replayed_ops(model, region(nothing), [x], parameters)
    for op, count in recomputed.items():
        assert replayed.get(op, 0) <= count


# Names by hand


def named(x, w):
    h = remat.checkpoint_name((x @ w).exp(), "hidden")
    return (h * 2).sin()


def named_input(x, w):
    return (remat.checkpoint_name(x, "input") @ w).sin()


@pytest.mark.parametrize(
    ("function", "policy", "tensors"),
    [
        (named, None, 0),
        (named, remat.save_names("hidden"), 1),
        (named_input, remat.save_names("input"), 0),
    ],
)
def test_name_by_hand_is_saved_by_that_name_alone(function, policy, tensors):
    inputs = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(((inputs[0] @ inputs[1]).exp() * 2).sin().sum(), inputs)
    assert_same(expected, torch.autograd.grad(named(*inputs).sum(), inputs))  # outside of regions
    assert_equal_gradients(function, region(policy)(function), inputs)
    assert kept(region(policy)(function), inputs).bytes == tensors * inputs[0].nbytes
    if tensors:
        assert replayed_ops(function, region(policy), inputs) == {"mul": 1}


def _named(tensor):
    return remat.checkpoint_name(tensor, "act")


def _written_through_a_view(x, w):
    h = x @ w
    h.view(16).relu_()
    return _named(h).sin()


def _view(view):
    """Return a function that names a view of a result, of which all is read."""

    def function(x, w):
        h = torch.complex(x @ w, w)
        return torch.view_as_real(h.exp()).sum(-1) + _named(view(h)).abs().sin().sum()

    return function


NAMED = {
    "relu": lambda x, w: _named(F.relu(x @ w, inplace=True)).sin(),
    "sigmoid": lambda x, w: _named((x @ w).sigmoid_()).sin() @ w,
    "a view after it": lambda x, w: _named(F.relu(x @ w, inplace=True)[1:]).sin(),
    "written through a view": _written_through_a_view,
    "two": lambda x, w: _named((_named((x @ w).exp_()) @ w).tanh_()).sin(),
    "conjugate": _view(torch.conj),
    "transposed": _view(torch.t),
    "as real": _view(torch.view_as_real),
    "rows": _view(lambda h: h[1:]),
}


@pytest.mark.parametrize("name", NAMED)
def test_name_by_hand_of_a_view_or_what_an_op_in_place_left(name):
    function, inputs = NAMED[name], (leaf(4, 4), leaf(4, 4))
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    for policy in (remat.save_names("act"), remat.offload_names("act")):
        y = region(policy)(function)(*inputs).sum()
        for keep in (True, False):
            assert_same(expected, torch.autograd.grad(y, inputs, retain_graph=keep))
    if name in ("relu", "sigmoid"):
        assert "mm" not in replayed_ops(function, region(remat.save_names("act")), inputs)
        assert kept(region(remat.save_names("act"))(function), inputs).bytes == inputs[0].nbytes


# Errors


@pytest.mark.parametrize(
    ("function", "pattern", "near"),
    [
        (block(), "bloks.0.*", "blocks.0."),
        (block(), "blocks.0.norm.layer_norm_0_0", "blocks.0.norm.native_layer_norm"),
        (lambda x: named(x[0], x[1]), "hiden", "hidden"),
    ],
)
def test_pattern_that_matches_nothing_is_an_error_with_near_matches(function, pattern, near):
    ran = Calls(function)
    with uncollected(), pytest.raises(remat.RematError) as caught:
        region(remat.save_names("*mm_*", pattern), region_name="block")(ran)(leaf(2, 8, 8))
    assert pattern in str(caught.value)
    assert near in str(caught.value)
    assert caught.value.region == "block"
    assert ran.total == 1, "it comes at the end of forward"


# Policy functions that read names


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
