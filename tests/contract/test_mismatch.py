"""Replays that differ from forward: other ops, other shapes, other parameters, other calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, STYLES, Both, Trace, call
from tests.helpers import (
    assert_same,
    chain,
    checkpointed,
    leaf,
    pairwise,
)
from torch_remat.dispatch.region import replay as filling


def differing(forward, replay):
    """Return a function that does one thing in forward and another in replay."""

    def block(*args):
        return (replay if remat.is_recomputing() else forward)(*args)

    return block


def raised(block, *args, error=remat.MismatchError, **options):
    """Run a region and its backward; return the error that backward must raise."""
    y = checkpointed(block, region_name="block", **options)(*args)
    with pytest.raises(error) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert "block" in str(caught.value)
    assert not remat.is_recomputing()
    x = leaf(3)
    assert_same(torch.autograd.grad(checkpointed(chain)(x).sum(), x), torch.autograd.grad(chain(x).sum(), x))
    return caught.value


def position(error):
    """Return the number in the name of the tensor that an error is about."""
    found = re.search(r"\d+", error.tensor or "")
    assert found, f"no position in {error.tensor!r}"
    return int(found.group())


def sines(count, dtype=None, shape=None, at=None):
    """Return a function of `count` sines, whose value changes dtype or shape before sine number `at`."""

    def block(x):
        for index in range(count):
            if index == at:
                x = x.to(dtype) if dtype else x.expand(shape)
            x = x.sin()
        return x

    return block


@pytest.mark.parametrize("early_stop", [True, False])
def test_replay_that_saves_another_number_of_tensors_raises_and_tells_a_count(early_stop):
    for forward, replay in [(3, 2), (3, 0), (1, 0), (10, 9), *([] if early_stop else [(2, 3), (1, 5)])]:
        error = raised(differing(sines(forward), sines(replay)), leaf(3), early_stop=early_stop)
        numbers = {int(number) for number in re.findall(r"\d+", str(error))}
        assert numbers & {forward, replay}


def test_replay_that_saves_more_tensors_after_the_last_needed_one_is_right_under_early_stop():
    x = leaf(3)
    checkpointed(differing(sines(2), sines(4)))(x).sum().backward()
    assert_same(x.grad, torch.autograd.grad(x.sin().sin().sum(), x)[0])


@pytest.mark.parametrize("at", [0, 1, 3])
def test_replay_with_another_dtype_shape_or_device_raises_with_the_position(at):
    for change, told in [({"dtype": torch.float64}, "float64"), ({"shape": (7, 5)}, r"7\D+5")]:
        error = raised(differing(sines(4), sines(4, **change, at=at)), leaf(5))
        first = raised(differing(sines(4), sines(4, **change, at=0)), leaf(5))
        assert position(error) - position(first) == at
        assert re.search(told, str(error))
        assert "float32" in str(error)
    raised(differing(lambda x: (x * torch.ones(3)).sin(), lambda x: (x * torch.ones(3, device="meta")).sin()), leaf(3))


def first(h):
    return h[:4]


def other_view(one, other):
    """Return a block that takes one view in forward and another in replay, of a result, an argument or a weight."""

    def take(tensor):
        return (other if remat.is_recomputing() else one)(tensor)

    return {
        "result": lambda x, w: (take(x.sin()) @ w[:4, :4]).sin(),
        "argument": lambda x, w: (take(x) @ w[:4, :4]).sin(),
        "argument in an op of its own": lambda x, w: take(x).sin().sin(),
        "weight": lambda x, w: (x[:4, :4].sin() @ take(w)).sin(),
        "constant": lambda x, w: (x[:4, :4] * take(torch.ones(8, 4))).sin(),
    }


OTHER_VIEWS = {
    "transposed": (first, lambda h: h[:4].t()),
    "another part": (first, lambda h: h[4:]),
    "with other strides": (first, lambda h: h[::2]),
    "not transposed": (lambda h: h[:4].t(), first),
}


@pairwise(
    name=OTHER_VIEWS,
    place=other_view(first, first),
    policy=[None, [torch.ops.aten.mm.default], lambda ctx, op, *args, **kwargs: False],
)
def test_replay_that_takes_another_view_of_the_same_shape_is_an_error(name, place, policy):
    x, w = leaf(8, 4), nn.Parameter(torch.randn(8, 4))
    y = checkpointed(other_view(*OTHER_VIEWS[name])[place], region_name="block", policy=policy)(x, w)
    with pytest.raises(remat.MismatchError):
        y.sum().backward()


def test_another_view_is_an_error_that_shows_both():
    error = raised(other_view(lambda h: h, lambda h: h.t())["argument"], leaf(4, 4), leaf(4, 4))
    assert "a whole tensor here, but replay saved a view with strides" in str(error)


@pytest.mark.parametrize("policy", [None, [torch.ops.aten.sin.default]], ids=["plain", "policy"])
@pytest.mark.parametrize("differs", ["op", "dtype", "layout"])
def test_error_names_the_line_that_does_otherwise_in_replay(differs, policy):
    odd = {"op": torch.sigmoid, "dtype": torch.Tensor.double, "layout": torch.t}[differs]

    def other(x):
        return odd(x.exp()).sin()  # this line

    text = str(raised(differing(lambda x: x.exp().sin(), other), leaf(4, 4), policy=policy))
    assert f"at {Path(__file__).name}:{other.__code__.co_firstlineno + 1}" in text


# --- Which check notices what; docs/limits.md says the same.

one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
weight = torch.randn(4, 4)

# What differs: how the function goes on from x, in forward and in replay.
NOTICED = {
    "fewer saved tensors": (lambda x: x.exp().sin().cos(), lambda x: x.exp().sin()),
    "another op, which saves its result": (lambda x: x.sigmoid(), lambda x: x.exp()),
    "another op before one that saves its argument": (lambda x: x.sin().cos().tan(), lambda x: x.sin().tanh().tan()),
    "another parameter": (lambda x: one(x).exp(), lambda x: other(x).exp()),
    # These change a value that backward reads, and no description of one.
    "another scalar": (lambda x: (x * 2).exp(), lambda x: (x * 3).exp()),
    "another tensor that the region makes": (
        lambda x: (x * weight.t().clone()).exp(),
        lambda x: (x * weight.clone()).exp(),
    ),
    "other arguments in the same order of ops": (
        lambda x: (x.sin() - x.cos()).exp(),
        lambda x: (x.cos() - x.sin()).exp(),
    ),
    "sin becomes cos before an op that saves its result": (lambda x: x.sin().exp(), lambda x: x.cos().exp()),
}
# These change nothing that backward reads: the gradients are those of forward.
HARMLESS = {
    "sin becomes cos, the last op": (lambda x: x.exp().sin(), lambda x: x.exp().cos()),
    "other ops after the last saved tensor": (lambda x: x.exp() + 1, lambda x: x.exp() - 1),
}
CHECKS = {
    "default": {},
    "bitwise": {"determinism_check": "bitwise"},
    "policy": {"policy": lambda *_, **__: False},
}


def gradient(function, x, **options):
    y = remat.checkpoint(**options)(lambda x: function(x))(x)
    return torch.autograd.grad(y.sum(), x)[0]


@pairwise(check=CHECKS, name=[*NOTICED, *HARMLESS])
def test_difference_is_noticed_as_the_limits_say(name, check):
    forward, replay = (NOTICED | HARMLESS)[name]
    x = leaf(4, 4)
    function = differing(forward, replay)
    if name in NOTICED:
        with pytest.raises(remat.MismatchError):
            gradient(function, x, **CHECKS[check])
        return
    expected = torch.autograd.grad(forward(x).sum(), x)[0]
    assert torch.equal(gradient(function, x, **CHECKS[check]), expected)


def test_native_region_compares_its_ops():
    inside = differing(torch.sin, torch.cos)
    with pytest.raises(remat.MismatchError, match=r"forward ran aten\.sin\.default.*replay ran aten\.cos\.default"):
        gradient(lambda x: remat.native_save_region("op", lambda x: inside(x).exp(), x).sin().exp(), leaf(4, 4))


# --- Calls that differ, in a region or in regions inside it

OFFLOAD = remat.CheckpointPolicy.OFFLOAD
A, B, C = ("a", SAVE), ("b", SAVE), ("c", SAVE)
AR, BR, CR = ("a", RECOMPUTE), ("b", RECOMPUTE), ("c", RECOMPUTE)

# What runs in forward, what in replay, and the op that the error names.
CALLS_THAT_DIFFER = {
    "policy to recompute": ([A, BR], [AR, BR], "a"),
    "policy to save": ([AR, BR], [A, BR], "a"),
    "policy to offload": ([A, B], [A, ("b", OFFLOAD)], "b"),
    "names swapped": ([A, B, CR], [B, A, CR], "b"),
    "names of saved ones swapped": ([A, B, C], [B, A, C], "b"),
    "first saved one is missing": ([A, B, C], [B, C], "b"),
    "another name": ([A, B], [A, C], "c"),
    "first is missing": ([A, B, CR], [B, CR], "b"),
    "recomputed one is new": ([A, C], [A, BR, C], "b"),
    # Where the last one is missing or new, replay shows it at its end alone.
    "last is missing": ([A, B], [A], None),
    "last is new": ([A], [A, B], "b"),
    "only one is new": ([], [AR], "a"),
}


def run_ops(style, ops, x):
    """Run calls, given as `(name, policy)`, one after another."""
    for name, policy in ops:
        if style == "op":
            x = remat.op(lambda h: h.sin().exp(), name, policy=policy)(x)
        elif style == "native":
            x = remat.native_save_region(name, lambda h: h.sin().exp(), x)
        else:
            x = call(style, Both, Trace(), name, policy, x)
    return x


def are_saved(name, style, **_):
    """Return whether all calls are of the kind that native regions are."""
    return style != "native" or {policy for ops in CALLS_THAT_DIFFER[name][:2] for _, policy in ops} == {SAVE}


@pairwise(name=CALLS_THAT_DIFFER, style=[*STYLES, "op", "native"], early_stop=[True, False], possible=are_saved)
def test_op_that_differs_in_replay_is_an_error_that_names_it(name, style, early_stop):
    forward, replay, op = CALLS_THAT_DIFFER[name]

    def block(x):
        return run_ops(style, replay if remat.is_recomputing() else forward, x.sin()), x.cos().exp()

    x = leaf(3)
    y, z = checkpointed(block, region_name="block", early_stop=early_stop)(x)
    with pytest.raises(remat.MismatchError) as caught:
        (y.sum() + z.sum()).backward()
    assert x.grad is None
    assert caught.value.region == "block"
    assert caught.value.op == op or op is None
    assert (op or forward[-1][0]) in str(caught.value)
    assert not remat.is_recomputing()


@pytest.mark.parametrize("name", ["names swapped", "policy to save"])
def test_call_that_differs_in_the_replay_of_an_inner_region_is_an_error_that_names_it(name):
    """It is the run after those of the enclosing regions; it need not come to the last call."""
    forward, replay, op = CALLS_THAT_DIFFER[name]
    runs = []

    def block(x):
        runs.append(None)
        return run_ops("auto", replay if len(runs) == 4 else forward, x.cos())

    def level(x, left):
        inner = checkpointed(level)(x.sin(), left - 1) if left else checkpointed(block, region_name="inner")(x.sin())
        return inner.exp().cos()

    with pytest.raises(remat.MismatchError) as caught:
        checkpointed(level)(leaf(3), 1).sum().backward()
    assert (caught.value.region, caught.value.op) == ("inner", op)


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_replay_that_does_not_fill_what_backward_needs_is_an_error_and_not_repeated_for_ever(monkeypatch, keeps_graph):
    replays = []
    monkeypatch.setattr(filling.Filling, "replay", lambda self: replays.append(self))
    y = checkpointed(lambda x: x.sin().exp(), region_name="block")(leaf(4))
    with pytest.raises(remat.MismatchError, match=r"^block::saved tensor 1: .*replay ended without it"):
        y.sum().backward(retain_graph=keeps_graph)
    assert 1 <= len(replays) <= 2
