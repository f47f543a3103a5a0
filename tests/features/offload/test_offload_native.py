"""OFFLOAD in native regions and op-level policies: the gradients of SAVE; each tensor away once, tickets released."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

import torch_remat as remat
from tests.features.offload.offloaders import Counting
from tests.helpers import LiveStorages, assert_same

OFFLOAD = remat.CheckpointPolicy.OFFLOAD
aten = torch.ops.aten


def mlp(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))


def outcome(run, x, model):
    torch.manual_seed(1)
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def all_released(offloader):
    return dict(offloader.released) == dict.fromkeys(range(len(offloader.sent)), 1)


def body(name, keep):
    """Return a function whose native regions are made by ``keep(name, function)(*args)``."""
    weight = torch.randn(8, 8, requires_grad=True)

    def closure(x):
        h = x.sin()
        y = keep("mm", lambda h: (h @ weight).tanh())(h)
        return y.exp() * h

    def builtin(x):
        return keep("mm", torch.matmul)(x.cos(), weight).sigmoid() + x

    def chunks(x):
        a, b = keep("split", lambda h: (h @ weight).exp().chunk(2, 1))(x * 2)
        return torch.cat([a.sin(), b.cos() * a], 1)

    def random(x):
        y = keep("drop", lambda h: F.dropout(h @ weight, 0.4))(x * 1.5)
        return F.dropout(y.exp(), 0.3)

    def noise(x):
        return keep("rrelu", lambda h: F.rrelu(h * 2, training=True))(x.sin()).exp()

    functions = {"closure": closure, "builtin": builtin, "chunks": chunks, "random": random, "noise": noise}
    return functions[name], weight


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("name", ["closure", "builtin", "chunks", "random", "noise"])
def test_native_region_that_offloads_is_equal_and_releases_each_ticket(name, retain):
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(5)
    plain, weight = body(name, lambda name, function: function)
    torch.manual_seed(5)
    away, other = body(name, lambda name, function: remat.op(function, name, policy=OFFLOAD))
    offloader = Counting()
    gc.collect()
    gc.disable()
    try:
        torch.manual_seed(3)
        expected = torch.autograd.grad(plain(x).sum(), [x, weight], allow_unused=True)
        torch.manual_seed(3)
        y = remat.checkpoint(offloader=offloader)(away)(x)
        assert offloader.sent
        assert all(info.op in ("mm", "split", "drop", "rrelu") for info in offloader.sent)
        for keep in (True, False) if retain else (False,):
            assert_same(expected, torch.autograd.grad(y.sum(), [x, other], retain_graph=keep, allow_unused=True))
        del y
        assert all_released(offloader)
    finally:
        gc.enable()


def test_result_that_is_saved_and_read_by_replay_travels_once():
    weight = torch.randn(8, 8, requires_grad=True)
    offloader = Counting()

    def function(x):
        h = remat.op(lambda x: (x @ weight).exp(), "e", policy=OFFLOAD)(x)
        return h.sin()

    x = torch.randn(4, 8, requires_grad=True)
    y = remat.checkpoint(offloader=offloader)(function)(x)
    assert [info.bytes for info in offloader.sent] == [4 * 8 * 4]
    y.sum().backward()
    assert all_released(offloader)


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
    assert all_released(offloader)


def test_default_offloader_on_the_cpu_is_equal():
    model, x = mlp(), torch.randn(16, 8, requires_grad=True)
    expected = outcome(model, x, model)
    actual = outcome(remat.checkpoint(policy=remat.offload_names("*addmm*"))(model), x, model)
    assert_same(expected, actual)


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


def test_stronger_decision_wins():
    model, x = mlp(), torch.randn(16, 8, requires_grad=True)
    offloader = Counting()
    policy = remat.offload_names("*addmm*") | remat.save_names("0.*")
    y = remat.checkpoint(policy=policy, offloader=offloader)(model)(x)
    assert not [info for info in offloader.sent if info.tensor.startswith("0.")]
    y.sum().backward()
    assert all_released(offloader)


def test_nested_regions_offload_at_the_outermost_level_only():
    model, x = mlp(), torch.randn(16, 8, requires_grad=True)
    expected = outcome(model, x, model)
    offloader = Counting()
    inner = remat.checkpoint(policy=remat.offload_names("*addmm_0_0"), offloader=offloader)(model)
    actual = outcome(remat.checkpoint()(inner), x, model)
    assert_same(expected, actual)
    assert all_released(offloader)


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


@pytest.mark.parametrize("patterns", [("*",), ("*mm*",), ("*mm*", "*gelu*"), ("*sin*", "*exp*"), None])
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
    assert all_released(offloader)


@pytest.mark.parametrize("names", [remat.save_names, remat.offload_names])
def test_result_changed_through_an_alias_is_an_error_kept_or_away(names):
    """A batched product comes out of its op through an alias that counts changes for itself."""
    x = torch.randn(2, 5, 8, requires_grad=True)

    def function(x):
        h = x.mT @ x
        return h.exp(), h

    y, h = remat.checkpoint(policy=names("bmm_*"), offloader=Counting(), region_name="r")(function)(x * 1)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(remat.MutationError, match=r"r::bmm_0_0|r::_unsafe_view"):
        y.sum().backward()
