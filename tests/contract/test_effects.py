"""Regions that touch what outlives them, by native regions, policies and calls: once, whatever replay runs.

What a skipped call leaves to its region otherwise than by its result is an error in forward, or it is left once. The
Python of a native region runs again in replay, so that there the gradients are right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_remat as remat
from tests.contract.test_native_regions import BODIES, framed
from tests.handle_ops import SAVE, Kernel, Trace
from tests.handle_ops import call as call_kernel
from tests.helpers import (
    assert_equal_gradients,
    assert_same,
    leaf,
    name_of,
    pairwise,
    plain,
    tensors_in,
)
from tests.native_programs import keep, region
from tests.ways import BY_NATIVE_REGION, BY_OP, assert_same_in, everything, nothing

# --- Under a policy


def random_half(ctx, op, *args, **kwargs):
    """A fixed half of all ops, told by their names."""
    return sum(map(ord, op.name())) % 2 == 0


POLICIES = [everything, nothing, random_half]
policies = pytest.mark.parametrize("policy", POLICIES, ids=name_of)


@torch.library.custom_op("remat_policy_tests::record", mutates_args=("log",))
def record(x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    log.add_(x)
    return x.abs()


@pytest.mark.parametrize("run", [lambda _name, op, *args: op(*args), keep], ids=["plain", "native"])
@policies
def test_custom_op_that_writes_outside_writes_once(policy, run):
    log, x = torch.zeros(4), leaf(4)

    def function(x):
        return (x * run("k", record, x.detach() * 2, log)).exp()

    expected = torch.autograd.grad(function(x).sum(), x)
    written = log.clone()
    log.zero_()
    y = region(policy)(function)(x)
    actual = torch.autograd.grad(y.sum(), x)
    assert_same([expected, written], [actual, log])


@pytest.mark.parametrize("name", BODIES)
@policies
def test_bodies_of_native_regions_under_a_policy(policy, name):
    """All that native regions must be able to hold, in one, and with the policy alone."""
    body, inputs = BODIES[name], (leaf(4, 4), leaf(4, 4))
    function = framed(body)
    assert_equal_gradients(function, region(policy)(function), inputs)

    def bare(x, w):
        return [y.sin() for y in tensors_in([body(x * 2, w)]) if y.is_floating_point()]

    try:
        assert_equal_gradients(bare, region(policy)(bare), inputs)
    except remat.MutationError:
        assert policy is not nothing  # a saved result was changed: SAC refuses it too


@pytest.mark.parametrize("given", ["argument", "variable"])
@pytest.mark.parametrize("way", [BY_OP, BY_NATIVE_REGION], ids=str)
@pytest.mark.filterwarnings("ignore:.*replay:torch_remat.RematWarning")
def test_call_that_runs_after_all_refuses_what_was_changed_after_it(given, way):
    """NumPy reads a placeholder in a native region: replay starts over, and the region's input is another by then."""

    def program(way):
        def scaled(b):
            h = torch.where(b > 0, b, b * 2)
            h * float(h.detach().numpy().mean())  # in a native region this runs in replay
            return h

        def function(a, b):
            h = way.keep("c", scaled, b) if given == "argument" else way.keep("c", lambda: scaled(b))
            y = a @ h * float(h.detach().numpy().mean())
            with torch.no_grad():
                b.mul_(0.9)
            return y

        a, b = leaf(4, 4), leaf(4, 4)
        return torch.autograd.grad(way.region(function)(a, b).sum(), [a, b])

    with pytest.raises(remat.MutationError, match="the region itself modified this input in place"):
        assert_same_in(way, program, policy=[torch.ops.aten.sigmoid.default])


# --- What a skipped call leaves


CALLS: dict[str, Callable[[Callable], Callable]] = {
    "function": lambda function: remat.op(function, "c"),
    "native": lambda function: lambda *args: remat.native_save_region("c", function, *args),
}
OUTSIDE: list[Any] = []


def variable_gets_a_tensor(call, h):
    kept = None

    def f(h):
        nonlocal kept
        kept = h.exp()
        return h.sin()

    return call(f)(h).sin() * kept.sin()


def view_of_what_was_returned(call, h):
    """Its base is read."""
    kept = []
    y = call(lambda h: kept.append(h.exp()) or kept[0][:1])(h)
    return y.sin() * kept[0].sin()


def variable_gets_a_number(call, h):
    count = 0

    def f(h):
        nonlocal count
        count += 1
        return h.sin()

    return call(f)(h).sin()


def leak_by(make, leave, read):
    """Return a block whose call leaves something in a container, and which reads it."""

    def block(call, h):
        kept = make(h)
        y = call(lambda h: leave(kept, h) or h.sin())(h)
        return y.sin() * read(kept).sin()

    return block


