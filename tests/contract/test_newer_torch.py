"""What releases of torch after the oldest one brought, in each way of keeping; skipped where torch lacks it."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch.autograd import graph
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat
from tests.helpers import CountOps, assert_same, leaf
from tests.ways import BY_HANDLE, WAYS, assert_same_in, call

aten = torch.ops.aten
FUNCTIONS_AS_THEY_ARE = [way for way in WAYS if way is not BY_HANDLE]  # which wraps them in a Function
PRODUCTS = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])


def needs(owner, name, release):
    return pytest.mark.skipif(not hasattr(owner, name), reason=f"torch has {name} from {release} on")


# torch's selective checkpointing in a region: the hooks of a region are none of the user's


has_respect = pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(torch_checkpoint).parameters,
    reason="torch has respect_saved_tensors_hooks from 2.14 on",
)


def product_kept_by_torch(x, w, **options):
    inner = functools.partial(torch_checkpoint, use_reentrant=False, context_fn=PRODUCTS, **options)
    return inner(lambda x: (x.sin() @ w).exp(), x).cos()


@pytest.mark.parametrize("way", FUNCTIONS_AS_THEY_ARE, ids=str)
def test_selective_checkpoint_in_a_region_keeps_what_it_names_and_does_not_warn(way):
    x, w = leaf(4, 4), leaf(4, 4)
    expected = torch.autograd.grad(product_kept_by_torch(x, w).sum(), (x, w))

    def block(x):
        return way.keep("product", product_kept_by_torch, x, w).clone()

    y = way.region(block)(x)  # a warning is an error
    with CountOps() as ops:
        actual = torch.autograd.grad(y.sum(), (x, w))
    assert_same(expected, actual)
    runs_again = way.keep is call and way.options == {}
    assert ops.counts["mm"] == 2 + runs_again  # two of backward; torch's own replay takes the kept one


@has_respect
@pytest.mark.parametrize("respects", [None, True, False])
def test_selective_checkpoint_in_a_region_finds_the_users_hooks_around_it(respects):
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    x, w = leaf(4, 4), leaf(4, 6)
    expected = torch.autograd.grad(product_kept_by_torch(x, w).sum(), (x, w))
    region = remat.checkpoint()(lambda x: product_kept_by_torch(x, w, respect_saved_tensors_hooks=respects))
    with graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if respects is None:
            with pytest.warns(FutureWarning, match="saved_tensors_hooks context"):
                y = region(x)
        else:
            y = region(x)
    assert (torch.Size([4, 6]) in packed) == (respects is True)
    assert_same(expected, torch.autograd.grad(y.sum(), (x, w)))


# node_creation_hook


node_creation_hook = getattr(graph, "node_creation_hook", None)
has_creation_hook = needs(graph, "node_creation_hook", "2.15")


def wave(x, w):
    return ((x @ w).sin() @ w).exp()


@has_creation_hook
@pytest.mark.parametrize("prefix", ["name", "_raw_saved_"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_hook_that_only_looks_at_new_nodes_sees_them_in_both_phases(way, prefix):
    def program(way):
        seen = []

        def look(node):
            seen.append(node.name())
            for name in dir(node):
                if name.startswith(prefix):
                    getattr(node, name)

        x, w = leaf(4, 4), leaf(4, 4)
        with node_creation_hook(look):
            y = way.region(lambda x: way.keep("wave", wave, x, w).clone())(x)
            assert seen
            return y, *torch.autograd.grad(y.sum(), (x, w))

    assert_same_in(way, program)


@has_creation_hook
@pytest.mark.parametrize(
    "options", [{}, {"policy": remat.policies.save_matmuls}, {"determinism_check": "bitwise"}, {"debug": True}], ids=str
)
@pytest.mark.parametrize("product", [torch.mm, lambda x, w: x @ w], ids=["function", "operator"])
def test_a_hook_may_read_a_saved_tensor_in_forward(options, product):
    def read(node):
        for name in dir(node):
            if name.startswith("_saved_"):
                getattr(node, name)

    x, w = leaf(4, 4), leaf(4, 4)
    region = remat.checkpoint(region_name="block", **options)(lambda x: product(product(x, w).sin(), w).exp())
    with node_creation_hook(read):
        y = region(x)
    assert_same(torch.autograd.grad(wave(x, w).sum(), (x, w)), torch.autograd.grad(y.sum(), (x, w)), "gradient")


@has_creation_hook
def test_what_a_hook_takes_raw_can_be_read_after_the_region():
    nodes = []
    x = leaf(3)
    with node_creation_hook(nodes.append):
        y = remat.checkpoint()(lambda x: x.sin().exp())(x)
    (node,) = (node for node in nodes if node.name() == "SinBackward0")
    assert torch.equal(node._saved_self, x)
    assert torch.equal(y, x.sin().exp())


def test_saved_tensor_may_be_read_in_forward():
    def block(x):
        y = x.sin()
        assert y.grad_fn._saved_self is not None
        return y.exp()

    x = leaf(3)
    for options in ({}, {"policy": remat.policies.save_matmuls}):
        region = remat.checkpoint(**options)(block)
        assert_same(torch.autograd.grad(block(x).sum(), x), torch.autograd.grad(region(x).sum(), x))


# set_output_grad_dtype


class Halved(torch.autograd.Function):
    """Returns half precision, and is given its gradient in the precision that was asked for."""

    seen: tuple[torch.dtype, ...] = ()

    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x, dtype):
        ctx.set_output_grad_dtype(dtype)
        ctx.save_for_backward(x)
        return (x * 1.5).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, grad):
        Halved.seen = (*Halved.seen, grad.dtype)
        return grad.float() * ctx.saved_tensors[0].cos() * 1.5, None


class Amplified(torch.autograd.Function):
    """Sends a gradient back in float32 whose bits bfloat16 lacks, where its node may."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.float() * 1.0009765625


@needs(FunctionCtx, "set_output_grad_dtype", "2.15")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("way", FUNCTIONS_AS_THEY_ARE, ids=str)
def test_a_function_gets_its_gradient_in_the_dtype_that_it_asks_for(way, dtype):
    def program(way):
        Halved.seen = ()
        x = leaf(5)

        def block(x):
            y = way.keep("halved", lambda x: Halved.apply(x.sin(), dtype), x)
            return Amplified.apply(y).clone()

        (gradient,) = torch.autograd.grad(way.region(block)(x).sum(), x)
        return gradient, torch.tensor([seen.itemsize for seen in Halved.seen])

    assert_same_in(way, program)
