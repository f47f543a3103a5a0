"""The check of an offloader against the contract of `torch_remat.Offloader`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat.offload.protocol import Offloader, OffloadInfo

_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.bool, torch.uint8, torch.int32, torch.int64),
)
_PATIENCE_SECONDS = 10.0


def check_offloader(offloader: Offloader, *, device: str | torch.device = "cpu", length: int = 50_000) -> int:
    """Check an offloader against the contract of `torch_remat.Offloader`.

    Tensors of several dtypes and lengths travel, are prefetched, read once, twice or never, changed by their reader,
    and released in another order, on other threads, and from inside the offloader's own calls. What the offloader
    does not take, with or without an exception, is left out.

    Args:
        offloader: The offloader. It should keep bits; one that does not fails here.
        device: Where the tensors are.
        length: How many elements the larger tensors have.

    Returns:
        How many tensors the offloader took.

    Raises:
        AssertionError: It broke a rule, which the message tells.

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
    checked, taken = _Checked(offloader), 0
    for dtype in _DTYPES:
        for count in (1, 7, length):
            taken += _round_trip(checked, _some(count, dtype, where, seed=count))
    if taken == 0 and checked.refusal is not None:
        error = checked.refusal
        raise AssertionError(f"the offloader takes nothing: offload always raises, at last {error!r}") from error
    _sources_are_let_go(checked, where, length)
    _in_any_order(checked, where, length)
    _on_threads(checked, where, length)
    _release_inside_calls(checked, where, length)
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
        try:
            ticket = self._offloader.offload(
                tensor, OffloadInfo("check_offloader", "op", "x", "residual", tensor.nbytes)
            )
        except Exception as error:
            self.refusal = error
        self.returned += 1
        kept = tensor.untyped_storage().nbytes() == size and torch.equal(_bits(tensor), _bits(before))
        _require(kept, "offload leaves the tensor as it is, also if it does not take it")
        if ticket is not None and hasattr(self._offloader, "still_here"):
            here = self._call("still_here", ticket, "a tensor that was just offloaded")
            same = here is None or here.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            _require(same, "still_here returns the tensor that offload was given, or None")
        return ticket

    def prefetch(self, ticket: Any, what: str) -> None:
        """Ask for a tensor ahead."""
        self._call("prefetch", ticket, what)

    def onload(self, ticket: Any, expected: torch.Tensor, what: str) -> torch.Tensor:
        """Return what comes back, after a comparison."""
        result = self._call("onload", ticket, what)
        _require(isinstance(result, torch.Tensor), f"onload returns a tensor ({what})")
        for field in ("shape", "dtype", "device"):
            got, wanted = getattr(result, field), getattr(expected, field)
            _require(got == wanted, f"onload returns the same {field}: {wanted}, not {got} ({what})")
        plain = result.layout is torch.strided and result.stride() == (1,) and not result.requires_grad
        _require(plain, f"onload returns a plain contiguous tensor ({what})")
        _require(torch.equal(_bits(result), _bits(expected)), f"onload returns the same bits ({what})")
        tensor: torch.Tensor = result
        return tensor

    def release(self, ticket: Any) -> None:
        """Release a ticket."""
        self._call("release", ticket, "on any thread")

    def _call(self, method: str, ticket: Any, what: str) -> Any:
        try:
            return getattr(self._offloader, method)(ticket)
        except Exception as error:
            raise AssertionError(f"the offloader breaks the contract: {method} raises {error!r} ({what})") from error
        finally:
            self.returned += 1


def _round_trip(offloader: _Checked, tensor: torch.Tensor) -> int:
    expected = tensor.clone()
    ticket = offloader.offload(tensor)
    if ticket is None:
        return 0
    del tensor
    what = f"a tensor of {len(expected):,} {expected.dtype}"
    offloader.onload(ticket, expected, what)
    offloader.onload(ticket, expected, f"{what}, read again")
    offloader.prefetch(ticket, what)
    offloader.prefetch(ticket, f"{what}, for the second time")
    offloader.onload(ticket, expected, f"{what}, prefetched twice")
    offloader.prefetch(ticket, what)
    offloader.release(ticket)
    return 1