# Refused: the region goes on with a tensor that was not returned, its own containers hold others, or no tree returns.
LEAKS: dict[str, Callable[[Callable, Tensor], Tensor]] = {
    "variable": variable_gets_a_tensor,
    "base": view_of_what_was_returned,
    "list": leak_by(lambda h: [], lambda kept, h: kept.append(h.exp()), lambda kept: kept[0]),
    "shorter list": leak_by(lambda h: [h.exp(), h.tanh()], lambda kept, h: kept.__delitem__(0), lambda kept: sum(kept)),
    "list from outside": lambda call, h: (
        call(lambda h: OUTSIDE.append(h.exp()) or h.sin())(h).sin() * OUTSIDE[-1].sin()
    ),
    "dict": leak_by(lambda h: {}, lambda kept, h: kept.update(a=h.exp()), lambda kept: kept["a"]),
    "set": leak_by(lambda h: set(), lambda kept, h: kept.add(h.exp()), lambda kept: next(iter(kept))),
    "object": leak_by(lambda h: SimpleNamespace(), lambda kept, h: setattr(kept, "a", h.exp()), lambda kept: kept.a),
    "returned generator": lambda call, h: next(call(lambda h: (one for one in (h.sin(),)))(h)).sin(),
    "returned object": lambda call, h: call(lambda h: SimpleNamespace(y=h.sin()))(h).y.sin(),
    "returned function": lambda call, h: call(lambda h: lambda: h.sin())(h)().sin(),
}
# Left once, and no error: the region does not go on with it, or it is no tensor.
LEFT: dict[str, Callable[[Callable, Tensor], Tensor]] = {
    "number": variable_gets_a_number,
    "list from outside": lambda call, h: call(lambda h: OUTSIDE.append(h.exp()) or h.sin())(h).sin(),
}


def run_call(block: Callable, call: Callable, wrap: Callable, counts: list[int]) -> tuple[Tensor, list[Any]]:
    """Return the gradient, and the warnings; note how often the call's Python ran."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)

    def counted(function):
        def f(*args):
            counts[0] += 1
            return function(*args)

        return call(f)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(lambda x: block(counted, x.cos()))(x).sum().backward()
    OUTSIDE.clear()
    return x.grad, caught


POLICY = {"policy": lambda ctx, op, *args, **kwargs: op is torch.ops.aten.exp.default}
AROUND = {
    "nothing": remat.checkpoint(),
    "policy": remat.checkpoint(**POLICY),
    "region": lambda block: remat.checkpoint()(lambda x: remat.checkpoint()(block)(x.tanh())),
}


@pairwise(name=LEAKS, how=CALLS, around=AROUND)
def test_what_leaks_is_refused_in_forward(name, how, around):
    """Replay would go on with another tensor, or without one."""
    if how != "native":
        with pytest.raises(remat.UsageError) as caught:
            AROUND[around](lambda x: LEAKS[name](CALLS[how], x.cos()))(torch.randn(4, 4, requires_grad=True))
        assert caught.value.op == "c"
        return
    counts = [0]
    expected = run_call(LEAKS[name], plain, lambda f: (lambda x: f(x.tanh())) if around == "region" else f, counts)[0]
    assert torch.equal(expected, run_call(LEAKS[name], CALLS[how], AROUND[around], counts)[0])


@pairwise(name=LEFT, how=CALLS)
def test_what_does_not_reach_the_region_is_left_once(name, how):
    counts = [0]
    expected, _ = run_call(LEFT[name], plain, plain, counts)
    counts[0] = 0
    found, caught = run_call(LEFT[name], CALLS[how], remat.checkpoint(), counts)
    assert torch.equal(expected, found)
    assert not caught
    assert counts[0] <= (2 if how == "native" else 1)


# --- A call writes a tensor that the region made: right, or an error, never another gradient.


def doubled(x, v, write):
    write(v)
    return x * 2


def by_kernel(style):
    """Return what calls a Function that modifies its second argument without saying so."""

    def writer(x, v, write):
        def forward(ctx, x, v):
            write(v)
            return x * 2, {"x": x}

        kernel = Kernel("writes", ("x",), forward, lambda ctx, saved, grad: (grad * 2, None), 2)
        return call_kernel(style, kernel, Trace(), "c", SAVE, x, v)

    return writer


WRITERS = {how: lambda x, v, write, call=call: call(doubled)(x, v, write) for how, call in CALLS.items()}
WRITERS |= {style: by_kernel(style) for style in ("op", "handle", "auto")}
WRITES = {
    "without a gradient": torch.no_grad()(lambda v: v.mul_(0.5)),
    "past the graph": lambda v: v.detach().mul_(0.5),
    "in part": torch.no_grad()(lambda v: v[0].mul_(0.5)),
}


@pairwise(
    who=WRITERS,
    how=WRITES,
    history=[False, True],
    policy=[None, torch.ops.aten.mul.Tensor, torch.ops.aten.mm.default],
)
@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")
def test_a_call_that_writes_its_argument_is_right_or_refused(who, how, history, policy):
    def gradient(writer, wrap):
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)

        def block(x):
            v = (x if history else x.detach()) * 1.5
            return writer(x.sin(), v, WRITES[how]), v.sin() * x

        sum(y.exp().sum() for y in wrap(block)(x)).backward()
        return x.grad

    expected = gradient(doubled if who in CALLS else by_kernel("plain"), plain)
    chosen = policy and (lambda ctx, op, *args, **kwargs: op is policy)
    try:
        found = gradient(WRITERS[who], remat.checkpoint(policy=chosen))
    except remat.RematError as error:
        assert error.op or error.tensor  # noqa: PT017
    else:
        assert torch.equal(expected, found)
