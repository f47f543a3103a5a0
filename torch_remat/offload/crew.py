"""Threads that do jobs, and may die at any moment.

In: jobs, in two queues. Kept: each until a thread takes it. Out: the jobs that ended, and a ring for those who wait.

NOTE [ Threads that may be killed ]
1. An exception may come in such a thread between any two bytecodes (``PyThreadState_SetAsyncExc``), also just after it
   took a lock. So it takes none that others wait for: all that it does to what it shares is single calls of C code,
   done wholly or not at all (``deque.append``, ``SimpleQueue.put``), and single assignments.
2. A job is taken by an append to the list of its takers: the first one has it. So whenever a thread dies, the job tells
   whether that thread had it; and who wants a job left undone takes it.
3. How a job ended is one assignment, the last thing that is done for it. A job without that whose taker is dead failed.
4. What a dead thread took out of a queue and did not reach is untaken: it is put back. More rings and more entries of
   a queue than jobs do no harm.
5. A garbage collection in such a thread runs finalizers of others, with their locks: ours leave that to other threads
   (`guard.here`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from torch_remat.offload.guard import here

Bell = SimpleQueue[None]
"""Something to wait for: ``put`` rings it."""


class Job(ABC):
    """Something for a thread to do; see NOTE [ Threads that may be killed ]."""

    __slots__ = ("_takers",)

    def __init__(self) -> None:
        self._takers: list[tuple[threading.Thread | None]] = []

    def take(self, taker: threading.Thread | None) -> bool:
        """Whether a thread is the first to take the job, and so the one to do it; None leaves it undone."""
        if self._takers:
            return False
        mine = (taker,)
        self._takers.append(mine)
        return self._takers[0] is mine

    @property
    def taken(self) -> bool:
        """Whether somebody has taken the job."""
        return bool(self._takers)

    def taker_died(self) -> bool:
        """Whether a thread took the job and is dead now; then look whether it was done before."""
        taker = self._takers[0][0] if self._takers else None
        return taker is not None and not taker.is_alive()

    @abstractmethod
    def do(self) -> None:
        """Do it; raises nothing of its own."""


U = TypeVar("U", bound=Job)  # urgent
J = TypeVar("J", bound=Job)


class Crew(Generic[U, J]):
    """Threads, and what they have to do. All methods are for other threads, and for one at a time where they say so.

    Args:
        count: How many threads there should be.

    Attributes:
        ended: Jobs that were done and are not urgent ones: to be taken away by the owner.
        threads: Those that were started.
    """

    def __init__(self, count: int) -> None:
        self.ended: deque[J] = deque()
        self.threads: list[threading.Thread] = []
        self._count = count
        self._urgent: deque[U] = deque()
        self._jobs: deque[J] = deque()
        self._wake: Bell = SimpleQueue()
        self._bells: dict[Bell, None] = {}
        self._closed = False

    def add(self, job: J) -> None:
        """Have a job done."""
        self._jobs.append(job)
        self._wake.put(None)

    def add_urgent(self, job: U) -> None:
        """Have a job done before all others."""
        self._urgent.append(job)
        self._wake.put(None)

    def is_whole(self) -> bool:
        """Whether all threads are there; for one thread at a time."""
        return len(self.threads) == self._count and all(thread.is_alive() for thread in self.threads)

    def make_whole(self, undone: Iterable[J]) -> str | None:
        """Start threads in the place of those that died; return what is wrong if there is none at all then.

        For one thread at a time, that adds no job meanwhile.

        Args:
            undone: All jobs that nobody has taken.
        """
        self._jobs.clear()
        self._jobs.extend(undone)
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        while len(self.threads) < self._count:
            thread = threading.Thread(target=self._work, name="torch_remat files", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self.threads:
                    return f"no thread could be started: {error}"
                break
            self.threads.append(thread)
        for _ in self.threads:
            self._wake.put(None)
        return None

    def ring(self) -> None:
        """Wake those who wait for news."""
        for bell in list(self._bells):
            bell.put(None)

    @contextmanager
    def news(self) -> Iterator[Callable[[], bool]]:
        """Give a function that waits for the next ring, but not long, and returns whether there was one."""
        bell: Bell = SimpleQueue()
        try:
            self._bells[bell] = None
            yield lambda: rings(bell)
        finally:
            self._bells.pop(bell, None)

    def close(self) -> None:
        """Have the threads end, once they are done with what they have in their hands, and wait for that."""
        self._closed = True
        self._urgent.clear()
        self._jobs.clear()
        self._wake.put(None)
        self.ring()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        here.mortal = True
        me = threading.current_thread()
        while True:
            self._wake.get()
            while not self._closed and self._do_one(me):
                pass
            if self._closed:
                self._wake.put(None)  # for the next one
                return

    def _do_one(self, me: threading.Thread) -> bool:
        with suppress(IndexError):
            urgent = self._urgent.popleft()
            if urgent.take(me):
                urgent.do()
            return True
        with suppress(IndexError):
            job = self._jobs.popleft()
            if job.take(me):
                job.do()
                self.ended.append(job)
                self.ring()
            return True
        return False


def rings(bell: Bell) -> bool:
    """Wait for a bell, but not long: whoever should ring it may have died."""
    try:
        bell.get(timeout=0.1)
    except Empty:
        return False
    return True
