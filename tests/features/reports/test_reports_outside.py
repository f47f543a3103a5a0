"""Memory reports of parameters that need no gradient, buffers, torch's own checkpoints, and what hangs on ``ctx``."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.features.reports.test_memory_report import assert_exact, retained_bytes
from tests.helpers import checkpointed, leaf, no_other_regions, pairwise


@pytest.fixture(autouse=True)
def _no_other_regions():
    with no_other_regions():
        yield


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
    "view in a region": lambda: checkpointed(lambda x: (x @ W[:, :8]).sin())(made(4, 16)).sum(),
    "view as a region's input": lambda: checkpointed(torch.mm)(made(4, 16), W.t()).sum(),
    "views as inputs by name": lambda: checkpointed(lambda x, **w: x @ w["a"] @ w["b"])(
        made(4, 16), a=W.t(), b=EMBEDDING.weight.t()
    ).sum(),
    "view that hooks hold": lambda: packed(lambda: FROZEN(made(4, 16)).sin().sum()),
    "torch's checkpoint of a view": lambda: through_torch(torch.mm, made(4, 16), W.t()).sum(),
}


@pytest.mark.parametrize("program", FROZEN_PROGRAMS)
def test_views_of_parameters_that_need_no_gradient_are_apart(program):
    report = assert_exact(FROZEN_PROGRAMS[program])
    assert report.parameters.bytes == 16 * 16 * 4 * report.parameters.count > 0


def test_view_of_a_parameter_is_apart_without_roots():
    for parameter in (W, EMBEDDING.weight):
        y = checkpointed(torch.mm, preserve_rng_state=False)(leaf(4, 16), parameter.t())
        report = remat.memory_report()
        assert (report.bytes, report.parameters.count) == (4 * 16 * 4, 1)
        assert report.regions[0].tensors[1].shared_with == "parameter"
        del y


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


def test_text_and_table_tell_of_buffers():
    report = remat.memory_report(CONV(made(2, 3, 8, 8)).sum(), CONV)
    assert str(report).splitlines()[1:3] == ["parameters, apart: 360 B in 4", "buffers, apart: 32 B in 3"]
    assert "buffers, apart: 32 B in 3" in report._repr_html_()
    assert "buffers" not in str(remat.memory_report(made(3).sin()))


def test_module_whose_parameters_are_not_made_yet_has_none():
    assert remat.memory_report(nn.LazyLinear(4)).parameters.bytes == 0


def turned(function):
    return lambda x: through_torch(function, x).view(-1).sin()


def sines(x):
    return x.sin().cos()


def twice_over(function):
    return lambda x: through_torch(lambda x: function(through_torch(sines, x)), x)


def with_graph_kept(function):
    x = torch.randn(4, 16, requires_grad=True)
    y = function(x * 1).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    return y


def after_partial_backward(function):
    y = function(made(4, 16))
    torch.autograd.grad(y.exp().sum(), y)
    return y.sum()


def after_backward_of_one_output(function):
    x = made(4, 16)
    y, z = through_torch(lambda x: (function(x), x.exp().sin()), x)
    torch.autograd.grad(z.sum(), x, retain_graph=True)
    return y.sum()


def torchs(function):
    return lambda x: through_torch(function, x)


INSIDE_EACH_OTHER = {
    "two": turned(lambda x: through_torch(torch.sin, x).view(64)),
    "two and a product": turned(lambda x: through_torch(torch.mm, x.view(4, 16), W).view(64)),
    "three": turned(twice_over(sines)),
    "a region around": checkpointed(turned(twice_over(sines))),
    "a region between": torchs(checkpointed(turned(twice_over(sines)))),
    "a region inside": turned(twice_over(checkpointed(sines))),
    "arguments of all kinds": lambda x: through_torch(lambda x, y, *, z: x * y[0] * z, x, [x.exp()], z=x.cos()),
    "what hooks hold": lambda x: packed(lambda: through_torch(turned(sines), x.exp())),
}


@pairwise(
    program=INSIDE_EACH_OTHER,
    run=[lambda f: f(made(4, 16)).sum(), with_graph_kept, after_partial_backward],
)
def test_torchs_checkpoints_inside_each_other_are_all_counted(program, run):
    assert_exact(lambda: run(INSIDE_EACH_OTHER[program]))


@pytest.mark.parametrize("inner", [sines, turned(sines)])
def test_torchs_checkpoint_after_backward_of_one_of_two_outputs(inner):
    assert_exact(lambda: after_backward_of_one_output(inner))


def test_what_a_backward_through_torchs_checkpoint_has_recomputed_is_counted():
    reports = []

    def look(_grad):
        reports.append(remat.memory_report(y))

    x = made(8, 8)
    y = through_torch(lambda x: noted(x.sin().exp(), look).tanh(), x).sum()
    y.backward()
    (node,) = [node for node in reports[0].outside if node.node == "torch.utils.checkpoint"]
    recomputed = [tensor for tensor in node.tensors if tensor.kind == "refilled"]
    assert [tensor.bytes for tensor in recomputed] == [256]


def noted(x, look):
    x.register_hook(look)
    return x


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