def _sources_are_let_go(offloader: _Checked, device: torch.device, length: int) -> None:
    """The tensor that was given is freed, changed results do not come back, and released tickets keep nothing."""
    tensor = _some(length, torch.float32, device, seed=1)
    expected, source = tensor.clone(), StorageWeakRef(tensor.untyped_storage())
    ticket = offloader.offload(tensor)
    if ticket is None:
        return
    del tensor

    def let_go() -> bool:
        other = offloader.offload(_some(length, torch.float32, device, seed=2))  # some look only when they are called
        if other is not None:
            offloader.release(other)
        expired: bool = source.expired()
        return expired

    if _soon(let_go):
        result = offloader.onload(ticket, expected, "a tensor whose memory was freed")
        result.add_(1)
        offloader.onload(ticket, expected, "a tensor whose first result was changed by its reader")
        del result
    result = offloader.onload(ticket, expected, "a tensor that is released while its reader has it")
    back = StorageWeakRef(result.untyped_storage())
    offloader.release(ticket)
    del ticket
    _require(torch.equal(_bits(result), _bits(expected)), "a result stays as it is after release")
    del result
    _require(_soon(back.expired), "after release, the result of onload is not kept")
    _require(_soon(source.expired), "after release, the tensor that was offloaded is not kept")


def _in_any_order(offloader: _Checked, device: torch.device, length: int) -> None:
    tensors = [_some(length + index, torch.float32, device, seed=index) for index in range(6)]
    tickets = [offloader.offload(tensor) for tensor in tensors]
    order = [(ticket, tensor) for ticket, tensor in zip(tickets, tensors, strict=True) if ticket is not None]
    for ticket, _ in order[::2]:
        offloader.prefetch(ticket, "one of several tensors")
    for ticket, tensor in order[1::2] + order[::2]:
        offloader.onload(ticket, tensor, "one of several tensors")
    for ticket, _ in order[::2] + order[1::2]:
        offloader.release(ticket)


def _on_threads(offloader: _Checked, device: torch.device, length: int) -> None:
    """Eight threads at once, which take turns between any two lines of the offloader."""
    together = threading.Barrier(8)

    def take_turns(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != __file__:
            time.sleep(0)
        return take_turns

    def work(seed: int) -> None:
        tensors = [_some(length // (step + 1), torch.float32, device, seed=seed * 10 + step) for step in range(5)]
        what = "a tensor of one of several threads"
        together.wait()
        sys.settrace(take_turns)
        for _ in range(2):
            sent = [(ticket, tensor) for tensor in tensors if (ticket := offloader.offload(tensor)) is not None]
            for ticket, tensor in sent:
                offloader.prefetch(ticket, what)
                offloader.onload(ticket, tensor, what)
            _elsewhere([partial(offloader.release, ticket) for ticket, _ in sent])

    _elsewhere([partial(work, seed) for seed in range(8)])


def _release_inside_calls(offloader: _Checked, device: torch.device, length: int) -> None:
    """Release tickets between any two lines that run inside the offloader, as a garbage collection may."""
    errors: list[BaseException] = []

    def work() -> None:
        for every in range(1, 6):
            tensors = [_some(length, torch.float32, device, seed=seed) for seed in range(20)]
            waiting = [ticket for tensor in tensors if (ticket := offloader.offload(tensor)) is not None]
            lines = 0

            def trace(frame: Any, event: str, arg: Any, every: int = every, waiting: list[Any] = waiting) -> Any:
                nonlocal lines
                lines += event == "line" and frame.f_code.co_filename != __file__
                if event == "line" and lines % every == 0 and waiting:
                    _caught(partial(offloader.release, waiting.pop()), errors)
                return trace

            sys.settrace(trace)
            try:
                for tensor in tensors[:3]:
                    ticket = offloader.offload(tensor)
                    if ticket is not None:
                        what = "a tensor that is read while others are released"
                        offloader.prefetch(ticket, what)
                        offloader.onload(ticket, tensor, what)
                        offloader.release(ticket)
            finally:
                sys.settrace(None)
            for ticket in waiting:
                offloader.release(ticket)

    thread = threading.Thread(target=_caught, args=(work, errors), daemon=True)
    thread.start()
    while thread.is_alive():
        before = offloader.returned  # all calls together may take long, where much else runs, but no single one does
        thread.join(_PATIENCE_SECONDS * 3)
        goes_on = offloader.returned > before or not thread.is_alive()
        _require(goes_on, "release does not wait for a lock that the offloader's other methods hold")
    if errors:
        raise errors[0]


def _caught(work: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        errors.append(error)


def _elsewhere(works: Sequence[Callable[[], None]]) -> None:
    """Do things on a thread each, and raise what the first of them raised that did."""
    errors: list[BaseException] = []
    threads = [threading.Thread(target=_caught, args=(work, errors)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _some(count: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
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
