"""What travels, under which name, how often, and as what it comes back; what stays, to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.features.offload.blocks import Writes, stored
from tests.handle_ops import RECOMPUTE, SAVE, Affine, Inner, Trace, call
from tests.helpers import LiveStorages, assert_same, checkpointed, leaf, plain
from tests.offloaders import OFFLOAD, Counting
from torch_remat.offload.transfer import ALIGNMENT_BYTES, Placement, flattened, travelling_span


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


def test_small_part_of_a_large_storage_travels_alone():
    def part(x):
        large = torch.zeros(100, 100) + 2
        return x * large[50, 10:20]

    offloader, x = Counting(), leaf(10)
    run = remat.op(part, "part", policy=OFFLOAD)
    y = checkpointed(run, offloader=offloader)(x * 1)
    (info,) = offloader.sent
    assert 40 <= info.bytes < 40 + 512
    assert_same(torch.autograd.grad(run(x * 1).sum(), x), torch.autograd.grad(y.sum(), x))


def test_parameters_leaves_region_inputs_and_elided_tensors_never_travel():
    offloader, w, x = Counting(), nn.Parameter(torch.randn(3, 3)), leaf(3, 3)

    def block(x, own):
        h = call("auto", Affine, Trace(), "a", OFFLOAD, x, w)  # a region input, a parameter
        h = call("auto", Affine, Trace(), "b", OFFLOAD, x.t(), w.t())  # views of them
        h = call("handle", Affine, Trace(), "c", OFFLOAD, x, w.detach())  # by a handle, which knows no inputs
        h = call("handle", Affine, Trace(), "d", OFFLOAD, own, own)
        h = call("handle", Inner, Trace(), "e", RECOMPUTE, x.sin())
        return call("auto", Affine, Trace(), "f", OFFLOAD, h, h.t())  # recomputed in replay

    y = checkpointed(block, offloader=offloader)(x * 1, leaf(3, 3))
    assert offloader.names == []
    y.sum().backward()
    assert x.grad is not None


ALIASES = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "detach of view": lambda x: x[1:].detach(),
    "other dtype": lambda x: x.detach().view(torch.int32),
    "a change before": lambda x: x.data.mul_(2),
}


def product(a, b):
    b = b.view(torch.float32) if b.dtype is torch.int32 else b
    return a.sin().sum() * b.cos().sum() * (a.exp().sum() + b.sum())


def gradient(wrap, alias, x):
    h = x * 1
    other = alias(h)
    (grad,) = torch.autograd.grad(wrap(product)(h, other), x)
    return grad


@pytest.mark.parametrize("alias", ALIASES)
def test_inputs_of_one_region_that_share_memory_travel_once(alias):
    offloader, x = Counting(), leaf(4, 4)
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True, region_name="r")
    assert_same(gradient(plain, ALIASES[alias], x), gradient(wrap, ALIASES[alias], x))
    assert offloader.names == ["r::args[0]"]
    assert offloader.count("onload") == 2
    offloader.assert_all_released_once()


def test_alias_that_is_sent_later_travels_by_itself():
    """Its version counter does not tell whether the memory was changed since."""
    offloader, x = Counting(), leaf(4, 4)

    def model(wrap):
        h = x * 1
        first = wrap(torch.sin)(h)
        h.data.mul_(2)
        fresh = h.data
        assert fresh._version == h._version == 0
        return first, wrap(lambda a, b: (a * b).sin())(x, fresh)

    (expected,) = torch.autograd.grad(model(plain)[1].sum(), x)
    first, y = model(remat.checkpoint(offloader=offloader, offload_inputs=True))
    assert_same(expected, torch.autograd.grad(y.sum(), x)[0])
    assert len(offloader.sent) == 2
    del first
    offloader.assert_all_released_once()


@pytest.mark.parametrize(("alias", "changed"), [("detach", 1), ("data", 0), ("data", 1)])
def test_in_place_change_of_either_is_an_error(alias, changed):
    offloader, x = Counting(), leaf(4, 4)
    h = x * 1
    both = h, ALIASES[alias](h)
    y = checkpointed(product, offloader=offloader, offload_inputs=True, region_name="r")(*both)
    with torch.no_grad():
        both[changed].add_(1)
    with pytest.raises(remat.MutationError, match="r::args") as caught:
        y.backward()
    assert caught.value.tensor == f"args[{changed if alias == 'data' else 0}]"
    del y, caught
    offloader.assert_all_released_once()


def test_versions_of_the_tensors_stay_while_the_first_one_is_still_there(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    writes.go.clear()
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0), leaf(4, 4)
    h = x * 1
    with torch.no_grad():
        h.mul_(1)
    other, content = h.data, h.detach().clone()
    y = checkpointed(product, offloader=offloader, offload_inputs=True)(h, other)
    assert (h._version, other._version) == (1, 0)
    expected = gradient(plain, ALIASES["data"], x)
    assert_same(expected, torch.autograd.grad(y, x, retain_graph=True)[0])
    assert (h._version, other._version) == (1, 0)
    writes.go.set()
    offloader.flush()
    assert len(stored(offloader)) == 1
    del other
    h.data = torch.zeros(4, 4)
    assert_same(expected, torch.autograd.grad(y, x)[0])
    assert_same(content, x.detach())
    del y
    assert offloader.offloaded_bytes == 0


def test_view_is_rebuilt_with_its_strides_on_a_copy_of_what_travelled():
    base = torch.arange(1000.0)
    numbers = torch.view_as_complex(base.view(500, 2))
    views = [base, base[7], base[400:440].view(5, 8).t(), base[500:].as_strided((4, 3), (9, 2)), base[:1].expand(4)]
    views += [base.bool()[3:], numbers[90:].conj(), numbers[90:].conj().imag, base.to(torch.uint8)[::5]]
    for view in views:
        placement = Placement.of(view)
        span = travelling_span(view, placement)
        assert span.covers(placement.span)
        flat = flattened(view, span)
        assert flat.is_contiguous()
        assert (flat.is_conj(), flat.is_neg()) == (False, False)
        total = view.untyped_storage().nbytes()
        assert flat.nbytes == span.stop - span.start <= total
        whole = span.start == 0 and span.stop > total - 16
        assert whole or span.stop - span.start < ALIGNMENT_BYTES + total / 2
        assert span.start % ALIGNMENT_BYTES == 0
        rebuilt = placement.seen_in(flat.clone(), -span.start)
        assert_same(view, rebuilt)
        assert rebuilt.stride() == view.stride()
        assert (rebuilt.is_conj(), rebuilt.is_neg()) == (view.is_conj(), view.is_neg())


WIDTH, ROWS, BLOCKS = 16, 32, 12
BYTES = ROWS * WIDTH * 4


def retained(policy, offloader=None, offload_inputs=False):
    """Return the bytes that the forward of blocks leaves alive that save a wide activation each."""
    up, down = torch.randn(WIDTH, 4 * WIDTH, requires_grad=True), torch.randn(4 * WIDTH, WIDTH, requires_grad=True)
    wide = remat.op(lambda x: (x @ up).tanh() @ down, "wide", policy=policy)
    h = torch.randn(ROWS, WIDTH, requires_grad=True)
    with LiveStorages() as live:
        h = h.clone()
        for _ in range(BLOCKS):
            h = remat.checkpoint(offloader=offloader, offload_inputs=offload_inputs)(lambda x: x + wide(x.sin()))(h)
        if offloader is not None:
            offloader.flush()
        return live.bytes()


def test_twelve_blocks_keep_only_what_does_not_leave(tmp_path):
    # Of each block its input, and what the op saves: its input is elided, since replay has it; at the end, the output.
    assert retained(SAVE) == (BLOCKS + 1) * BYTES + BLOCKS * 4 * BYTES
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    assert retained(OFFLOAD, offloader) == (BLOCKS + 1) * BYTES
    assert retained(OFFLOAD, offloader, offload_inputs=True) == BYTES
    assert offloader.offloaded_bytes == 0
