"""Regions beside other parts of torch: forward-mode derivatives, function transforms, anomaly mode, subclasses."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import torch_remat as remat
from tests.helpers import (
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    leaf,
    pairwise,
)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_derivatives_are_equal():
    x, tangent = torch.randn(4), torch.randn(4)
    results = []
    for function in (chain, checkpointed(chain)):
        with forward_ad.dual_level():
            results.append(tuple(forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent)))))
    assert_same(*map(list, results))


def test_vmap_is_equal_and_transforms_that_take_gradients_are_refused_by_torch():
    x = torch.randn(4)
    assert_same(torch.func.vmap(chain)(x), torch.func.vmap(checkpointed(chain))(x))
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(checkpointed(lambda x: chain(x).sum()))(x)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.jacrev(checkpointed(chain))(x)


def test_wrapper_subclass_as_input_is_equal():
    def program(wrap):
        x = TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_()
        y = wrap(lambda x: x.sin().exp() * x)(x)
        assert type(y) is TwoTensor
        y.sum().backward()
        assert type(x.grad) is TwoTensor
        return [y.a, y.b, x.grad.a, x.grad.b]

    assert_same_program(program, replays=1)


def test_plain_region_runs_under_no_dispatch_mode_in_either_phase():
    stacks = []

    def block(x):
        stacks.append(list(_get_current_dispatch_mode_stack()))
        return chain(x)

    checkpointed(block)(leaf(3)).sum().backward()
    assert stacks == [[], []]


def _tokens(linear, x):
    """A linear layer on pixels: torch adds its bias in place, but in a new tensor where a dispatch mode is active."""
    y = linear(x.flatten(2).permute(0, 2, 1)).square()
    return y.permute(0, 2, 1).reshape(x.shape).sin()


def _gradient_inside(layer, x):
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + layer(gradient)


def _saves_products(_context, op, *_args, **_kwargs):
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return remat.CheckpointPolicy.SAVE if kept else remat.CheckpointPolicy.RECOMPUTE


# Each takes what makes a region, what makes a call, a layer and a batch norm.
_UNDER_MODES = {
    "call after": lambda region, call, layer, norm: region(lambda x: call(norm, "norm")(layer(x))),
    "policy": lambda region, call, layer, norm: region(layer, policy=_saves_products),
    "gradient": lambda region, call, layer, norm: region(partial(_gradient_inside, layer)),
}


@pairwise(name=_UNDER_MODES, active=["never", "in forward", "in backward"])
def test_ops_that_write_in_place_only_where_no_dispatch_mode_is_active_are_equal(name, active):
    torch.manual_seed(0)
    linear, norm = nn.Linear(8, 8), nn.BatchNorm2d(8)
    start = torch.randn(2, 8, 2, 2)

    def gradients(region, call):
        function = _UNDER_MODES[name](region, call, partial(_tokens, linear), norm)
        x = start.clone().requires_grad_()
        with FlopCounterMode(display=False) if active == "in forward" else nullcontext():
            y = function(x)
        with FlopCounterMode(display=False) if active == "in backward" else nullcontext():
            return list(torch.autograd.grad(y.sum(), [x, *linear.parameters()]))

    plain = gradients(lambda function, **_options: function, lambda function, _name: function)
    assert_same(plain, gradients(checkpointed, remat.op))
