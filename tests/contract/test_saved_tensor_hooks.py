"""Saved-tensor hooks of the caller: around a region, inside it, around backward only."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import torch_remat as remat
from tests.helpers import (
    alive,
    assert_same,
    checkpointed,
    collector_off,
    leaf,
    pairwise,
    plain,
    watch,
)
from tests.ways import BY_OP, RECOMPUTED

PLACES = {
    "args": lambda block, x: checkpointed(block)(x),
    "kwargs": lambda block, x: checkpointed(block)(x=x),
    "container": lambda block, x: checkpointed(lambda items: block(items[0]))([x]),
    "nested": lambda block, x: checkpointed(lambda x: checkpointed(block)(x * 1) * 1)(x),
}


@pytest.mark.parametrize("place", PLACES)
def test_region_inputs_go_through_the_hooks_outside_and_nothing_from_inside_does(place):
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.detach().clone())
        return packed[-1].numpy().copy()

    def unpack(array):
        unpacked.append(array)
        return torch.from_numpy(array)

    def block(x):
        return x.sin().exp().cos()

    leaf_input = leaf(3)
    with collector_off():
        x = leaf_input * 1
        value, reference = x.detach().clone(), watch(x)
        with saved_tensors_hooks(pack, unpack):
            y = PLACES[place](block, x)
        del x
        assert len(packed) >= 1
        assert all(torch.equal(tensor, value) for tensor in packed)
        assert alive(reference) == 0, "the region keeps the input beside what the hook made of it"
        assert unpacked == []
        y.sum().backward()
    assert len(unpacked) >= 1
    expected = torch.autograd.grad(leaf_input.sin().exp().cos().sum(), leaf_input)
    assert_same(expected, [leaf_input.grad])


SLICES = {
    "part": lambda h: h[:, :4],
    "every second": lambda h: h[:, ::2],
    "expanded": lambda h: h[:1, :4].expand(4, 4),
    "one row": lambda h: h[:1, :4],
}


@pairwise(
    policy=[None, [torch.ops.aten.sin.default], lambda *args, **kwargs: True],
    view=SLICES,
)
def test_hooks_around_a_region_may_give_its_arguments_back_with_other_strides(policy, view):
    """As ``save_on_cpu`` does with parts of tensors on a GPU: replay gets them as forward did."""
    strides = []

    def function(h):
        strides.append(h.stride())
        return (h.sin() * h + h).exp().t().cos()

    def program(wrap):
        torch.manual_seed(0)
        x = leaf(4, 8)
        with saved_tensors_hooks(lambda h: torch.empty(h.shape, dtype=h.dtype).copy_(h), lambda tensor: tensor):
            y = wrap(function)(SLICES[view](x.sin()))
        y.square().mean().backward()
        return y, x.grad

    assert_same(program(plain), program(remat.checkpoint(policy=policy)))
    assert len(set(strides)) == 1 < len(strides)


@pytest.mark.parametrize("policy", [None, [torch.ops.aten.sin.default]], ids=["plain", "policy"])
@pytest.mark.parametrize("way", [RECOMPUTED, BY_OP], ids=str)
@pytest.mark.parametrize("write", [lambda a: a.mul_(0.9), lambda a: a[0].mul_(0.5)], ids=["all", "row"])
def test_region_that_writes_its_argument_is_refused_also_where_hooks_give_it_another_copy(write, way, policy):
    """The copy may be of before or after: nobody says."""

    def function(a):
        way.keep("write", write, a)
        return a.sin() * 2

    with saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        y = remat.checkpoint(policy=policy)(function)(leaf(4, 4) * 1.0)
    with pytest.raises(remat.MutationError, match=r"the region itself modified this input in place") as caught:
        y.sum().backward()
    assert caught.value.tensor == "args[0]"


@pytest.mark.parametrize("options", [{}, {"policy": [torch.ops.aten.sin.default]}], ids=["plain", "policy"])
@pytest.mark.parametrize("is_complex", [True, False], ids=["conjugate", "negative"])
def test_hooks_around_a_region_may_resolve_lazy_conjugates_and_negatives(is_complex, options):
    z = leaf(3, 4, dtype=torch.complex64)

    def run(region):
        z.grad = None
        argument = z.conj() if is_complex else z.conj().imag
        with saved_tensors_hooks(lambda tensor: tensor.resolve_conj().resolve_neg().clone(), lambda packed: packed):
            y = region(argument)
        y.abs().sum().backward()
        return z.grad

    def block(x):
        return (x * 2 + x.sin()).exp()

    assert_same(run(block), run(checkpointed(block, **options)))
