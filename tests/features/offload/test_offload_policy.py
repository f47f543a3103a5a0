"""OFFLOAD by handles, native regions and policies: gradients, which offloader, and who decides."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.features.offload.blocks import expected_gradient, plain_model, run
from tests.handle_ops import (
    RECOMPUTE,
    STYLES,
    Affine,
    Both,
    Inner,
    Trace,
    call,
)
from tests.helpers import (
    LiveStorages,
    assert_same,
    checkpointed,
    collector_off,
    leaf,
    pairwise,
    run_with_gradients,
)
from tests.offloaders import OFFLOAD, Counting, Declining


def three_ops(style, policies, trace):
    def block(x, w):
        h = call(style, Inner, trace, "a", policies[0], x.sin())
        h = call(style, Both, trace, "b", policies[1], h.t())
        return call(style, Affine, trace, "c", policies[2], h, w)

    return block


@pairwise(a=remat.CheckpointPolicy, b=remat.CheckpointPolicy, c=remat.CheckpointPolicy, style=STYLES)
def test_gradients_equal_those_of_plain_autograd(a, b, c, style):
    policies, inputs = (a, b, c), [leaf(4, 4), leaf(4, 4)]
    expected = run_with_gradients(lambda x, w: three_ops("plain", policies, Trace())(x * 1, w * 1), inputs)
    for options in ({}, {"offload_inputs": True}, {"debug": True, "early_stop": False}):
        trace, offloader = Trace(), Counting(prefetch_bytes=100)
        wrap = remat.checkpoint(offloader=offloader, **options)
        actual = run_with_gradients(
            lambda x, w, t=trace, r=wrap: r(three_ops(style, policies, t))(x * 1, w * 1), inputs
        )
        assert_same(expected, actual)
        assert all(trace.runs[name] == 1 for name, p in zip("abc", policies, strict=True) if p is not RECOMPUTE)
        offloader.assert_all_released_once()


def test_offload_to_is_for_everything_inside_and_an_option_goes_before():
    outer, inner, own = Counting(), Counting(), Counting()

    def block(x):
        return call("handle", Inner, Trace(), "a", OFFLOAD, x)

    x = leaf(3, 3)
    with remat.offload_to(outer):
        one = checkpointed(block)(x)
        with remat.offload_to(inner):
            two = checkpointed(block)(x)
            three = checkpointed(block, offloader=own)(x)
        four = checkpointed(block)(x)
    (one + two + three + four).sum().backward()
    assert [len(offloader.sent) for offloader in (outer, inner, own)] == [2, 1, 1]
    for offloader in (outer, inner, own):
        offloader.assert_all_released_once()


def test_without_an_offloader_a_shared_one_for_host_memory_is_used():
    from torch_remat.offload.sender import default_offloader

    before = default_offloader().offloaded_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the CPU's memory is host memory
        y = checkpointed(lambda x: call("handle", Inner, Trace(), "a", OFFLOAD, x))(leaf(200, 200))
    assert default_offloader().offloaded_bytes - before == 160_000
    y.sum().backward()
    assert default_offloader().offloaded_bytes == before


@pytest.mark.parametrize("outer", ["region", "torch", "save_on_cpu"])
def test_hooks_around_the_region_decide(outer):
    offloader, x = Counting(), leaf(3, 3)

    def block(x):
        return run(offloader, x.cos(), 1)

    if outer == "region":
        y = checkpointed(block)(x)
    elif outer == "torch":
        y = torch_checkpoint(block, x, use_reentrant=False)
    else:
        with save_on_cpu():
            y = block(x)
    (actual,) = torch.autograd.grad(y.sum(), x)
    assert offloader.sent == []

    assert_same(actual, torch.autograd.grad(plain_model(x.cos(), 1).sum(), x)[0])


def test_outside_of_regions_and_without_gradients_nothing_travels():
    offloader = Counting()
    with remat.offload_to(offloader):
        call("handle", Inner, Trace(), "a", OFFLOAD, leaf(3, 3)).sum().backward()
        with torch.no_grad():
            checkpointed(lambda x: call("handle", Inner, Trace(), "a", OFFLOAD, x), offload_inputs=True)(leaf(3, 3) * 1)
    assert offloader.sent == []


def test_what_is_declined_stays_and_is_equal():
    offloader, x = Declining(), leaf(4, 4)
    assert_same(expected_gradient(x), torch.autograd.grad(run(offloader, x).sum(), x)[0])
    assert len(offloader.asked) >= 12


aten = torch.ops.aten


WEIGHT = torch.linspace(-1, 1, 64).view(8, 8)


def calls(x):
    """Results that are views, random numbers inside a call and after it."""
    a, b = remat.op(lambda h: F.dropout(h @ WEIGHT, 0.4).exp().chunk(2, 1), "split", policy=OFFLOAD)(x * 2)
    return F.dropout(torch.cat([a.sin(), b.cos() * a], 1), 0.3)


def test_call_that_offloads_is_equal_and_releases_each_ticket():
    offloader, x = Counting(), torch.randn(4, 8, requires_grad=True)
    with collector_off():
        torch.manual_seed(3)
        expected = torch.autograd.grad(calls(x).sum(), x)
        torch.manual_seed(3)
        y = remat.checkpoint(offloader=offloader)(calls)(x)
        assert {info.op for info in offloader.sent} == {"split"}
        for keep in (True, False):
            assert_same(expected, torch.autograd.grad(y.sum(), x, retain_graph=keep))
        del y
        offloader.assert_all_released_once()


POLICIES = {
    "torch": lambda: (
        lambda ctx, op, *a, **k: (
            TorchPolicy.MUST_CPU_OFFLOAD if op is aten.addmm.default else TorchPolicy.PREFER_RECOMPUTE
        )
    ),
    "ours": lambda: lambda ctx, op, *a, **k: OFFLOAD if op is aten.addmm.default else False,
    "names": lambda: remat.offload_names("0.addmm_*"),
    "both": lambda: remat.save_names("2.addmm_0_0") | remat.offload_names("0.addmm_*", "1.gelu_*"),
}


# Torch 2.10 has no policies that offload.
if not hasattr(TorchPolicy, "MUST_CPU_OFFLOAD"):
    del POLICIES["torch"]


@pytest.mark.parametrize("policy", POLICIES)
def test_op_level_policy_that_offloads_is_equal_and_releases_each_ticket(policy):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(16, 8, requires_grad=True)
    offloader = Counting()

    def gradients(function):
        return torch.autograd.grad(function(x).square().sum(), [x, *model.parameters()])

    region = remat.checkpoint(policy=POLICIES[policy](), offloader=offloader)(model)
    assert_same(gradients(model), gradients(region))
    assert offloader.sent
    assert {info.op for info in offloader.sent} == {None}
    assert all(info.tensor.startswith(("0.addmm_0", "1.gelu_0")) for info in offloader.sent)
    assert len({info.tensor for info in offloader.sent}) == len(offloader.sent)
    offloader.assert_all_released_once()


def matrices(x):
    """On inputs of three dimensions a product makes a matrix, and what backward reads is a view of it."""
    h = F.gelu(F.layer_norm(x, [8]) @ WEIGHT) + x
    one, two = (h @ WEIGHT).chunk(2, -1)
    h = torch.cat([one.exp(), two.sin()], -1)
    return (h.mT @ h).sin().softmax(-1) @ h.mT


@pytest.mark.parametrize("patterns", [("*",), ("*mm*", "*gelu*")])
def test_bytes_that_travel_are_those_that_save_keeps(patterns):
    def kept(policy):
        x = torch.linspace(-1, 1, 80).view(2, 5, 8).requires_grad_()
        with LiveStorages() as live:
            y = remat.checkpoint(offloader=offloader, policy=policy)(matrices)(x * 1)
            kept = live.bytes()
        return kept, torch.autograd.grad(y.square().sum(), x)[0]

    offloader = Counting()
    (stays, expected), (leaves, actual) = kept(remat.save_names(*patterns)), kept(remat.offload_names(*patterns))
    assert_same(expected, actual)
    assert sum(info.bytes for info in offloader.sent) == stays - leaves > 0
    offloader.assert_all_released_once()
