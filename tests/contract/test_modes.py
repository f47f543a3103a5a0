"""What stands around a region: grad modes, autocast, device contexts, the caller's saved-tensor hooks."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.helpers import (
    Mlp,
    alive,
    assert_same,
    assert_same_program,
    checkpointed,
    collector_off,
    leaf,
    pairwise,
    parameter_gradients,
    watch,
)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_caller_without_gradients_keeps_nothing(mode):
    inner = []

    def block(x):
        h = x.sin()
        inner.extend(watch(h))
        return h.exp()

    with collector_off(), mode():
        x = torch.randn(3)
        inputs = watch(x)
        y = checkpointed(block)(x)
        assert not y.requires_grad
        assert_same(y, x.sin().exp())
        del x
        assert alive(inputs + inner) == 0


def test_part_of_a_region_without_gradients_is_equal():
    def program(wrap):
        def block(x):
            with torch.no_grad():
                scale = x.exp()
            with torch.set_grad_enabled(False):
                shift = x.cos()
            return (x * scale).sin() + shift

        x = leaf(3)
        wrap(block)(x).sum().backward()
        return x.grad

    assert_same_program(program, replays=1)


OUTSIDE = {
    "none": contextlib.nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "disabled": lambda: torch.autocast("cpu", enabled=False),
    "no_cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
}


@pytest.mark.parametrize("backward", ["none", "bfloat16"])
@pytest.mark.parametrize("forward", OUTSIDE)
def test_replay_runs_under_the_autocast_of_forward(forward, backward):
    def program(wrap):
        mlp = Mlp(4)
        x = leaf(2, 4)
        with OUTSIDE[forward]():
            y = wrap(mlp)(x)
            y = wrap(mlp)(y)
        loss = y.float().square().sum()
        with OUTSIDE[backward]():
            loss.backward()
        return y, x.grad, *parameter_gradients(mlp)

    assert_same_program(program, replays=2)


@pytest.mark.parametrize(("forward", "backward"), [("meta", None), (None, "meta")])
def test_replay_makes_tensors_on_the_default_device_of_forward(forward, backward):
    seen = []

    def block(x):
        seen.append(torch.empty(1).device.type)
        return x.sin().exp()

    def device(name):
        return torch.device(name) if name else contextlib.nullcontext()

    x = leaf(3)
    with device(forward):
        y = checkpointed(block)(x).sum()
    with device(backward):
        y.backward()
    assert seen == [forward or "cpu"] * 2
    assert_same(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


# --- Autocast keeps casts of leaves, so that leaves must be the same in both phases


ATEN = torch.ops.aten


def _saving(*ops):
    kept = {True: remat.CheckpointPolicy.SAVE, False: remat.CheckpointPolicy.RECOMPUTE}
    return {"policy": lambda _context, op, *_args, **_kwargs: kept[op in ops]}


POLICIES = {
    "none": {},
    "products": _saving(ATEN.mm.default, ATEN.addmm.default),
    "casts": _saving(ATEN._to_copy.default),
    "others": _saving(ATEN.mul.Tensor, ATEN.sin.default),
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
    "written": lambda call, region: _written,
    "layer": lambda call, region: lambda x, w: nn.functional.linear(_float(x, w), w, w[0]).float() * x,
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
