"""What holds in every way of keeping: gradients of plain autograd, and what is kept is not recomputed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_remat as remat
from tests.helpers import assert_same, leaf
from tests.ways import KEEPING, PLAIN_AUTOGRAD, WAYS


def trained(way, function, *shapes):
    torch.manual_seed(0)
    inputs = [leaf(*shape) for shape in shapes]
    y = way.region(lambda *tensors: function(way.keep, *tensors))(*inputs)
    return y, torch.autograd.grad(y.square().sum(), inputs), torch.get_rng_state()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_are_those_of_plain_autograd(way):
    def function(keep, x, w):
        h = torch.nn.functional.dropout(x.sin(), 0.3) @ w
        h = keep("kept", lambda h, w: (h @ w).tanh(), h, w)
        return keep("reads it", torch.exp, h) + torch.rand_like(x)

    assert_same(trained(PLAIN_AUTOGRAD, function, (4, 4), (4, 4)), trained(way, function, (4, 4), (4, 4)))


@pytest.mark.parametrize("way", KEEPING, ids=str)
def test_what_is_kept_is_not_recomputed(way):
    def function(x):
        return way.keep("reads it", torch.exp, way.keep("kept", lambda h: h.erf().sin(), x.cos())) + x.sinh()

    seen = Counter()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[func.overloadpacket.__name__, remat.is_recomputing()] += 1
            return func(*args, **(kwargs or {}))

    with Seen():
        way.region(function)(leaf(4)).sum().backward()
    assert seen["cos", True] == 1
    assert seen["sin", True] == seen["exp", True] == 0
