"""Placeholders under autograd, and who keeps them alive: views have a graph, nothing outlives its last use."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import torch_remat as remat
from tests.helpers import collector_off, python_objects
from torch_remat.dispatch.placeholder import Source, make_placeholder

SOURCE = Source("block.3", "attention", "out")


def placeholder(like=None):
    return make_placeholder(torch.randn(2, 3) if like is None else like, SOURCE)


def refused(consume, *args):
    """Return the PlaceholderError that a call must raise."""
    with pytest.raises(remat.PlaceholderError) as caught:
        consume(*args)
    return caught.value


class Skip(torch.autograd.Function):
    """An op that replay skips: gives a placeholder; its backward is a factor of three."""

    @staticmethod
    def forward(ctx, x):
        return make_placeholder(x, SOURCE)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Take(torch.autograd.Function):
    """An op that takes a placeholder and has its values from elsewhere; its backward is a factor of five."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.zeros(x.shape)

    @staticmethod
    def backward(ctx, grad):
        assert remat.is_placeholder(*ctx.saved_tensors)
        return grad * 5


VIEWS = {
    "nothing": lambda x: x,
    "view": lambda x: x.view(3, 8),
    "index": lambda x: x[1],
    "slices": lambda x: x[:, 1:, ::2],
    "transpose": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x.unsqueeze(0).expand(2, 2, 3, 4),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 3), 5),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unbind": lambda x: x.unbind(1)[1],
    "split": lambda x: x.split([1, 3], -1)[1],
    "chain": lambda x: x.flatten(1)[:, 2:].t()[None],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_gradient_flows_through_views_of_a_placeholder(view):
    x = torch.randn(2, 3, 4, requires_grad=True)
    weights = torch.arange(float(view(x).numel())).view(view(x).shape)
    (expected,) = torch.autograd.grad(view(x), x, weights)
    skipped = Skip.apply(x)
    assert remat.is_placeholder(skipped)
    assert type(skipped.grad_fn).__name__ == "SkipBackward"
    (actual,) = torch.autograd.grad(Take.apply(view(skipped)), x, weights, create_graph=True)
    assert torch.equal(actual, expected * 15)


def test_view_of_a_placeholder_that_requires_grad_has_a_grad_fn():
    given = placeholder().requires_grad_()
    like = torch.randn(2, 3, requires_grad=True)
    assert type(given.t().grad_fn) is type(like.t().grad_fn)
    assert not given.detach().requires_grad
    with torch.no_grad():
        assert given.t().grad_fn is None
        assert given.t().requires_grad == like.t().requires_grad


def test_placeholder_made_under_no_grad_takes_part_in_autograd():
    with torch.no_grad():
        given = placeholder()
    given.requires_grad_()
    Take.apply(given[1]).sum().backward()
    assert torch.equal(given.grad, torch.tensor([[0.0, 0.0, 0.0], [5.0, 5.0, 5.0]]))


def test_hooks_and_retained_gradients_of_a_placeholder_work():
    x = torch.randn(2, 3, requires_grad=True)
    given, seen = Skip.apply(x), []
    given.register_hook(seen.append)
    given.retain_grad()
    Take.apply(given.t()).sum().backward()
    assert torch.equal(seen[0], torch.full((2, 3), 5.0))
    assert torch.equal(given.grad, seen[0])
    assert torch.equal(x.grad, torch.full((2, 3), 15.0))


def test_saved_tensor_hooks_get_the_placeholder():
    x, packed = torch.randn(2, 3, requires_grad=True), []
    with saved_tensors_hooks(lambda saved: packed.append(saved) or saved, lambda saved: saved):
        out = Take.apply(Skip.apply(x))
    assert [remat.is_placeholder(saved) for saved in packed] == [True]
    out.sum().backward()


def test_saved_tensor_hooks_that_copy_raise():
    given = placeholder().requires_grad_()
    with saved_tensors_hooks(torch.clone, torch.clone):
        assert refused(Take.apply, given).consumer.startswith("aten.clone")


def test_failed_consumption_leaves_no_graph_behind():
    x = torch.randn(2, 3, requires_grad=True)
    given = Skip.apply(x)
    refused(lambda: given * x)
    Take.apply(given).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 15.0))


# Lifetimes


def test_placeholder_and_views_are_freed_by_reference_counts():
    def use():
        given = placeholder().requires_grad_()
        view = given.t()[1:]
        out = Take.apply(view)
        torch.zeros_like(given)
        repr(given)
        out.sum().backward()
        return [weakref.ref(tensor) for tensor in (given, view, given.grad)]

    with collector_off():
        assert [reference() for reference in use()] == [None] * 3


def caught(consume, given):
    """Consume it, handle the error, return nothing of it."""
    with contextlib.suppress(remat.PlaceholderError):
        consume(given)


def test_error_that_was_handled_keeps_nothing():
    def use():
        given = placeholder()
        for consume in (torch.sin, lambda x: x.data_ptr(), lambda x: x.tolist(), lambda x: x.t().numpy()):
            caught(consume, given)
        return weakref.ref(given)

    with collector_off():
        assert use()() is None


def test_error_itself_holds_no_tensor():
    error = refused(torch.sin, placeholder())
    held = [value for value in vars(error).values() if not isinstance(value, (str, type(None)))]
    assert held == []


def test_view_does_not_keep_a_placeholder_alive():
    with collector_off():
        given = placeholder()
        reference, view = weakref.ref(given), given.detach()
        del given
        assert reference() is None
        assert remat.is_placeholder(view)


def test_many_placeholders_leave_no_objects():
    def use(count):
        for _ in range(count):
            given = placeholder()
            given.view(3, 2).t()
            caught(torch.sin, given)

    use(400)
    gc.collect()
    before = python_objects()
    with collector_off():
        use(1000)
        tensors, objects, blocks = python_objects()
    assert tensors == before[0]
    assert objects - before[1] < 50
    assert blocks - before[2] < 500
