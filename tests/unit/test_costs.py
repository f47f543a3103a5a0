"""Costs that can be counted: calls instead of time, so that the numbers are exact on any machine."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from tests.helpers import CountOps, checkpointed, leaf


def python_calls(function):
    """Return the number of Python and C calls that a function makes."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # other libraries have the collector call them back (hypothesis does)
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def sines(count):
    def block(x):
        for _ in range(count):
            x = x.sin()
        return x

    return block


def step(count, **options):
    x = leaf(2)
    torch.autograd.grad(checkpointed(sines(count), **options)(x).sum(), x)


@pytest.mark.parametrize(
    "options", [{}, {"early_stop": False}, {"determinism_check": "none"}, {"determinism_check": "bitwise"}], ids=str
)
def test_calls_for_each_saved_tensor_are_flat(options):
    step(10, **options)
    few, more, many = (python_calls(lambda n=n: step(n, **options)) for n in (10, 110, 1110))
    first, second = (more - few) / 100, (many - more) / 1000
    assert first > 0
    assert abs(second - first) < 0.05 * first


def test_region_runs_each_op_twice_and_adds_no_op_of_its_own_for_each_saved_tensor():
    def ops(count):
        with CountOps() as counted:
            step(count)
        return counted.counts

    small, large = ops(10), ops(110)
    assert large["sin"] - small["sin"] == 200
    assert large["cos"] - small["cos"] == 100  # the sines' backward
    others = {name: large[name] - small[name] for name in large if large[name] != small[name]}
    assert set(others) <= {"sin", "cos", "mul", "detach"}
    assert others.get("detach", 0) <= 200
