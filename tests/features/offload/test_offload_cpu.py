"""`CpuOffloader`: its copies, with the device played by the CPU and copies that come late.

A `LateCopier` is what a CUDA device does at its worst: no copy is done before somebody waits for it. What reads too
early reads garbage here.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, Affine, Both, Inner, Trace, call
from tests.helpers import alive, assert_same, leaf, watch
from tests.offloaders import OFFLOAD, Counting
from torch_remat.offload.cpu import CpuOffloader
from torch_remat.offload.streams import Arrival
from torch_remat.offload.table import Batch, Table


@pytest.fixture(autouse=True)
def _host_memory_is_the_device():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CpuOffloader moves tensors to host memory")
        yield


class LateEvent:
    """Work of a stream that is done when somebody waits for it, or when chance has it."""

    def __init__(self, copier, work):
        self.copier, self.work = copier, work

    def query(self):
        if self.copier.chance.random() < self.copier.likely:
            self.synchronize()
        return self not in self.copier.queue

    def synchronize(self):
        while self in self.copier.queue:
            event = self.copier.queue.pop(0)
            event.work, work = None, event.work
            work()


class LateCopier:
    """A copier whose copies are queued. Both directions share a stream; an event waits for all before it."""

    def __init__(self, likely=0.0, seed=0):
        self.queue, self.likely, self.chance = [], likely, random.Random(seed)

    def enqueue(self, work):
        self.queue.append(event := LateEvent(self, work))
        return event

    def to_host(self, tensor, buffer):
        return self.enqueue(lambda: buffer.copy_(tensor))

    def to_device(self, buffer, after):
        tensor = torch.empty_like(buffer).fill_(-77)

        def work():
            if after is not None:
                after.synchronize()
            tensor.copy_(buffer)

        return tensor, self.enqueue(work)

    def use(self, tensor, event):
        if event is not None:
            event.synchronize()


def info(tensor):
    return remat.offload.OffloadInfo("r", "o", "t", "residual", tensor.nbytes)


def block(x):
    h = call("handle", Inner, Trace(), "a", OFFLOAD, x.sin())
    h = call("handle", Both, Trace(), "b", OFFLOAD, h)
    return call("handle", Affine, Trace(), "c", RECOMPUTE, h, h.t())


def model(wrap, x, depth=4):
    h = x * 1
    for _ in range(depth):
        h = wrap(block)(h)
    return h


@pytest.mark.parametrize(("likely", "prefetch_bytes"), [(0.0, 2000), (0.1, 0), (0.5, 2000), (1.0, 0)])
def test_training_steps_with_late_copies_are_equal(likely, prefetch_bytes):
    copier = LateCopier(likely)
    offloader = CpuOffloader(
        min_bytes=0, prefetch_bytes=prefetch_bytes, max_pending_bytes=1500, copier=lambda _: copier
    )
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True)
    for step in range(6):
        torch.manual_seed(step)
        x = leaf(8, 8) if step % 2 else leaf(9, 9)
        (expected,) = reference(x)
        y = model(wrap, x)
        if step == 3:
            assert_same(expected, torch.autograd.grad(y.sum(), x, retain_graph=True)[0])
        if step == 4:
            del y  # without backward, with copies on their way
            continue
        assert_same(expected, torch.autograd.grad(y.sum(), x)[0])
        assert offloader.offloaded_bytes == 0


def reference(x, depth=4):
    h = x * 1
    for _ in range(depth):
        h = call("plain", Inner, Trace(), "a", None, h.sin())
        h = call("plain", Both, Trace(), "b", None, h)
        h = call("plain", Affine, Trace(), "c", None, h, h.t())
    return torch.autograd.grad(h.sum(), x)


def test_tensor_is_kept_until_its_copy_is_done_and_then_let_go():
    copier = LateCopier()
    offloader = CpuOffloader(min_bytes=0, copier=lambda _: copier)
    tensor = torch.randn(100)
    expected, (source,) = tensor.clone(), watch(tensor)
    ticket = offloader.offload(tensor, info(tensor))
    del tensor
    assert alive([source]) == 1
    assert offloader.onload(ticket).untyped_storage()._cdata == source.cdata  # it has not left yet
    copier.queue[0].synchronize()
    offloader.prefetch(ticket)
    assert alive([source]) == 0
    assert torch.equal(offloader.onload(ticket), expected)
    offloader.release(ticket)


def test_bytes_that_wait_for_their_copy_are_bounded():
    copier = LateCopier()
    offloader = CpuOffloader(min_bytes=0, max_pending_bytes=1000, copier=lambda _: copier)
    tensors = [torch.randn(100) for _ in range(6)]
    sources = watch(*tensors)
    tickets = [offloader.offload(tensor, info(tensor)) for tensor in tensors]
    del tensors
    assert alive(sources) == 2
    for ticket in tickets:
        offloader.release(ticket)


def test_without_host_memory_a_tensor_stays_and_one_warning_says_so():
    offloader, x = CpuOffloader(min_bytes=0, max_bytes=1000), leaf(8, 8)
    with pytest.warns(remat.RematWarning, match=r"no host memory left for block::b\.y \(256 bytes\).*stays") as caught:
        y = model(remat.checkpoint(offloader=offloader, offload_inputs=True), x)
    assert len(caught) == 2  # and one that the CPU's memory is host memory
    assert offloader.host_bytes <= 1000
    assert_same(reference(x), torch.autograd.grad(y.sum(), x))


def test_without_memory_that_can_be_pinned_a_tensor_stays(monkeypatch):
    empty = torch.empty

    def fail(*args, **options):
        if "pin_memory" in options:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **options)

    offloader, x = CpuOffloader(min_bytes=0), leaf(8, 8)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.warns(remat.RematWarning, match="no host memory left"):
        y = model(remat.checkpoint(offloader=offloader), x)
    assert_same(reference(x), torch.autograd.grad(y.sum(), x))


def test_copy_that_cannot_begin_leaves_the_tensor_and_one_warning_says_so():
    class Failing(LateCopier):
        def to_host(self, tensor, buffer):
            raise RuntimeError("CUDA error")

    offloader, x = CpuOffloader(min_bytes=0, copier=lambda _: Failing()), leaf(8, 8)
    with pytest.warns(remat.RematWarning, match="could not take"):
        y = model(remat.checkpoint(offloader=offloader), x)
    assert offloader.host_bytes == offloader.offloaded_bytes == 0
    assert_same(reference(x), torch.autograd.grad(y.sum(), x))


class FailingEvent(LateEvent):
    """Work that fails, as is noticed when somebody asks for it."""

    def query(self):
        raise RuntimeError("CUDA error: misaligned address")

    synchronize = query


class FailingCopier(LateCopier):
    """A copier whose third copy to the host fails."""

    def to_host(self, tensor, buffer):
        self.copies = getattr(self, "copies", 0) + 1
        if self.copies == 3:
            return FailingEvent(self, None)
        return super().to_host(tensor, buffer)


@pytest.mark.parametrize("max_pending_bytes", [0, 1 << 30])
def test_copy_that_fails_later_leaves_the_tensor_and_one_warning_says_so(max_pending_bytes):
    copier, x = FailingCopier(likely=1.0), leaf(8, 8)
    offloader = CpuOffloader(min_bytes=0, max_pending_bytes=max_pending_bytes, copier=lambda _: copier)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            y = model(remat.checkpoint(offloader=offloader, offload_inputs=True), x)
            assert_same(reference(x), torch.autograd.grad(y.sum(), x))
    told = [one for one in map(str, (one.message for one in caught)) if "could not be copied to host memory" in one]
    assert len(told) == 1
    assert "CUDA error: misaligned address" in told[0]
    assert offloader.offloaded_bytes == offloader.host_bytes == 0


def test_copy_back_that_fails_ahead_of_its_use_is_tried_again():
    class Once(LateCopier):
        def to_device(self, buffer, after):
            self.failed = getattr(self, "failed", 0) + 1
            if self.failed % 2:
                raise RuntimeError("CUDA error: out of memory")
            return super().to_device(buffer, after)

    copier, x = Once(likely=1.0), leaf(8, 8)
    offloader = CpuOffloader(min_bytes=0, prefetch_bytes=1, copier=lambda _: copier)
    tensor = torch.randn(9)
    ticket = offloader.offload(tensor, info(tensor))
    with pytest.raises(RuntimeError, match="out of memory"):
        offloader.prefetch(ticket)  # the runtime ignores that
    assert_same(offloader.onload(ticket), tensor)
    y = model(remat.checkpoint(offloader=offloader), x)
    with pytest.raises(remat.OffloadError, match=r"could not bring this tensor back.*out of memory"):
        y.sum().backward()  # the first is not asked for ahead


def test_numbers_that_make_no_sense_are_refused():
    for options in ({"max_bytes": -1}, {"min_bytes": -1}, {"prefetch_bytes": 0.5}, {"max_pending_bytes": "1"}):
        with pytest.raises(remat.UsageError, match=next(iter(options))):
            CpuOffloader(**options)


class Stream:
    """Notes what it waits for."""

    def __init__(self, name):
        self.name, self.waits = name, []

    def record_event(self):
        return f"now on {self.name}"

    def wait_event(self, event):
        self.waits.append(event)


def test_each_stream_that_reads_a_value_waits_until_it_is_there(monkeypatch):
    """A CUDA device has several streams, and autograd's nodes run on those of forward; here they are played."""
    streams, told = {name: Stream(name) for name in "abc"}, []
    current = "a"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda value, stream: told.append(stream.name))
    monkeypatch.setattr("torch_remat.offload.transfer.graph_is_kept", lambda: False)
    monkeypatch.setattr("torch_remat.offload.transfer.arrival_of", lambda value: Arrival(streams[current]))
    tensor = torch.randn(8)
    transfer = Table().send(Counting(), tensor, info(tensor), Batch())
    for current in "abacb":  # noqa: B007
        assert_same(transfer.take(info(tensor))[0], tensor)
    assert [streams[name].waits for name in "abc"] == [[], ["now on a"], ["now on a"]]
    assert told == ["b", "c"]
