"""`DiskOffloader`: files and threads, full disks, damaged files, dead threads and processes, forks."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import torch_remat as remat
from tests.features.offload.blocks import Writes, block, expected_gradient, run, run_and_flush, soon, stored
from tests.helpers import assert_same, checkpointed, leaf
from torch_remat.offload import files
from torch_remat.offload.shared import Notices

INFO = remat.offload.OffloadInfo("r", "o", "t", "residual", 400)


@pytest.fixture
def offloader(tmp_path):
    return remat.DiskOffloader(tmp_path / "store", min_bytes=0)


@pytest.fixture
def writes(monkeypatch):
    return Writes(monkeypatch)


@pytest.fixture
def told():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


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


def test_directory_and_files_are_private(offloader):
    previous = os.umask(0)
    try:
        y = run_and_flush(offloader, leaf(8, 8), 1)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(offloader.directory).st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in stored(offloader)} == {0o600}
    del y


def test_graph_that_is_dropped_takes_its_files_along(offloader):
    for flush in (False, True):
        y = run(offloader, leaf(8, 8))
        if flush:
            offloader.flush()
            assert len(stored(offloader)) == 12
        del y
        assert soon(lambda: stored(offloader) == [])
        assert offloader.offloaded_bytes == 0


def test_files_and_threads_are_gone_with_the_offloader(tmp_path):
    before = set(threading.enumerate())
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0, threads=3)
    y = run(offloader, leaf(8, 8))
    own = set(threading.enumerate()) - before
    assert 1 <= len(own) <= 3
    del y, offloader
    assert soon(lambda: not any(thread.is_alive() for thread in own))
    assert list(tmp_path.iterdir()) == []


def test_forward_waits_while_the_queue_is_full(tmp_path, writes):
    writes.go.clear()
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, queue_bytes=1000), leaf(8, 8)
    timer = threading.Timer(0.2, writes.go.set)
    timer.start()
    y = run(offloader, x)
    assert writes.go.is_set()
    timer.join()
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x))


def test_disk_on_which_no_file_can_be_written_is_told_once_in_many_steps(tmp_path, writes, told):
    writes.fails = lambda number: True
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1), leaf(10, 10)
    for _ in range(5):
        y = run(offloader, x, 1)
        assert soon(lambda: writes.ended == writes.begun >= 1)
        assert_same(torch.autograd.grad(y.sum(), x)[0], expected_gradient(x, 1))
    offloader.flush()
    assert ["No space left" in str(one.message) for one in told] == [True]
    assert Path(__file__).parents[2] in Path(told[0].filename).parents  # a line of the tests: the user's
    assert (stored(offloader), offloader.offloaded_bytes) == ([], 0)


@pytest.mark.parametrize(("first", "asked"), [(0, "offload"), (1, "flush"), (2, "onload"), (3, "offload")])
def test_first_or_later_file_that_cannot_be_written_is_told_by_the_next_call(tmp_path, writes, told, first, asked):
    writes.fails = lambda number: number == first
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


@pytest.mark.parametrize("directory", ["there", "gone"])
def test_failure_that_nobody_was_told_of_is_told_when_the_offloader_goes(tmp_path, writes, told, directory):
    writes.fails = lambda number: True
    writes.go.clear()
    offloader, x = remat.DiskOffloader(tmp_path / "store", min_bytes=0, threads=1), leaf(10, 10)
    y = run(offloader, x, 1)
    assert soon(lambda: writes.begun == 1)
    assert_same(torch.autograd.grad(y.sum(), x)[0], expected_gradient(x, 1))
    writes.go.set()
    assert soon(lambda: writes.ended == writes.begun)
    del y
    assert told == []
    if directory == "gone":  # a temporary one, whose owner is done with it
        shutil.rmtree(tmp_path / "store")
    del offloader
    assert soon(lambda: len(told) == (directory == "there"))


def test_warning_that_is_made_an_error_passes_backward_and_loses_nothing(tmp_path, writes):
    writes.fails = lambda number: True
    writes.go.clear()
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1), leaf(10, 10)
    y = run(offloader, x, 1)
    writes.go.set()
    assert soon(lambda: writes.ended == 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(remat.RematWarning, match=r"no file could be written for .*stays in memory"):
            y.sum().backward(retain_graph=True)
        assert_same(torch.autograd.grad(y.sum(), x)[0], expected_gradient(x, 1))


def test_limit_of_bytes_keeps_tensors_resident_and_one_warning_says_so(tmp_path):
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, max_bytes=1000), leaf(8, 8)
    with pytest.warns(
        remat.RematWarning, match=r"block::b\.y \(256 bytes\) would exceed max_bytes=1000.*stays"
    ) as caught:
        y = run_and_flush(offloader, x, 6)
    assert len(caught) == 1
    assert offloader.offloaded_bytes <= 1000
    y.sum().backward()
    assert offloader.offloaded_bytes == 0
    assert_same(x.grad, expected_gradient(x, 6))


@pytest.mark.parametrize("how", ["truncated", "changed", "removed", "directory removed", "a link", "a pipe"])
def test_damaged_file_is_an_error_that_names_file_region_op_and_tensor(offloader, how, tmp_path):
    x = leaf(8, 8)
    y = checkpointed(block, offloader=offloader, region_name="block")(x)
    offloader.flush()
    path = stored(offloader)[-1]
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-1])
    elif how == "changed":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif how == "directory removed":
        shutil.rmtree(offloader.directory)
    else:
        path.unlink()
    if how == "a link":
        (tmp_path / "other").write_bytes(content)
        path.symlink_to(tmp_path / "other")
    elif how == "a pipe":
        os.mkfifo(path)
    with pytest.raises(remat.OffloadError, match=r"^block::") as caught:
        y.sum().backward()
    error = caught.value
    assert error.file is not None
    assert error.file in str(error)
    assert (error.region, error.op, error.tensor) == ("block", "b", "y") or how == "directory removed"
    assert "run the step again" in str(error)


CHILD = """
import os, sys, torch
sys.path[:0] = [{root!r}]
import torch_remat as remat
offloader = remat.DiskOffloader({directory!r}, min_bytes=0)
y = remat.checkpoint(offloader=offloader, offload_inputs=True)(torch.sin)(torch.ones(9, requires_grad=True) * 2)
offloader.flush()
assert len(os.listdir({directory!r})) == {count}, os.listdir({directory!r})
{end}
"""


def child(directory, end, count=1):
    code = CHILD.format(root=str(Path(__file__).parents[3]), directory=str(directory), end=end, count=count)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_files_are_gone_at_exit_and_those_of_a_dead_process_with_the_next_offloader(tmp_path):
    assert "ValueError" in child(tmp_path, "raise ValueError").stderr
    assert list(tmp_path.iterdir()) == []
    assert child(tmp_path, "os._exit(7)").returncode == 7
    (left,) = tmp_path.iterdir()
    assert {path.name for path in left.iterdir()} == {"lock", "0.raw"}
    shutil.copytree(left, tmp_path / "other")
    (tmp_path / "torch_remat-unlocked").mkdir()
    (tmp_path / "torch_remat-link").symlink_to(tmp_path / "other")
    others = {path.name for path in tmp_path.iterdir()} - {left.name}
    remat.DiskOffloader(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others
    assert len(list((tmp_path / "other").iterdir())) == 2


def test_files_of_a_process_that_lives_are_left_alone(tmp_path):
    folder = files.Folder(str(tmp_path), Notices())
    path = Path(folder.new_path())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.write_bytes(b"x")
    files.remove_folders_left_in(str(tmp_path))
    assert path.exists()
    del folder
    assert list(tmp_path.iterdir()) == []
    files.remove_folders_left_in(str(tmp_path / "nowhere"))


def test_folder_that_another_process_took_for_one_that_is_left_is_made_anew(tmp_path, monkeypatch):
    lock, removed = files._lock, []

    def late(descriptor):
        if not removed:
            removed.extend(tmp_path.iterdir())
            files.remove_folders_left_in(str(tmp_path))
        lock(descriptor)

    monkeypatch.setattr(files, "_lock", late)
    folder = files.Folder(str(tmp_path), Notices())
    assert len(removed) == 1
    assert Path(folder.new_path()).parent.exists()
    del folder
    assert list(tmp_path.iterdir()) == []


FORKED = """
offloader2 = remat.DiskOffloader({directory!r}, min_bytes=0)
z = remat.checkpoint(offloader=offloader2, offload_inputs=True)(torch.cos)(torch.ones(9, requires_grad=True) * 2)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        y.sum().backward(), z.sum().backward()
        w = remat.checkpoint(offloader=offloader, offload_inputs=True)(torch.sin)(torch.ones(9, requires_grad=True) * 2)
        offloader.flush()
        assert len(os.listdir({directory!r})) == 3
        w.sum().backward()
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(pid, 0)[1] == 0
offloader2.flush()
remat.DiskOffloader({directory!r})  # removes what the child has left
assert len(os.listdir({directory!r})) == 2, os.listdir({directory!r})
y.sum().backward(), z.sum().backward()
print("both")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_child_reads_what_there_is_and_removes_nothing_of_its_parents(tmp_path):
    done = child(tmp_path, FORKED.format(directory=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "both\n"
    assert list(tmp_path.iterdir()) == []


def test_without_threads_tensors_stay_resident_and_one_warning_says_so(tmp_path, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0), leaf(8, 8)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.warns(remat.RematWarning, match="can't start new thread") as caught:
            y = run(offloader, x)
    assert len(caught) == 1
    y = run_and_flush(offloader, y)
    assert len(stored(offloader)) == 12
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x, 6))


