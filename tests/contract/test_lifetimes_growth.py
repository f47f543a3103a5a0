"""2,000 regions in a loop leave no live tensor and no Python object more, with the garbage collector off."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import LiveStorages, chain, checkpointed, collector_off, python_objects

REGIONS = 2_000
x = torch.ones(3, requires_grad=True)
w = torch.nn.Parameter(torch.ones(3, 3))


def grad(y, **options):
    return torch.autograd.grad(y.sum(), x, **options)


def forward_and_backward():
    grad(checkpointed(chain)(x))


def forward_only():
    checkpointed(lambda x: chain(x @ w))(x)


def without_gradients():
    with torch.no_grad():
        checkpointed(chain)(x)


def random_numbers():
    grad(checkpointed(lambda x: F.dropout(x.sin(), 0.5).exp())(x))


def nested():
    inner = checkpointed(chain)
    y = checkpointed(lambda x: inner(x.sin()).exp())(x)
    grad(y)


def nested_forward_only():
    inner = checkpointed(chain)
    checkpointed(lambda x: inner(x.sin()).exp())(x)


def kept_graph():
    y = checkpointed(chain)(x)
    grad(y, retain_graph=True)
    grad(y, retain_graph=True)


def second_order():
    (first,) = grad(checkpointed(chain)(x), create_graph=True)
    torch.autograd.grad(first.sum(), x)


def one_of_two_outputs():
    one, _ = checkpointed(lambda x: (x.sin().exp(), x.cos()))(x)
    grad(one)


def output_in_place():
    y = checkpointed(lambda x: chain(x) + 1)(x)
    grad(y.mul_(2))


def every_option():
    options = {"region_name": "r", "determinism_check": "bitwise", "early_stop": False, "debug": True}
    grad(checkpointed(chain, **options)(x))


def containers():
    y = checkpointed(lambda d, *, k: {"y": [chain(d["x"][0]) * k]})({"x": [x]}, k=torch.ones(3))
    grad(y["y"][0])


def exception_in_forward():
    with contextlib.suppress(RuntimeError):
        checkpointed(lambda x: x.sin() @ torch.ones(7))(x)


def exception_in_replay():
    def block(x):
        h = x.sin()
        if remat.is_recomputing():
            raise ValueError
        return h.exp()

    y = checkpointed(block)(x)
    with contextlib.suppress(ValueError):
        grad(y)


def backward_inside():
    def block(x):
        inner = x.detach().requires_grad_()
        (step,) = torch.autograd.grad(chain(inner).sum(), inner)
        return (x + step).sin().exp()

    grad(checkpointed(block)(x))


def error_of_mutation():
    h = x * 1
    y = checkpointed(chain)(h)
    with torch.no_grad():
        h.add_(1)
    try:
        grad(y)
    except remat.MutationError:
        pass
    else:
        raise AssertionError("nothing was raised")


STEPS = [
    forward_and_backward,
    forward_only,
    without_gradients,
    random_numbers,
    nested,
    nested_forward_only,
    kept_graph,
    second_order,
    one_of_two_outputs,
    output_in_place,
    every_option,
    containers,
    exception_in_forward,
    exception_in_replay,
    backward_inside,
    error_of_mutation,
]
FULL = {forward_and_backward, forward_only}


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


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_regions_in_a_loop_leave_no_growth(step):
    times = REGIONS if step in FULL else REGIONS // 5
    with collector_off():
        tensors, objects, blocks = growth(step, times)
    assert tensors == 0
    assert objects < 20
    assert blocks < times / 4


def test_growth_is_seen_where_there_is_some():
    kept = []
    with collector_off():
        tensors, objects, blocks = growth(lambda: kept.append([torch.ones(1)]), 400)
    assert tensors == 400
    assert objects >= 800
    assert blocks >= 800
    kept.clear()


def test_regions_in_a_loop_leave_no_bytes():
    """Storages held from C++ alone are no Python objects: count them by what one step leaves behind."""
    with collector_off():
        live = LiveStorages()
        with live:
            for step in STEPS:
                step()
        assert len(live.seen) > 100
        assert live.bytes() == 0
