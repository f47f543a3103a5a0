"""Views of placeholders: metadata, graph and gradients are those of the true views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import torch_remat as remat
from tests.helpers import pairwise, tensors_in
from torch_remat.dispatch.placeholder import Source, make_placeholder

SOURCE = Source("block", "op", "out")


def metadata(tensor: Tensor) -> dict[str, Any]:
    """Return what a caller can ask of a tensor without reading its data."""
    return {
        "shape": tensor.shape,
        "stride": tensor.stride(),
        "offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "grad_fn": type(tensor.grad_fn).__name__,
        "conj": tensor.is_conj(),
        "neg": tensor.is_neg(),
        "contiguous": tensor.is_contiguous(),
    }


def assert_passed_on(expected: Any, actual: Any) -> None:
    """Assert that a call gave placeholders, with the metadata of the true views."""
    wanted, found = tensors_in(expected), tensors_in(actual)
    assert len(found) == len(wanted)
    assert type(actual) is type(expected) or remat.is_placeholder(actual)
    for view, placeholder in zip(wanted, found, strict=True):
        assert remat.is_placeholder(placeholder)
        assert metadata(placeholder) == metadata(view)
        with pytest.raises(remat.PlaceholderError) as caught:
            placeholder.clone()
        assert (caught.value.region, caught.value.op, caught.value.tensor) == SOURCE[:3]


# As users write them; `test_placeholder_sweep.py` has every op of torch that makes views.
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slices": lambda x: x[..., 1:, ::2],
    "flatten": lambda x: x.flatten(1),
    "expand": lambda x: x[:, :1].expand(2, 5, 4),
    "broadcast with a real one": lambda x: torch.broadcast_tensors(x, torch.zeros(5, 1, 1, 1))[0],
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 3), 5),
    "split": lambda x: x.split([1, 3], -1),
    "bits": lambda x: x.detach().view(torch.int32),
    "pairs": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)),
    "data": lambda x: x.data,
    "contiguous": lambda x: x.contiguous(),
    "to what it is": lambda x: x.to(torch.float32),
    "positive": lambda x: +x,
    "iteration": lambda x: list(x),
    "identity": lambda x: nn.Identity()(x),
}


def pair(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Return a tensor with strides of its own and its placeholder."""
    like = torch.randn(2, 3, 4).transpose(0, 1).contiguous().transpose(0, 1).contiguous()
    return like.requires_grad_(requires_grad), make_placeholder(like.detach(), SOURCE).requires_grad_(requires_grad)


@pairwise(
    view=VIEWS,
    mode=[torch.no_grad, torch.enable_grad, torch.inference_mode],
    requires_grad=[False, True],
    possible=lambda mode, requires_grad, **_: not (mode is torch.inference_mode and requires_grad),
)
def test_view_has_the_metadata_of_the_true_view(view, mode, requires_grad):
    like, placeholder = pair(requires_grad)
    with mode():
        assert_passed_on(VIEWS[view](like), VIEWS[view](placeholder))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.squeeze_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.as_strided_((2,), (1,)),
        lambda x: x.resize_(1),
        lambda x: x.set_(torch.zeros(3)),
        lambda x: x.detach_(),
    ],
)
def test_change_of_metadata_in_place_is_true_or_refused(change):
    like = torch.randn(3, 4)
    placeholder = make_placeholder(like, SOURCE)
    before = metadata(placeholder)
    try:
        changed = change(placeholder)
    except remat.PlaceholderError:
        assert metadata(placeholder) == before
    else:
        assert changed is placeholder
        assert_passed_on(change(like), placeholder)


def test_wrong_view_raises_as_the_true_one_does():
    like, placeholder = pair()
    for view in (lambda x: x.view(5), lambda x: x[7], lambda x: x.squeeze(9), lambda x: x.expand(3, 3, 4)):
        with pytest.raises((RuntimeError, IndexError)) as true:
            view(like)
        with pytest.raises(type(true.value)) as caught:
            view(placeholder)
        assert not isinstance(caught.value, remat.RematError)


# --- Under autograd


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


@pytest.mark.parametrize("view", ["slices", "expand", "diagonal", "as_strided", "contiguous", "identity"])
def test_gradient_flows_through_views_of_a_placeholder(view):
    x = torch.randn(2, 3, 4, requires_grad=True)
    like = VIEWS[view](x)
    weights = torch.arange(float(like.numel())).view(like.shape)
    (expected,) = torch.autograd.grad(like, x, weights) if like is not x else (weights,)
    skipped, seen = Skip.apply(x), []
    assert type(skipped.grad_fn).__name__ == "SkipBackward"
    skipped.register_hook(seen.append)
    (actual,) = torch.autograd.grad(Take.apply(VIEWS[view](skipped)), x, weights, create_graph=True)
    assert torch.equal(actual, expected * 15)
    assert torch.equal(seen[0], expected * 5)


def test_saved_tensor_hooks_get_the_placeholder_and_may_not_copy_it():
    x, packed = torch.randn(2, 3, requires_grad=True), []
    with saved_tensors_hooks(lambda saved: packed.append(saved) or saved, lambda saved: saved):
        out = Take.apply(Skip.apply(x))
    assert [remat.is_placeholder(saved) for saved in packed] == [True]
    out.sum().backward()
    with saved_tensors_hooks(torch.clone, torch.clone), pytest.raises(remat.PlaceholderError) as caught:
        Take.apply(Skip.apply(x))
    assert caught.value.consumer.startswith("aten.clone")
    Take.apply(Skip.apply(x)).sum().backward()  # no graph was left behind
    assert torch.equal(x.grad, torch.full((2, 3), 30.0))