def test_offloader_in_a_cycle_is_closed_by_a_collection_in_its_own_thread(tmp_path, monkeypatch):
    """The thread cannot wait for itself, so it cannot close what it works for."""
    write, collected, gone = files.write, [], threading.Event()

    def collecting(path, content):
        assert gone.wait(20)
        collected.append(gc.collect())
        return write(path, content)

    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    monkeypatch.setattr(files, "write", collecting)
    gc.disable()
    try:
        offloader.cycle = offloader
        offloader.offload(torch.ones(100), INFO)
        del offloader
        gone.set()
        assert soon(lambda: list(tmp_path.iterdir()) == [])
        assert soon(lambda: collected and collected[0] > 0)
    finally:
        gc.enable()


def test_offloader_that_goes_while_a_file_is_written_waits_for_nothing(tmp_path, writes, monkeypatch):
    """A collection may come in the middle of a thread's start, where to wait for a thread would be for ever."""
    writes.go.clear()
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1)
    ticket = offloader.offload(torch.ones(100), INFO)
    assert soon(lambda: writes.begun == 1)
    with monkeypatch.context() as within:
        within.setattr(threading.Thread, "join", lambda *args: pytest.fail("it waits for a thread"))
        within.setattr(threading.Thread, "start", lambda *args: pytest.fail("it starts a thread"))
        del offloader, ticket
        gc.collect()
    assert len(list(tmp_path.iterdir())) == 1, "a thread writes there"
    writes.go.set()
    assert soon(lambda: not list(tmp_path.iterdir()))
