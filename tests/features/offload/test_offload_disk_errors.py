"""`DiskOffloader` that cannot write: it loses nothing, and says so once, whenever it happens and whoever asks next."""

from __future__ import annotations

import shutil
import threading
import warnings
from pathlib import Path

import pytest
import torch

import torch_remat as remat
from tests.features.offload.disk_model import expected_gradient, run, soon, stored
from tests.helpers import assert_same, leaf
from torch_remat.offload import files

INFO = remat.offload.OffloadInfo("r", "o", "t", "residual", 400)
TOLD = "no file could be written for .*No space left on device.*stays in memory"


class Disk:
    """Stands before `files.write`: writes fail that it is told to fail, each when it is let go.

    Attributes:
        go: Whether writes may end.
        fails: Tells of the number of a write, from 0, whether it fails.
        writes: How many have begun.
        ended: How many are over.
    """

    def __init__(self, write):
        self.write = write
        self.go = threading.Event()
        self.go.set()
        self.fails = lambda number: True
        self.writes = self.ended = 0

    def __call__(self, path, content):
        number, self.writes = self.writes, self.writes + 1
        assert self.go.wait(20)
        try:
            if self.fails(number):
                raise OSError(28, "No space left on device")
            return self.write(path, content)
        finally:
            self.ended += 1


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(files.write)
    monkeypatch.setattr(files, "write", disk)
    return disk


@pytest.fixture
def told():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def step(offloader, x, disk, wait=True):
    y = run(offloader, x, 1)
    if wait:
        assert soon(lambda: disk.ended == disk.writes >= 1)
    assert_same(torch.autograd.grad(y.sum(), x)[0], expected_gradient(x, 1))


@pytest.mark.parametrize("wait", [True, False], ids=["failed when read", "released at once"])
def test_disk_on_which_no_file_can_be_written_is_told_once_in_many_steps(tmp_path, disk, told, wait):
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1), leaf(10, 10)
    for _ in range(5):
        step(offloader, x, disk, wait)
    offloader.flush()
    if disk.writes == 0:  # all were released before a thread came
        step(offloader, x, disk)
    offloader.flush()
    assert ["No space left" in str(one.message) for one in told] == [True]
    assert Path(__file__).parents[2] in Path(told[0].filename).parents  # a line of the user's
    assert (stored(offloader), offloader.offloaded_bytes) == ([], 0)


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("asked", ["offload", "onload", "flush"])
def test_first_or_later_file_that_cannot_be_written_is_told_by_the_next_call(tmp_path, disk, told, first, asked):
    disk.fails = lambda number: number == first
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1)
    tensors = [torch.full((100,), float(value)) for value in range(4)]
    tickets = [offloader.offload(tensor, INFO) for tensor in tensors]
    assert soon(lambda: len(stored(offloader)) == 3)
    assert soon(lambda: offloader.stays(tickets[first]))
    assert told == [] or first < 3  # an early failure may be told to the next offload of the four
    if asked == "offload":
        offloader.release(offloader.offload(tensors[0], INFO))
    elif asked == "flush":
        offloader.flush()
    for ticket, tensor in zip(tickets, tensors, strict=True):
        assert_same(offloader.onload(ticket), tensor)
    assert len(told) == 1
    assert offloader.offloaded_bytes == 3 * 400
    for ticket in tickets:
        offloader.release(ticket)
    assert offloader.offloaded_bytes == 0
    assert soon(lambda: stored(offloader) == [])


@pytest.mark.parametrize("asked", ["offload", "flush"])
def test_write_that_fails_after_the_release_is_told_by_the_next_call(tmp_path, disk, told, asked):
    disk.go.clear()
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1)
    ticket = offloader.offload(torch.ones(100), INFO)
    assert soon(lambda: disk.writes == 1)
    offloader.release(ticket)
    disk.go.set()
    assert soon(lambda: ticket.tensor is None)
    if asked == "offload":
        disk.fails = lambda number: False
        offloader.offload(torch.ones(100), INFO)
    offloader.flush()
    assert len(told) == 1
    assert offloader.offloaded_bytes == (400 if asked == "offload" else 0)


@pytest.mark.parametrize("directory", ["there", "gone"])
def test_failure_that_nobody_was_told_of_is_told_when_the_offloader_goes(tmp_path, disk, told, directory):
    offloader, x = remat.DiskOffloader(tmp_path / "store", min_bytes=0, threads=1), leaf(10, 10)
    disk.go.clear()
    y = run(offloader, x, 1)
    assert soon(lambda: disk.writes == 1)
    assert_same(torch.autograd.grad(y.sum(), x)[0], expected_gradient(x, 1))
    disk.go.set()
    assert soon(lambda: disk.ended == disk.writes)
    del y
    assert told == []
    if directory == "gone":  # a temporary one, whose owner is done with it
        shutil.rmtree(tmp_path / "store")
    del offloader
    assert len(told) == (directory == "there")


def test_warning_that_is_made_an_error_passes_backward_and_loses_nothing(tmp_path, disk):
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1), leaf(10, 10)
    disk.go.clear()
    y = run(offloader, x, 1)
    disk.go.set()
    assert soon(lambda: disk.ended == 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(remat.RematWarning, match=TOLD):
            y.sum().backward(retain_graph=True)
        assert_same(torch.autograd.grad(y.sum(), x)[0], expected_gradient(x, 1))
