"""What travels, under which name, how often, and as what it comes back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.features.offload.offloaders import OFFLOAD, Counting
from tests.handle_ops import RECOMPUTE, Affine, Both, Inner, Trace, call
from tests.helpers import assert_same, checkpointed, leaf, plain


def test_info_names_region_op_tensor_kind_and_bytes():
    offloader = Counting()
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True, region_name="block")

    def block(x, *, more):
        h = call("handle", Inner, Trace(), "a", OFFLOAD, x + more["y"][0])
        return call("handle", Affine, Trace(), "b", RECOMPUTE, h, h.t())

    y = wrap(block)(leaf(3, 3) * 1, more={"y": [leaf(3) * 1]})
    assert offloader.sent == [
        ("block", None, "args[0]", "input", 36),
        ("block", None, "kwargs['more']['y'][0]", "input", 12),
        ("block", "a", "m", "residual", 36),
        ("block", "a", "out", "input", 36),
    ]
    assert offloader.names[2:] == ["block::a.m", "block::a.out"]
    y.sum().backward()
    offloader.assert_all_released_once()


def test_what_is_saved_twice_or_saved_and_slotted_travels_once():
    offloader = Counting()

    def block(x):
        h = call("handle", Both, Trace(), "a", OFFLOAD, x.sin())
        h = call("handle", Both, Trace(), "b", OFFLOAD, h)
        return call("handle", Affine, Trace(), "c", RECOMPUTE, h, h.t())

    y = checkpointed(block, offloader=offloader, region_name="r")(leaf(3, 3) * 1)
    assert offloader.names == ["r::a.x", "r::a.y", "r::b.y"]
    y.sum().backward()
    assert offloader.count("onload") == 3
    offloader.assert_all_released_once()


def test_one_input_of_many_regions_travels_once():
    offloader = Counting()
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True)
    x, mask = leaf(3, 3), torch.rand(3, 3) > 0.5

    def model(wrap, x):
        for _ in range(4):
            x = wrap(lambda x, mask: torch.where(mask, x.sin(), x * x))(x, mask)
        return x

    y = model(wrap, x)
    assert [info.bytes for info in offloader.sent] == [9, 36, 36, 36]  # a leaf stays
    (actual,) = torch.autograd.grad(y.sum(), x)
    assert_same(torch.autograd.grad(model(plain, x).sum(), x), actual)
    assert offloader.count("onload") == 4
    offloader.assert_all_released_once()


class Views(torch.autograd.Function):
    """Saves three views of one tensor."""

    @staticmethod
    @remat.auto_forward("q", "k", "v")
    def forward(ctx, qkv):
        q, k, v = qkv.chunk(3, -1)
        ctx.save_for_backward(q, k.t(), v)
        return q * k + v

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        ctx.layouts.append([(x.shape, x.stride(), x.storage_offset()) for x in (q, k, v)])
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        return torch.cat([grad * k.t(), grad * q, grad * v.sign()], -1)


def test_views_of_one_storage_travel_once_and_come_back_as_views_with_their_strides():
    layouts = []

    class Watched(Views):
        @staticmethod
        def backward(ctx, grad):
            ctx.layouts = layouts
            return Views.backward(ctx, grad)

    def model(wrap, x):
        def block(x):
            qkv = call("handle" if wrap is not plain else "plain", Inner, Trace(), "qkv", OFFLOAD, x)
            return remat.op(Watched.apply, "attention", policy=OFFLOAD)(qkv)

        return wrap(block)(x)

    offloader, x = Counting(), leaf(4, 12)
    wrap = remat.checkpoint(offloader=offloader, region_name="r")
    results = [torch.autograd.grad(model(w, x * 1).sum(), x) for w in (plain, wrap)]
    assert_same(*results)
    assert offloader.names == ["r::qkv.m", "r::attention.q"]
    assert [info.bytes for info in offloader.sent] == [192, 192]
    assert layouts[0] == layouts[1]


class Part(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("part")
    def forward(ctx, x):
        large = torch.zeros(100, 100) + x.sum()
        ctx.save_for_backward(large[50, 10:20])
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 + ctx.saved_tensors[0].sum()


def test_small_part_of_a_large_storage_travels_alone():
    offloader, x = Counting(), leaf(3)
    run = remat.op(Part.apply, "part", policy=OFFLOAD)
    y = checkpointed(run, offloader=offloader)(x * 1)
    (info,) = offloader.sent
    assert 40 <= info.bytes < 40 + 512
    assert_same(torch.autograd.grad(run(x * 1).sum(), x), torch.autograd.grad(y.sum(), x))


class Complex(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("c", "n", "r")
    def forward(ctx, x):
        z = torch.complex(x.sin(), x.cos())
        ctx.save_for_backward(z.conj(), z.conj().imag, torch.view_as_real(z))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        c, n, r = ctx.saved_tensors
        assert c.is_conj()
        assert n.is_neg()
        return grad * (c.real + 2 * c.imag + 3 * n + r.sum(-1))


def test_lazy_conjugates_negatives_and_other_dtypes_of_one_storage_travel_once():
    x, offloader = leaf(5), Counting()
    run = remat.op(Complex.apply, "z", policy=OFFLOAD)
    expected = torch.autograd.grad(run(x * 1).sum(), x)
    y = checkpointed(run, offloader=offloader)(x * 1)
    assert [info.bytes for info in offloader.sent] == [40]
    assert_same(expected, torch.autograd.grad(y.sum(), x))


def test_parameters_leaves_region_inputs_and_elided_tensors_never_travel():
    offloader, w, x = Counting(), nn.Parameter(torch.randn(3, 3)), leaf(3, 3)

    def block(x, own):
        h = call("auto", Affine, Trace(), "a", OFFLOAD, x, w)  # a region input, a parameter
        h = call("auto", Affine, Trace(), "b", OFFLOAD, x.t(), w.t())  # views of them
        h = call("handle", Affine, Trace(), "c", OFFLOAD, x, w.detach())  # by a handle, which knows no inputs
        h = call("handle", Affine, Trace(), "d", OFFLOAD, own, own)
        h = call("handle", Inner, Trace(), "e", RECOMPUTE, x.sin())
        return call("auto", Affine, Trace(), "f", OFFLOAD, h, h.t())  # made again in replay

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = w

        def forward(self, x, own):
            return block(x, own)

    y = checkpointed(Block(), offloader=offloader)(x * 1, leaf(3, 3))
    assert offloader.names == []
    y.sum().backward()
    assert x.grad is not None


def test_offloaded_inputs_that_an_op_saves_travel_once():
    offloader, x = Counting(), leaf(3, 3)

    def block(x):
        return call("handle", Affine, Trace(), "a", OFFLOAD, x, x.t())

    y = checkpointed(block, offloader=offloader, offload_inputs=True, region_name="r")(x * 1)
    assert offloader.names == ["r::args[0]"]
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert_same(grad, torch.autograd.grad(call("plain", Affine, Trace(), "a", None, x, x.t()).sum(), x)[0])
    offloader.assert_all_released_once()


@pytest.mark.parametrize("passed", ["to the op", "to the region"])
def test_detached_alias_of_a_parameter_that_an_op_saves_never_travels(passed):
    offloader, w, start = Counting(), nn.Parameter(torch.randn(3, 3)), torch.randn(3, 3)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, op_name, remat_policy):
            handle = remat.get_handle(ctx, op_name, remat_policy)
            if (ret := handle.maybe_load_saved()) is not None:
                return ret
            if passed == "to the op":
                x, w = handle.save_or_load_inputs(x, w)
            handle.save_for_backward({"x": x.data, "w": w.detach().t()})
            return handle.record_outputs(x @ w)

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w, x.t() @ grad, None, None

    def program(wrap):
        w.grad, x = None, start.clone().requires_grad_()
        block = lambda x, given: Product.apply(x.sin(), w if given is None else given, "p", OFFLOAD)  # noqa: E731
        wrap(block)(x * 1, w if passed == "to the region" else None).sum().backward()
        return x.grad, w.grad

    assert_same(program(plain), program(lambda block: checkpointed(block, offloader=offloader)))
    assert [info.tensor for info in offloader.sent] == ["x"]
