"""Regions under an op-level policy that write to what outlives them: once, whatever the policy says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.contract.test_native_regions import BODIES, framed
from tests.handle_ops import RECOMPUTE, SAVE
from tests.helpers import (
    assert_equal_gradients,
    assert_same,
    assert_same_program,
    leaf,
    plain,
    tensors_in,
)
from tests.native_programs import ComputeOps, aten, keep, region, replayed_ops

MM = [aten.mm.default]


def everything(ctx, op, *args, **kwargs):
    return True


def nothing(ctx, op, *args, **kwargs):
    return False


def matmuls(ctx, op, *args, **kwargs):
    return op in (aten.mm.default, aten.addmm.default, aten.convolution.default)


def random_half(ctx, op, *args, **kwargs):
    """A fixed half of all ops, told by their names."""
    return sum(map(ord, op.name())) % 2 == 0


POLICIES = [everything, nothing, matmuls, random_half]
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.__name__)


@policies
def test_counter_is_counted_once(policy):
    counter, log, w = torch.zeros(()), torch.zeros(4), leaf(4, 4)

    def function(x):
        h = (x @ w).sin()
        counter.add_(1)
        log[1:3] += h.detach()[0, :2]
        log.mul_(2)
        torch.add(log, 1, out=log)
        return (h * 2).exp()

    x, results = leaf(4, 4), []
    for wrap in (plain, region(policy)):
        counter.zero_(), log.zero_()
        y = wrap(function)(x)
        after = counter.clone(), log.clone()
        results.append([*after, *torch.autograd.grad(y.sum(), [x, w], retain_graph=True)])
        results[-1] += torch.autograd.grad(y.sum(), [x, w])
        assert_same(after, (counter, log))
    assert_same(*results)


@policies
def test_buffer_that_is_written_and_then_read_is_right_or_refused(policy):
    """Backward may come when the buffer has changed again: then it is an error, never a wrong gradient."""

    def program(wrap, steps):
        torch.manual_seed(1)
        cache, w, x = torch.zeros(3, 4), leaf(4, 4), leaf(4)

        def function(x, step):
            cache[step] = (x @ w).detach().sin()
            return ((cache.sum(0) * x) @ w).exp()

        outputs = [wrap(function)(x, step) for step in range(steps)]
        return *outputs, *torch.autograd.grad(sum(y.sum() for y in outputs), [x, w]), cache

    assert_same(program(plain, 1), program(region(policy), 1))
    try:
        actual = program(region(policy), 3)
    except remat.MutationError:
        return
    assert_same(program(plain, 3), actual)


@torch.library.custom_op("remat_policy_tests::record", mutates_args=("log",))
def record(x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    log.add_(x)
    return x.abs()


@policies
def test_custom_op_that_writes_outside_writes_once(policy):
    log, x = torch.zeros(4), leaf(4)

    def function(x):
        return (x * record(x.detach() * 2, log)).exp()

    expected = torch.autograd.grad(function(x).sum(), x)
    written = log.clone()
    log.zero_()
    y = region(policy)(function)(x)
    actual = torch.autograd.grad(y.sum(), x)
    assert_same([expected, written], [actual, log])


# Models


# Native regions and handles under a policy


@policies
def test_native_regions_in_a_region_with_a_policy(policy):
    def program(wrap):
        x, w = leaf(4, 4), leaf(4, 4)

        def function(x):
            h = F.dropout(x @ w, 0.3)
            h = keep("a", lambda: F.dropout((h @ w).cumsum(0), 0.3))
            h = h.sin() @ w
            h = remat.op(lambda h: F.dropout(h.cos(), 0.3), "b", policy=RECOMPUTE)(h)
            return keep("c", torch.tanh, h).exp()

        y = wrap(function)(x)
        for retain in (True, False):
            torch.autograd.backward(y.sum(), retain_graph=retain)
        return y, x.grad, w.grad, torch.rand(2)

    assert_same_program(program, policy=policy)


@pytest.mark.parametrize("saved", ["mul_", "sin", "exp"])
@pytest.mark.parametrize("call", ["native", "plain"])
@pytest.mark.filterwarnings("ignore:.*replay recomputes this call:torch_remat.RematWarning")
def test_what_was_written_and_then_got_another_shape_in_place(saved, call):
    def block(x):
        written = remat.native_save_region("k", lambda h: h.mul_(2).t_(), x.sin()) if call == "native" else None
        return (x.sin().mul_(2).t_() if written is None else written).exp() * x

    def policy(ctx, op, *args, **kwargs):
        return SAVE if op.overloadpacket is getattr(torch.ops.aten, saved) else RECOMPUTE

    x = leaf(3, 3)
    expected = torch.autograd.grad(block(x).sum(), x)
    assert_same(expected, torch.autograd.grad(remat.checkpoint(policy=policy)(block)(x).sum(), x))


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


def test_dead_op_with_an_effect_outside_is_not_run_again():
    log, x = torch.zeros(4), leaf(4)

    def function(x):
        log.copy_(x.detach())
        return x.sin().exp()

    y = region(nothing)(function)(x)
    with torch.no_grad():
        log.fill_(7)
    with ComputeOps() as ops:
        y.sum().backward()
    assert "copy_" not in ops.counts
    assert_same(torch.full((4,), 7.0), log)


def test_result_changed_outside_through_a_view_that_counts_for_itself_is_an_error():
    """`x @ w` of three dimensions ends in `_unsafe_view`, whose changes the kept product does not count."""
    x, w = leaf(2, 3, 4), leaf(4, 4)

    def function(x):
        y = x @ w
        return y, (y + 1).exp() * 2

    y, z = region(MM)(function)(x)
    with torch.no_grad():
        y.detach().mul_(2)
    with pytest.raises(remat.MutationError, match="mm_0_0"):
        z.sum().backward()


def test_saved_write_to_what_replay_makes_again_is_put_back_and_not_run():
    def function(x, w):
        h = x * 2
        before = (h + 1).exp()
        h.addmm_(w, w)
        return h.sin() * before

    def writes(ctx, op, *args, **kwargs):
        return op is aten.addmm_.default

    inputs = leaf(4, 4), leaf(4, 4)
    assert_equal_gradients(function, region(writes)(function), inputs)
    assert "addmm_" not in replayed_ops(function, region(writes), inputs)


class Averaged(nn.Module):
    """A buffer that follows a mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.rand(4, 4) + 0.5)

    def follow(self, x):
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.detach().abs().mean(0))

    def scale(self, x, reads):
        self.follow(x)
        return x * self.mean.clone() if reads else x * 2


