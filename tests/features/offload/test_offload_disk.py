"""`DiskOffloader`: files and threads, when all goes well."""

from __future__ import annotations

import os
import stat
import threading

import pytest
import torch

import torch_remat as remat
from tests.features.offload.disk_model import expected_gradient, run, soon, stored
from tests.helpers import LiveStorages, alive, assert_same, leaf, watch
from torch_remat.offload import files


@pytest.fixture
def offloader(tmp_path):
    return remat.DiskOffloader(tmp_path / "store", min_bytes=0)


def test_gradients_are_equal_and_files_are_gone_when_backward_has_read_them(offloader):
    x = leaf(20, 20)
    y = run(offloader, x)
    offloader.flush()
    assert len(stored(offloader)) == 12
    assert offloader.offloaded_bytes == sum(path.stat().st_size for path in stored(offloader)) == 12 * 1600
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x))
    assert offloader.offloaded_bytes == 0
    assert soon(lambda: stored(offloader) == [])


def test_directory_and_files_are_private_and_hold_nothing_but_the_bytes(offloader):
    previous = os.umask(0)
    try:
        y = run(offloader, leaf(8, 8), 1)
        offloader.flush()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(offloader.directory).st_mode) == 0o700
    for path in stored(offloader):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_size == 256
    del y


def test_memory_is_free_once_the_files_are_written(offloader):
    live = LiveStorages()
    with live:
        x = leaf(64, 64)
        y = run(offloader, x)
    offloader.flush()
    assert live.bytes() == x.nbytes + y.nbytes
    assert offloader.offloaded_bytes == 12 * x.nbytes


def test_graph_that_is_dropped_takes_its_files_along(offloader):
    y = run(offloader, leaf(8, 8))
    del y
    assert soon(lambda: stored(offloader) == [])
    assert offloader.offloaded_bytes == 0
    y = run(offloader, leaf(8, 8))
    offloader.flush()
    assert len(stored(offloader)) == 12
    del y
    assert soon(lambda: stored(offloader) == [])


def test_kept_graph_keeps_its_files_and_reads_them_again(offloader):
    x = leaf(8, 8)
    y = run(offloader, x)
    offloader.flush()
    for _ in range(3):
        assert_same(expected_gradient(x), torch.autograd.grad(y.sum(), x, retain_graph=True)[0])
        assert len(stored(offloader)) == 12
    y.sum().backward()
    assert soon(lambda: stored(offloader) == [])


def test_files_and_threads_are_gone_with_the_offloader(tmp_path):
    before = threading.active_count()
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0, threads=3)
    y = run(offloader, leaf(8, 8))
    assert before < threading.active_count() <= before + 3
    del y, offloader
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_there_while_their_files_are_being_written(tmp_path, monkeypatch):
    go, write = threading.Event(), files.write

    def slowly(path, content):
        assert go.wait(10)
        return write(path, content)

    monkeypatch.setattr(files, "write", slowly)
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    x = leaf(8, 8)
    y = run(offloader, x)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert stored(offloader) == []
    assert_same(expected_gradient(x), first)
    del y  # released while it is waiting or being written
    go.set()
    offloader.flush()
    assert soon(lambda: stored(offloader) == [])
    assert offloader.offloaded_bytes == 0


def test_forward_waits_while_the_queue_is_full(tmp_path, monkeypatch):
    go, write, largest = threading.Event(), files.write, []

    def slowly(path, content):
        assert go.wait(10)
        return write(path, content)

    monkeypatch.setattr(files, "write", slowly)
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0, queue_bytes=1000)
    timer = threading.Timer(0.2, go.set)
    timer.start()
    x = leaf(8, 8)
    y = run(offloader, x)
    largest.append(go.is_set())
    timer.join()
    assert largest == [True]
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x))


def test_numbers_that_make_no_sense_are_refused(tmp_path):
    for options in (
        {"threads": 0},
        {"max_bytes": -1},
        {"min_bytes": 1.5},
        {"queue_bytes": -1},
        {"prefetch_bytes": "1"},
    ):
        with pytest.raises(remat.UsageError, match=next(iter(options))):
            remat.DiskOffloader(tmp_path, **options)


def test_source_is_dead_after_flush_and_value_is_dead_after_release(offloader):
    tensor = torch.randn(100)
    (source,) = watch(tensor)
    ticket = offloader.offload(tensor, remat.offload.OffloadInfo("r", "o", "t", "residual", tensor.nbytes))
    del tensor
    offloader.flush()
    assert alive([source]) == 0
    offloader.prefetch(ticket)
    offloader.release(ticket)
    assert soon(lambda: stored(offloader) == [])
