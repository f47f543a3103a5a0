"""Memory reports: bytes equal what the profiler sees retained, by whatever they are held."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from benchmarks.memory import allocations
from tests.handle_ops import (
    RECOMPUTE,
    SAVE,
    Affine,
    Both,
    Inner,
    InnerView,
    Noise,
    Result,
    SinCos,
    Trace,
    Transpose,
    call,
)
from tests.helpers import Mlp, checkpointed, leaf, no_other_regions, pairwise


@pytest.fixture(autouse=True)
def _no_other_regions():
    with no_other_regions():
        yield


def retained_bytes(make):
    """Return a root and the bytes, besides its own, that making it has left allocated."""
    make()  # what is made once only is made now
    with allocations() as events:
        root = make()
    return root, sum(events) - root.untyped_storage().nbytes()


def assert_exact(make):
    """Assert that the report of a root says what the profiler sees; return the report."""
    root, measured = retained_bytes(make)
    report = remat.memory_report(root)
    assert report.bytes == measured, f"{measured} bytes retained\n{report}"
    return report


def op(kernel, name, policy, *inputs, style="auto"):
    return call(style, kernel, Trace(), name, policy, *inputs)


def block(x):
    """Ops of both policies, scopes, views, several outputs, shared storage, and random numbers."""
    h = op(Both, "a", SAVE, x)
    with remat.name_scope("sub.0"):
        h = op(Inner, "b", RECOMPUTE, h)
    h = op(InnerView, "c", SAVE, h.t())
    s, c = op(SinCos, "d", SAVE, h)
    h = op(Affine, "e", RECOMPUTE, s.t(), c)
    return op(Noise, "f", SAVE, h, style="handle")


def fresh(*shape):
    return torch.randn(*shape, requires_grad=True)


PARAMETER = nn.Parameter(torch.randn(6, 6))
MODULES = nn.ModuleList(Mlp() for _ in range(3))


def several_regions():
    h = F.gelu(fresh(4, 8) * 3.0)
    for index, module in enumerate(MODULES):
        h = checkpointed(module, region_name=f"layers.{index}")(h)
    return (h * h).sum()


def partial_backward():
    x = fresh(6, 6) * 2
    y, z = checkpointed(lambda x: (op(Result, "b", RECOMPUTE, x).exp(), op(Both, "a", SAVE, x)))(x)
    torch.autograd.grad(y.sum(), x)
    return z.sum()


PROGRAMS = {
    "no region": lambda: (fresh(5, 5).sin() @ fresh(5, 5)).exp().sum(),
    "plain region": lambda: checkpointed(lambda x: x.sin().exp())(fresh(5, 5) * 2).sum(),
    "handles": lambda: checkpointed(block)(fresh(6, 6) * 2).sum(),
    "an input twice": lambda: checkpointed(lambda x, y, z: x * y + z["z"])(*[fresh(9)] * 2, z={"z": fresh(9)}).sum(),
    "view that pins its base": lambda: checkpointed(torch.sin)((fresh(50, 4) * 2)[7]).sum(),
    "view of a parameter": lambda: checkpointed(torch.mul)(PARAMETER.t(), fresh(6, 6)).sum(),
    "several regions": several_regions,
    "determinism check": lambda: checkpointed(sines, determinism_check=lambda t: [t.abs(), 1])(fresh(9) * 2).sum(),
    "nested regions": lambda: checkpointed(lambda x: checkpointed(block)(x.sin()).cos())(fresh(6, 6) * 2).sum(),
    "torch's in a region": lambda: checkpointed(in_torchs(torch.sin))(fresh(9)).sum(),
    "packed inputs": lambda: packed(lambda: checkpointed(block)(fresh(6, 6) * 2).sum()),
    "partial backward": partial_backward,
    "a view of an output": lambda: checkpointed(lambda x: op(Transpose, "t", RECOMPUTE, x).sin())(fresh(4, 4)).sum(),
}  # fmt: skip


def sines(x):
    return x.sin().exp().sin()


@pytest.mark.parametrize("program", PROGRAMS)
def test_total_equals_the_bytes_that_the_profiler_sees_retained(program):
    assert_exact(PROGRAMS[program])


def test_total_in_the_middle_of_backward_counts_what_replay_has_made():
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


FROZEN = nn.Linear(16, 16).requires_grad_(False)
CONV = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
EMBEDDING = nn.Embedding(16, 16)
W = FROZEN.weight


def made(*shape):
    """Return a tensor that nothing but what saves it keeps."""
    return torch.randn(*shape, requires_grad=True) * 1


def through_torch(function, *args, **kwargs):
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def packed(make):
    """Run with hooks that put each saved tensor, as it is, into a tuple."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("here", [tensor]), lambda kept: kept[1][0]):
        return make()


