"""Offloading on a CUDA device: streams, pinned memory, overlap. These tests have not run: no GPU was at hand."""

from __future__ import annotations

import gc

import pytest
import torch

import torch_remat as remat
from tests.features.offload.blocks import block
from tests.handle_ops import SAVE
from tests.helpers import assert_same, leaf
from tests.offloaders import OFFLOAD

pytestmark = pytest.mark.gpu


def gradient(wrap, x, policy):
    h = x * 1
    for _ in range(6):
        h = wrap(block)(h, policy)
    return torch.autograd.grad(h.sum(), x)[0]


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_gradients_are_those_of_save_over_many_steps(kind, tmp_path):
    offloader = (
        remat.CpuOffloader(min_bytes=0, max_pending_bytes=4 << 20)
        if kind == "cpu"
        else remat.DiskOffloader(tmp_path, min_bytes=0)
    )
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True)
    for side in (512, 500, 512, 700, 512):
        x = leaf(side, side, device="cuda")
        assert_same(gradient(remat.checkpoint(), x, SAVE), gradient(wrap, x, OFFLOAD))
        assert offloader.offloaded_bytes == 0


def test_contract_holds_on_the_device(tmp_path):
    assert remat.testing.check_offloader(remat.CpuOffloader(min_bytes=0), device="cuda") == 27
    assert remat.testing.check_offloader(remat.DiskOffloader(tmp_path, min_bytes=0), device="cuda") == 27


def test_buffers_are_used_again_while_the_device_is_far_behind():
    """A busy device: all copies of several steps are queued before the first of them runs."""
    offloader = remat.CpuOffloader(min_bytes=0, max_bytes=64 << 20)
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True)
    xs = [leaf(512, 512, device="cuda") for _ in range(4)]
    expected = [gradient(remat.checkpoint(), x, SAVE) for x in xs]
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    actual = [gradient(wrap, x, OFFLOAD) for x in xs]
    assert_same(expected, actual)


def test_device_memory_after_forward_is_that_of_what_stays():
    offloader = remat.CpuOffloader(min_bytes=0)
    gc.collect()
    x = leaf(1024, 1024, device="cuda")
    before = torch.cuda.memory_allocated()
    h = x * 1
    for _ in range(4):
        h = remat.checkpoint(offloader=offloader, offload_inputs=True)(block)(h)
    torch.cuda.synchronize()
    poke = torch.ones(1024, 1024, device="cuda")
    info = remat.offload.OffloadInfo("r", "o", "t", "residual", poke.nbytes)
    offloader.release(offloader.offload(poke, info))  # it lets go of tensors when it is called
    torch.cuda.synchronize()
    offloader.release(offloader.offload(poke, info))
    del poke
    assert torch.cuda.memory_allocated() - before <= h.nbytes + 2 * x.nbytes
    h.sum().backward()
    assert offloader.offloaded_bytes == 0


def test_regions_on_a_side_stream_are_equal():
    offloader, stream = remat.CpuOffloader(min_bytes=0), torch.cuda.Stream()
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True)
    x = leaf(512, 512, device="cuda")
    expected = gradient(remat.checkpoint(), x, SAVE)
    for _ in range(5):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            actual = gradient(wrap, x, OFFLOAD)
        torch.cuda.current_stream().wait_stream(stream)
        assert_same(expected, actual)
