"""`remat.testing.check_offloader` passes what keeps the contract, and tells what does not."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

import torch_remat as remat
from tests.offloaders import Counting, Declining
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


def test_offloaders_of_these_tests_keep_the_contract():
    counting = Counting()
    assert remat.testing.check_offloader(counting) == 27
    counting.assert_all_released_once()
    assert remat.testing.check_offloader(Declining()) == 0


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


class Reshapes(Base):
    def onload(self, ticket):
        return ticket.clone()[:, None]


class Rounds(Base):
    def offload(self, tensor, info):
        return tensor.bfloat16() if tensor.dtype is torch.float32 else tensor.clone()

    def onload(self, ticket):
        return ticket.float() if ticket.dtype is torch.bfloat16 else ticket.clone()


class HandsOutOnce(Base):
    def offload(self, tensor, info):
        return [tensor.clone()]

    def onload(self, ticket):
        return ticket.pop()


class KeepsSource(Base):
    def offload(self, tensor, info):
        self.kept.append(tensor)
        return super().offload(tensor, info)


class KeepsResults(Base):
    def onload(self, ticket):
        self.kept.append(super().onload(ticket))
        return self.kept[-1].detach()


class LocksLate(Base):
    """The lock is held in one line of many, of a method that is called least."""

    def prefetch(self, ticket):
        total = 0
        total += 1
        total += 2
        total += 3
        total += 4
        total += 5
        with self.lock:
            total += 6

    def release(self, ticket):
        with self.lock:
            pass


class Graph(Base):
    def onload(self, ticket):
        return ticket.clone().requires_grad_(ticket.is_floating_point())


class ChangesSource(Base):
    def offload(self, tensor, info):
        ticket = tensor.clone()
        tensor.zero_()
        return ticket


class ChangesWhatItRefuses(Base):
    def offload(self, tensor, info):
        tensor.zero_()
        raise MemoryError


class RaisesInRelease(Base):
    def release(self, ticket):
        raise ValueError("oh")


class ThreadBound(Base):
    def __init__(self):
        super().__init__()
        self.thread = threading.get_ident()

    def release(self, ticket):
        if threading.get_ident() != self.thread:
            raise ValueError("another thread")


class RaisesInPrefetch(Base):
    def prefetch(self, ticket):
        raise ValueError("oh")


class ReleasesByItself(Base):
    def offload(self, tensor, info):
        return {"value": tensor.clone()}

    def onload(self, ticket):
        value = ticket["value"].clone()
        self.release(ticket)
        return value

    def release(self, ticket):
        del ticket["value"]


class WrongStillHere(Base):
    def still_here(self, ticket):
        return ticket


class AnotherSignature(Base):
    def offload(self, tensor):
        return tensor.clone()


class CountsWithoutLock(Base):
    """Two threads may get one number."""

    def __init__(self):
        super().__init__()
        self.count, self.content = 0, {}

    def offload(self, tensor, info):
        number = self.count
        content = tensor.clone()
        self.count = number + 1
        self.content[number] = content
        return number

    def onload(self, ticket):
        return self.content[ticket].clone()


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Reshapes, "same shape"),
        (Rounds, "same dtype|same bits"),
        (HandsOutOnce, r"onload raises IndexError\('pop from empty list'\) .*read again"),
        (KeepsSource, "tensor that was offloaded is not kept"),
        (KeepsResults, "result of onload is not kept"),
        (LocksLate, "does not wait for a lock"),
        (Graph, "plain contiguous"),
        (ChangesSource, "offload leaves the tensor as it is"),
        (ChangesWhatItRefuses, "offload leaves the tensor as it is, also if it does not take it"),
        (RaisesInRelease, r"release raises ValueError\('oh'\)"),
        (ThreadBound, r"release raises ValueError\('another thread'\) \(on any thread\)"),
        (RaisesInPrefetch, r"prefetch raises ValueError\('oh'\)"),
        (ReleasesByItself, "onload raises KeyError.*read again"),
        (WrongStillHere, "still_here returns the tensor that offload was given"),
        (AnotherSignature, "takes nothing: offload always raises, at last TypeError"),
        (CountsWithoutLock, "one of several threads"),
    ],
)
def test_broken_offloader_is_told_which_rule_it_breaks(kind, rule):
    with pytest.raises(AssertionError, match=rule):
        remat.testing.check_offloader(kind())


def test_offloader_that_refuses_some_tensors_keeps_the_contract():
    class Picky(Base):
        def offload(self, tensor, info):
            if tensor.dtype is torch.float64:
                raise MemoryError
            return super().offload(tensor, info)

    assert remat.testing.check_offloader(Picky()) == 24


def test_object_without_the_methods_is_told_so():
    with pytest.raises(AssertionError, match="methods offload, prefetch, onload, release"):
        remat.testing.check_offloader(object())
