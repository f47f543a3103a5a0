"""A model of three small blocks whose tensors leave, and what the tests of offloading ask about files and writes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

from tests.handle_ops import RECOMPUTE, Affine, Both, Inner, Trace, call
from tests.helpers import checkpointed
from tests.offloaders import OFFLOAD
from torch_remat.offload import files


def block(x, policy=OFFLOAD):
    """Four tensors leave: the region's input, `a.m`, and `b.x` and `b.y`, which replay of `c` reads too."""
    h = call("handle", Inner, Trace(), "a", policy, x.sin())
    h = call("handle", Both, Trace(), "b", policy, h)
    return call("handle", Affine, Trace(), "c", RECOMPUTE, h, h.t())


def run(offloader, x, depth=3, function=block):
    h = x * 1
    for _ in range(depth):
        h = checkpointed(function, offloader=offloader, offload_inputs=True, region_name="block")(h)
    return h


def run_and_flush(offloader, x, depth=3):
    y = run(offloader, x, depth)
    offloader.flush()
    return y


def plain_model(x, depth=3):
    h = x * 1
    for _ in range(depth):
        h = call("plain", Inner, Trace(), "a", None, h.sin())
        h = call("plain", Both, Trace(), "b", None, h)
        h = call("plain", Affine, Trace(), "c", None, h, h.t())
    return h


def expected_gradient(x, depth=3):
    return torch.autograd.grad(plain_model(x, depth).sum(), x)[0]


class Writes:
    """Stands before `files.write`: writes fail that it is told to fail, each when it is let go.

    Attributes:
        go: Whether writes may end.
        fails: Tells of the number of a write, from 0, whether it fails.
        begun: How many have begun.
        ended: How many are over.
    """

    def __init__(self, monkeypatch):
        self.go = threading.Event()
        self.go.set()
        self.fails = lambda number: False
        self.begun = self.ended = 0
        self._write = files.write
        monkeypatch.setattr(files, "write", self)

    def __call__(self, path, content):
        number, self.begun = self.begun, self.begun + 1
        assert self.go.wait(20)
        try:
            if self.fails(number):
                raise OSError(28, "No space left on device")
            return self._write(path, content)
        finally:
            self.ended += 1


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
