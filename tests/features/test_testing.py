"""`remat.testing.check_offloader` passes what keeps the contract, and tells what does not."""

from __future__ import annotations

import threading
import time
import warnings

import pytest
import torch

import torch_remat as remat
from torch_remat.testing import offloaders


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch):
    monkeypatch.setattr(offloaders, "_PATIENCE_SECONDS", 0.3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CpuOffloader moves tensors to host memory")
        yield


def test_own_offloaders_keep_the_contract(tmp_path):
    assert remat.testing.check_offloader(remat.CpuOffloader(min_bytes=0)) == 27
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    assert remat.testing.check_offloader(offloader) == 27
    assert offloader.offloaded_bytes == 0
    assert remat.testing.check_offloader(remat.DiskOffloader(tmp_path, min_bytes=10**9)) == 0


def test_offloader_that_refuses_some_tensors_keeps_the_contract():
    assert remat.testing.check_offloader(broken(offload=refuses_doubles)) == 24


class Base:
    def __init__(self):
        self.lock = threading.Lock()
        self.kept = []

    def offload(self, tensor, info):
        return tensor.clone()

    def prefetch(self, ticket):
        pass

    def onload(self, ticket):
        return ticket.clone()

    def release(self, ticket):
        pass


class LocksLate(Base):
    """The lock is held in one line of many, of a method that is called least."""

    def prefetch(self, ticket):
        total = 0
        total += 1
        total += 2
        total += 3
        with self.lock:
            total += 4

    def release(self, ticket):
        with self.lock:
            pass


class CountsWithoutLock(Base):
    """Two threads get one number."""

    count = 0

    def offload(self, tensor, info):
        number = self.count
        content = tensor.clone()
        time.sleep(0.001)  # in which another thread gets the same one
        self.count = number + 1
        setattr(self, f"content_{number}", content)
        return number

    def onload(self, ticket):
        return getattr(self, f"content_{ticket}").clone()


def broken(**methods):
    """Return an offloader of which these methods are others."""
    return type("Broken", (Base,), methods)()


def fails(self, *args):
    raise ValueError("oh")


def changes_what_it_refuses(self, tensor, info):
    tensor.zero_()
    raise MemoryError


def refuses_doubles(self, tensor, info):
    if tensor.dtype is torch.float64:
        raise MemoryError
    return tensor.clone()


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: broken(onload=lambda self, ticket: ticket.clone()[:, None]), "same shape"),
        (lambda: broken(onload=lambda self, ticket: ticket.bfloat16().to(ticket.dtype)), "same bits"),
        (lambda: broken(onload=lambda self, ticket: ticket.clone().requires_grad_()), "plain contiguous"),
        (lambda: broken(prefetch=fails), r"prefetch raises ValueError\('oh'\)"),
        (lambda: broken(release=fails), r"release raises ValueError\('oh'\)"),
        (
            lambda: broken(still_here=lambda self, ticket: ticket),
            "still_here returns the tensor that offload was given",
        ),
        (
            lambda: broken(offload=lambda self, tensor: tensor),
            "takes nothing: offload always raises.* TypeError",
        ),
        (
            lambda: broken(offload=lambda self, tensor, info: [tensor.clone()], onload=lambda self, one: one.pop()),
            r"onload raises IndexError\('pop from empty list'\) .*read again",
        ),
        (
            lambda: broken(offload=lambda self, tensor, info: self.kept.append(tensor) or tensor.clone()),
            "tensor that was offloaded is not kept",
        ),
        (
            lambda: broken(offload=changes_what_it_refuses),
            "offload leaves the tensor as it is, also if it does not take it",
        ),
        (object, "methods offload, prefetch, onload, release"),
        (LocksLate, "does not wait for a lock"),
        (CountsWithoutLock, "one of several threads"),
    ],
)
def test_broken_offloader_is_told_which_rule_it_breaks(make, rule):
    with pytest.raises(AssertionError, match=rule):
        remat.testing.check_offloader(make())
