"""Gradients taken inside regions that lie in each other: the replay of an inner one is part of the outer ones' ops."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import CountOps, assert_same, checkpointed, leaf, pairwise, plain, refused_if

aten = torch.ops.aten
SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE
POLICIES = {
    "products": (aten.mm.default, aten.mul.Tensor),
    "exponentials": (aten.exp.default, aten.sin.default, aten.add.Tensor),
    "nothing": (),
}


def saving(*ops):
    return lambda ctx, op, *args, **kwargs: SAVE if op in ops else RECOMPUTE


def torchs(function):
    return lambda *args: torch_checkpoint(function, *args, use_reentrant=False)


REGIONS = {
    "plain": checkpointed,
    "torch": torchs,
    "bitwise": lambda function: checkpointed(function, determinism_check="bitwise"),
    "offload": lambda function: checkpointed(function, offload_inputs=True),
    "everything": lambda function: checkpointed(function, policy=lambda ctx, op, *args, **kwargs: SAVE),
    **{
        name: lambda function, ops=ops: checkpointed(function, policy=saving(*ops), region_name=str(len(ops)))
        for name, ops in POLICIES.items()
    },
}


REFUSING = {"everything", *POLICIES}  # their policies watch ops


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


BODIES = {
    "sin of a product": lambda h, w: (h * h).sin() @ w,
    "views": lambda h, w: h.view(2, 8).sin().view(4, 4).T.exp(),
    "halves": lambda h, w: torch.cat([h.chunk(2)[1].sigmoid(), h.chunk(2)[0] @ w]),
    "dropout": lambda h, w: functional.dropout(h, 0.3) * w,
    "in place": lambda h, w: functional.silu(h + 1, inplace=True) * 2,
    "layer norm": lambda h, w: functional.layer_norm(h, (4,)).softmax(-1),
    "function": lambda h, w: Exp.apply(h * 0.3).tanh(),
    "linear layer": lambda h, w: functional.linear(h.view(2, 2, 4).transpose(0, 1), w, w[0]).square().view(4, 4),
}


def second_order(body, h):
    (gradient,) = torch.autograd.grad(body(h).sum(), h, create_graph=True)
    return h + gradient.sin()


def second_order_beside(body, h):
    y = body(h)
    (gradient,) = torch.autograd.grad(y.sum(), h, create_graph=True)
    return y + gradient.square()


def of_a_copy(body, h):
    point = h.detach().requires_grad_()
    return h + torch.autograd.grad(body(point).sum(), point)[0]


def accumulated(body, h):
    point = h.detach().requires_grad_()
    for _ in range(2):
        body(point).sum().backward(inputs=[point])
    return h * point.grad


def graph_kept(body, h):
    y = body(h)
    (gradient,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
    return y * gradient


GRADIENTS = [second_order, second_order_beside, of_a_copy, accumulated, graph_kept]


def result(program):
    torch.manual_seed(5)
    x, w = leaf(4, 4), leaf(4, 4)
    y = program(x.sin(), w)
    y.square().sum().backward()
    return y, x.grad, w.grad, torch.get_rng_state()


@pairwise(outer=REGIONS, inner=[None, *REGIONS], gradient=GRADIENTS)
def test_gradient_inside_of_an_inner_region(outer, inner, gradient):
    wrap = plain if inner is None else REGIONS[inner]
    for name, body in BODIES.items():

        def program(h, w, outer=plain, inner=plain, body=body):
            def block(h):
                return gradient(lambda point: body(point, w), h).tanh()

            return outer(lambda h: inner(block)(h.cos()).sin())(h)

        with refused_if(not REFUSING.isdisjoint((outer, inner))):
            actual = result(lambda h, w: program(h, w, outer=REGIONS[outer], inner=wrap))
            assert_same(result(program), actual, name)


@pairwise(outer=REGIONS, inner=REGIONS, gradient=GRADIENTS)
def test_gradient_through_an_inner_region(outer, inner, gradient):
    for name, body in BODIES.items():

        def program(h, w, outer=plain, inner=plain, body=body):
            def block(h):
                return gradient(lambda point: inner(body)(point, w).cos(), h * 2).sin()

            return outer(block)(h)

        with refused_if(not REFUSING.isdisjoint((outer, inner))):
            actual = result(lambda h, w: program(h, w, outer=REGIONS[outer], inner=REGIONS[inner]))
            assert_same(result(program), actual, name)


def called(function, h):
    return function(h)


CALLS = {
    "native": lambda function, h: remat.native_save_region("kept", function, h),
    "region": lambda function, h: remat.op(function, "kept")(h),
}


def can_keep(outer, inner, **_):
    """A kept call needs a region of ours; torch's region inside of one repeats the call, whose name is then taken."""
    return (outer, inner) != ("torch", None) and (inner != "torch" or outer == "torch")


