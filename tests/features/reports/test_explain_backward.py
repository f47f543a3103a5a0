"""Explanations: from what they run backward, and what they say if there is nothing to run it from."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, Both, Inner, Trace, call
from tests.helpers import Mlp, checkpointed, leaf


def op(kernel, name, policy, x):
    return call("auto", kernel, Trace(), name, policy, x)


@dataclass
class Output:
    """What models return that name their results."""

    loss: torch.Tensor
    logits: object = None


class Named(OrderedDict):
    """The same, as a mapping."""


class Opaque:
    """The same, as an object that nobody can look into."""

    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize(
    "form", [Output, lambda y: Named(loss=y), lambda y: Output(None, [y]), lambda y: SimpleNamespace(a={"b": y})]
)
def test_backward_starts_from_what_lies_in_dataclasses_and_containers(form):
    function = checkpointed(Mlp(), region_name="mlp")
    explanation = remat.explain(lambda x: form(function(x).sum()))(leaf(2, 8))
    assert explanation.no_backward is None
    assert explanation.regions == remat.explain(lambda x: function(x).sum())(leaf(2, 8)).regions
    assert explanation.regions[0].replays == 1


@pytest.mark.parametrize("form", [Opaque, lambda y: None, lambda y: y.item()])
def test_explanation_says_that_no_backward_ran(form):
    function = checkpointed(lambda x: op(Inner, "a", RECOMPUTE, x.sin()), region_name="r")
    explanation = remat.explain(lambda x: form(function(x).sum()), alternatives=False)(leaf(2, 8))
    assert "found no tensor that needs a gradient" in explanation.no_backward
    assert str(explanation).startswith("explain() ran no backward: it found no tensor that needs a gradient in what")
    assert "no replay: no backward came to it" in str(explanation)
    assert "nothing has to be recomputed" not in str(explanation)
    assert explanation.to_dict()["no_backward"] == explanation.no_backward


def test_nothing_is_said_of_a_missing_backward_where_no_replay_waits_for_one():
    def kept(x):
        return Opaque(checkpointed(lambda x: op(Both, "only", SAVE, x))(x).sum())

    explanation = remat.explain(kept)(leaf(4, 4))
    assert explanation.no_backward is not None
    assert "no backward" not in str(explanation)
    assert "no replay: nothing has to be recomputed" in str(explanation)


@pytest.mark.parametrize("body", [Mlp(), lambda x: op(Both, "a", SAVE, x.sin()), lambda x: (x * x).view(-1)])
def test_training_step_that_returns_its_loss_after_backward(body):
    def step(x):
        h = checkpointed(body)(x)
        h = h + Double.apply(h)
        loss = h.exp().sum()
        loss.backward()
        return {"loss": loss, "hidden": h}

    explanation = remat.explain(step)(leaf(2, 8))
    assert [region.replays for region in explanation.regions] == [1]
    assert "ran no backward" not in str(explanation)


class Double(torch.autograd.Function):
    """Saves nothing, as the sum does: a second backward could run through both."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2
