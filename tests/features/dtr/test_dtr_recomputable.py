"""Tensors that keep a recipe and no data."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_remat as remat
from tests.helpers import collector_off


def test_a_read_computes_and_forgets() -> None:
    calls = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(weakref.ref(y := x * 2))
        return y

    made = remat.dtr.recomputable(double, torch.arange(4.0))
    assert len(calls) == 1
    assert isinstance(made, remat.dtr.RecomputableTensor)
    assert (made.shape, made.dtype) == ((4,), torch.float32)
    assert len(calls) == 1
    assert (made + made).tolist() == [0, 4, 8, 12]
    assert len(calls) == 2
    assert made.tolist() == [0, 2, 4, 6]
    assert torch.equal(made, torch.tensor([0.0, 2, 4, 6]))
    x = torch.ones(4, requires_grad=True)
    with collector_off():
        made = remat.dtr.recomputable(double, x)
        loss = (made.sin() + made).sum()
        assert all(reference() is None for reference in calls)  # for backward neither
        loss.backward()
    assert x.grad is not None


def test_gradients_and_random_state_are_those_of_a_call() -> None:
    layer = torch.nn.Linear(6, 6)

    def function(x: torch.Tensor, parts: list[Any]) -> dict[str, Any]:
        h = F.dropout(torch.tanh(layer(x)), 0.5)
        return {"h": h, "mask": h > 0, "many": (h * parts[0], 3)}

    results = []
    for call in (remat.dtr.recomputable, lambda function, *args: function(*args)):
        torch.manual_seed(0)
        x, scale = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
        layer.zero_grad()
        made = call(function, x, [scale])
        assert made["many"][1] == 3
        loss = (made["h"].exp() * made["mask"]).sum() + made["many"][0].pow(2).sum()
        after = torch.rand(3)
        loss.backward()
        results.append([loss.detach(), after, x.grad, scale.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_a_generator_among_the_arguments_stands_at_each_read_as_at_the_call() -> None:
    generator = torch.Generator().manual_seed(3)
    made = remat.dtr.recomputable(lambda g: torch.rand(4, generator=g), generator)
    following = generator.get_state()
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(made + 0, expected)
    assert torch.equal(made + 0, expected)
    assert torch.equal(generator.get_state(), following)


def test_an_argument_changed_since_is_an_error() -> None:
    x = torch.ones(3)
    made = remat.dtr.recomputable(torch.exp, x)
    assert (made + 0).shape == (3,)
    x.add_(1)
    with pytest.raises(remat.MutationError, match="modified in place"):
        made + 0
    with pytest.raises(remat.MutationError):
        made.tolist()


def test_a_recomputable_tensor_cannot_be_written() -> None:
    made = remat.dtr.recomputable(torch.exp, torch.ones(3))
    with pytest.raises(remat.RematError, match="no data to change"):
        made.add_(1)
    clone = made.clone()
    clone.add_(1)
    assert type(clone) is torch.Tensor


def test_in_a_budget_it_is_evicted_and_comes_back_and_one_from_outside_is_read() -> None:
    outside, x = remat.dtr.recomputable(torch.exp, torch.ones(5)), torch.randn(100, requires_grad=True)
    with remat.dtr.budget("1 MiB") as runtime:
        read = outside + 1
        before = runtime.live_bytes
        y = remat.dtr.recomputable(torch.exp, x)
        assert runtime.live_bytes == before
        y.sum().backward()
        assert runtime.rematerializations > 0
    assert torch.equal(x.grad, x.detach().exp())
    assert torch.equal(read, torch.ones(5).exp() + 1)
