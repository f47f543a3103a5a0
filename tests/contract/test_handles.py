"""Handles: a SAVE body runs once, ever; a RECOMPUTE body runs again; gradients are those of plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

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
    Identity,
    Inner,
    Result,
    Shift,
    Sort,
    Trace,
    Transpose,
    as_tuple,
    call,
)
from tests.helpers import (
    LiveStorages,
    assert_same,
    assert_same_program,
    checkpointed,
    leaf,
    pairwise,
    plain,
)


def run_kernel(style, kernel, trace, policy, x, w):
    """Run the kernel on what it takes, then a RECOMPUTE op that reads its floating outputs."""
    second = [torch.tensor([[1, 0, 1]] * 3)] if kernel is Gather else [w]
    outputs = as_tuple(call(style, kernel, trace, "it", policy, x, *second[: kernel.arity - 1]))
    other = outputs[-1] if outputs[-1].is_floating_point() and len(outputs) > 1 else w
    return call(style, Affine, trace, "reader", RECOMPUTE, outputs[0], other), *outputs


@pairwise(kernel=KERNELS, style=STYLES, policy=POLICIES)
def test_op_is_equal_and_its_body_runs_as_often_as_its_policy_says(kernel, style, policy):
    traces = {}

    def program(wrap, form=style):
        trace = traces[wrap, form] = Trace()
        x, w = leaf(3, 3), leaf(3, 3)
        y, *outputs = wrap(lambda x: run_kernel(form, kernel, trace, policy, x.sin(), w))(x)
        results = []
        for keep in (True, True, False):
            y.sum().backward(retain_graph=keep)
            results += [x.grad.clone(), w.grad.clone() if w.grad is not None else w]
        return y, *outputs, results

    assert_same_program(program)
    region = next(traces[key] for key in traces if key[0] is not plain)
    assert traces[plain, style].runs == {"it": 1, "reader": 1}
    assert region.runs == {"it": 1 if policy is SAVE else 4, "reader": 4}
    torch.manual_seed(2)
    expected = program(plain, "plain")
    torch.manual_seed(2)
    assert_same(expected, program(plain))


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


@pytest.mark.parametrize("style", STYLES)
def test_tensors_from_outside_the_region_are_not_copied(style):
    outside = [leaf(3, 3), torch.randn(3, 3), nn.Parameter(torch.randn(3, 3)), leaf(3, 3).sin()]
    trace, live, x = Trace(), LiveStorages(), leaf(3, 3)

    def block(x):
        for index, tensor in enumerate(outside):
            x = call(style, Affine, trace, f"op{index}", POLICIES[index % 2], x, tensor)
        return x

    leaf(1).detach().sin()
    with live:
        outputs = [checkpointed(block)(x)]
    kept = {"op1.out"}  # what the RECOMPUTE op after the SAVE op reads
    assert trace.alive() == kept | {"op3.out"}
    loss = outputs.pop().sum()
    assert live.bytes() == x.nbytes * len(kept)
    got = torch.autograd.grad(loss, [x, outside[0], outside[2]])
    trace = Trace()
    assert_same(torch.autograd.grad(block(x).sum(), [x, outside[0], outside[2]]), got)


def written_copy(tensor):
    """Return a copy that was filled in place, as pinned copies are: its version is not 0."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor).add_(0)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kernel", [Identity, Transpose, Inner], ids=str)
def test_hooks_around_the_region_may_give_back_tensors_of_any_version(kernel, style):
    def program(wrap):
        x = leaf(3, 3)

        def block(x):
            keep = call(style, Both, Trace(), "of input", SAVE, x)
            s = call(style, Inner, Trace(), "s", SAVE, keep)
            r = call(style, kernel, Trace(), "alias", RECOMPUTE, s)
            return call(style, Both, Trace(), "keeper", SAVE, r), call(style, kernel, Trace(), "t", RECOMPUTE, x)

        with saved_tensors_hooks(written_copy, lambda tensor: tensor):
            y, t = wrap(block)(x * 2)
        results = [torch.autograd.grad(y.sum() + t.sum(), x, retain_graph=True) for _ in range(2)]
        return y, results, torch.autograd.grad(y.sum(), x)

    assert_same_program(program)
