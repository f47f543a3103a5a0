"""Behaviours of `torch.utils.checkpoint` that its users rely on, through `drop_in`, next to torch's own.

Only what no other file of tests shows. Gradients of all kinds of graphs are in `test_graphs.py` and
`test_gradients.py`, nested regions in `test_nesting.py`, what replay may not do otherwise in `test_mismatch.py`, memory
in `test_lifetimes.py`, selective checkpointing in `test_policies.py`.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.utils.checkpoint as of_torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks

import torch_remat as remat
from tests.helpers import assert_clean_state, assert_same, chain, leaf

TORCH = functools.partial(of_torch.checkpoint, use_reentrant=False)
OURS = remat.drop_in()
SAVING = remat.drop_in(policy=lambda ctx, op, *args, **kwargs: True)
MATMULS = remat.drop_in(policy=remat.policies.save_matmuls)
EVERY = pytest.mark.parametrize(
    "run", [TORCH, OURS, MATMULS, SAVING], ids=["torch", "plain", "save_matmuls", "save_everything"]
)
BOTH = pytest.mark.parametrize("run", [TORCH, OURS], ids=["torch", "plain"])


class Saving(torch.autograd.Function):
    """Returns its first argument, saves the second, and tells which object backward gets."""

    @staticmethod
    def forward(ctx, x, y, seen):
        ctx.save_for_backward(y)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(ctx.saved_tensors[0])
        return grad, None, None


# ---- arguments and results


@pytest.mark.parametrize("where", ["argument", "closure"])
@EVERY
def test_backward_gets_the_very_object_that_was_saved_if_it_needs_no_gradient(run, where):
    x, y, seen = leaf(3), torch.ones(3), []
    out = run(Saving.apply, x, y, seen) if where == "argument" else run(lambda x: Saving.apply(x, y, seen), x)
    out.sum().backward()
    (found,) = seen
    assert found is y


@EVERY
def test_nested_tensors_are_equal(run):
    w = leaf(3, 3)

    def function(x):
        return (x.sin() @ w).exp()

    def jagged(call):
        rows = [torch.linspace(-1, 1, 3 * n).view(n, 3).requires_grad_() for n in (2, 4)]
        y = call(function, torch.nested.as_nested_tensor(rows, layout=torch.jagged))
        return y.values().detach(), torch.autograd.grad(y.values().sum(), [*rows, w])

    assert_same(jagged(lambda function, x: function(x)), jagged(run))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            OURS, marks=pytest.mark.xfail(strict=True, reason="a Parameter made inside is taken for one from outside")
        ),
        MATMULS,
    ],
)
def test_region_that_copies_a_module_is_equal(run):
    linear = nn.Linear(3, 3)

    def function(x):
        return copy.deepcopy(linear)(x).sin()

    x = leaf(2, 3)
    expected = torch.autograd.grad(function(x).sum(), x)
    assert_same(expected, torch.autograd.grad(run(function, x).sum(), x))


class Doubled(torch.Tensor):
    """A subclass whose sine is twice the sine."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is torch.Tensor.sin else out


@pytest.mark.parametrize(
    ("run", "backward_of"), [(OURS, "a tensor"), (OURS, "the subclass"), (MATMULS, "the subclass")]
)
def test_what_a_subclass_makes_of_functions_it_makes_in_replay_too(run, backward_of):
    """Where backward is a method of the subclass, torch's checkpoint gives the gradients of another function."""

    def function(x):
        return x.sin().exp().cos()

    gradients = []
    for call in (lambda function, x: function(x), run):
        x = torch.linspace(-1, 1, 4).as_subclass(Doubled).requires_grad_()
        y = call(function, x).sum()
        (y if backward_of == "the subclass" else y.as_subclass(torch.Tensor)).backward()
        gradients.append(x.grad.as_subclass(torch.Tensor))
    assert_same(*gradients)


# ---- hooks on saved tensors


@BOTH
def test_where_hooks_on_saved_tensors_are_disabled_a_region_is_the_error_that_was_given(run):
    x = leaf(3)
    with disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        run(chain, x)
    assert_clean_state()
    run(chain, x).sum().backward()


# ---- backward


@EVERY
def test_weights_that_are_updated_as_soon_as_their_gradient_is_there_are_equal(run):
    def update(weight):
        with torch.no_grad():
            weight.add_(weight.grad, alpha=-0.1)
        weight.grad = None

    def trained(call):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(update)
        for _ in range(2):
            x = torch.linspace(-1, 1, 8).view(2, 4)
            y = call(lambda x: call(model[2], call(model[:2], x).exp()), x)
            y.sin().sum().backward()
        return [weight.detach() for weight in model.parameters()]

    assert_same(trained(lambda function, x: function(x)), trained(run))


# ---- where regions meet other parts of torch


@BOTH
def test_parametrized_weight_that_a_cache_has_in_one_phase_only_is_an_error(run):
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with nn.utils.parametrize.cached():
        y = run(linear, run(linear, leaf(2, 4)))
    with pytest.raises(RuntimeError, match=r"metadata|replay used another one"):
        y.sum().backward()


# ---- where there are no values
