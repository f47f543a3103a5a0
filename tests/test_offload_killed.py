"""`DiskOffloader` when its threads, or the main one, are interrupted at any point."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time

import pytest
import torch
from disk_model import expected_gradient, run, soon, stored
from helpers import assert_same, leaf

import torch_remat as remat
from torch_remat.offload.guard import Guard

SECONDS = 4
INFO = remat.OffloadInfo("r", "o", "t", "residual", 4096)


@pytest.fixture
def silent(monkeypatch):
    """Threads that are killed say nothing."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


def kill(thread, error):
    """Raise an error in a thread, between two bytecodes."""
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))


def open_files():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def in_time(work):
    """Do something on a thread of its own; fail if that is not done in time, or raises."""
    errors = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


@pytest.mark.filterwarnings("ignore:DiskOffloader:RuntimeWarning")
@pytest.mark.parametrize("error", [SystemExit, ValueError])
def test_threads_that_are_killed_at_any_point_lose_nothing(tmp_path, silent, error):
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0, queue_bytes=2000), leaf(8, 8)
    expected, killed, others = expected_gradient(x), [0], set(threading.enumerate())

    def kill_all():
        for thread in set(threading.enumerate()) - others:
            if thread.name == "torch_remat files":
                kill(thread, error)
                killed[0] += 1

    def steps():
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            y = run(offloader, x)
            kill_all()
            if killed[0] % 3 == 0:
                offloader.flush()
                kill_all()
            (actual,) = torch.autograd.grad(y.sum(), x)
            assert_same(expected, actual)
            del y
            kill_all()
        offloader.flush()

    opened = open_files()
    in_time(steps)
    assert killed[0] > 50
    assert open_files() <= opened + 2
    assert offloader.offloaded_bytes == 0
    assert stored(offloader) == []
    # What was done before does not count any more.
    y = run(offloader, x)
    offloader.flush()
    assert len(stored(offloader)) == 12
    del y


def test_thread_that_is_killed_between_a_jobs_result_and_its_report_has_written_the_file(tmp_path, silent):
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1)
    crew = offloader._store._crew

    class Deadly:
        def append(self, _):
            raise SystemExit

        def __len__(self):
            return 0

    ended, crew.ended = crew.ended, Deadly()
    tickets = [offloader.offload(torch.full((1024,), float(value)), INFO) for value in range(3)]
    assert soon(lambda: not crew.threads[0].is_alive())
    crew.ended = ended
    offloader.flush()
    assert len(stored(offloader)) == 3
    assert offloader.offloaded_bytes == 3 * 4096
    for value, ticket in enumerate(tickets):
        assert_same(offloader.onload(ticket), torch.full((1024,), float(value)))
        offloader.release(ticket)
    assert stored(offloader) == []


def test_release_by_a_collection_in_a_thread_of_the_offloader_takes_no_lock(tmp_path, monkeypatch):
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0, threads=1)
    ticket = offloader.offload(torch.ones(1024), INFO)
    offloader.flush()
    took = []

    class Trap:
        def acquire(self, *_):
            took.append(threading.current_thread())
            return lock.acquire(*_)

        def __enter__(self):
            self.acquire()

        def __exit__(self, *_):
            lock.release()

        def release(self):
            lock.release()

    lock, offloader._store.guard.lock = offloader._store.guard.lock, Trap()

    class Releasing:
        def __del__(self):
            offloader.release(ticket)

    entry = offloader.offload(torch.ones(1024), INFO)
    offloader.flush()
    held = Releasing()
    held.cycle = held
    del held
    monkeypatch.setattr(type(entry), "do", lambda self: (gc.collect(), self.end("")))
    gc.disable()
    try:
        entry = offloader.offload(torch.ones(1024), INFO)
        assert soon(lambda: ticket.released)
    finally:
        gc.enable()
    assert set(took) == {threading.main_thread()}
    assert len(stored(offloader)) == 1  # it is gone already
    assert offloader.offloaded_bytes == 2 * 4096


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:DiskOffloader:RuntimeWarning")
def test_interrupts_of_the_main_thread_leave_no_lock_taken(tmp_path):
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    lock, interrupted = offloader._store.guard.lock, 0
    tensor = torch.ones(1024)

    def interrupt(*_):
        raise KeyboardInterrupt

    def work():
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + (interrupted % 97) * 1e-5)
        for _ in range(100):
            ticket = offloader.offload(tensor, INFO)
            offloader.prefetch(ticket)
            offloader.onload(ticket)
            offloader.release(ticket)

    before = signal.signal(signal.SIGALRM, interrupt)
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            with contextlib.suppress(KeyboardInterrupt):
                work()
            interrupted += 1
            assert not lock.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 50
    in_time(offloader.flush)
    ticket = offloader.offload(tensor, INFO)
    in_time(offloader.flush)
    assert_same(offloader.onload(ticket), tensor)


def test_what_is_released_while_the_lock_is_taken_is_dealt_with_by_its_holder():
    class Owner:
        def __init__(self):
            self.settled = []
            self.guard = Guard(self.settled_one)

        def settled_one(self, value):
            self.settled.append(value)

    owner = Owner()

    def work():
        adding = threading.Thread(target=owner.guard.add, args=(1,))
        adding.start()
        adding.join()  # it found the lock taken
        assert owner.settled == []

    owner.guard.run(work)
    assert owner.settled == [1]
    owner.guard.add(2)
    assert owner.settled == [1, 2]
    assert not owner.guard.lock.locked()
