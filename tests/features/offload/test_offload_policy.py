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
from tests.handle_ops import (
    RECOMPUTE,
    SAVE,
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
    for options in ({}, {"offload_inputs": True}, {"debug": True}, {"early_stop": False}):
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
    offloader, x, trace = Counting(), leaf(3, 3), Trace()

    def inner(x):
        h = call("handle", Inner, trace, "a", OFFLOAD, x.sin())
        return call("handle", Affine, trace, "b", RECOMPUTE, h, x)

    def block(x):
        return checkpointed(inner, offloader=offloader, offload_inputs=True)(x.cos())

    if outer == "region":
        y = checkpointed(block)(x)
    elif outer == "torch":
        y = torch_checkpoint(block, x, use_reentrant=False)
    else:
        with save_on_cpu():
            y = block(x)
    (actual,) = torch.autograd.grad(y.sum(), x)
    assert offloader.sent == []

    def reference(x):
        x = x.cos()
        h = call("plain", Inner, Trace(), "a", None, x.sin())
        return call("plain", Affine, Trace(), "b", None, h, x)

    assert_same(actual, torch.autograd.grad(reference(x).sum(), x)[0])


def test_outside_of_regions_and_without_gradients_nothing_travels():
    offloader = Counting()
    with remat.offload_to(offloader):
        call("handle", Inner, Trace(), "a", OFFLOAD, leaf(3, 3)).sum().backward()
        with torch.no_grad():
            checkpointed(lambda x: call("handle", Inner, Trace(), "a", OFFLOAD, x), offload_inputs=True)(leaf(3, 3) * 1)
    assert offloader.sent == []


def test_what_is_declined_stays_and_is_equal():
    offloader, inputs = Declining(), [leaf(4, 4), leaf(4, 4)]
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True)
    policies = [OFFLOAD] * 3
    expected = run_with_gradients(lambda x, w: three_ops("plain", policies, Trace())(x * 1, w * 1), inputs)
    block = three_ops("handle", policies, Trace())
    assert_same(expected, run_with_gradients(lambda x, w: wrap(block)(x * 1, w * 1), inputs))
    assert len(offloader.asked) >= 4


def test_class_object_without_methods_and_other_values_are_no_offloaders():
    for value in (remat.CpuOffloader, object(), "disk", 3):
        with pytest.raises(remat.UsageError, match="offload"):
            remat.checkpoint(offloader=value)
        with pytest.raises(remat.UsageError, match="offload"), remat.offload_to(value):
            pass
    with pytest.raises(remat.UsageError, match="True or False"):
        remat.checkpoint(offload_inputs=1)


def test_replay_with_another_policy_is_refused():
    def block(x):
        h = call("handle", Inner, Trace(), "a", SAVE if remat.is_recomputing() else OFFLOAD, x.sin())
        return call("handle", Affine, Trace(), "b", RECOMPUTE, x, h)

    offloader = Counting()
    y = checkpointed(block, offloader=offloader)(leaf(3, 3))
    with pytest.raises(remat.MismatchError, match="OFFLOAD"):
        y.sum().backward()
    del y
    offloader.assert_all_released_once()


aten = torch.ops.aten


def mlp(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))


def outcome(run, x, model):
    torch.manual_seed(1)
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def body(name, keep):
    """Return a function whose native regions are made by ``keep(name, function)(*args)``."""
    weight = torch.randn(8, 8, requires_grad=True)

    def closure(x):
        h = x.sin()
        y = keep("mm", lambda h: (h @ weight).tanh())(h)
        return y.exp() * h

    def chunks(x):
        a, b = keep("split", lambda h: (h @ weight).exp().chunk(2, 1))(x * 2)
        return torch.cat([a.sin(), b.cos() * a], 1)

    def random(x):
        y = keep("drop", lambda h: F.dropout(h @ weight, 0.4))(x * 1.5)
        return F.dropout(y.exp(), 0.3)

    functions = {"closure": closure, "chunks": chunks, "random": random}
    return functions[name], weight


