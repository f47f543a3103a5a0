"""`DiskOffloader` when things go wrong: full disks, damaged files, dead threads and processes, forks."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from weakref import ref

import pytest
import torch

import torch_remat as remat
from tests.features.offload.disk_model import block, expected_gradient, run, run_and_flush, soon, stored
from tests.helpers import assert_same, checkpointed, collector_off, leaf
from torch_remat.offload import files

ROOT = str(Path(__file__).parents[3])


@pytest.fixture
def offloader(tmp_path):
    return remat.DiskOffloader(tmp_path / "store", min_bytes=0)


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


def test_tensors_that_could_not_be_written_use_up_no_bytes(tmp_path):
    directory = tmp_path / "store"
    offloader, x = remat.DiskOffloader(directory, min_bytes=0, max_bytes=1000), leaf(8, 8)
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True)(torch.sin)
    wrap(x * 0)
    offloader.flush()
    (folder,) = directory.iterdir()
    folder.rename(tmp_path / "elsewhere")
    stuck = wrap(x * 1)
    with pytest.warns(remat.RematWarning, match="no file could be written"):
        offloader.flush()
    assert offloader.offloaded_bytes == 0
    (tmp_path / "elsewhere").rename(folder)
    written = [wrap(x * 2) for _ in range(3)]
    offloader.flush()
    assert (len(stored(offloader)), offloader.offloaded_bytes) == (3, 3 * 256)
    stuck.sum().backward()
    assert_same(x.grad, x.detach().cos())
    assert offloader.offloaded_bytes == 3 * 256
    del written
    assert (stored(offloader), offloader.offloaded_bytes) == ([], 0)


def test_full_disk_keeps_tensors_resident_and_one_warning_says_so(tmp_path, monkeypatch):
    write, room = files.write, [3000]

    def limited(path, content):
        if content.nbytes > room[0]:
            write(path, content.view(torch.uint8)[: room[0]])
            room[0] = 0
            raise OSError(28, "No space left on device")
        room[0] -= content.nbytes
        return write(path, content)

    monkeypatch.setattr(files, "write", limited)
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1), leaf(16, 16)
    with pytest.warns(remat.RematWarning, match="No space left on device.*stays in memory") as caught:
        y = run_and_flush(offloader, x, 6)
    assert len(caught) == 1
    assert sum(path.stat().st_size for path in stored(offloader)) == 2 * 1024  # the third was not whole
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x, 6))
    assert stored(offloader) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a file system")
def test_full_tmpfs_keeps_tensors_resident(tmp_path):
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0), leaf(64, 64)
        with pytest.warns(remat.RematWarning, match="No space left on device"):
            y = run_and_flush(offloader, x)
        y.sum().backward()
        assert_same(x.grad, expected_gradient(x))
        assert soon(lambda: list(tmp_path.rglob("*.raw")) == [])
        del offloader, y
        gc.collect()
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("how", ["truncated", "longer", "changed", "removed", "directory removed", "a link", "a pipe"])
def test_damaged_file_is_an_error_that_names_file_region_op_and_tensor(offloader, how, tmp_path):
    x = leaf(8, 8)
    y = checkpointed(block, offloader=offloader, region_name="block")(x)
    offloader.flush()
    path = stored(offloader)[-1]
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-1])
    elif how == "longer":
        path.write_bytes(content + b"x")
    elif how == "changed":
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    else:
        for each in [path] if how != "directory removed" else stored(offloader):
            each.unlink()
        if how == "directory removed":
            shutil.rmtree(offloader.directory)
        elif how == "a link":
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


def test_what_was_read_stays_as_it_is_whatever_becomes_of_the_file(tmp_path):
    path, content = str(tmp_path / "file"), torch.arange(10_000)
    checksum = files.write(path, content)
    value = files.read(path, content.nbytes, checksum).view(torch.int64)
    Path(path).write_bytes(bytes(content.nbytes))
    assert_same(value, content)
    os.truncate(path, 0)
    assert_same(value, content)


def test_error_about_a_damaged_file_that_was_to_be_read_ahead_keeps_nothing_alive(offloader):
    class Marker:
        pass

    def failing():
        marker = Marker()
        ticket = offloader.offload(torch.ones(100), remat.offload.OffloadInfo("r", "op", "x", "residual", 400))
        offloader.flush()
        os.truncate(ticket.path, 0)
        offloader.prefetch(ticket)
        assert soon(lambda: offloader._store._ahead[ticket].done())
        with pytest.raises(remat.OffloadError, match="0 bytes instead of 400"):
            offloader.onload(ticket)
        return ref(marker)

    with collector_off():
        assert failing()() is None


def test_directory_that_is_removed_keeps_later_tensors_resident(offloader):
    Path(offloader.directory).rmdir()
    x = leaf(8, 8)
    with pytest.warns(remat.RematWarning, match="FileNotFoundError"):
        y = run_and_flush(offloader, x)
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_writer_that_is_killed_loses_nothing_and_another_takes_its_place(tmp_path, monkeypatch, error):
    write, kills = files.write, [3]

    def deadly(path, content):
        checksum = write(path, content)
        if kills[0]:
            kills[0] -= 1
            raise error
        return checksum

    monkeypatch.setattr(files, "write", deadly)
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1), leaf(8, 8)
    with pytest.warns(remat.RematWarning, match="no file could be written"):
        y = run_and_flush(offloader, x)
    assert len(stored(offloader)) == 12 - 3
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x))
    assert soon(lambda: stored(offloader) == [])


def test_reader_that_is_killed_is_no_loss(tmp_path, monkeypatch):
    read, kills = files.read, [4]

    def deadly(*args):
        if threading.current_thread() is not threading.main_thread() and kills[0]:
            kills[0] -= 1
            raise SystemExit
        return read(*args)

    monkeypatch.setattr(files, "read", deadly)
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1), leaf(8, 8)
    y = run(offloader, x)
    offloader.flush()
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x))


def test_fifty_threads_share_an_offloader(tmp_path):
    offloader, errors = remat.DiskOffloader(tmp_path, min_bytes=0, queue_bytes=20_000), []

    def work():
        try:
            for _ in range(2):
                torch.manual_seed(0)
                x = leaf(16, 16)
                y = run(offloader, x)
                assert_same(expected_gradient(x), torch.autograd.grad(y.sum(), x)[0])
                del y
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert soon(lambda: stored(offloader) == [])
    assert offloader.offloaded_bytes == 0


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
    code = CHILD.format(root=ROOT, directory=str(directory), end=end, count=count)
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
    folder = files.Folder(str(tmp_path))
    path = Path(folder.new_path())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.write_bytes(b"x")
    files.remove_folders_left_in(str(tmp_path))
    assert path.exists()
    os.close(folder._lock)  # as when it ends
    files.remove_folders_left_in(str(tmp_path))
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
    folder = files.Folder(str(tmp_path))
    assert len(removed) == 1
    assert Path(folder.new_path()).parent.exists()
    folder.remove()
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
    write, collected = files.write, []

    def collecting(path, content):
        collected.append(gc.collect())
        return write(path, content)

    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    monkeypatch.setattr(files, "write", collecting)
    gc.disable()
    try:
        store, offloader.cycle = offloader._store, offloader
        del offloader
        store.put(torch.ones(10), remat.offload.OffloadInfo("r", "o", "t", "residual", 40), None)
        assert soon(lambda: list(tmp_path.iterdir()) == [])
        assert soon(lambda: collected and collected[0] > 0)
    finally:
        gc.enable()


def test_bytes_of_released_tensors_are_not_counted_while_another_thread_has_the_lock(tmp_path):
    """A release never waits: whoever has the lock does it. Who asks afterwards gets the sum without it."""
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    info = remat.offload.OffloadInfo(region="r", op=None, tensor="t", kind="input", bytes=400)
    ticket = offloader.offload(torch.randn(100), info)
    offloader.flush()
    assert len([path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == 400]) == 1
    lock, taken, released = offloader._store._lock, threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            released.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    offloader.release(ticket)
    threading.Timer(0.05, released.set).start()
    assert offloader.offloaded_bytes == 0
    holder.join()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size == 400] == []


SLOW = """
import time, torch
import torch_remat as remat
from torch_remat.offload import files
write = files.write
files.write = lambda path, content: (time.sleep(0.5), write(path, content))[1]
offloader = remat.DiskOffloader({directory!r}, min_bytes=0, threads=1)
block, x = remat.checkpoint(offloader=offloader, offload_inputs=True)(torch.sin), torch.ones(9, requires_grad=True)
kept = [block(x * step) for step in range(120)]
"""


def test_leaving_the_process_does_not_wait_for_what_is_queued(tmp_path):
    """To write it all would take a minute."""
    code = SLOW.format(directory=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=45, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_offloader_that_goes_while_a_file_is_written_waits_for_nothing(tmp_path, monkeypatch):
    """A collection may come in the middle of a thread's start, where to wait for a thread would be for ever."""
    begun, go, write = threading.Event(), threading.Event(), files.write

    def slowly(path, content):
        begun.set()
        assert go.wait(10)
        return write(path, content)

    monkeypatch.setattr(files, "write", slowly)
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1)
    ticket = offloader.offload(torch.ones(8), remat.offload.OffloadInfo("block", "b", "y", "output", 32))
    assert begun.wait(10)
    with monkeypatch.context() as within:
        within.setattr(threading.Thread, "join", lambda *args: pytest.fail("it waits for a thread"))
        within.setattr(threading.Thread, "start", lambda *args: pytest.fail("it starts a thread"))
        del offloader
        gc.collect()
    assert len(list(tmp_path.iterdir())) == 1, "a thread writes there"
    go.set()
    assert soon(lambda: not list(tmp_path.iterdir()))
    del ticket
