"""Tensors of a subclass that is no wrapper: no placeholder can stand in for one."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import torch_remat as remat
from tests.helpers import leaf
from tests.ways import BY_HANDLE, PLAIN_AUTOGRAD, WAYS
from torch_remat.dispatch.region.region import live_regions


class Marked(Tensor):
    """A subclass without data of its own."""


def output(way, x, weight):
    """Return what a region makes of a marked tensor, which a call in it keeps."""

    def block(x):
        return way.keep("product", torch.mm, x * 1.0, weight).sin()

    return way.region(block, region_name="block")(x.as_subclass(Marked))


def gradients(way, x, weight):
    return torch.autograd.grad(output(way, x, weight).sum(), [x, weight])


@pytest.mark.parametrize("way", [way for way in WAYS if way is not BY_HANDLE], ids=str)
def test_gradients_are_those_of_plain_autograd_and_nothing_is_left(way):
    x, weight, before = leaf(4, 4), leaf(4, 4), len(live_regions())
    for expected, found in zip(gradients(PLAIN_AUTOGRAD, x, weight), gradients(way, x, weight), strict=True):
        assert torch.equal(expected, found)
    output(way, x, weight)
    gc.collect()
    assert len(live_regions()) <= before


def test_handle_that_returns_one_is_an_error():
    with pytest.raises(remat.UsageError, match=r"(?s)^block::product\.out: .*returned a Marked.*remat\.op\(Fn\.apply"):
        output(BY_HANDLE, leaf(4, 4), leaf(4, 4))
