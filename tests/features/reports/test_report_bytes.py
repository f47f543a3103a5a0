"""Memory reports: bytes equal what the profiler sees retained, by whatever they are held."""

from __future__ import annotations

from collections import OrderedDict, deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.features.reports.blocks import (
    EXP,
    MM,
    W1,
    W2,
    assert_exact,
    block,
    fresh,
    native_block,
    op,
    retained_bytes,
    several_regions,
)
from tests.handle_ops import RECOMPUTE, SAVE, Both, Result, Transpose
from tests.helpers import OLDEST, checkpointed, leaf

FROZEN = nn.Linear(16, 16).requires_grad_(False)
CONV = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
EMBEDDING = nn.Embedding(16, 16)
PARAMETER = nn.Parameter(torch.randn(6, 6))
W = FROZEN.weight


def through_torch(function, *args, **kwargs):
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def in_torchs(function):
    return lambda x: through_torch(function, x)


def packed(make):
    """Run with hooks that put each saved tensor, as it is, into a tuple."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("here", [tensor]), lambda kept: kept[1][0]):
        return make()


def sines(x):
    return x.sin().exp().sin()


def partial_backward():
    x = fresh(6, 6) * 2
    y, z = checkpointed(lambda x: (op(Result, "b", RECOMPUTE, x).exp(), op(Both, "a", SAVE, x)))(x)
    torch.autograd.grad(y.sum(), x)
    return z.sum()


def turned(function):
    return lambda x: through_torch(function, x).view(-1).sin()


def products(x, y, *, z):
    return x * y[0] * z


def graph_kept_of(function):
    x = fresh(4, 16)
    y = function(x * 1).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    return y


PROGRAMS = {
    "no region": lambda: (fresh(5, 5).sin() @ fresh(5, 5)).exp().sum(),
    "plain region": lambda: checkpointed(lambda x: x.sin().exp())(fresh(5, 5) * 2).sum(),
    "handles": lambda: checkpointed(block)(fresh(6, 6) * 2).sum(),
    "an input twice": lambda: checkpointed(lambda x, y, z: x * y + z["z"])(*[fresh(9)] * 2, z={"z": fresh(9)}).sum(),
    "view that pins its base": lambda: checkpointed(torch.sin)((fresh(50, 4) * 2)[7]).sum(),
    "view of a parameter": lambda: checkpointed(torch.mul)(PARAMETER.t(), fresh(6, 6)).sum(),
    "several regions": several_regions,
    "nested regions": lambda: checkpointed(lambda x: checkpointed(block)(x.sin()).cos())(fresh(6, 6) * 2).sum(),
    "torch's in a region": lambda: checkpointed(in_torchs(torch.sin))(fresh(9)).sum(),
    "packed inputs": lambda: packed(lambda: checkpointed(block)(fresh(6, 6) * 2).sum()),
    "partial backward": partial_backward,
    "a view of an output": lambda: checkpointed(lambda x: op(Transpose, "t", RECOMPUTE, x).sin())(fresh(4, 4)).sum(),
    "linear, frozen": lambda: FROZEN(fresh(4, 16) * 1).sin().sum(),
    "view of a frozen parameter": lambda: (fresh(4, 16) * 1 @ W[:, :8]).sum(),
    "torch's with all arguments": lambda: through_torch(products, fresh(9), [fresh(9)], z=fresh(9).cos()).sum(),
    "torch's of a partial": lambda: through_torch(partial(products, y=[fresh(9)], z=fresh(9).cos()), fresh(9)).sum(),
    "a partial": lambda: checkpointed(partial(partial(products, y=[fresh(9).sin()]), z=fresh(9).cos()))(fresh(9)).sum(),
    "a partial of a parameter": lambda: checkpointed(partial(torch.mul, PARAMETER))(fresh(6, 6).sin()).sum(),
    "torch's with a region between": lambda: graph_kept_of(in_torchs(checkpointed(turned(in_torchs(sines))))),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_total_equals_the_bytes_that_the_profiler_sees_retained(program):
    if OLDEST and "all arguments" in program:
        pytest.skip("reports do not see keyword arguments of torch's checkpoint there")
    _, report = assert_exact(PROGRAMS[program])
    if "frozen" in program:
        assert report.parameters.bytes == 16 * 16 * 4


def with_write(x):
    """A native region that changes a tensor that is made inside the region."""
    h = x.sin()
    remat.native_save_region("write", lambda: h.add_(1).mul_(2))
    return h.exp() @ W1


def whole_calls(x):
    """Native regions that are one call of a function of torch's own: with residents, choices, random numbers."""
    g = remat.native_save_region("mm", torch.matmul, x.sin(), W1).tanh()
    values, places = remat.native_save_region("top", torch.topk, g, 8)
    h = remat.native_save_region("drop", torch.dropout, values.exp(), 0.5, True)
    return h.cos() * g.gather(-1, places)


def by_policy(x):
    return (F.gelu(torch.dropout(x, 0.5, True) @ W1).exp() @ W2).sin() @ W1


KEPT_BY_CALLS_AND_POLICIES = {
    "native regions": (native_block, {}),
    "native region recomputed": (lambda x: native_block(x, RECOMPUTE), {}),
    "whole calls": (whole_calls, {}),
    "a write": (with_write, {}),
    "products and results": (by_policy, {"policy": [MM, EXP]}),
    "native regions under a policy": (native_block, {"policy": [MM]}),
}


