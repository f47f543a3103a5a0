"""`op`: what a single call promises; `test_found.py` has programs with calls of all kinds."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import torch_remat as remat
from tests.helpers import (
    CountOps,
    LiveStorages,
    assert_same,
    checkpointed,
    leaf,
    no_other_regions,
    watch,
)
from tests.native_programs import SAVE, keep

OFFLOAD, RECOMPUTE = remat.CheckpointPolicy.OFFLOAD, remat.CheckpointPolicy.RECOMPUTE


@pytest.mark.parametrize("kept", [SAVE, OFFLOAD])
def test_a_call_in_a_region_with_a_policy_is_left_out_and_keeps_no_argument(kept):
    runs = []

    def call(h):
        runs.append(remat.is_recomputing())
        return (h * h).sin()

    def block(x):
        return remat.op(call, "k", policy=kept)(x * 2.0).tanh() * x

    x = leaf(64, 64)
    expected = torch.autograd.grad(block(x).sum(), x)
    runs.clear()
    live = LiveStorages()
    with live, warnings.catch_warnings():
        warnings.simplefilter("error")
        y = remat.checkpoint(policy=lambda *_, **__: RECOMPUTE)(block)(x)
    # The output, what the sine saves, and the result, which tanh reads; not the argument, which replay makes again.
    assert live.bytes() <= 3 * x.nbytes
    assert_same(expected, torch.autograd.grad(y.sum(), x))
    assert runs == [False]


@pytest.mark.parametrize("only_replay", [False, True])
def test_an_op_before_a_call_that_only_one_phase_runs_is_a_mismatch_under_a_policy(only_replay):
    def block(x):
        h = x.exp()
        if remat.is_recomputing() is only_replay:
            h = h.abs()
        return remat.op(lambda t: t.sin() * t, "k")(h).tanh() * x

    y = remat.checkpoint(policy=lambda *_, **__: RECOMPUTE)(block)(leaf(4))
    with pytest.raises(remat.MismatchError, match=None if only_replay else "k"):
        y.sum().backward()


def test_as_a_decorator_it_keeps_the_method_and_is_plain_outside():
    class Block(nn.Module):
        calls = 0

        @remat.op(name="mix", policy=SAVE)
        def mix(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
            """Mix."""
            self.calls += 1
            return x.sin() * factor

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x.cos(), factor=2.0).exp()

    block, x = Block(), leaf(4)
    (got,) = torch.autograd.grad(remat.checkpoint()(block)(x).sum(), x)
    assert block.calls == 1
    assert Block.mix.__doc__ == "Mix."
    assert torch.equal(got, torch.autograd.grad(block(x).sum(), x)[0])
    with pytest.raises(remat.UsageError, match="mix"):
        remat.checkpoint()(lambda t: block.mix(block.mix(t)))(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda: remat.op(3, "k"),
        lambda: remat.op(torch.sin),
        lambda: remat.op(torch.sin, ""),
        lambda: remat.op(torch.sin, 3),
        lambda: remat.op(torch.sin, "k", policy="save"),
        lambda: remat.op(torch.sin, "k", policy=None),
        lambda: remat.op(name="k", policy="save"),
        lambda: remat.op("k", torch.sin),
        lambda: remat.op(),
        lambda: remat.recompute_needs_tensor([torch.ones(1)]),
        lambda: remat.checkpoint()(lambda x: keep("k", torch.sin, remat.op(torch.cos, "k")(x)))(leaf(1)),
    ],
)  # fmt: skip
def test_wrong_use_is_an_error(call):
    with pytest.raises(remat.UsageError):
        call()


CHANGED = {  # what the call runs in forward and in replay, and the length of its argument in replay
    "function": (torch.sin, torch.tanh, 4),
    "python function": (lambda t: t.sum() * t, lambda t: t.mean() * t, 4),
    "what a region runs": (remat.checkpoint()(torch.sin), remat.checkpoint()(torch.cos), 4),
    "shape": (torch.sin, torch.sin, 3),
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_call_in_replay_is_a_mismatch(change):
    forward, replay, length = CHANGED[change]

    def block(x):
        h = x.exp()[: length if remat.is_recomputing() else 4]
        return remat.op(replay if remat.is_recomputing() else forward, "k")(h).exp().sin()

    y = remat.checkpoint()(block)(leaf(4))
    told = "different shapes" if change == "shape" else "different function"
    with pytest.raises(remat.MismatchError, match=told) as caught:
        y.sum().backward()
    assert caught.value.op == "k"


@pytest.mark.parametrize("form", ["argument", "closure"])
def test_an_argument_dies_in_forward_with_its_last_use(form):
    dead = []

    def block(x):
        h = x * 2  # saved by nobody, and too large to be held until forward ends
        (reference,) = watch(h)
        if form == "argument":
            y = remat.op(lambda t: t.exp(), "k")(h)
        else:
            y = (lambda t: remat.op(lambda: t.exp(), "k")())(h)
        del h
        dead.append(reference.expired())
        return y.sum()

    remat.checkpoint()(block)(leaf(1024, 1024)).backward()
    assert dead[0]


def test_a_copy_that_was_cast_before_the_region_need_not_follow_its_leaf():
    w = leaf(4, 4)
    cast = w.to(torch.bfloat16)
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    expected = (x.sin() @ cast).sin()
    y = remat.checkpoint()(lambda x: remat.op(lambda t: t @ cast, "k")(x.sin()).sin())(x)
    with torch.no_grad():
        w.add_(1)
    assert_same(torch.autograd.grad(expected.sum(), x), torch.autograd.grad(y.sum(), x))


def test_the_warning_says_what_runs_again_and_where_it_is_defined():
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    def block(x, function):
        return remat.op(function, "k")(x * 2).add_(1) * x

    for function in (Sine(), lambda x: Sine()(x)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            remat.checkpoint()(block)(leaf(4), function).sum().backward()
        (warning,) = caught
        assert "a result of it was modified in place afterwards" in str(warning.message)
        assert (warning.filename, warning.lineno > 0) == (__file__, True)


def test_a_weights_copy_under_autocast_is_not_kept():
    w, x = nn.Parameter(torch.randn(16, 48)), leaf(4, 16)

    def block(x):
        return remat.op(lambda t: t @ w, "k")(x.sin()).sin()

    with no_other_regions(), torch.autocast("cpu", torch.bfloat16):
        y = remat.checkpoint(region_name="r")(block)(x)
        expected = torch.autograd.grad((x.sin() @ w).sin().sum(), [x, w])
        rows = [row for row in remat.memory_report(y).regions[0].all_tensors() if row.shape == (16, 48)]
    assert sum(row.bytes for row in rows if row.kind != "parameter") == 0
    assert_same(expected, torch.autograd.grad(y.sum(), [x, w]))


class Holder:
    """Holds a tensor two levels deep."""

    def __init__(self, tensor):
        self.inner = [[tensor]]


def test_call_that_modifies_a_tensor_of_the_region_that_it_does_not_reach_is_loud_where_it_is_saved_afterwards():
    def function(x):
        h = x * 2
        holder = Holder(h)
        remat.op(lambda holder: holder.inner[0][0].neg_().sum(), "k")(holder)
        return h.exp().sin()

    with pytest.raises(remat.RematError):
        checkpointed(function)(leaf(4)).sum().backward()


def test_replay_ends_with_the_call_whose_argument_waits_though_a_parameter_follows():
    weight = nn.Parameter(torch.randn(4, 4))

    def function(x):
        made = remat.op(torch.mm, "kept")(x * 2, weight)
        return remat.op(torch.mm, "runs", policy=remat.CheckpointPolicy.RECOMPUTE)(made, weight)

    y = remat.checkpoint()(function)(leaf(4, 4))
    with warnings.catch_warnings(), CountOps() as ran:
        warnings.simplefilter("error")  # of a replay that starts over
        y.sum().backward()
    assert ran.counts["mm"] == 4  # two for each product's backward
