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
    Inner,
    Trace,
    call,
)
from tests.helpers import (
    LiveStorages,
    assert_same,
    checkpointed,
    leaf,
)
from tests.offloaders import OFFLOAD, Counting, Declining


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


def test_hooks_around_the_region_decide():
    offloader, x = Counting(), leaf(3, 3)
    expected = torch.autograd.grad(plain_model(x.cos(), 1).sum(), x)

    def block(x):
        return run(offloader, x.cos(), 1)

    for around in (checkpointed(block), lambda x: torch_checkpoint(block, x, use_reentrant=False)):
        assert_same(expected, torch.autograd.grad(around(x).sum(), x))
    with save_on_cpu():
        y = block(x)
    assert_same(expected, torch.autograd.grad(y.sum(), x))
    assert offloader.sent == []


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


ADDMM = torch.ops.aten.addmm.default
WEIGHT = torch.linspace(-1, 1, 64).view(8, 8)
POLICIES = {
    "ours": lambda: lambda ctx, op, *a, **k: OFFLOAD if op is ADDMM else False,
    "names": lambda: remat.offload_names("0.addmm_*"),
    "both": lambda: remat.save_names("2.addmm_0_0") | remat.offload_names("0.addmm_*", "1.gelu_*"),
}


def as_torch_says(ctx, op, *args, **kwargs):
    return TorchPolicy.MUST_CPU_OFFLOAD if op is ADDMM else TorchPolicy.PREFER_RECOMPUTE


if hasattr(TorchPolicy, "MUST_CPU_OFFLOAD"):  # which torch 2.10 lacks
    POLICIES["torch"] = lambda: as_torch_says


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
