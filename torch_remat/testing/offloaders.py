"""The check of an offloader against the contract of `torch_remat.Offloader`."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat.offload.protocol import Offloader, OffloadInfo

_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.bool, torch.uint8, torch.int32, torch.int64),
)
_PATIENCE_SECONDS = 10.0
_THREADS = 8


def check_offloader(offloader: Offloader, *, device: str | torch.device = "cpu", length: int = 50_000) -> int:
    """Check an offloader against the contract of `torch_remat.Offloader`.

    Tensors of several dtypes and lengths travel, are prefetched, read once, twice or never, changed by their reader,
    and released in another order, on other threads, and from inside the offloader's own calls. What the offloader
    does not take, with or without an exception, is skipped.

    Args:
        offloader: The offloader. It should keep bits; one that does not fails here.
        device: Where the tensors are.
        length: How many elements the larger tensors have.

    Returns:
        How many tensors the offloader took.

    Raises:
        AssertionError: It broke a rule, which the message names.

    Example:
        >>> import tempfile
        >>> import torch_remat as remat
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     taken = remat.testing.check_offloader(remat.DiskOffloader(directory, min_bytes=0))
    """
    where = torch.device(device)
    _require(isinstance(offloader, Offloader), "it has the methods offload, prefetch, onload, release")
    ahead = getattr(offloader, "prefetch_bytes", 0)
    _require(isinstance(ahead, (int, float)), f"prefetch_bytes is a number, not {ahead!r}")
    checked = _Checked(offloader)
    taken = sum(_travels(checked, _some(count, dtype, where)) for dtype in _DTYPES for count in (1, 7, length))
    if taken == 0 and checked.refusal is not None:
        error = checked.refusal
        raise AssertionError(f"the offloader takes nothing: offload always raises, at last {error!r}") from error
    _lets_go(checked, where, length)
    _stands_threads(checked, where, length)
    return taken


class _Checked:
    """An offloader, each call of which is checked for what holds of all.

    Attributes:
        refusal: The latest exception of `offload`, which may raise what it likes.
        returned: How many calls have returned.
    """

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self.refusal: Exception | None = None
        self.returned = 0

    def offload(self, tensor: torch.Tensor) -> Any:
        """Return a ticket, or None if the tensor was not taken."""
        before, size, ticket = tensor.clone(), tensor.untyped_storage().nbytes(), None
        info = OffloadInfo("check_offloader", "op", "x", "residual", tensor.nbytes)
        try:
            ticket = self._offloader.offload(tensor, info)
        except Exception as error:
            self.refusal = error
        self.returned += 1
        kept = tensor.untyped_storage().nbytes() == size and torch.equal(_bits(tensor), _bits(before))
        _require(kept, "offload leaves the tensor as it is, also if it does not take it")
        if ticket is not None and hasattr(self._offloader, "still_here"):
            here = self.call("still_here", ticket, "a tensor that was just offloaded")
            same = here is None or here.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            _require(same, "still_here returns the tensor that offload was given, or None")
        return ticket

    def onload(self, ticket: Any, expected: torch.Tensor, what: str) -> torch.Tensor:
        """Return what comes back, after a comparison."""
        result: Any = self.call("onload", ticket, what)
        _require(isinstance(result, torch.Tensor), f"onload returns a tensor ({what})")
        for field in ("shape", "dtype", "device"):
            got, wanted = getattr(result, field), getattr(expected, field)
            _require(got == wanted, f"onload returns the same {field}: {wanted}, not {got} ({what})")
        plain = result.layout is torch.strided and result.stride() == (1,) and not result.requires_grad
        _require(plain, f"onload returns a plain contiguous tensor ({what})")
        _require(torch.equal(_bits(result), _bits(expected)), f"onload returns the same bits ({what})")
        tensor: torch.Tensor = result
        return tensor

    def call(self, method: str, ticket: Any, what: str) -> Any:
        """Call what must not raise."""
        try:
            return getattr(self._offloader, method)(ticket)
        except Exception as error:
            raise AssertionError(f"the offloader breaks the contract: {method} raises {error!r} ({what})") from error
        finally:
            self.returned += 1

    def release(self, ticket: Any) -> None:
        """Release a ticket."""
        self.call("release", ticket, "on any thread")


def _travels(offloader: _Checked, tensor: torch.Tensor) -> bool:
    expected = tensor.clone()
    ticket = offloader.offload(tensor)
    if ticket is None:
        return False
    del tensor
    what = f"a tensor of {len(expected):,} {expected.dtype}"
    for then in (what, f"{what}, read again"):
        offloader.onload(ticket, expected, then)
    for then in (what, f"{what}, for the second time"):
        offloader.call("prefetch", ticket, then)
    offloader.onload(ticket, expected, f"{what}, prefetched twice")
    offloader.call("prefetch", ticket, what)
    offloader.release(ticket)
    return True


def _lets_go(offloader: _Checked, device: torch.device, length: int) -> None:
    """The tensor that was given is freed, changed results do not come back, and released tickets keep nothing."""
    tensor = _some(length, torch.float32, device)
    expected, source = tensor.clone(), StorageWeakRef(tensor.untyped_storage())
    ticket = offloader.offload(tensor)
    if ticket is None:
        return
    del tensor

    def is_let_go() -> bool:
        other = offloader.offload(_some(length, torch.float32, device, seed=1))  # some look only when they are called
        if other is not None:
            offloader.release(other)
        expired: bool = source.expired()
        return expired

    if _soon(is_let_go):
        offloader.onload(ticket, expected, "a tensor whose memory was freed").add_(1)
        offloader.onload(ticket, expected, "a tensor whose first result was changed by its reader")
    result = offloader.onload(ticket, expected, "a tensor that is released while its reader has it")
    back = StorageWeakRef(result.untyped_storage())
    offloader.release(ticket)
    del ticket
    _require(torch.equal(_bits(result), _bits(expected)), "a result stays as it is after release")
    del result
    _require(_soon(back.expired), "after release, the result of onload is not kept")
    _require(_soon(source.expired), "after release, the tensor that was offloaded is not kept")


def _stands_threads(offloader: _Checked, device: torch.device, length: int) -> None:
    """Threads take turns between any two lines of the offloader, and release tickets there, as a collection may.

    Each releases those of another thread, every 1, 2, 5, ... lines, which comes to lines of all kinds.
    """
    together = threading.Barrier(_THREADS)
    done: list[deque[Any]] = [deque() for _ in range(_THREADS)]  # tickets that nobody will read, by thread
    errors: list[BaseException] = []

    def release_one(tickets: deque[Any]) -> None:
        try:
            if tickets:
                offloader.release(tickets.popleft())
        except BaseException as error:
            errors.append(error)

    def work(number: int) -> None:
        lines = 0

        def between_lines(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != __file__:
                time.sleep(0)
                lines += event == "line"
                if event == "line" and lines % (number * number + 1) == 0:
                    release_one(done[number - 1])
            return between_lines

        what = "a tensor of one of several threads"
        try:
            together.wait()
            sys.settrace(between_lines)
            for _ in range(8):
                tensors = [_some(length // step, torch.float32, device, number * 10 + step) for step in range(1, 6)]
                sent = [(ticket, tensor) for tensor in tensors if (ticket := offloader.offload(tensor)) is not None]
                for ticket, _ in sent:
                    offloader.call("prefetch", ticket, what)
                for ticket, tensor in sent[::-1]:
                    offloader.onload(ticket, tensor, what)
                done[number] += [ticket for ticket, _ in sent]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            before = offloader.returned  # all calls together may take long, where much else runs, but no single one
            thread.join(_PATIENCE_SECONDS * 3)
            goes_on = offloader.returned > before or not thread.is_alive()
            _require(goes_on, "release does not wait for a lock that the offloader's other methods hold")
    for tickets in done:
        while tickets:
            release_one(tickets)
    if errors:
        raise errors[0]


def _some(count: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        content &= 1
    return content.view(dtype).to(device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _soon(holds: Callable[[], bool]) -> bool:
    """Whether something comes true within a while; writing may take its time."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"the offloader breaks the contract: {rule}")
