"""What a model keeps when its blocks offload, to the byte: what is not offloaded, and nothing more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.features.offload.offloaders import OFFLOAD, Counting
from tests.helpers import LiveStorages, assert_same

SAVE = remat.CheckpointPolicy.SAVE
WIDTH, ROWS, BLOCKS = 64, 512, 12
BYTES = ROWS * WIDTH * 4


class Wide(torch.autograd.Function):
    """The expensive part of a block: saves its input and the wide activation."""

    @staticmethod
    @remat.auto_forward("x", "h")
    def forward(ctx, x, up, down):
        h = torch.tanh(x @ up)
        ctx.weights = up, down
        ctx.save_for_backward(x, h)
        return h @ down

    @staticmethod
    def backward(ctx, grad):
        x, h = ctx.saved_tensors
        up, down = ctx.weights
        inner = grad @ down.t() * (1 - h * h)
        return inner @ up.t(), x.t() @ inner, h.t() @ grad


class Block(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / WIDTH)
        self.policy = policy

    def forward(self, x):
        return x + remat.op(Wide.apply, "wide", policy=self.policy)(self.norm(x), self.up, self.down)


def model(policy, offloader=None, inputs=False):
    torch.manual_seed(0)
    blocks = [Block(policy) for _ in range(BLOCKS)]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def forward():
        h = x.clone()
        for block in blocks:
            h = remat.checkpoint(offloader=offloader, offload_inputs=inputs)(block)(h)
        return h

    return forward, [x, *(parameter for block in blocks for parameter in block.parameters())]


class Peak(LiveStorages):
    """Notes the most bytes that were alive after any op."""

    peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.bytes())
        return out


def retained(forward, flush=lambda: None):
    """Return the bytes that forward leaves alive."""
    with LiveStorages() as live:
        output = forward()
        flush()
        retained = live.bytes()
    del output
    return retained


def test_twelve_blocks_keep_only_what_does_not_leave(tmp_path):
    forward, _ = model(SAVE)
    # Of each block its input, and what the op saves: `x` is elided, since replay has it; at the end, the output.
    assert retained(forward) == (BLOCKS + 1) * BYTES + BLOCKS * 4 * BYTES
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    forward, _ = model(OFFLOAD, offloader)
    assert retained(forward, offloader.flush) == (BLOCKS + 1) * BYTES
    forward, _ = model(OFFLOAD, offloader, inputs=True)
    assert retained(forward, offloader.flush) == BYTES
    assert offloader.offloaded_bytes == 0


def test_bytes_on_disk_are_those_that_left(tmp_path):
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    forward, _ = model(OFFLOAD, offloader, inputs=True)
    with LiveStorages() as live:
        y = forward()
    offloader.flush()
    assert offloader.offloaded_bytes == BLOCKS * 5 * BYTES
    assert live.bytes() == y.nbytes == BYTES
    y.sum().backward()
    assert offloader.offloaded_bytes == 0


@pytest.mark.parametrize("inputs", [False, True])
def test_peak_of_a_step_falls_by_what_has_left(tmp_path, inputs):
    """What waits to be written depends on the disk: here forward waits for each file.

    What backward reads of the files is not counted: it is the offloader's memory, within `prefetch_bytes`.
    """

    def peak(forward, flush=lambda: None):
        with Peak() as live:
            y = forward()
            flush()
            y.sum().backward()
        return live.peak

    (stays, expected), offloader = model(SAVE), remat.DiskOffloader(tmp_path, min_bytes=0, queue_bytes=0, threads=1)
    leaves, actual = model(OFFLOAD, offloader, inputs)
    before, after = peak(stays), peak(leaves, offloader.flush)
    # At its highest, a step with SAVE has nearly all of what forward keeps; each block's gradients come in its place.
    away = BLOCKS * (5 if inputs else 4) * BYTES
    assert before - away <= after <= before - 0.6 * away
    for one, other in zip(expected, actual, strict=True):
        assert_same(one.grad, other.grad)


def test_every_offloader_gives_the_gradients_of_save(tmp_path):
    def gradients(*args):
        forward, tensors = model(*args)
        forward().square().sum().backward()
        return [tensor.grad for tensor in tensors]

    expected = gradients(SAVE)
    counting = Counting(prefetch_bytes=3 * BYTES)
    assert_same(expected, gradients(OFFLOAD, counting, True))
    assert len(counting.sent) == 2 * BLOCKS
    counting.assert_all_released_once()
    assert_same(expected, gradients(OFFLOAD, remat.DiskOffloader(tmp_path, min_bytes=0), True))
