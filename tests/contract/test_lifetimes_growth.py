"""Regions in a loop, up to 2,000, leave no live tensor and no Python object more, with the garbage collector off."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import LiveStorages, chain, checkpointed, collector_off, python_objects

REGIONS = 2_000
x = torch.ones(3, requires_grad=True)


def grad(y, **options):
    return torch.autograd.grad(y.sum(), x, **options)


def nested(call=lambda function, x: function(x)):
    inner = checkpointed(chain)
    return checkpointed(lambda x: inner(call(torch.sin, x)).exp())(x)


def every_option():
    options = {"region_name": "r", "determinism_check": "bitwise", "early_stop": False, "debug": True}
    grad(checkpointed(lambda x: F.dropout(chain(x)).exp(), **options)(x))


def exception(phase):
    def block(x):
        h = x.sin()
        if remat.is_recomputing() == (phase == "replay"):
            raise ValueError
        return h.exp()

    with contextlib.suppress(ValueError):
        grad(checkpointed(block)(x))


STEPS = {
    "forward and backward": lambda: grad(checkpointed(chain)(x)),
    "forward only": lambda: checkpointed(chain)(x),
    "nested": lambda: grad(nested()),
    "a call": lambda: grad(nested(lambda function, x: remat.op(function, "sin")(x))),
    "a native region": lambda: grad(nested(lambda function, x: remat.native_save_region("sin", function, x))),
    "every option": every_option,
    "exception in forward": lambda: exception("forward"),
    "exception in replay": lambda: exception("replay"),
}


def growth(step, times):
    """Return by how much tensors, objects and memory blocks grow over so many steps, once they grow no more.

    Python and torch fill caches of their own in the first some thousand steps, so the smallest growth of a few
    rounds counts; a leak shows in every round.
    """
    for _ in range(20):
        step()
    rounds = []
    for _ in range(8):
        before = python_objects()
        for _ in range(times):
            step()
        rounds.append([late - early for late, early in zip(python_objects(), before, strict=True)])
        if rounds[-1][0] == 0 and rounds[-1][1] < 20 and rounds[-1][2] < times / 4:
            break
    return [min(column) for column in zip(*rounds, strict=True)]


@pytest.mark.parametrize("name", STEPS)
def test_regions_in_a_loop_leave_no_growth(name):
    times = REGIONS if name == "forward and backward" else REGIONS // 5
    with collector_off():
        tensors, objects, blocks = growth(STEPS[name], times)
    assert tensors == 0
    assert objects < 20
    assert blocks < times / 4


def test_regions_in_a_loop_leave_no_bytes():
    """Storages held from C++ alone are no Python objects: count them by what one step leaves behind."""
    with collector_off():
        live = LiveStorages()
        with live:
            for step in STEPS.values():
                step()
        assert len(live.seen) > 100
        assert live.bytes() == 0
