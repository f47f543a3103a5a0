"""`CpuOffloader`: its copies, with the device played by the CPU and copies that come late.

`LateStreams` are what a CUDA device does at its worst: no copy is done before somebody waits for it. What reads too
early reads garbage here.
"""

from __future__ import annotations

import random
import re
import warnings

import pytest
import torch

import torch_remat as remat
from tests.features.offload.blocks import expected_gradient, run
from tests.helpers import alive, assert_same, leaf, watch
from tests.offloaders import Counting
from torch_remat.offload import cpu
from torch_remat.offload.cpu import CpuOffloader
from torch_remat.offload.sender import Batch, Table


@pytest.fixture(autouse=True)
def _host_memory_is_the_device():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CpuOffloader moves tensors to host memory")
        yield


class LateEvent:
    """Work of a stream that is done when somebody waits for it, or when chance has it."""

    def __init__(self, streams, work):
        self.streams, self.work = streams, work

    def query(self):
        if self.streams.chance.random() < self.streams.likely:
            self.synchronize()
        return self not in self.streams.queue

    def synchronize(self):
        while self in self.streams.queue:
            event = self.streams.queue.pop(0)
            event.work, work = None, event.work
            work()


class LateStreams:
    """Stands for `torch_remat.offload.streams`; copies are queued, and an event waits for all before it."""

    def __init__(self, likely=0.0, seed=0):
        self.queue, self.likely, self.chance = [], likely, random.Random(seed)

    def enqueue(self, work):
        self.queue.append(event := LateEvent(self, work))
        return event

    def copy_to_host(self, tensor):
        stored = torch.empty_like(tensor).fill_(-77)
        return stored, self.enqueue(lambda: stored.copy_(tensor))

    def copy_to_device(self, stored, device, after):
        tensor = torch.empty_like(stored).fill_(-77)

        def work():
            after.synchronize()
            tensor.copy_(stored)

        return tensor, self.enqueue(work)

    def use(self, tensor, event):
        event.synchronize()


@pytest.fixture
def late(monkeypatch):
    """Let copies come late, as these streams say."""

    def install(streams):
        monkeypatch.setattr(cpu, "streams", streams)
        return streams

    return install


def info(tensor):
    return remat.offload.OffloadInfo("r", "o", "t", "residual", tensor.nbytes)


def test_training_steps_with_late_copies_are_equal(late):
    for likely, prefetch_bytes in ((0.0, 2000), (0.5, 2000), (1.0, 0)):
        late(LateStreams(likely))
        offloader = CpuOffloader(min_bytes=0, prefetch_bytes=prefetch_bytes, max_pending_bytes=1500)
        for step in range(6):
            torch.manual_seed(step)
            x = leaf(8, 8) if step % 2 else leaf(9, 9)
            expected = expected_gradient(x, 4)
            y = run(offloader, x, 4)
            if step == 3:
                assert_same(expected, torch.autograd.grad(y.sum(), x, retain_graph=True)[0])
            if step == 4:
                del y  # without backward, with copies on their way
                continue
            assert_same(expected, torch.autograd.grad(y.sum(), x)[0], f"likely={likely}, step {step}")
            assert offloader.offloaded_bytes == 0


def test_tensor_is_kept_until_its_copy_is_done_and_then_let_go(late):
    streams, offloader = late(LateStreams()), CpuOffloader(min_bytes=0)
    tensor = torch.randn(100)
    expected, (source,) = tensor.clone(), watch(tensor)
    ticket = offloader.offload(tensor, info(tensor))
    del tensor
    assert alive([source]) == 1
    assert offloader.onload(ticket).untyped_storage()._cdata == source.cdata  # it has not left yet
    streams.queue[0].synchronize()
    offloader.prefetch(ticket)
    assert alive([source]) == 0
    assert torch.equal(offloader.onload(ticket), expected)
    offloader.release(ticket)


def test_bytes_that_wait_for_their_copy_are_bounded(late):
    late(LateStreams())
    offloader = CpuOffloader(min_bytes=0, max_pending_bytes=1000)
    tensors = [torch.randn(100) for _ in range(6)]
    sources = watch(*tensors)
    tickets = [offloader.offload(tensor, info(tensor)) for tensor in tensors]
    del tensors
    assert alive(sources) == 2
    for ticket in tickets:
        offloader.release(ticket)


class Refusing(LateStreams):
    """Streams on which copies to the host cannot begin."""

    def copy_to_host(self, tensor):
        raise RuntimeError("CUDA error")


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("limit", r"block::b\.y \(256 bytes\) would exceed max_bytes=1000.*stays"),
        ("no pinned memory", "could not take block::.*out of memory.*stays"),
        ("no copy", "could not take block::.*CUDA error.*stays"),
    ],
)
def test_tensor_that_cannot_leave_stays_and_one_warning_says_so(monkeypatch, late, case, told):
    empty = torch.empty

    def fail(*args, **options):
        if "pin_memory" in options:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **options)

    if case == "no pinned memory":
        monkeypatch.setattr(torch, "empty", fail)
    elif case == "no copy":
        late(Refusing())
    offloader, x = CpuOffloader(min_bytes=0, max_bytes=1000 if case == "limit" else None), leaf(8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = run(offloader, x, 4)
    messages = [str(one.message) for one in caught if "saves nothing" not in str(one.message)]
    assert [re.search(told, message) is not None for message in messages] == [True], messages
    assert offloader.host_bytes == offloader.offloaded_bytes
    assert 768 <= offloader.host_bytes <= 1000 if case == "limit" else offloader.host_bytes == 0
    assert_same(expected_gradient(x, 4), torch.autograd.grad(y.sum(), x)[0])
    assert offloader.host_bytes == 0


def test_copy_back_that_fails_ahead_of_its_use_is_tried_again(late):
    class Once(LateStreams):
        def copy_to_device(self, stored, device, after):
            self.failed = getattr(self, "failed", 0) + 1
            if self.failed % 2:
                raise RuntimeError("CUDA error: out of memory")
            return super().copy_to_device(stored, device, after)

    late(Once(likely=1.0))
    offloader, x = CpuOffloader(min_bytes=0, prefetch_bytes=1), leaf(8, 8)
    tensor = torch.randn(9)
    ticket = offloader.offload(tensor, info(tensor))
    with pytest.raises(RuntimeError, match="out of memory"):
        offloader.prefetch(ticket)  # the runtime ignores that
    assert_same(offloader.onload(ticket), tensor)
    y = run(offloader, x, 4)
    with pytest.raises(remat.OffloadError, match=r"could not bring this tensor back.*out of memory"):
        y.sum().backward()  # the first is not asked for ahead


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
    monkeypatch.setattr("torch_remat.offload.transfer.event_after", lambda value: streams[current].record_event())
    tensor = torch.randn(8)
    transfer = Table().send(Counting(), tensor, info(tensor), Batch())
    for current in "abacb":  # noqa: B007
        assert_same(transfer.take(info(tensor))[0], tensor)
    assert [set(streams[name].waits) for name in "abc"] == [{"now on a"}] * 3
    assert told == list("bacb")
