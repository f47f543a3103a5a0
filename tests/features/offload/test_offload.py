"""OFFLOAD: which offloader takes what, who decides, in-place changes, offloaders that fail, and what users are told."""

from __future__ import annotations

import re
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
from tests.handle_ops import RECOMPUTE, Affine, Inner, Trace, call
from tests.helpers import LiveStorages, assert_same, checkpointed, leaf
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


def resident(x, seen):
    def body(x):
        seen.append(x.tanh())
        return seen[0] * 2

    return remat.op(body, "a", policy=OFFLOAD)(x)


def slot(x, seen):
    h = call("handle", Inner, Trace(), "a", OFFLOAD, x.sin())
    seen.append(h)
    return call("handle", Affine, Trace(), "b", RECOMPUTE, x, h)


def region_input(x, seen):
    seen.append(x)
    return x.sin()


def result_by_policy(x, seen):
    seen.append(x * 2)
    return seen[0].sin()


@pytest.mark.parametrize(
    ("function", "op", "tensor", "options"),
    [
        (resident, "a", "saved_0", {}),
        (slot, "a", "out", {}),
        (region_input, None, "args[0]", {"offload_inputs": True}),
        (result_by_policy, None, "mul_0_0", {"policy": remat.offload_names("mul_0_0")}),
    ],
)
def test_what_is_changed_in_place_after_its_offload_began_is_an_error_with_its_name(function, op, tensor, options):
    for change in (lambda t: t.add_(1), lambda t: t.view(-1).mul_(2)):
        seen, x = [], leaf(3, 3) * 1
        y = checkpointed(lambda x, seen=seen: function(x, seen), offloader=Counting(), region_name="r", **options)(x)
        with torch.no_grad():
            change(seen[0])
        with pytest.raises(remat.MutationError, match=r"^r::.*: this tensor was modified in place") as caught:
            y.sum().backward()
        assert (caught.value.region, caught.value.op, caught.value.tensor) == ("r", op, tensor)


def test_offloader_that_cannot_take_a_tensor_leaves_it_and_one_warning_says_so():
    offloader, x = Counting(), leaf(3, 3)
    offloader.refuse = OSError("disk on fire")
    message = re.escape(f"Counting could not take block::args[0] (36 bytes): {offloader.refuse!r}. It stays where")
    with pytest.warns(remat.RematWarning, match=message) as caught:
        y = run(offloader, x)
    assert len(caught) == 1
    assert_same(expected_gradient(x), torch.autograd.grad(y.sum(), x)[0])
    assert offloader.sent == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda t: t[:-1], r"brought back \(8,\) torch.float32 on cpu where 9 torch.float32 on cpu were sent"),
        (lambda t: t.double(), "brought back .* torch.float64"),
        (lambda t: t.to("meta"), "on meta where"),
        (lambda t: None, "brought back None where"),
        (lambda t: t.view(3, 3), r"brought back \(3, 3\)"),
        (lambda t: torch.stack([t, t], 1)[:, 0], "contiguous"),
        (lambda t: t.to_sparse(), "contiguous"),
        (lambda t: t.requires_grad_(), "without graph"),
    ],
)
def test_offloader_that_brings_back_something_else_is_an_error(wrong, told):
    class Wrong(Counting):
        def onload(self, ticket):
            return wrong(super().onload(ticket))

    y = checkpointed(lambda x: call("handle", Inner, Trace(), "a", OFFLOAD, x), offloader=Wrong())(leaf(3, 3))
    with pytest.raises(remat.OffloadError, match=told) as caught:
        y.sum().backward()
    assert (caught.value.op, caught.value.tensor, caught.value.file) == ("a", "m", None)


def test_numbers_and_objects_that_make_no_sense_are_refused(tmp_path):
    for options in ({"max_bytes": -1}, {"min_bytes": -1}, {"prefetch_bytes": 0.5}, {"max_pending_bytes": "1"}):
        with pytest.raises(remat.UsageError, match=next(iter(options))):
            remat.CpuOffloader(**options)
    for options in ({"threads": 0}, {"max_bytes": -1}, {"min_bytes": 1.5}, {"queue_bytes": -1}):
        with pytest.raises(remat.UsageError, match=next(iter(options))):
            remat.DiskOffloader(tmp_path, **options)
    for value in (remat.CpuOffloader, object(), "disk", 3):
        with pytest.raises(remat.UsageError, match="offload"):
            remat.checkpoint(offloader=value)
        with pytest.raises(remat.UsageError, match="offload"), remat.offload_to(value):
            pass
    with pytest.raises(remat.UsageError, match="True or False"):
        remat.checkpoint(offload_inputs=1)
    for patterns in ((), ("",), (3,)):
        with pytest.raises(remat.PolicyError, match="offload_names"):
            remat.offload_names(*patterns)


def test_input_changed_in_place_before_the_region_is_equal():
    def program(wrap):
        torch.manual_seed(0)
        leaf_ = leaf(3, 3)
        x = leaf_ * 1
        x.mul_(2).add_(1)

        def block(x):
            h = x.sin()
            h.mul_(x)
            return h * x

        y = wrap(block)(x)
        y.sum().backward()
        return y, leaf_.grad

    offloader = Counting()
    assert_same(program(lambda f: f), program(remat.checkpoint(offloader=offloader, offload_inputs=True)))
    assert len(offloader.sent) == 1