@pytest.mark.parametrize("name", ["closure", "chunks", "random"])
def test_native_region_that_offloads_is_equal_and_releases_each_ticket(name):
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(5)
    plain, weight = body(name, lambda name, function: function)
    torch.manual_seed(5)
    away, other = body(name, lambda name, function: remat.op(function, name, policy=OFFLOAD))
    offloader = Counting()
    with collector_off():
        torch.manual_seed(3)
        expected = torch.autograd.grad(plain(x).sum(), [x, weight], allow_unused=True)
        torch.manual_seed(3)
        y = remat.checkpoint(offloader=offloader)(away)(x)
        assert offloader.sent
        assert all(info.op in ("mm", "split", "drop") for info in offloader.sent)
        for keep in (True, False):
            assert_same(expected, torch.autograd.grad(y.sum(), [x, other], retain_graph=keep, allow_unused=True))
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
    model, x = mlp(), torch.randn(16, 8, requires_grad=True)
    offloader = Counting()
    expected = outcome(model, x, model)
    actual = outcome(remat.checkpoint(policy=POLICIES[policy](), offloader=offloader)(model), x, model)
    assert_same(expected, actual)
    assert offloader.sent
    assert {info.op for info in offloader.sent} == {None}
    assert all(info.tensor.startswith(("0.addmm_0", "1.gelu_0")) for info in offloader.sent)
    assert len({info.tensor for info in offloader.sent}) == len(offloader.sent)
    offloader.assert_all_released_once()


def test_offloaded_result_changed_in_place_is_an_error_with_its_name():
    def function(x):
        h = x * 2
        y = h.sin()
        h.add_(1)
        return y

    x = torch.randn(4, 8, requires_grad=True)
    y = remat.checkpoint(policy=remat.offload_names("mul_0_0"), offloader=Counting(), region_name="r")(function)(x)
    with pytest.raises(remat.MutationError, match=r"r::mul_0_0") as caught:
        y.sum().backward()
    assert (caught.value.region, caught.value.op, caught.value.tensor) == ("r", None, "mul_0_0")


@pytest.mark.parametrize("patterns", [(), ("",), (3,)])
def test_offload_names_without_a_pattern_is_an_error(patterns):
    with pytest.raises(remat.PolicyError, match="offload_names"):
        remat.offload_names(*patterns)


class Stack(nn.Module):
    """On inputs of three dimensions a linear layer makes a matrix, and what backward reads is a view of it."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        h = F.gelu(self.linear(self.norm(x))) + x
        one, two = self.linear(h).chunk(2, -1)
        h = torch.cat([one.exp(), two.sin()], -1)
        return (h.mT @ h).sin().softmax(-1) @ h.mT


def in_a_native_region(policy):
    linear = nn.Linear(8, 8)
    return lambda x: remat.op(lambda x: F.gelu(linear(x)), "n", policy=policy)(x.sin()).mT.exp()


@pytest.mark.parametrize("patterns", [("*",), ("*mm*", "*gelu*"), None])
def test_bytes_that_travel_are_those_that_save_keeps(patterns):
    def kept(policy, save_names):
        torch.manual_seed(0)
        function = in_a_native_region(policy) if patterns is None else Stack()
        options = {} if patterns is None else {"policy": save_names(*patterns)}
        x = torch.randn(2, 5, 8, requires_grad=True)
        with LiveStorages() as live:
            y = remat.checkpoint(offloader=offloader, **options)(function)(x * 1)
            kept = live.bytes()
        return kept, torch.autograd.grad(y.square().sum(), x)[0]

    offloader = Counting()
    stays, expected = kept(remat.CheckpointPolicy.SAVE, remat.save_names)
    leaves, actual = kept(OFFLOAD, remat.offload_names)
    assert_same(expected, actual)
    assert sum(info.bytes for info in offloader.sent) == stays - leaves > 0
    offloader.assert_all_released_once()
