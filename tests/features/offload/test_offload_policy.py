"""`CheckpointPolicy.OFFLOAD`, `offload_to`, `offload_inputs`: gradients, which offloader, and who decides."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.features.offload.offloaders import OFFLOAD, Counting, Declining
from tests.handle_ops import (
    KERNELS,
    RECOMPUTE,
    SAVE,
    STYLES,
    Affine,
    Both,
    Gather,
    Inner,
    Kernel,
    Trace,
    as_tuple,
    call,
)
from tests.helpers import (
    Attention,
    Mlp,
    assert_same,
    checkpointed,
    leaf,
    pairwise,
    parameter_gradients,
    plain,
    run_with_gradients,
)


def ids(policies):
    return "".join(policy.name[0] for policy in policies)


def three_ops(style, policies, trace):
    def block(x, w):
        h = call(style, Inner, trace, "a", policies[0], x.sin())
        h = call(style, Both, trace, "b", policies[1], h.t())
        return call(style, Affine, trace, "c", policies[2], h, w)

    return block


@pairwise(policies=list(itertools.product(remat.CheckpointPolicy, repeat=3)), style=STYLES)
def test_gradients_equal_those_of_plain_autograd_for_every_assignment(policies, style):
    inputs = [leaf(4, 4), leaf(4, 4)]
    expected = run_with_gradients(lambda x, w: three_ops("plain", policies, Trace())(x * 1, w * 1), inputs)
    for options in ({}, {"offload_inputs": True}, {"debug": True}, {"early_stop": False}):
        trace, offloader = Trace(), Counting(prefetch_bytes=100)
        wrap = remat.checkpoint(offloader=offloader, **options)
        actual = run_with_gradients(
            lambda x, w, t=trace, r=wrap: r(three_ops(style, policies, t))(x * 1, w * 1), inputs
        )
        assert_same(expected, actual)
        assert all(trace.runs[name] == 1 for name, p in zip("abc", policies, strict=True) if p is not RECOMPUTE)
        offloader.assert_all_released_once()


@pairwise(kernel=KERNELS, style=STYLES)
def test_every_kernel_gives_the_gradients_of_save(kernel: Kernel, style):
    index = torch.tensor([[1, 0, 1]] * 3)
    inputs = [leaf(3, 3), leaf(3, 3)]

    def block(policy, style, x, w):
        second = [index if kernel is Gather else w]
        outputs = as_tuple(call(style, kernel, Trace(), "it", policy, x.sin(), *second[: kernel.arity - 1]))
        h = outputs[0] if outputs[0].is_floating_point() else x
        return call("plain" if style == "plain" else "handle", Affine, Trace(), "reader", RECOMPUTE, h, w)

    expected = run_with_gradients(lambda x, w: block(None, "plain", x, w), inputs)
    offloader = Counting()
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True)
    assert_same(expected, run_with_gradients(lambda x, w: wrap(block)(OFFLOAD, style, x, w), inputs))
    offloader.assert_all_released_once()


def test_model_with_offloaded_inputs_is_equal_with_dropout_and_parameters():
    def run(wrap):
        torch.manual_seed(3)
        model = nn.ModuleList([kind(8) for _ in range(3) for kind in (Attention, Mlp)])
        x = h = leaf(2, 6, 8)
        for block in model:
            h = wrap(block)(h)
        h.square().sum().backward()
        return [h, x.grad, *parameter_gradients(model)]

    offloader = Counting(prefetch_bytes=1000)
    assert_same(run(plain), run(remat.checkpoint(offloader=offloader, offload_inputs=True)))
    assert len(offloader.sent) == 5
    offloader.assert_all_released_once()


def test_offload_to_is_for_everything_inside_and_an_option_goes_before():
    outer, inner, own = Counting(), Counting(), Counting()

    def block(x):
        return call("handle", Inner, Trace(), "a", OFFLOAD, x)

    x = leaf(3, 3)
    with remat.offload_to(outer):
        one = checkpointed(block)(x)
        with remat.offload_to(inner):
            two = checkpointed(block)(x)
            three = checkpointed(block, offloader=own)(x)
        four = checkpointed(block)(x)
    (one + two + three + four).sum().backward()
    assert [len(offloader.sent) for offloader in (outer, inner, own)] == [2, 1, 1]
    for offloader in (outer, inner, own):
        offloader.assert_all_released_once()


def test_offload_to_inside_the_function_is_for_its_ops():
    offloader = Counting()

    def block(x):
        with remat.offload_to(offloader):
            h = call("handle", Inner, Trace(), "a", OFFLOAD, x)
        return call("handle", Inner, Trace(), "b", SAVE, h)

    checkpointed(block, region_name="r")(leaf(3, 3)).sum().backward()
    assert offloader.names == ["r::a.m"]
    offloader.assert_all_released_once()


def test_without_an_offloader_a_shared_one_for_host_memory_is_used():
    from torch_remat.offload.sender import default_offloader

    before = default_offloader().offloaded_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the CPU's memory is host memory
        y = checkpointed(lambda x: call("handle", Inner, Trace(), "a", OFFLOAD, x))(leaf(200, 200))
    assert default_offloader().offloaded_bytes - before == 160_000
    y.sum().backward()
    assert default_offloader().offloaded_bytes == before


@pytest.mark.parametrize("outer", ["region", "torch", "save_on_cpu"])
def test_hooks_around_the_region_decide(outer):
    offloader, x, trace = Counting(), leaf(3, 3), Trace()

    def inner(x):
        h = call("handle", Inner, trace, "a", OFFLOAD, x.sin())
        return call("handle", Affine, trace, "b", RECOMPUTE, h, x)

    def block(x):
        return checkpointed(inner, offloader=offloader, offload_inputs=True)(x.cos())

    if outer == "region":
        y = checkpointed(block)(x)
    elif outer == "torch":
        y = torch_checkpoint(block, x, use_reentrant=False)
    else:
        with save_on_cpu():
            y = block(x)
    (actual,) = torch.autograd.grad(y.sum(), x)
    assert offloader.sent == []

    def reference(x):
        x = x.cos()
        h = call("plain", Inner, Trace(), "a", None, x.sin())
        return call("plain", Affine, Trace(), "b", None, h, x)

    assert_same(actual, torch.autograd.grad(reference(x).sum(), x)[0])


def test_outside_of_regions_and_without_gradients_nothing_travels():
    offloader = Counting()
    with remat.offload_to(offloader):
        call("handle", Inner, Trace(), "a", OFFLOAD, leaf(3, 3)).sum().backward()
        with torch.no_grad():
            checkpointed(lambda x: call("handle", Inner, Trace(), "a", OFFLOAD, x), offload_inputs=True)(leaf(3, 3) * 1)
    assert offloader.sent == []


def test_what_is_declined_stays_and_is_equal():
    offloader, inputs = Declining(), [leaf(4, 4), leaf(4, 4)]
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True)
    policies = [OFFLOAD] * 3
    expected = run_with_gradients(lambda x, w: three_ops("plain", policies, Trace())(x * 1, w * 1), inputs)
    block = three_ops("handle", policies, Trace())
    assert_same(expected, run_with_gradients(lambda x, w: wrap(block)(x * 1, w * 1), inputs))
    assert len(offloader.asked) >= 4


def test_class_object_without_methods_and_other_values_are_no_offloaders():
    for value in (remat.CpuOffloader, object(), "disk", 3):
        with pytest.raises(remat.UsageError, match="offload"):
            remat.checkpoint(offloader=value)
        with pytest.raises(remat.UsageError, match="offload"), remat.offload_to(value):
            pass
    with pytest.raises(remat.UsageError, match="True or False"):
        remat.checkpoint(offload_inputs=1)


def test_replay_with_another_policy_is_refused():
    def block(x):
        h = call("handle", Inner, Trace(), "a", SAVE if remat.is_recomputing() else OFFLOAD, x.sin())
        return call("handle", Affine, Trace(), "b", RECOMPUTE, x, h)

    offloader = Counting()
    y = checkpointed(block, offloader=offloader)(leaf(3, 3))
    with pytest.raises(remat.MismatchError, match="OFFLOAD"):
        y.sum().backward()
    del y
    offloader.assert_all_released_once()