@pytest.mark.parametrize("call", ["op", "native"])
@pytest.mark.parametrize("also", ["before", "after", "both"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.filterwarnings("ignore:.*replay recomputes this call:torch_remat.RematWarning")
def test_buffer_that_a_call_which_runs_whole_and_the_region_both_write(call, also, reads):
    """It is written once, or what reads it in replay is refused."""

    def train(wrap):
        torch.manual_seed(0)
        module, x = Averaged(), torch.randn(4, 4, requires_grad=True)

        def function(x):
            h = x * 1.0
            if also != "after":
                module.follow(x)
            if not wrap:
                r = module.scale(h, reads)
            elif call == "op":
                r = remat.op(module.scale, "scale")(h, reads)
            else:
                r = remat.native_save_region("scale", module.scale, h, reads)
            if also != "before":
                module.follow(h)
            r[0].mul_(0.5)
            return r.sin() * h

        region = remat.checkpoint(policy=[torch.ops.aten.mm.default])(function) if wrap else function
        region(x).sum().backward()
        return x.grad, module.mean

    expected = train(False)
    if reads:
        with pytest.raises(remat.MutationError, match="mean"):
            train(True)
    else:
        assert_same(train(True), expected)


@pytest.mark.parametrize("given", ["argument", "variable"])
@pytest.mark.parametrize("call", ["op", "native"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore:.*replay:torch_remat.RematWarning")
def test_call_that_runs_after_all_refuses_what_was_changed_after_it(given, call, autocast):
    """NumPy reads a placeholder in a native region: replay starts over, and the region's input is another by then."""

    def train(wrap):
        def scaled(b):
            h = torch.where(b > 0, b, b * 2)
            h * float(h.detach().numpy().mean())  # in a native region this runs in replay
            return h

        def function(a, b):
            args = (b,) if given == "argument" else ()
            part = scaled if args else lambda: scaled(b)
            if not wrap:
                h = part(*args)
            else:
                h = remat.op(part, "c")(*args) if call == "op" else remat.native_save_region("c", part, *args)
            y = a @ h
            if call == "op":
                y = y * float(h.detach().numpy().mean())
            with torch.no_grad():
                b.mul_(0.9)
            return y

        torch.manual_seed(0)
        a, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = (remat.checkpoint(policy=[torch.ops.aten.sigmoid.default])(function) if wrap else function)(a, b)
        y.float().sum().backward()
        return a.grad, b.grad

    if call == "op":  # its result is kept, since recomputed code reads it
        assert_same(train(True), train(False))
    else:
        with pytest.raises(remat.MutationError, match="c is recomputed in replay and reads"):
            train(True)
