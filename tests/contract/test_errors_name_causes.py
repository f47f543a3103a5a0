"""Errors of a replay name the cause: flags, an activation where a parameter was, what changed, what grew."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import assert_same_program, checkpointed, leaf, pairwise

MM = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


# --- requires_grad


@pairwise(
    before=[True, False], now=[True, False], policy=[None, MM], part=["all", "first", "bias"], twice=[False, True]
)
def test_flags_of_parameters_that_change_before_backward_are_as_without_checkpointing(before, now, policy, part, twice):
    def program(wrap):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()), leaf(3, 4)
        of_part = {"all": model, "first": model[0]}.get(part)
        flags = [model[2].bias] if of_part is None else list(of_part.parameters())
        for one in flags:
            one.requires_grad_(before)
        y = wrap(model)(x).sum()
        for one in flags:
            one.requires_grad_(now)
        y.backward(retain_graph=twice)
        if twice:
            y.backward()
        assert [one.requires_grad for one in flags] == [now] * len(flags)
        return x.grad, *[one.grad for one in model.parameters() if one.grad is not None]

    assert_same_program(program, policy=policy)


# --- Another tensor in a parameter's place


def test_activation_in_place_of_a_parameter_is_named_with_its_op():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
            self.on = True

        def forward(self, x):
            return (self.base(self.adapter(x)) if self.on else self.adapter(x)).exp()

    block = Block()
    y = checkpointed(block, region_name="layer")(leaf(3, 4)).sum()
    block.on = False
    with pytest.raises(remat.MismatchError) as caught:
        y.backward()
    text = str(caught.value)
    assert "a parameter 'base.weight', float32[4, 4]" in text
    assert "but replay saved float32[3, 4] on cpu made by ExpBackward at" in text
    assert "The function must do the same in both phases" in text
    assert "replaced" not in text
    assert caught.value.region == "layer"


# --- What changed since forward, in an error of the user's code


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.carrier = nn.Linear(4, 4), torch.ones(8, 4)

    def forward(self, x):
        return (self.linear(x) + self.carrier).exp()


CHANGES = {
    "cut": (
        lambda m: setattr(m.carrier, "data", m.carrier.data[:4]),
        "'carrier' had shape (8, 4) in forward and has (4, 4) now",
    ),
    "none": (
        lambda m: setattr(m, "carrier", None),
        "'carrier' had shape (8, 4) in forward and is gone or no tensor now",
    ),
    "deleted": (lambda m: delattr(m, "carrier"), "'carrier' had shape (8, 4) in forward and is gone or no tensor now"),
    "replaced": (
        lambda m: setattr(m, "carrier", "it"),
        "'carrier' had shape (8, 4) in forward and is gone or no tensor now",
    ),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize("change", CHANGES)
def test_error_of_user_code_in_replay_says_what_changed_since_forward(change):
    model = Carrying()
    y = checkpointed(model, region_name="layer")(leaf(8, 4)).sum()
    make, text = CHANGES[change]
    make(model)
    with pytest.raises((RuntimeError, TypeError, AttributeError)) as caught:
        y.backward()
    (note,) = caught.value.__notes__
    assert note.startswith("This was raised while region 'layer' was replayed in backward.")
    assert text in note


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_error_of_user_code_in_replay_says_nothing_of_what_is_as_it_was():
    model = Carrying()

    def function(x):
        if remat.is_recomputing():
            raise ValueError("mine")
        return model(x)

    with pytest.raises(ValueError, match="mine") as caught:
        checkpointed(function, region_name="layer")(leaf(8, 4)).sum().backward()
    assert caught.value.__notes__ == ["This was raised while region 'layer' was replayed in backward."]


# --- Remedies that work


class Fused(torch.autograd.Function):
    """Takes gradients in its forward, as fused losses do."""

    @staticmethod
    def forward(ctx, x, w, target):
        with torch.enable_grad():
            a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
            loss = F.cross_entropy(a @ b.t(), target)
            ctx.save_for_backward(*torch.autograd.grad(loss, (a, b)))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return a * grad, b * grad, None


@pytest.mark.parametrize("policy", [MM, lambda *_, **__: True], ids=["matmuls", "everything"])
@pytest.mark.parametrize("call", [Fused.apply, remat.op(Fused.apply, "loss")], ids=["plain", "op"])
def test_gradient_in_the_forward_of_a_function_is_exact_under_a_policy(policy, call):
    w, target = nn.Parameter(torch.randn(5, 8)), torch.tensor([0, 3, 4])

    def program(wrap):
        m, x = nn.Linear(8, 8), leaf(3, 8)
        wrap(lambda x: call(m(x).tanh(), w, target))(x).backward()
        return x.grad, m.weight.grad

    assert_same_program(program, policy=policy)


def test_second_refusal_of_a_placeholder_names_a_cache_that_grew():
    cache = []

    def function(x):
        cache.append(x.sin().detach())
        return (x * sum(float(kept.numpy().max()) for kept in cache)).exp()

    with pytest.raises(remat.PlaceholderError, match="a list or cache that outlives the region grew"):
        checkpointed(function, policy=[torch.ops.aten.sin.default])(leaf(4, 8)).sum().backward()


def test_a_longer_table_with_the_same_rows_may_be_another_value_and_the_remedy_works():
    class Rope(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.arange(4.0)[:, None].cos()

        def forward(self, x, table=None):
            if len(x) > len(self.table):
                self.table = torch.arange(float(len(x)))[:, None].cos()
            return (x.sin() * (self.table if table is None else table)[: len(x)]).exp()

    for given in (False, True):
        rope, x, z = Rope(), leaf(4, 8), leaf(6, 8)
        region = remat.checkpoint()(rope)
        y = region(x, rope.table).sum() if given else region(x).sum()
        y = y + region(z).sum()
        if given:
            y.backward()
            continue
        with pytest.raises(remat.MutationError, match="may read a different value") as caught:
            y.backward()
        assert "as an argument" in caught.value.remedy


@pytest.mark.parametrize("kind", ["lru_cache", "attribute"])
def test_mask_that_is_built_lazily_under_a_policy_names_the_cause_and_the_remedy_works(kind):
    m = nn.Linear(8, 8, bias=False)

    def make():
        @functools.lru_cache
        def mask(n):
            return torch.ones(n, n).tril().log()

        held = SimpleNamespace(mask=None)  # of a module, None is state

        def attribute(n):
            if held.mask is None:
                held.mask = torch.ones(n, n).tril().log()
            return held.mask

        built = mask if kind == "lru_cache" else attribute
        return lambda x: ((h := m(x)) @ h.t() + built(len(x))).softmax(-1) @ h

    function = make()
    with pytest.raises(remat.MismatchError, match=r"lru_cache.*before the first region"):
        checkpointed(function, policy=MM)(leaf(4, 8)).sum().backward()
    function = make()
    with torch.no_grad():
        function(leaf(4, 8))
    checkpointed(function, policy=MM)(leaf(4, 8)).sum().backward()
