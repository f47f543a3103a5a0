"""What differs between forward and replay, and which check notices it; docs/limits.md says the same."""

from __future__ import annotations

import pytest
import torch

import torch_remat as remat
from tests.helpers import leaf, pairwise


def by_phase(forward, replay):
    """Return a function that does one thing in forward and another in replay."""
    return lambda x: replay(x) if remat.is_recomputing() else forward(x)


one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
weight = torch.randn(4, 4)

# What differs: how the function goes on from x, in forward and in replay; then by what it is noticed.
DIFFERENCES = {
    "fewer saved tensors": (lambda x: x.exp().sin().cos(), lambda x: x.exp().sin(), {"default", "bitwise", "policy"}),
    "more saved tensors before the last": (
        lambda x: x.exp().sigmoid(),
        lambda x: x.exp().tanh().sigmoid(),
        {"default", "bitwise", "policy"},
    ),
    "another shape": (
        lambda x: x.exp().sum(),
        lambda x: x[:2].exp().sum(),
        {"default", "bitwise", "policy"},
    ),
    "another dtype": (lambda x: x.exp(), lambda x: x.double().exp(), {"default", "bitwise", "policy"}),
    "another op, which saves its result": (
        lambda x: x.sigmoid(),
        lambda x: x.exp(),
        {"default", "bitwise", "policy"},
    ),
    "another op before one that saves its argument": (
        lambda x: x.sin().cos().tan(),
        lambda x: x.sin().tanh().tan(),
        {"default", "bitwise", "policy"},
    ),
    "another parameter": (lambda x: one(x).exp(), lambda x: other(x).exp(), {"default", "bitwise", "policy"}),
    # These change a value that backward reads, and no description of one.
    "another scalar": (lambda x: (x * 2).exp(), lambda x: (x * 3).exp(), {"bitwise"}),
    "another tensor from outside, made in the region": (
        lambda x: (x * weight.t().clone()).exp(),
        lambda x: (x * weight.clone()).exp(),
        {"bitwise"},
    ),
    "other arguments in the same order of ops": (
        lambda x: (x.sin() - x.cos()).exp(),
        lambda x: (x.cos() - x.sin()).exp(),
        {"bitwise", "policy"},
    ),
    "sin becomes cos before an op that saves its result": (
        lambda x: x.sin().exp(),
        lambda x: x.cos().exp(),
        {"bitwise", "policy"},
    ),
    "branch on a number of Python": (
        lambda x: (x + 1).exp(),
        lambda x: (x + 2).exp(),
        {"bitwise"},
    ),
    # These change nothing that backward reads: the gradients are those of forward.
    "sin becomes cos, the last op": (lambda x: x.exp().sin(), lambda x: x.exp().cos(), set()),
    "other ops after the last saved tensor": (lambda x: x.exp() + 1, lambda x: x.exp() - 1, set()),
}
HARMLESS = ("sin becomes cos, the last op", "other ops after the last saved tensor")
CHECKS = {
    "default": {},
    "bitwise": {"determinism_check": "bitwise"},
    "policy": {"policy": lambda *_, **__: False},
    "none": {"determinism_check": "none"},
}


def gradient(function, x, **options):
    y = remat.checkpoint(**options)(lambda x: function(x))(x)
    return torch.autograd.grad(y.sum(), x)[0]


@pairwise(check=["default", "bitwise", "policy"], name=DIFFERENCES)
def test_difference_is_noticed_as_the_limits_say(name, check):
    forward, replay, noticed_by = DIFFERENCES[name]
    x = leaf(4, 4)
    function = by_phase(forward, replay)
    if check in noticed_by:
        with pytest.raises(remat.MismatchError):
            gradient(function, x, **CHECKS[check])
        return
    expected = torch.autograd.grad(forward(x).sum(), x)[0]
    assert torch.equal(gradient(function, x, **CHECKS[check]), expected) == (name in HARMLESS)


@pytest.mark.parametrize("name", ["fewer saved tensors", "another parameter"])
def test_without_a_check_count_and_parameters_are_still_compared(name):
    forward, replay, _ = DIFFERENCES[name]
    with pytest.raises(remat.MismatchError):
        gradient(by_phase(forward, replay), leaf(4, 4), determinism_check="none")


def test_native_region_compares_its_ops():
    inside = by_phase(torch.sin, torch.cos)
    with pytest.raises(remat.MismatchError, match=r"forward ran aten\.sin\.default.*replay ran aten\.cos\.default"):
        gradient(lambda x: remat.native_save_region("op", lambda x: inside(x).exp(), x).sin().exp(), leaf(4, 4))


def test_values_of_a_callable_check_are_all_that_is_compared():
    forward, replay, _ = DIFFERENCES["another scalar"]
    with pytest.raises(remat.MismatchError):
        gradient(by_phase(forward, replay), leaf(4, 4), determinism_check=lambda tensor: tensor.sum().item())
    forward, replay, _ = DIFFERENCES["another op before one that saves its argument"]
    gradient(by_phase(forward, replay), leaf(4, 4), determinism_check=lambda tensor: 0)


def test_number_from_elsewhere_is_found_by_bitwise_only():
    state = [1.0]
    x = leaf(4, 4)

    def run(check):
        y = remat.checkpoint(determinism_check=check)(lambda x: (x * state[0]).exp())(x)
        state[0] += 1
        return torch.autograd.grad(y.sum(), x)[0]

    run("default")
    with pytest.raises(remat.MismatchError, match="value"):
        run("bitwise")