FROZEN_PROGRAMS = {
    "linear": lambda: FROZEN(made(4, 16)).sin().sum(),
    "view": lambda: (made(4, 16) @ W[:, :8]).sum(),
    "views as inputs by name": lambda: checkpointed(lambda x, **w: x @ w["a"] @ w["b"])(
        made(4, 16), a=W.t(), b=EMBEDDING.weight.t()
    ).sum(),
    "view that hooks hold": lambda: packed(lambda: FROZEN(made(4, 16)).sin().sum()),
}


@pytest.mark.parametrize("program", FROZEN_PROGRAMS)
def test_views_of_parameters_that_need_no_gradient_are_apart(program):
    report = assert_exact(FROZEN_PROGRAMS[program])
    assert report.parameters.bytes == 16 * 16 * 4 * report.parameters.count > 0


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
        (lambda: CONV(made(2, 3, 8, 8)).sum(), CONV, 24),  # the statistics; batches are counted apart, too
        (lambda: (made(4, 16) * masked.mask).sum(), masked, 256),
        (lambda: checkpointed(lambda x, mask: x * mask)(made(4, 16), masked.mask).sum(), masked, 256),
        (lambda: (made(4, 16) @ EMBEDDING.weight.detach()).sum(), EMBEDDING, 1024),
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


def turned(function):
    return lambda x: through_torch(function, x).view(-1).sin()


def sine_cosine(x):
    return x.sin().cos()


def twice_over(function):
    return lambda x: through_torch(lambda x: function(through_torch(sine_cosine, x)), x)


def graph_kept_of(function):
    x = torch.randn(4, 16, requires_grad=True)
    y = function(x * 1).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    return y


def after_partial_backward(function):
    y = function(made(4, 16))
    torch.autograd.grad(y.exp().sum(), y)
    return y.sum()


def in_torchs(function):
    return lambda x: through_torch(function, x)


INSIDE_EACH_OTHER = {
    "two and a product": turned(lambda x: through_torch(torch.mm, x.view(4, 16), W).view(64)),
    "a region between": in_torchs(checkpointed(turned(twice_over(sine_cosine)))),
    "arguments of all kinds": lambda x: through_torch(lambda x, y, *, z: x * y[0] * z, x, [x.exp()], z=x.cos()),
    "what hooks hold": lambda x: packed(lambda: through_torch(turned(sine_cosine), x.exp())),
}


@pairwise(
    program=INSIDE_EACH_OTHER,
    run=[lambda f: f(made(4, 16)).sum(), graph_kept_of, after_partial_backward],
)
def test_torchs_checkpoints_inside_each_other_are_all_counted(program, run):
    assert_exact(lambda: run(INSIDE_EACH_OTHER[program]))


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
    report = assert_exact(lambda: KeepsInside.apply(made(4, 16)).sum())
    (node,) = [node for node in report.outside if node.node == "KeepsInsideBackward"]
    assert [tensor.label for tensor in node.tensors] == ["pair"] * 3 + ["table"] * 2 + ["others"] * 2
    assert report.parameters.count == 1
    assert_exact(lambda: checkpointed(lambda x: KeepsInside.apply(x.sin()).cos())(made(4, 16)).sum())


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
