"""A model of three small blocks whose tensors go to files, and what the tests of files ask about it."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from tests.handle_ops import RECOMPUTE, Affine, Both, Inner, Trace, call
from tests.helpers import checkpointed
from tests.offloaders import OFFLOAD


def block(x):
    h = call("handle", Inner, Trace(), "a", OFFLOAD, x.sin())
    h = call("handle", Both, Trace(), "b", OFFLOAD, h)
    return call("handle", Affine, Trace(), "c", RECOMPUTE, h, h.t())


def run(offloader, x, depth=3):
    h = x * 1
    for _ in range(depth):
        h = checkpointed(block, offloader=offloader, offload_inputs=True, region_name="block")(h)
    return h


def run_and_flush(offloader, x, depth=3):
    y = run(offloader, x, depth)
    offloader.flush()
    return y


def expected_gradient(x, depth=3):
    h = x * 1
    for _ in range(depth):
        h = call("plain", Inner, Trace(), "a", None, h.sin())
        h = call("plain", Both, Trace(), "b", None, h)
        h = call("plain", Affine, Trace(), "c", None, h, h.t())
    return torch.autograd.grad(h.sum(), x)[0]


def stored(offloader):
    """Return the files that are there, oldest first."""
    number = lambda path: int(path.stem)  # noqa: E731
    return sorted(Path(offloader.directory).rglob("*.raw"), key=number)


def soon(holds):
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)
    return True
