"""Replays that differ from forward: other ops, other shapes, other parameters."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

import torch_remat as remat
from tests.helpers import (
    Mlp,
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    leaf,
    pairwise,
)


def differing(forward, replay):
    """Return a function that does one thing in forward and another in replay."""

    def block(*args):
        return (replay if remat.is_recomputing() else forward)(*args)

    return block


def raised(block, *args, error=remat.MismatchError, **options):
    """Run a region and its backward; return the error that backward must raise."""
    y = checkpointed(block, region_name="block", **options)(*args)
    with pytest.raises(error) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert "block" in str(caught.value)
    assert not remat.is_recomputing()
    x = leaf(3)
    assert_same(torch.autograd.grad(checkpointed(chain)(x).sum(), x), torch.autograd.grad(chain(x).sum(), x))
    return caught.value


def position(error):
    """Return the number in the name of the tensor that an error is about."""
    found = re.search(r"\d+", error.tensor or "")
    assert found, f"no position in {error.tensor!r}"
    return int(found.group())


def sines(count, dtype=None, shape=None, at=None):
    """Return a function of `count` sines, whose value changes dtype or shape before sine number `at`."""

    def block(x):
        for index in range(count):
            if index == at:
                x = x.to(dtype) if dtype else x.expand(shape)
            x = x.sin()
        return x

    return block


@pytest.mark.parametrize("early_stop", [True, False])
def test_replay_that_saves_another_number_of_tensors_raises_and_tells_a_count(early_stop):
    for forward, replay in [(3, 2), (3, 0), (1, 0), (10, 9), *([] if early_stop else [(2, 3), (1, 5)])]:
        error = raised(differing(sines(forward), sines(replay)), leaf(3), early_stop=early_stop)
        numbers = {int(number) for number in re.findall(r"\d+", str(error))}
        assert numbers & {forward, replay}


def test_replay_that_saves_more_tensors_after_the_last_needed_one_is_right_under_early_stop():
    x = leaf(3)
    checkpointed(differing(sines(2), sines(4)))(x).sum().backward()
    assert_same(x.grad, torch.autograd.grad(x.sin().sin().sum(), x)[0])


@pytest.mark.parametrize("at", [0, 1, 3])
def test_replay_with_another_dtype_shape_or_device_raises_with_the_position(at):
    for change, told in [({"dtype": torch.float64}, "float64"), ({"shape": (7, 5)}, r"7\D+5")]:
        error = raised(differing(sines(4), sines(4, **change, at=at)), leaf(5))
        first = raised(differing(sines(4), sines(4, **change, at=0)), leaf(5))
        assert position(error) - position(first) == at
        assert re.search(told, str(error))
        assert "float32" in str(error)
    raised(differing(lambda x: (x * torch.ones(3)).sin(), lambda x: (x * torch.ones(3, device="meta")).sin()), leaf(3))


class TwoLayers(nn.Module):
    """Two linear layers, the whole of which is a region."""

    def __init__(self, wrap=checkpointed):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.wrap = wrap

    def body(self, x):
        return self.two(self.one(x).sin())

    def forward(self, x):
        return self.wrap(self.body)(x)


def other_parameters(module):
    return {name: (p.detach() + 1).requires_grad_() for name, p in module.named_parameters()}


@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_region_inside_functional_call_raises_with_the_position(input_needs_grad):
    module = TwoLayers()
    module.wrap = lambda f: checkpointed(f, region_name="block")
    x = torch.randn(2, 3, requires_grad=input_needs_grad)
    y = functional_call(module, other_parameters(module), (x,))
    with pytest.raises(remat.MismatchError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert position(caught.value) >= 0


def test_region_around_functional_call_is_equal():
    def program(wrap):
        module = Mlp(3)
        parameters = other_parameters(module)
        x = leaf(2, 3)
        y = wrap(lambda parameters, x: functional_call(module, parameters, (x,)))(parameters, x)
        y.sum().backward()
        return y, x.grad, *(p.grad for p in parameters.values())

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_swapped_module_or_weight_is_an_error_that_names_the_parameter(name, input_needs_grad):
    for swap in (
        lambda module: setattr(module, name, nn.Linear(3, 3)),
        lambda module: setattr(getattr(module, name), "weight", nn.Parameter(torch.ones(3, 3))),
    ):
        module = TwoLayers()
        old = getattr(module, name).weight
        y = checkpointed(module.body, region_name="block")(torch.randn(2, 3, requires_grad=input_needs_grad))
        swap(module)
        with pytest.raises(remat.MismatchError) as caught:
            y.sum().backward()
        assert caught.value.region == "block"
        assert f"{name}.weight" in caught.value.tensor
        assert position(caught.value) >= 0
        assert old.grad is None
        assert getattr(module, name).weight.grad is None


def first(h):
    return h[:4]


def other_view(one, other):
    """Return a block that takes one view in forward and another in replay, of a result, an argument or a weight."""

    def take(tensor):
        return (other if remat.is_recomputing() else one)(tensor)

    return {
        "result": lambda x, w: (take(x.sin()) @ w[:4, :4]).sin(),
        "argument": lambda x, w: (take(x) @ w[:4, :4]).sin(),
        "argument in an op of its own": lambda x, w: take(x).sin().sin(),
        "weight": lambda x, w: (x[:4, :4].sin() @ take(w)).sin(),
        "constant": lambda x, w: (x[:4, :4] * take(torch.ones(8, 4))).sin(),
    }


OTHER_VIEWS = {
    "transposed": (first, lambda h: h[:4].t()),
    "another part": (first, lambda h: h[4:]),
    "with other strides": (first, lambda h: h[::2]),
    "not transposed": (lambda h: h[:4].t(), first),
}


@pairwise(
    name=OTHER_VIEWS,
    place=other_view(first, first),
    policy=[None, remat.policies.save_matmuls, lambda ctx, op, *args, **kwargs: False],
)
def test_replay_that_takes_another_view_of_the_same_shape_is_an_error(name, place, policy):
    x, w = leaf(8, 4), nn.Parameter(torch.randn(8, 4))
    y = checkpointed(other_view(*OTHER_VIEWS[name])[place], region_name="block", policy=policy)(x, w)
    with pytest.raises(remat.MismatchError):
        y.sum().backward()


def test_another_view_is_an_error_that_shows_both():
    block = other_view(lambda h: h, lambda h: h.t())["argument"]
    with pytest.raises(remat.MismatchError, match=r"a whole tensor here, but replay saved a view with strides"):
        checkpointed(block)(leaf(4, 4), leaf(4, 4)).sum().backward()


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("given", [lambda x: x, lambda x: x.t(), lambda x: x[1:], lambda x: x[:, 1:].t()])
def test_views_of_inputs_that_come_back_with_other_strides_are_no_difference(given, hooks):
    def block(x, w):
        return (x.t() @ x * x.t().sum() + x[1:].sum() * x.view_as(x).exp().t().mean()).sin()

    base = leaf(5, 5)
    expected = torch.autograd.grad(block(given(base), None).sum(), base)
    with hooks():
        y = checkpointed(block)(given(base * 1), None)
    y.sum().backward()
    assert torch.equal(base.grad, expected[0])


@pytest.mark.parametrize("policy", [None, [torch.ops.aten.sin.default]], ids=["plain", "policy"])
@pytest.mark.parametrize("differs", ["op", "dtype", "layout"])
def test_error_names_the_line_that_does_otherwise_in_replay(differs, policy):
    odd = {"op": torch.sigmoid, "dtype": torch.Tensor.double, "layout": torch.t}[differs]

    def other(x):
        return odd(x.exp()).sin()  # this line

    text = str(raised(differing(lambda x: x.exp().sin(), other), leaf(4, 4), policy=policy))
    assert f"at {Path(__file__).name}:{other.__code__.co_firstlineno + 1}" in text


def test_replaced_and_changed_parameters_are_told_with_the_line_that_reads_them():
    module = nn.Linear(4, 4)
    weight = module.weight
    for change, error in [
        (lambda: setattr(module, "bias", nn.Parameter(torch.ones(4))), remat.MismatchError),
        (lambda: weight.add_(1), remat.MutationError),
    ]:
        y = checkpointed(lambda x: module(x).sin(), region_name="block")(leaf(4, 4))
        with torch.no_grad():
            change()
        with pytest.raises(error, match=rf"reads .*at {Path(__file__).name}:\d+"):
            y.sum().backward()
