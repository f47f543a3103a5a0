"""`CpuOffloader`: its pool of buffers, and its copies, with the device played by the CPU and copies that come late.

A `LateLane` is what a CUDA device does at its worst: no copy is done before somebody waits for it. What reads too
early, or uses a buffer again too early, reads garbage here.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from handle_ops import RECOMPUTE, Affine, Both, Inner, Trace, call
from helpers import LiveStorages, alive, assert_same, leaf, watch
from offloaders import OFFLOAD, Counting

import torch_remat as remat
from torch_remat.dispatch.port import Port
from torch_remat.offload.cpu import CpuOffloader
from torch_remat.offload.lanes import Arrival
from torch_remat.offload.pool import BufferPool


@pytest.fixture(autouse=True)
def _host_memory_is_the_device():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CpuOffloader moves tensors to host memory")
        yield


class LateMark:
    """Work of a stream that is done when somebody waits for it, or when chance has it."""

    def __init__(self, lane, work):
        self.lane, self.work = lane, work

    def query(self):
        if self.lane.chance.random() < self.lane.likely:
            self.synchronize()
        return self not in self.lane.queue

    def synchronize(self):
        while self in self.lane.queue:
            mark = self.lane.queue.pop(0)
            mark.work, work = None, mark.work
            work()


class LateLane:
    """A lane whose copies are queued. Both directions share a stream; a mark waits for all before it."""

    def __init__(self, likely=0.0, seed=0):
        self.queue, self.likely, self.chance = [], likely, random.Random(seed)

    def enqueue(self, work):
        self.queue.append(mark := LateMark(self, work))
        return mark

    def away(self, tensor, buffer):
        return self.enqueue(lambda: buffer.copy_(tensor))

    def back(self, buffer, after):
        tensor = torch.empty_like(buffer).fill_(-77)

        def work():
            if after is not None:
                after.synchronize()
            tensor.copy_(buffer)

        return tensor, self.enqueue(work)

    def arrive(self, tensor, mark):
        if mark is not None:
            mark.synchronize()


def info(tensor):
    return remat.OffloadInfo("r", "o", "t", "residual", tensor.nbytes)


def block(x):
    h = call("handle", Inner, Trace(), "a", OFFLOAD, x.sin())
    h = call("handle", Both, Trace(), "b", OFFLOAD, h)
    return call("handle", Affine, Trace(), "c", RECOMPUTE, h, h.t())


def model(wrap, x, depth=4):
    h = x * 1
    for _ in range(depth):
        h = wrap(block)(h)
    return h


@pytest.mark.parametrize("likely", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("prefetch_bytes", [0, 2000])
def test_training_steps_with_late_copies_are_equal(likely, prefetch_bytes):
    lane = LateLane(likely)
    offloader = CpuOffloader(min_bytes=0, prefetch_bytes=prefetch_bytes, max_pending_bytes=1500, lane=lambda _: lane)
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


def test_buffer_is_not_used_again_before_the_last_copy_from_it_is_done():
    lane = LateLane()
    offloader = CpuOffloader(min_bytes=0, lane=lambda _: lane)
    first, second = torch.randn(100), torch.randn(100)
    ticket = offloader.offload(first, info(first))
    lane.queue[0].synchronize()
    offloader.prefetch(ticket)  # a copy from the buffer that nobody waited for
    value = ticket.value[0]
    offloader.release(ticket)
    other = offloader.offload(second, info(second))
    assert other.buffer is not ticket.buffer
    for mark in list(lane.queue):
        mark.synchronize()
    assert torch.equal(value, first)
    third = offloader.offload(first, info(first))
    assert third.buffer is ticket.buffer


def test_tensor_is_kept_until_its_copy_is_done_and_then_let_go():
    lane = LateLane()
    offloader = CpuOffloader(min_bytes=0, lane=lambda _: lane)
    tensor = torch.randn(100)
    expected, (source,) = tensor.clone(), watch(tensor)
    ticket = offloader.offload(tensor, info(tensor))
    del tensor
    assert alive([source]) == 1
    assert offloader.onload(ticket).untyped_storage()._cdata == source.cdata  # it has not left yet
    lane.queue[0].synchronize()
    offloader.prefetch(ticket)
    assert alive([source]) == 0
    assert torch.equal(offloader.onload(ticket), expected)
    offloader.release(ticket)


def test_released_ticket_keeps_its_tensor_only_until_the_copy_is_done():
    lane = LateLane()
    offloader = CpuOffloader(min_bytes=0, lane=lambda _: lane)
    tensor = torch.randn(100)
    (source,) = watch(tensor)
    offloader.release(offloader.offload(tensor, info(tensor)))
    del tensor
    assert alive([source]) == 1  # the copy reads it
    lane.queue[0].synchronize()
    other = torch.randn(100)
    offloader.offload(other, info(other))
    assert alive([source]) == 0


def test_bytes_that_wait_for_their_copy_are_bounded():
    lane = LateLane()
    offloader = CpuOffloader(min_bytes=0, max_pending_bytes=1000, lane=lambda _: lane)
    tensors = [torch.randn(100) for _ in range(6)]
    sources = watch(*tensors)
    tickets = [offloader.offload(tensor, info(tensor)) for tensor in tensors]
    del tensors
    assert alive(sources) == 2
    for ticket in tickets:
        offloader.release(ticket)


def test_without_host_memory_a_tensor_stays_and_one_warning_says_so():
    offloader, x = CpuOffloader(min_bytes=0, max_bytes=1000), leaf(8, 8)
    with pytest.warns(RuntimeWarning, match=r"no host memory left for block::b\.y \(256 bytes\).*stays") as caught:
        y = model(remat.checkpoint(offloader=offloader, offload_inputs=True), x)
    assert len(caught) == 2  # and one that the CPU's memory is host memory
    assert offloader.host_bytes <= 1000
    assert_same(reference(x), torch.autograd.grad(y.sum(), x))


def test_without_memory_that_can_be_pinned_a_tensor_stays():
    def fail(count):
        raise RuntimeError("CUDA error: out of memory")

    offloader, x = CpuOffloader(min_bytes=0), leaf(8, 8)
    offloader._pool._allocate = fail
    with pytest.warns(RuntimeWarning, match="no host memory left"):
        y = model(remat.checkpoint(offloader=offloader), x)
    assert_same(reference(x), torch.autograd.grad(y.sum(), x))


def test_small_tensors_stay_and_large_ones_travel():
    offloader, small, large = CpuOffloader(min_bytes=256), torch.ones(63), torch.ones(64)
    assert offloader.offload(small, info(small)) is None
    assert offloader.offload(large, info(large)) is not None
    assert offloader.offloaded_bytes == 256


def test_copy_that_fails_gives_its_buffer_back():
    class Failing(LateLane):
        def away(self, tensor, buffer):
            raise RuntimeError("CUDA error")

    offloader, x = CpuOffloader(min_bytes=0, lane=lambda _: Failing()), leaf(8, 8)
    with pytest.warns(RuntimeWarning, match="could not take"):
        y = model(remat.checkpoint(offloader=offloader), x)
    assert offloader.host_bytes == 256
    assert_same(reference(x), torch.autograd.grad(y.sum(), x))


def test_tensors_of_the_cpu_are_told_to_save_nothing_once():
    offloader = CpuOffloader(min_bytes=0)
    with pytest.warns(RuntimeWarning, match="is there already.*saves nothing") as caught:
        model(remat.checkpoint(offloader=offloader), leaf(4, 4))
    assert len(caught) == 1


def test_pool_uses_buffers_again_within_its_limit():
    pool = BufferPool(1000, lambda count: torch.empty(count, dtype=torch.uint8))
    one, two = pool.take(400), pool.take(500)
    assert pool.take(400) is None
    pool.give(one, None)
    assert pool.take(390) is one  # a little larger than asked for
    pool.give(one, None)
    pool.give(two, None)
    assert pool.take(450) is two
    assert pool.take(500).nbytes == 500  # in the place of the free one
    assert pool.total_bytes == 1000
    assert pool.take(1001) is None


def test_pool_waits_for_a_copy_before_it_gives_a_buffer_away():
    lane, done = LateLane(), []
    pool = BufferPool(1000, lambda count: torch.empty(count, dtype=torch.uint8))
    pool.give(pool.take(600), lane.enqueue(lambda: done.append(1)))
    assert pool.take(600) is not None
    assert done == [1]


def test_pool_counts_what_is_really_taken_and_gives_back_what_it_drops():
    given_back = []
    powers = lambda count: 1 << (count - 1).bit_length()  # noqa: E731
    allocate = lambda count: torch.empty(count, dtype=torch.uint8)  # noqa: E731
    pool = BufferPool(1024, allocate, powers, lambda: given_back.append(pool.total_bytes))
    one = pool.take(257)
    assert (one.nbytes, pool.total_bytes, pool.take(600)) == (512, 512, None)
    pool.give(one, None)
    assert pool.take(300) is one
    pool.give(one, None)
    assert given_back == []
    assert pool.take(513).nbytes == pool.total_bytes == 1024
    assert given_back == [0]


def test_what_comes_back_and_buffers_make_no_garbage():
    offloader, live = CpuOffloader(min_bytes=0), LiveStorages()
    with live:
        model(remat.checkpoint(offloader=offloader), leaf(8, 8) * 1).sum().backward()
    assert live.bytes() == 0


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
    monkeypatch.setattr("torch_remat.dispatch.parcel.graph_is_kept", lambda: False)
    monkeypatch.setattr("torch_remat.dispatch.parcel.arrival_of", lambda value: Arrival(streams[current]))
    tensor = torch.randn(8)
    parcel = Port().send(Counting(), tensor, ("r", None, "args[0]", "input"))
    for current in "abacb":  # noqa: B007
        assert_same(parcel.take(info(tensor))[0], tensor)
    assert [streams[name].waits for name in "abc"] == [[], ["now on a"], ["now on a"]]
    assert told == ["b", "c"]
