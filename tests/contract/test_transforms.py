"""Transforms of torch.func and forward-mode derivatives: around a region it is a plain call, inside it a call is."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import torch_remat as remat
from tests.helpers import assert_same, chain, checkpointed, leaf
from tests.ways import BY_NATIVE_REGION, BY_OP, BY_POLICY, PLAIN_AUTOGRAD, WAYS
from torch_remat.dispatch.region import forward

# torch 2.13 decorates with its own deprecated function in forward-mode derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

OPTIONS = [{}, {"offload_inputs": True}, {"determinism_check": "bitwise"}, {"debug": True}]


@pytest.fixture(autouse=True)
def _not_warned(monkeypatch):
    monkeypatch.setattr(forward, "_warned", [])


@contextlib.contextmanager
def warned_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [one.category for one in caught] == [remat.RematWarning]
    assert "plain call" in str(caught[0].message)
    assert caught[0].filename == __file__


class Net(torch.nn.Module):
    """A linear layer, something that is kept, and a region within the region."""

    def __init__(self, way, **options):
        super().__init__()
        torch.manual_seed(3)
        self.linear = torch.nn.Linear(4, 4)
        inner = way.region(chain, **options)
        self.region = way.region(lambda x: inner(way.keep("kept", torch.tanh, self.linear(x))), **options)

    def forward(self, x):
        return self.region(x)


def per_sample_gradients(net, x):
    parameters = dict(net.named_parameters())
    loss = lambda parameters, row: functional_call(net, parameters, (row[None],)).sum()  # noqa: E731
    return list(vmap(grad(loss), (None, 0))(parameters, x).values())


def vmap_and_backward(net, x):
    vmap(net)(x[None]).sum().backward()
    return [x.grad, *(parameter.grad for parameter in net.parameters())]


def forward_over_backward(net, x):
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x))))
        (y.sum() + tangent.square().sum()).backward()
    return [y, tangent, x.grad, *(parameter.grad for parameter in net.parameters())]


PROGRAMS = [
    per_sample_gradients,
    vmap_and_backward,
    forward_over_backward,
    lambda net, x: list(jvp(net, (x,), (x,))),
    lambda net, x: [jacrev(net)(x), jacfwd(net)(x), hessian(lambda x: net(x).sum())(x)],
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("way", WAYS[:1] + WAYS[2:], ids=str)  # torch refuses forwards that take `ctx`
@pytest.mark.parametrize("program", PROGRAMS)
def test_region_under_a_transform_is_a_plain_call(program, way, options):
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    expected = program(Net(PLAIN_AUTOGRAD), x.clone().requires_grad_())
    with warned_once():
        for _ in range(2):
            assert_same(expected, program(Net(way, **options), x.clone().requires_grad_()))


def test_region_with_a_handle_in_forward_mode_is_a_plain_call():
    class Square(torch.autograd.Function):
        @staticmethod
        @remat.auto_forward("x")
        def forward(ctx, x, *named):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad, None, None

        @staticmethod
        def jvp(ctx, tangent, *_):
            return 2 * ctx.saved_tensors[0] * tangent

    def program(region, *named):
        x = torch.arange(1.0, 4).requires_grad_()
        with forward_ad.dual_level():
            y = region(lambda x: Square.apply(x.sin(), *named).exp())(forward_ad.make_dual(x, torch.ones(3)))
            return list(forward_ad.unpack_dual(y)), torch.autograd.grad(forward_ad.unpack_dual(y)[1].sum(), x)

    with warned_once():
        assert_same(program(lambda f: f), program(checkpointed, "square", remat.CheckpointPolicy.SAVE))


@pytest.mark.filterwarnings("ignore:no region ran:torch_remat.RematWarning")
def test_region_of_a_budget_under_a_transform_is_a_plain_call():
    x = torch.randn(3, 4)
    with pytest.warns(remat.RematWarning, match="plain call"), remat.budget(1):
        assert_same(jvp(chain, (x,), (x,)), jvp(checkpointed(chain), (x,), (x,)))


@pytest.mark.parametrize("options", [*OPTIONS, BY_POLICY.options], ids=[*map(str, OPTIONS), "policy"])
@pytest.mark.parametrize("way", [BY_OP, BY_NATIVE_REGION], ids=str)
@pytest.mark.parametrize("transform", [vmap, lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]])
def test_call_inside_a_transform_inside_a_region_is_a_plain_call(transform, way, options):
    weight, x = leaf(4, 4), leaf(3, 4)

    def block(keep):
        return lambda x: transform(lambda row: torch.tanh(keep("product", torch.matmul, row.sin(), weight)))(x.exp())

    def gradients(function):
        return torch.autograd.grad(function(x).sin().sum(), [x, weight])

    assert_same(gradients(block(PLAIN_AUTOGRAD.keep)), gradients(checkpointed(block(way.keep), **options)))


def test_gradients_of_a_transform_inside_a_region_are_refused_by_torch():
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        checkpointed(lambda x: torch.func.grad(lambda x: chain(x).sum())(x))(leaf(4))


@pytest.mark.parametrize("product", [lambda x, weight: x @ weight, torch.mm])
@pytest.mark.parametrize("transform", [jvp, jacfwd])
def test_values_are_compared_around_a_transform_inside_a_region(transform, product):
    weight, x = leaf(4, 4), leaf(3, 4)

    def block(x):
        inner = lambda z: product(z, weight).sin()  # noqa: E731
        return jvp(inner, (x,), (torch.ones_like(x),))[1] if transform is jvp else jacfwd(inner)(x)

    def gradients(function):
        return torch.autograd.grad(function(x.exp()).sin().sum(), [x, weight])

    assert_same(gradients(block), gradients(checkpointed(block, determinism_check="bitwise")))


def test_difference_beside_a_transform_is_found():
    scales = iter((1.0, 2.0))

    def block(x):
        tangent = jvp(torch.sin, (x,), (torch.ones_like(x),))[1]
        return (tangent * next(scales)).exp()

    with pytest.raises(remat.MismatchError, match="other values"):
        checkpointed(block, determinism_check="bitwise")(leaf(4)).sum().backward()
