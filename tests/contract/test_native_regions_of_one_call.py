"""Native regions that are one call of a function of torch's own: skipped whole, with what they take and return."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import torch_remat as remat
from tests.helpers import assert_same, pairwise

keep = remat.native_save_region
region = remat.checkpoint


class Ops(TorchDispatchMode):
    """Notes the names of the aten ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op._schema.name.removeprefix("aten::"))
        return op(*args, **(kwargs or {}))


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


CALLS = {
    "matmul": lambda k, x, w: k("n", torch.matmul, x, w),
    "keywords": lambda k, x, w: k("n", torch.matmul, input=x, other=w),
    "linear": lambda k, x, w: k("n", F.linear, x, w, w[0]),
    "sum of a region's input": lambda k, x, w: k("n", torch.sum, x, 1, keepdim=True) * w,
    "list of tensors": lambda k, x, w: k("n", torch.cat, [x, w.sin(), x * 2], 1)[:, 2:10],
    "several results": lambda k, x, w: torch.mul(*k("n", torch.topk, x @ w, 2)[:1] * 2),
    "views": lambda k, x, w: torch.sub(*k("n", torch.chunk, x @ w, 2, 1)),
    "view of a parameter": lambda k, x, w: (k("n", torch.t, w)[:4] * x).sin() * k("m", torch.reshape, w, (4, -1)),
    "view of a kept result": lambda k, x, w: k("v", torch.t, k("n", torch.mm, x.sin(), w)).sin().exp(),
    "its argument": lambda k, x, w: k("n", torch.dropout, x.sin(), 0.5, False).exp() * w,
    "dropout": lambda k, x, w: k("n", torch.dropout, x @ w, 0.5, True),
    "noise": lambda k, x, w: k("n", torch.rrelu, x @ w, 0.1, 0.9, True),
    "attention": lambda k, x, w: k("n", F.scaled_dot_product_attention, x[None], (x * w)[None], w[None])[0],
    "choice": lambda k, x, w: (x @ w)[k("n", torch.argsort, x.detach() @ w.detach(), 0)[0]],
    "python value": lambda k, x, w: x * w if k("n", torch.is_tensor, x) else x,
    "exception": lambda k, x, w: attempt(lambda: k("n", torch.matmul, x, w[:3]), x * w),
}


def attempt(function, otherwise):
    try:
        return function()
    except RuntimeError:
        return otherwise


def plain(_name, function, *args, **kwargs):
    return function(*args, **kwargs)


def program(name, k):
    def function(x, w):
        h = x.cos() * 2
        y = CALLS[name](k, h, w)
        return F.dropout(y.exp().sigmoid(), 0.3).sum() + h.sum()

    return function


@pairwise(name=CALLS, retain=[False, True])
def test_gradients_and_generators_are_those_of_plain_autograd(name, retain):
    x, w = leaf(4, 4), leaf(4, 4)
    torch.manual_seed(1)
    expected = torch.autograd.grad(program(name, plain)(x, w), [x, w])
    number = torch.rand(1)
    torch.manual_seed(1)
    y = region()(program(name, keep))(x, w)
    for kept in (True, False) if retain else (False,):
        assert_same(expected, torch.autograd.grad(y, [x, w], retain_graph=kept))
    assert_same(number, torch.rand(1))


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("matmul", "mm"),
        ("linear", "addmm"),
        ("dropout", "bernoulli_"),
        ("noise", "rrelu_with_noise"),
    ],
)
def test_call_does_not_run_in_replay(name, op):
    x, w = leaf(4, 4), leaf(4, 4)
    with Ops() as forward:
        z = CALLS[name](plain, x.sin(), w).sin()
    assert op in forward.names
    with Ops() as backward:
        torch.autograd.grad(z.sum(), [x, w])
    y = region()(lambda x: CALLS[name](keep, x.sin(), w).sin())(x)
    with Ops() as both:
        torch.autograd.grad(y.sum(), [x, w])
    assert "sin" in both.names  # there was a replay
    assert both.names.count(op) == backward.names.count(op)


def test_kept_is_what_was_counted_by_hand():
    x, w = leaf(4, 8), torch.nn.Parameter(torch.randn(8, 8))
    gc.collect()
    gc.disable()
    try:
        refs = {}

        def function(x):
            h = x.sin()
            y = keep("n", torch.matmul, h, w)
            refs.update(h=torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage()))
            refs.update(y=torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
            return y.exp()

        out = region()(function)(x)
        assert refs["h"].expired()  # replay makes it again
        assert not refs["y"].expired()  # the exponential reads it
        out.sum().backward()
        del out
        assert refs["y"].expired()
    finally:
        gc.enable()


def test_another_function_or_shape_in_replay_is_an_error():
    x, w = leaf(4, 4), leaf(4, 4)

    def function(x):
        return keep("n", torch.mul if remat.is_recomputing() else torch.matmul, x.sin(), w).sin()

    def shape(x):
        return keep("n", torch.matmul, x.sin().t() if remat.is_recomputing() else x.sin(), w).sin()

    for changed in (function, shape):
        y = region(region_name="r")(changed)(x)
        with pytest.raises(remat.MismatchError, match="r::n"):
            y.sum().backward()


def test_call_whose_result_the_region_changes_in_place_runs_whole():
    x, w = leaf(4, 4), leaf(4, 4)

    def function(x):
        y = keep("product", torch.matmul, x.sin(), w)
        z = y.relu()
        y.add_(1)
        return z * y.exp()

    expected = torch.autograd.grad(function(x).sum(), (x, w))
    with pytest.warns(remat.RematWarning, match="r::product: replay recomputes this call"):
        y = region(region_name="r")(function)(x)
    assert_same(expected, torch.autograd.grad(y.sum(), (x, w)))
