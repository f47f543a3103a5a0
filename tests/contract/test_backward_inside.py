"""Gradients taken inside regions, also of regions in each other; saved tensors that are looked at; hooks on tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import torch_remat as remat
from tests.helpers import (
    assert_same,
    assert_same_program,
    checkpointed,
    leaf,
    pairwise,
    plain,
    refused_if,
)
from tests.native_programs import full
from tests.ways import BY_NATIVE_REGION, BY_OP, KEEPING, RECOMPUTED, assert_same_in


def _grad_of(output, *inputs, **options):
    return torch.autograd.grad(output.sum(), inputs, **options)[0]


THROUGH_CALLS = {
    "alone": lambda keep, h, w: h.cos() * _grad_of(keep("n", torch.exp, h), h),
    "a product": lambda keep, h, w: (h.cos() * _grad_of(keep("n", torch.mm, h, w), h)).sin(),
    "create_graph": lambda keep, h, w: h.cos() * _grad_of(keep("n", torch.exp, h).sin() + h, h, create_graph=True),
    "two ops": lambda keep, h, w: h * _grad_of(keep("n", lambda h: h.sin() @ h, h), h, create_graph=True),
}


@pairwise(name=THROUGH_CALLS, way=KEEPING, policy=[None, [torch.ops.aten.exp.default]], ids=str)
def test_gradient_taken_inside_a_region_through_a_saved_call_is_refused_in_forward(name, way, policy):
    w = leaf(3, 3)
    with pytest.raises(remat.UsageError, match="through this call before the region's forward ends") as caught:
        way.region(lambda x: THROUGH_CALLS[name](way.keep, x.sin(), w), policy=policy)(leaf(3, 3))
    assert caught.value.op == "n"


@pytest.mark.parametrize("way", [RECOMPUTED, BY_OP, BY_NATIVE_REGION], ids=str)
def test_gradient_taken_inside_a_region_of_what_a_saved_call_returned_is_equal(way):
    def block(way, h):
        q = way.keep("n", torch.exp, h)
        return q * _grad_of(q.sin(), q, create_graph=True)

    def program(way):
        x = leaf(3, 3)
        y = way.region(lambda x: block(way, x.sin()))(x)
        return y, torch.autograd.grad(y.sum(), x, retain_graph=True), torch.autograd.grad(y.sum(), x)

    assert_same_in(way, program)


def test_gradient_that_is_refused_and_swallowed_is_an_error_at_the_end_of_forward():
    def block(x):
        h = x.cos()
        y = remat.op(torch.sin, "n")(h)
        try:
            gradient = _grad_of(y, h)
        except RuntimeError:
            gradient = 1
        return gradient * h

    with pytest.raises(remat.UsageError, match="through this call before the region's forward ends") as caught:
        remat.checkpoint()(block)(leaf(3, 3))
    assert caught.value.op == "n"


class ReadTwice(torch.autograd.Function):
    """Reads its saved tensors twice in backward, and checks that both reads agree."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        first, second = ctx.saved_tensors, ctx.saved_tensors
        assert len(first) == len(second) == 2
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
        return grad * second[1], grad * first[0]


def test_saved_tensors_may_be_read_twice():
    def program(wrap):
        x = leaf(4)
        y = wrap(lambda x: ReadTwice.apply(x.sin(), x.cos()).tanh())(x)
        y.sum().backward()
        return x.grad

    assert_same_program(program)


def test_saved_tensor_looked_at_before_backward_is_right_and_harms_nothing():
    x = leaf(4)
    y = checkpointed(lambda x: x.sin().exp())(x)
    assert_same(y.grad_fn._saved_result, x.sin().exp())
    assert_same(y.grad_fn._saved_result, x.sin().exp())
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(x.sin().exp().sum(), x))


def test_hooks_on_outputs_inputs_and_inner_tensors_see_equal_gradients():
    def program(wrap):
        seen = []

        def block(x):
            h = x.sin()
            if not seen_inner:
                h.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
                seen_inner.append(True)
            return h.exp()

        seen_inner = []
        x = leaf(4)
        x.register_hook(lambda grad: grad + 1)
        y = wrap(block)(x)
        y.retain_grad()
        y.register_hook(lambda grad: grad * 3)
        y.sum().backward()
        return x.grad, y.grad, *seen

    assert_same_program(program)


# --- Regions in each other: the replay of an inner one is part of the ops of the outer one


aten = torch.ops.aten
SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE
REFUSING = {  # these policies watch ops
    "everything": lambda *args, **kwargs: SAVE,
    "products": lambda ctx, op, *args, **kwargs: op in (aten.mm.default, aten.mul.Tensor),
    "nothing": lambda *args, **kwargs: RECOMPUTE,
}
REGIONS = {
    "plain": checkpointed,
    "torch": full,
    "bitwise": lambda function: checkpointed(function, determinism_check="bitwise"),
    **{name: remat.checkpoint(policy=policy) for name, policy in REFUSING.items()},
}


BODIES = {
    "sin of a product": lambda h, w: (h * h).sin() @ w,
    "views": lambda h, w: h.view(2, 8).sin().view(4, 4).T.exp(),
    "dropout": lambda h, w: functional.dropout(h, 0.3) * w,
    "in place": lambda h, w: functional.silu(h + 1, inplace=True) * 2,
}


def second_order(body, h):
    (gradient,) = torch.autograd.grad(body(h).sum(), h, create_graph=True)
    return h + gradient.sin()


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


GRADIENTS = [second_order, of_a_copy, accumulated, graph_kept]


def result(program):
    torch.manual_seed(5)
    x, w = leaf(4, 4), leaf(4, 4)
    y = program(x.sin(), w)
    y.square().sum().backward()
    return y, x.grad, w.grad, torch.get_rng_state()


@pairwise(outer=REGIONS, inner=REGIONS, gradient=GRADIENTS, where=["inside", "through"])
def test_gradient_inside_of_nested_regions(outer, inner, gradient, where):
    """Taken inside the inner region, or by the outer one through it."""
    for name, body in BODIES.items():

        def program(h, w, outer=plain, inner=plain, body=body):
            def inside(h):
                return gradient(lambda point: body(point, w), h).tanh()

            def through(h):
                return gradient(lambda point: inner(body)(point, w).cos(), h * 2).sin()

            return outer(lambda h: inner(inside)(h.cos()).sin() if where == "inside" else through(h))(h)

        with refused_if(not REFUSING.keys().isdisjoint((outer, inner))):
            actual = result(lambda h, w: program(h, w, outer=REGIONS[outer], inner=REGIONS[inner]))
            assert_same(result(program), actual, name)