@pytest.mark.parametrize("case", KEPT_BY_CALLS_AND_POLICIES)
def test_total_stays_exact_while_the_graph_is_kept_and_ends_with_it(case):
    function, options = KEPT_BY_CALLS_AND_POLICIES[case]
    loss, report = assert_exact(lambda: checkpointed(function, **options)(leaf(4, 8) * 3).sum())
    warned = pytest.warns(remat.RematWarning, match="modified a tensor of the region in place")
    with warned if case == "a write" else nullcontext():
        loss.backward(retain_graph=True)
    (after,) = remat.memory_report(loss).regions
    assert after.bytes == report.regions[0].bytes
    with warned if case == "a write" else nullcontext():
        loss.backward()
    assert remat.memory_report(loss).regions == ()


def test_total_in_the_middle_of_backward_counts_what_replay_has_recomputed():
    seen = []

    def look(_grads):
        seen.append(remat.memory_report().bytes)

    x = leaf(8, 8) * 2
    y = checkpointed(lambda x: x.sin().exp().tanh())(x)
    y.grad_fn.next_functions[0][0].register_prehook(look)
    y.sum().backward()
    assert seen == [2 * 8 * 8 * 4]  # the input, which the sine saves too, and the exponential


def test_parameters_are_apart_and_counted_once():
    module = nn.Linear(8, 8)
    loss = sum(checkpointed(module)(F.linear(leaf(2, 8), module.weight)).sum() for _ in range(3))
    report = remat.memory_report(loss)
    assert report.parameters.count == 2
    assert report.parameters.bytes == (64 + 8) * 4
    assert not any(tensor.shape == (8, 8) for tensor in report.all_tensors())


def test_region_does_not_keep_the_parameter_that_an_input_is_a_view_of():
    weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    gone = torch.utils.weak.WeakTensorKeyDictionary({weight: True})
    y = checkpointed(torch.mm, preserve_rng_state=False)(leaf(4, 4), weight.t().clone().t())
    z = checkpointed(torch.mm, preserve_rng_state=False)(leaf(4, 4), weight.t())
    del weight
    assert len(gone) == 0
    assert remat.memory_report().bytes == 4 * 64  # nobody else has it now
    del y, z


def test_given_modules_have_their_buffers_and_what_shares_memory_with_their_parameters_apart():
    masked = nn.Module()
    masked.register_buffer("mask", torch.randn(4, 16))
    programs = (
        (lambda: CONV(fresh(2, 3, 8, 8)).sum(), CONV, 24),  # the statistics; batches are counted apart, too
        (lambda: (fresh(4, 16) * masked.mask).sum(), masked, 256),
        (lambda: checkpointed(lambda x, mask: x * mask)(fresh(4, 16), masked.mask).sum(), masked, 256),
        (lambda: (fresh(4, 16) @ EMBEDDING.weight.detach()).sum(), EMBEDDING, 1024),
    )
    for make, module, shared in programs:
        loss, measured = retained_bytes(make)
        assert remat.memory_report(loss).bytes == measured + shared
        report = remat.memory_report(module, loss)
        assert report.bytes == measured
        buffers, parameters = list(module.buffers()), list(module.parameters())
        assert (report.buffers.count, report.parameters.count) == (len(buffers), len(parameters))
        assert report.buffers.bytes == sum(buffer.nbytes for buffer in buffers)
        assert report.to_dict()["buffers"] == {"count": report.buffers.count, "bytes": report.buffers.bytes}


def test_module_whose_parameters_are_not_made_yet_has_none():
    assert remat.memory_report(nn.LazyLinear(4)).parameters.bytes == 0


@dataclass
class Pair:
    first: torch.Tensor
    rest: object = None


class Table(OrderedDict):
    pass


class Registered:
    def __init__(self, value):
        self.value = value


torch.utils._pytree.register_pytree_node(
    Registered, lambda one: ([one.value], None), lambda values, _: Registered(*values)
)


class KeepsInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.pair = Pair(x.exp(), Pair(x.sin(), [x.cos()]))
        ctx.table = Table(a=x.tan(), b={"more": deque([x.tanh(), None, "text"])})
        ctx.others = SimpleNamespace(a=x.sigmoid()), Registered(x.erf()), FROZEN.weight.t()
        ctx.pair.rest.rest.append(ctx.pair)  # a cycle
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.pair.rest.rest.clear()
        return grad * 2


def test_tensors_in_dataclasses_and_containers_on_ctx_are_counted():
    _, report = assert_exact(lambda: KeepsInside.apply(fresh(4, 16)).sum())
    (node,) = [node for node in report.outside if node.node == "KeepsInsideBackward"]
    assert [tensor.label for tensor in node.tensors] == ["pair"] * 3 + ["table"] * 2 + ["others"] * 2
    assert report.parameters.count == 1
    assert_exact(lambda: checkpointed(lambda x: KeepsInside.apply(x.sin()).cos())(fresh(4, 16)).sum())


@pytest.mark.gpu
def test_bytes_on_the_device_are_those_that_its_allocator_has_given():
    def make():
        x = torch.randn(64, 128, device="cuda", requires_grad=True)  # multiples of 512 bytes
        return checkpointed(lambda x: op(Result, "a", SAVE, x.sin()).view(-1), preserve_rng_state=False)(x).sum()

    make()
    before = torch.cuda.memory_allocated()
    loss = make()
    report = remat.memory_report(loss)
    assert report.bytes_by_device == {"cuda:0": torch.cuda.memory_allocated() - before - 512}  # the loss
