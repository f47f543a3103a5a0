"""In-place changes, offloaders that fail, and what users are told."""

from __future__ import annotations

import re

import pytest
import torch

import torch_remat as remat
from tests.features.offload.blocks import expected_gradient, run
from tests.handle_ops import RECOMPUTE, Affine, Both, Inner, Trace, call
from tests.helpers import assert_same, checkpointed, leaf
from tests.offloaders import OFFLOAD, Counting


def resident(x, seen):
    def body(x):
        seen.append(x.tanh())
        return seen[0] * 2

    return remat.op(body, "a", policy=OFFLOAD)(x)


def slot(x, seen):
    h = call("handle", Inner, Trace(), "a", OFFLOAD, x.sin())
    seen.append(h)
    return call("handle", Affine, Trace(), "b", RECOMPUTE, x, h)


def region_input(x, seen):
    seen.append(x)
    return x.sin()


def result_by_policy(x, seen):
    seen.append(x * 2)
    return seen[0].sin()


@pytest.mark.parametrize(
    ("function", "op", "tensor", "options"),
    [
        (resident, "a", "saved_0", {}),
        (slot, "a", "out", {}),
        (region_input, None, "args[0]", {"offload_inputs": True}),
        (result_by_policy, None, "mul_0_0", {"policy": remat.offload_names("mul_0_0")}),
    ],
)
def test_what_is_changed_in_place_after_its_offload_began_is_an_error_with_its_name(function, op, tensor, options):
    for change in (lambda t: t.add_(1), lambda t: t.view(-1).mul_(2)):
        seen, x = [], leaf(3, 3) * 1
        y = checkpointed(lambda x, seen=seen: function(x, seen), offloader=Counting(), region_name="r", **options)(x)
        with torch.no_grad():
            change(seen[0])
        with pytest.raises(remat.MutationError, match=r"^r::.*: this tensor was modified in place") as caught:
            y.sum().backward()
        assert (caught.value.region, caught.value.op, caught.value.tensor) == ("r", op, tensor)


def test_value_changed_by_a_backward_that_read_it_is_an_error_for_the_next_reader():
    class Changes(torch.autograd.Function):
        @staticmethod
        @remat.auto_forward("x")
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ctx.saved_tensors[0].zero_()
            return grad * 2

    def block(x):
        h = call("handle", Both, Trace(), "a", OFFLOAD, x.sin())  # saves its output h
        return remat.op(Changes.apply, "b", policy=OFFLOAD)(h)

    y = checkpointed(block, offloader=Counting(), region_name="r")(leaf(3, 3))
    with pytest.raises(remat.MutationError, match=r"^r::a\.y"):
        y.sum().backward()


def test_offloader_that_cannot_take_a_tensor_leaves_it_and_one_warning_says_so():
    offloader, x = Counting(), leaf(3, 3)
    offloader.refuse = OSError("disk on fire")
    message = re.escape(f"Counting could not take block::args[0] (36 bytes): {offloader.refuse!r}. It stays where")
    with pytest.warns(remat.RematWarning, match=message) as caught:
        y = run(offloader, x)
    assert len(caught) == 1
    assert_same(expected_gradient(x), torch.autograd.grad(y.sum(), x)[0])
    assert offloader.sent == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda t: t[:-1], r"brought back \(8,\) torch.float32 on cpu where 9 torch.float32 on cpu were sent"),
        (lambda t: t.double(), "brought back .* torch.float64"),
        (lambda t: t.to("meta"), "on meta where"),
        (lambda t: None, "brought back None where"),
        (lambda t: t.view(3, 3), r"brought back \(3, 3\)"),
        (lambda t: torch.stack([t, t], 1)[:, 0], "contiguous"),
        (lambda t: t.to_sparse(), "contiguous"),
        (lambda t: t.requires_grad_(), "without graph"),
    ],
)
def test_offloader_that_brings_back_something_else_is_an_error(wrong, told):
    class Wrong(Counting):
        def onload(self, ticket):
            return wrong(super().onload(ticket))

    y = checkpointed(lambda x: call("handle", Inner, Trace(), "a", OFFLOAD, x), offloader=Wrong())(leaf(3, 3))
    with pytest.raises(remat.OffloadError, match=told) as caught:
        y.sum().backward()
    assert (caught.value.op, caught.value.tensor, caught.value.file) == ("a", "m", None)


def test_numbers_and_objects_that_make_no_sense_are_refused(tmp_path):
    for options in ({"max_bytes": -1}, {"min_bytes": -1}, {"prefetch_bytes": 0.5}, {"max_pending_bytes": "1"}):
        with pytest.raises(remat.UsageError, match=next(iter(options))):
            remat.CpuOffloader(**options)
    for options in ({"threads": 0}, {"max_bytes": -1}, {"min_bytes": 1.5}, {"queue_bytes": -1}):
        with pytest.raises(remat.UsageError, match=next(iter(options))):
            remat.DiskOffloader(tmp_path, **options)
    for value in (remat.CpuOffloader, object(), "disk", 3):
        with pytest.raises(remat.UsageError, match="offload"):
            remat.checkpoint(offloader=value)
        with pytest.raises(remat.UsageError, match="offload"), remat.offload_to(value):
            pass
    with pytest.raises(remat.UsageError, match="True or False"):
        remat.checkpoint(offload_inputs=1)
    for patterns in ((), ("",), (3,)):
        with pytest.raises(remat.PolicyError, match="offload_names"):
            remat.offload_names(*patterns)


def test_input_changed_in_place_before_the_region_is_equal():
    def program(wrap):
        torch.manual_seed(0)
        leaf_ = leaf(3, 3)
        x = leaf_ * 1
        x.mul_(2).add_(1)

        def block(x):
            h = x.sin()
            h.mul_(x)
            return h * x

        y = wrap(block)(x)
        y.sum().backward()
        return y, leaf_.grad

    offloader = Counting()
    assert_same(program(lambda f: f), program(remat.checkpoint(offloader=offloader, offload_inputs=True)))
    assert len(offloader.sent) == 1
