"""`checkpoint_sequential`: equal gradients, the segments that torch makes, all options."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential as torch_sequential

import torch_remat as remat
from tests.helpers import Calls, Mlp, assert_same, leaf, train_step


@pytest.mark.parametrize("segments", [1, 3, 7])
def test_gradients_are_equal_for_any_number_of_segments(segments):
    layers, x = nn.Sequential(*(Mlp(4) for _ in range(7))), leaf(2, 4)
    expected = train_step(layers, x)
    for given in (layers, list(layers)):
        run = lambda _, x, given=given: remat.checkpoint_sequential(given, segments, x)  # noqa: E731
        assert_same(expected, train_step(layers, x, run))


@pytest.mark.parametrize(("count", "segments"), [(1, 1), (4, 2), (5, 2), (7, 3), (8, 8)])
def test_each_function_runs_as_often_as_under_torch(count, segments):
    def totals(sequential):
        functions = [Calls(torch.sin) for _ in range(count)]
        sequential(functions, segments, leaf(3)).sum().backward()
        return [function.total for function in functions]

    ours = totals(remat.checkpoint_sequential)
    assert ours == totals(lambda *args: torch_sequential(*args, use_reentrant=False))
    assert (2 in ours) == (segments > 1)


def test_options_reach_every_region():
    layers = [lambda x: x.sin().exp(), lambda x: (x.double() if remat.is_recomputing() else x).cos().exp(), torch.sin]
    y = remat.checkpoint_sequential(layers, 3, leaf(3), region_name="layers", early_stop=False)
    with pytest.raises(remat.MismatchError) as caught:
        y.sum().backward()
    assert "layers" in caught.value.region
