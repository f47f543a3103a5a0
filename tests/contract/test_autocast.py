"""Autocast around and inside of regions: it keeps casts of leaves, so that leaves must be the same in both phases."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.helpers import assert_same, no_other_regions, pairwise

ATEN = torch.ops.aten


def _saving(*ops):
    kept = {True: remat.CheckpointPolicy.SAVE, False: remat.CheckpointPolicy.RECOMPUTE}
    return {"policy": lambda _context, op, *_args, **_kwargs: kept[op in ops]}


POLICIES = {
    "none": {},
    "nothing": _saving(),
    "products": _saving(ATEN.mm.default, ATEN.addmm.default),
    "casts": _saving(ATEN._to_copy.default),
    "others": _saving(ATEN.mul.Tensor, ATEN.sin.default),
    "to the end": {"early_stop": False, **_saving(ATEN._to_copy.default)},
}


def _written(x, w):
    y = x * 1.5
    y.mul_(2)
    return ((y @ w).sin() @ w).exp()


def _product(x, w):
    return (x @ w).sin()


def _float(x, w):
    return x.sin() * w


# Each takes what makes a call and what makes an inner region.
PROGRAMS = {
    "argument twice": lambda call, region: lambda x, w: (_product(x, w) @ w).exp(),
    "written": lambda call, region: _written,
    "layer": lambda call, region: lambda x, w: nn.functional.linear(_float(x, w), w, w[0]).float() * x,
    "argument of a call": lambda call, region: lambda x, w: (call(_product)(x, w) @ w).sin(),
    "result of a call": lambda call, region: lambda x, w: _product(call(_float)(x, w), w) @ w,
    "call of a result": lambda call, region: lambda x, w: call(_product, "b")(call(_float)(x, w), w).exp(),
    "inner region": lambda call, region: lambda x, w: region(_product)(x * 2, w).sin(),
    "result to an inner region": lambda call, region: lambda x, w: region(_product)(call(_float)(x, w), w).sin(),
}


@pairwise(policy=POLICIES, program=PROGRAMS, around=["region", "body", "part"])
@pytest.mark.parametrize(
    "call", [remat.op, lambda f, name: partial(remat.native_save_region, name, f)], ids=["call", "native"]
)
def test_gradients_are_equal_whether_arguments_are_leaves_or_not(policy, program, call, around):
    torch.manual_seed(0)
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def under_autocast(function):
        def run(*args):
            with torch.autocast("cpu", torch.bfloat16):
                return function(*args)

        return run

    def gradients(make_call, region, leaves):
        function = PROGRAMS[program](make_call, region)
        if around == "body":
            function = under_autocast(function)
        elif around == "part":
            part = under_autocast(function)
            function = lambda x, w: part(x, w).float().sin() @ w  # noqa: E731
        run = region(function, **POLICIES[policy])
        run = under_autocast(run) if around == "region" else run
        y = run(x if leaves[0] else x * 1, w if leaves[1] else w * 1)
        return [y.detach(), *torch.autograd.grad(y.float().sum(), (x, w))]

    for leaves in ((True, True), (True, False), (False, True), (False, False)):
        expected = gradients(lambda f, _name="a": f, lambda f, **_options: f, leaves)
        with warnings.catch_warnings():
            warnings.simplefilter("error", remat.RematWarning)
            actual = gradients(lambda f, name="a": call(f, name), lambda f, **o: remat.checkpoint(**o)(f), leaves)
        assert_same(expected, actual)


def test_cast_of_a_weight_in_the_memory_of_a_result_that_is_gone_is_not_taken_for_it():
    """A native region keeps what it makes, but not a cast that autocast keeps: both phases must say the same of it."""
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def product(x):
        (x.cos(), x.bfloat16(), x.bfloat16())  # the two casts that `mm` needs take their memory
        return torch.mm(x, weight)

    with torch.autocast("cpu", torch.bfloat16), no_other_regions():
        out = remat.checkpoint()(lambda x: remat.native_save_region("product", product, x.sin()).sin())(x)
        report = str(remat.memory_report())
    assert "product.out" in report
    assert "product.cos_0_0" not in report
    out.sum().backward()
