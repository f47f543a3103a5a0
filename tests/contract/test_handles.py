"""Handles: a SAVE body runs once, ever; a RECOMPUTE body runs again; gradients are those of plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import torch_remat as remat
from tests.handle_ops import (
    KERNELS,
    POLICIES,
    RECOMPUTE,
    SAVE,
    STYLES,
    Affine,
    Both,
    Gather,
    Inner,
    Power,
    Result,
    Shift,
    Sort,
    Trace,
    as_tuple,
    call,
    policy_ids,
)
from tests.helpers import Calls, assert_same, assert_same_program, checkpointed, leaf, pairwise, plain


def my_op_fwd1(x):
    return x.sin()


def my_op_fwd2(y):
    return y.exp()


def my_op_bwd(x, y, grad_z):
    return grad_z * y.exp() * x.cos(), None, None


class MyOp(Function):
    """The example of the README, as it stands there; it counts its runs."""

    runs = 0

    @staticmethod
    def forward(ctx, x, op_name, remat_policy):
        handle = remat.get_handle(ctx, op_name, remat_policy)
        if (ret := handle.maybe_load_saved()) is not None:
            return ret
        x = handle.save_or_load_inputs(x)
        MyOp.runs += 1
        y = my_op_fwd1(x)
        z = my_op_fwd2(y)
        handle.save_for_backward(
            {"x": x, "y": y},  # order matters!
        )
        return handle.record_outputs(z)

    @staticmethod
    def backward(ctx, grad_z):
        x, y = ctx.saved_tensors
        return my_op_bwd(x, y, grad_z)


class Probe(Function):
    """Logs what the handle answers in each call."""

    @staticmethod
    def forward(ctx, x, log, op_name, policy):
        handle = remat.get_handle(ctx, op_name, policy)
        assert isinstance(handle, remat.RematHandle)
        ret = handle.maybe_load_saved()
        if ret is not None:
            log.append(("loaded", type(ret) is not tuple and remat.is_placeholder(ret)))
            return ret
        given = remat.is_placeholder(x)
        x = handle.save_or_load_inputs(x)
        log.append(("ran", given, remat.is_placeholder(x)))
        y = x.sin()
        handle.save_for_backward({"x": x, "y": y})
        return handle.record_outputs(y)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        assert not remat.is_placeholder(x)
        assert not remat.is_placeholder(y)
        return grad * x.cos() * (1 + y), None, None, None


def run_kernel(style, kernel, trace, policy, x, w):
    """Run the kernel on what it takes, then a RECOMPUTE op that reads its floating outputs."""
    second = [torch.tensor([[1, 0, 1]] * 3)] if kernel is Gather else [w]
    outputs = as_tuple(call(style, kernel, trace, "it", policy, x, *second[: kernel.arity - 1]))
    other = outputs[-1] if outputs[-1].is_floating_point() and len(outputs) > 1 else w
    return call(style, Affine, trace, "reader", RECOMPUTE, outputs[0], other), *outputs


def test_policies_are_recompute_and_save():
    assert {"RECOMPUTE", "SAVE"} <= set(remat.CheckpointPolicy.__members__)
    assert SAVE is not RECOMPUTE


@pairwise(kernel=KERNELS, style=STYLES, policy=POLICIES)
def test_op_outside_a_region_is_plain_autograd(kernel, style, policy):
    results = []
    for form in ("plain", style):
        torch.manual_seed(3)
        trace, x, w = Trace(), leaf(3, 3), leaf(3, 3)
        y, *outputs = run_kernel(form, kernel, trace, policy, x, w)
        y.sum().backward()
        results.append([y, *outputs, x.grad, w.grad if w.grad is not None else w])
        assert trace.runs == {"it": 1, "reader": 1}
    assert_same(*results)


@pairwise(kernel=KERNELS, style=STYLES, policy=POLICIES)
def test_op_inside_a_region_is_equal_and_its_body_runs_once_or_twice(kernel, style, policy):
    traces = []

    def program(wrap):
        traces.append(Trace())
        x, w = leaf(3, 3), leaf(3, 3)
        y, *outputs = wrap(lambda x: run_kernel(style, kernel, traces[-1], policy, x.sin(), w))(x)
        y.sum().backward()
        return y, *outputs, x.grad, w.grad if w.grad is not None else w

    assert_same_program(program, replays=1)
    assert traces[0].runs == {"it": 1, "reader": 1}
    assert traces[1].runs == {"it": 1 if policy is SAVE else 2, "reader": 2}


@pytest.mark.parametrize("policies", [(a, b, c) for a in POLICIES for b in POLICIES for c in POLICIES], ids=policy_ids)
def test_readme_example_works_as_written(policies):
    def program(wrap):
        MyOp.runs = 0

        def block(x):
            for index, policy in enumerate(policies):
                x = MyOp.apply(x, f"op{index}", policy)
            return x

        x = leaf(3)
        y = wrap(block)(x)
        y.sum().backward()
        assert MyOp.runs == (3 if wrap is plain else 3 + policies.count(RECOMPUTE))
        return y, x.grad

    assert_same_program(program)


def test_forward_without_staticmethod_works():
    class Bare(Function):
        forward = MyOp.forward

        def backward(ctx, grad_z):
            return my_op_bwd(*ctx.saved_tensors, grad_z)

    for policy in POLICIES:

        def program(wrap, policy=policy):
            x = leaf(3)
            wrap(lambda x: Bare.apply(x.sin(), "it", policy))(x).sum().backward()
            return x.grad

        assert_same_program(program)


@pytest.mark.parametrize("style", STYLES)
def test_region_whose_ops_need_no_replay_is_not_replayed(style):
    traces = []

    def program(wrap):
        trace = Trace()
        traces.append(trace)

        def block(x):
            h = call(style, Inner, trace, "a", SAVE, x * 2)
            h = call(style, Result, trace, "b", SAVE, h)
            h = call(style, Shift, trace, "c", SAVE, h)
            return call(style, Inner, trace, "d", SAVE, h) + 1, call(style, Sort, trace, "e", SAVE, h)[0]

        x = leaf(3, 3)
        y, z = wrap(block)(x)
        (y.sum() + z.square().sum()).backward()
        return y, z, x.grad

    assert_same_program(program, replays=0)
    assert traces[1].runs == dict.fromkeys("abcde", 1)


def test_handle_answers_none_in_forward_and_a_placeholder_in_replay_of_a_saved_op():
    log = []

    def block(x):
        return Probe.apply(Probe.apply(x.sin(), log, "a", SAVE), log, "b", RECOMPUTE)

    y = checkpointed(block)(leaf(3))
    assert log == [("ran", False, False)] * 2
    log.clear()
    y.sum().backward()
    assert log == [("loaded", True), ("ran", True, False)]


def test_handle_answers_none_outside_a_region():
    log = []
    for policy in POLICIES:
        Probe.apply(leaf(3), log, "a", policy).sum().backward()
    assert log == [("ran", False, False)] * 2


def test_methods_keep_one_tensor_bare_and_several_in_a_tuple():
    seen = []

    class Two(Function):
        @staticmethod
        def forward(ctx, x, w, name, policy):
            handle = remat.get_handle(ctx, name, policy)
            if (ret := handle.maybe_load_saved()) is not None:
                seen.append(("loaded", type(ret), len(ret)))
                return ret
            both = handle.save_or_load_inputs(x, w)
            seen.append(("inputs", type(both), len(both)))
            x, w = both
            handle.save_for_backward({"x": x, "w": w})
            out = handle.record_outputs(x * w, x + w)
            seen.append(("outputs", type(out), len(out)))
            return out

        @staticmethod
        def backward(ctx, g, h):
            x, w = ctx.saved_tensors
            return g * w + h, g * x + h, None, None

    def block(x, w):
        return Two.apply(*Two.apply(x, w, "a", SAVE), "b", RECOMPUTE)

    y, z = checkpointed(block)(leaf(3), leaf(3))
    assert seen == [("inputs", tuple, 2), ("outputs", tuple, 2)] * 2
    seen.clear()
    (y + z).sum().backward()
    assert seen == [("loaded", tuple, 2), ("inputs", tuple, 2), ("outputs", tuple, 2)]


def test_order_of_saved_tensors_is_the_order_of_keys():
    order = []

    class Ordered(Function):
        @staticmethod
        def forward(ctx, x, policy):
            handle = remat.get_handle(ctx, "it", policy)
            if (ret := handle.maybe_load_saved()) is not None:
                return ret
            x = handle.save_or_load_inputs(x)
            handle.save_for_backward({"z": x + 3, "none": None, "a": x, "m": x + 1})
            return handle.record_outputs(x * 1)

        @staticmethod
        def backward(ctx, grad):
            z, none, a, m = ctx.saved_tensors
            order.append([none, *(t.detach().clone() for t in (a, m, z))])
            return grad, None

    for policy in POLICIES:
        x = torch.zeros(2, requires_grad=True)
        checkpointed(lambda x, policy=policy: Ordered.apply(x.exp(), policy))(x).sum().backward()
    for none, *values in order:
        assert none is None
        assert [value[0].item() for value in values] == [1, 2, 4]


@pytest.mark.parametrize("style", STYLES)
def test_chain_of_saved_ops_feeds_recomputed_ones_through_views(style):
    def program(wrap):
        trace = Trace()

        def views(x, w):
            s = call(style, Inner, trace, "s1", SAVE, x)
            left, right = s.t().chunk(2, dim=1)
            one = call(style, Affine, trace, "r1", RECOMPUTE, left, w[:, :2])
            two = call(style, Affine, trace, "r2", RECOMPUTE, right.expand(3, 3), s.view(9)[::1].view(3, 3))
            return one.sin() + two[:, :2], s[0].unsqueeze(0)

        x, w = leaf(3, 3), leaf(3, 3)
        y, z = wrap(views)(x, w)
        y.sum().backward()
        return y, z, x.grad, w.grad

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
def test_attributes_on_ctx_are_there_in_backward_after_many_replays(policy):
    trace, x = Trace(), leaf(3, 3)
    y = checkpointed(lambda x: call("handle", Power, trace, "it", policy, x.sin()))(x)
    expected = torch.autograd.grad(call("plain", Power, Trace(), "it", policy, x.sin()).sum(), x)
    for _ in range(3):
        assert_same(expected, torch.autograd.grad(y.sum(), x, retain_graph=True))
    assert trace.runs["it"] == (1 if policy is SAVE else 4)


def test_saved_op_runs_once_over_any_number_of_backwards():
    trace, x = Trace(), leaf(3, 3)

    def block(x):
        h = call("handle", Both, trace, "s", SAVE, x.sin())
        return call("handle", Both, trace, "r", RECOMPUTE, h)

    function = Calls(block)
    y = checkpointed(function)(x)
    for _ in range(4):
        y.sum().backward(retain_graph=True)
    assert function.replays == 4
    assert trace.runs == {"s": 1, "r": 5}