@pairwise(outer=REGIONS, inner=[None, *REGIONS], call=CALLS, gradient=GRADIENTS, possible=can_keep)
def test_gradient_by_what_is_kept(outer, inner, call, gradient):
    """Of two nested regions the inner one unpacks what the outer one has recomputed."""
    wrap = plain if inner is None else REGIONS[inner]

    def program(h, w, outer=plain, inner=plain, keep=called):
        def block(h):
            kept = keep(torch.sin, h)
            return gradient(lambda point: (point @ w).sin() * point.T, kept).tanh()

        return outer(lambda h: inner(block)(h.cos()).sin())(h)

    with warnings.catch_warnings(), refused_if(True):
        warnings.simplefilter("ignore", remat.RematWarning)
        actual = result(lambda h, w: program(h, w, outer=REGIONS[outer], inner=wrap, keep=CALLS[call]))
        assert_same(result(program), actual)


@pytest.mark.parametrize("shape", ["", "products"])
def test_gradient_that_a_policy_keeps_and_code_outside_changes_is_an_error(shape):
    def block(h):
        point = h.detach().requires_grad_()
        y = point @ torch.ones(4, 4) if shape else point.sin() * point  # the gradient is a view of a product
        (gradient,) = torch.autograd.grad(y.sum(), point)
        return (h * gradient.exp()).sin(), gradient

    y, gradient = checkpointed(block, policy=lambda *_args, **_kwargs: SAVE)(leaf(2, 4, 4).sin())
    gradient.mul_(2)
    y.sum().backward()  # all is saved
    y, gradient = checkpointed(
        block, policy=lambda ctx, op, *args, **kwargs: RECOMPUTE if op is aten.exp.default else SAVE
    )(leaf(2, 4, 4).sin())
    gradient.mul_(2)
    with pytest.raises(remat.MutationError, match="after it was kept for replay"):
        y.sum().backward()


def test_autograd_takes_over_gradients_that_a_policy_keeps():
    def block(h):
        point = h.detach().requires_grad_()
        point.sin().sum().backward(inputs=[point])
        return (h * point.grad).sin()

    with CountOps() as expected:
        block(leaf(3))
    with CountOps() as ops:
        checkpointed(block, policy=saving(aten.mul.Tensor))(leaf(3))
    assert ops.counts["mul"] == expected.counts["mul"] == 2
    assert "new_empty_strided" not in ops.counts


def test_replay_inside_forward_goes_no_further_than_forward_has_come():
    """An op may fill the last tensor that it saves, so that replay does not stop before it."""
    runs = []

    def block(h):
        point = h.detach().requires_grad_()
        y = functional.layer_norm(point, (4,))
        (gradient,) = torch.autograd.grad(y.sum(), point, create_graph=True)
        runs.append(remat.is_recomputing())
        (second,) = torch.autograd.grad((point + gradient.sin()).sum(), point)
        return h * second

    expected = result(lambda h, w: block(h) * w)
    runs.clear()
    assert_same(expected, result(lambda h, w: checkpointed(block)(h) * w))
    assert runs[0] is False
