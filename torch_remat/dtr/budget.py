"""Blocks: run any training step in so many bytes, and write a log of it.

In: a limit, a heuristic. Kept: while the block runs, its runtime, one a thread. Out: the runtime, with what happened.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from torch_remat._compat import as_written
from torch_remat._util.bytes import parse_bytes
from torch_remat._util.text import format_bytes
from torch_remat.dtr._block_memory import BlockMemory
from torch_remat.dtr._memory import Deallocation
from torch_remat.dtr._ops import Cost, Costs
from torch_remat.dtr._pool import Search
from torch_remat.dtr._recorder import Recorder
from torch_remat.dtr._runtime import BlockRuntime
from torch_remat.dtr.heuristics import Heuristic, resolve
from torch_remat.errors import UsageError

_active = threading.local()


class Runtime:
    """The runtime of a block, which `budget` returns: enter it once. It says what the block did, also afterwards."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._block = BlockRuntime(memory)
        self._uncompiled = as_written()
        self._is_new = True

    def __enter__(self) -> Runtime:
        if not self._is_new:
            raise UsageError("a budget is for one block", remedy="Call remat.dtr.budget(...) again.")
        if active_runtime() is not None:
            raise UsageError(
                "a budget inside of a budget: this thread is in the block of one already",
                remedy="One budget holds for all of a block; end it before the next begins.",
            )
        self._is_new = False
        self._uncompiled.__enter__()
        self._block.__enter__()
        _active.runtime = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the block: all that it made becomes plain. What fails meanwhile is raised if the block ended well."""
        _active.runtime = None
        self._block.__exit__(None, None, None)
        self._uncompiled.__exit__(None, None, None)
        failure = self._block.close()
        if failure is not None and error is None:
            raise failure

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that may be alive; None without a budget."""
        limit = self._memory.limit
        return None if math.isinf(limit) else int(limit)

    @property
    def live_bytes(self) -> int:
        """Bytes of what the block made, now."""
        self._block.forget()
        self._memory.poll()
        return self._memory.live

    @property
    def peak_bytes(self) -> int:
        """The most bytes of what the block made that were alive at once."""
        return self._memory.peak

    @property
    def evictions(self) -> int:
        """How many storages were evicted to make room."""
        return self._memory.evictions

    @property
    def rematerializations(self) -> int:
        """How many ops ran again."""
        return self._memory.rematerializations

    @property
    def base_compute(self) -> float:
        """Cost of the program's own ops: seconds, or the unit of the cost function."""
        return self._memory.clock - self._memory.time_again

    @property
    def total_compute(self) -> float:
        """The same with the ops that ran again."""
        return self._memory.clock

    @property
    def overhead(self) -> float:
        """`total_compute` over `base_compute`; 1 where nothing ran."""
        return self.total_compute / self.base_compute if self.base_compute else 1.0

    def report(self) -> str:
        """Say in a few lines what the block did."""
        memory, limit = self._memory, self.budget_bytes
        lines = [
            f"budget {format_bytes(limit) if limit is not None else 'none'}, peak {format_bytes(memory.peak)}, "
            f"live {format_bytes(memory.live)}",
            f"{memory.evictions:,} evictions, {memory.rematerializations:,} ops run again, "
            f"compute x{self.overhead:.3f} ({type(memory.heuristic).__name__}, {memory.deallocation})",
        ]
        most = sorted(memory.again.items(), key=lambda item: -item[1][1])[:8]
        if most:
            width = max(len(name) for name, _ in most)
            lines.append("run again:")
            lines += [f"  {name:<{width}}  {count:>8,} times  cost {cost:.6g}" for name, (count, cost) in most]
        return "\n".join(lines)


def budget(
    limit: str | int | float,
    heuristic: str | type[Heuristic] | Heuristic = "dtr_eq",
    *,
    cost: Cost = "measured",
    deallocation: Deallocation = "eager",
    search: Search | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Runtime:
    """Run a block of code in a budget of bytes, by evicting tensors and recomputing them.

    Inside the block the results of ops are `EvictableTensor`s. What was there before is constant; gradients of plain
    leaves are plain; when the block ends, everything that it made and that is still referenced becomes plain.

    Args:
        limit: Bytes, ``"600 MiB"``, or a float below 1: a share of the device's memory. It counts what the block
            makes (activations, gradients), not what was there before, nor memory inside an op.
        heuristic: What is evicted first: a name, or a subclass of `Heuristic` or an instance of one.
        cost: What ops cost: ``"measured"`` seconds (medians by op and shapes), ``"flops"``, or a function of the op,
            its args, its kwargs and its result (or of the first few of these).
        deallocation: What happens to what the program can no longer reach: ``"eager"`` evicts it at once,
            ``"ignore"`` leaves it to the heuristic, ``"banish"`` removes it for good once nothing evicted needs it.
        search: How the victim is found: ``"index"``, ``"sample"`` or ``"scan"``; the heuristic's best by default.
        seed: Of the sample.
        device: The device of which a share is meant.

    Raises:
        UsageError: The limit is zero, negative or nonsense. Of the block: one is active in this thread already, or
            at its end a tensor cannot become plain.
        BudgetError: Inside the block: an op does not fit, with nothing left to evict.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> weight = torch.ones(64, 64, requires_grad=True)
        >>> with remat.dtr.budget("200 KiB") as runtime:
        ...     x = torch.ones(64, 64)
        ...     for _ in range(20):
        ...         x = torch.tanh(x @ weight)
        ...     x.sum().backward()
        >>> type(weight.grad) is torch.Tensor, runtime.peak_bytes <= 200 * 2**10, runtime.evictions > 0
        (True, True, True)
    """
    limit_bytes = parse_bytes(limit, device)
    return Runtime(BlockMemory(limit_bytes, resolve(heuristic), Costs(cost), deallocation, search, seed))


def active_runtime() -> Runtime | None:
    """Return the runtime of the block that this thread is in, None outside."""
    return getattr(_active, "runtime", None)


@contextmanager
def record(path: str | Path) -> Iterator[Runtime]:
    """Write the log of all that a block does with tensors, for `simulate`.

    Inside the block of a budget it writes what that block does; elsewhere it is such a block itself, without a limit.

    Args:
        path: Of the file, which is overwritten. It is sound also after an exception.

    Example:
        >>> import tempfile
        >>> import torch_remat as remat
        >>> path = tempfile.mkdtemp() + "/step.log"
        >>> weight = torch.ones(8, requires_grad=True)
        >>> with remat.dtr.record(path):
        ...     loss = (weight * 2).sum()
        >>> len(remat.dtr.Log.load(path).ops) > 0
        True
    """
    runtime = active_runtime()
    if runtime is not None and runtime._block.recorder is not None:
        raise UsageError("this block is being recorded already", remedy="Record it once.")
    with ExitStack() as stack:
        if runtime is None:
            runtime = stack.enter_context(Runtime(BlockMemory(math.inf, resolve("lru"), Costs("measured"))))
        block, recorder = runtime._block, Recorder(path, seconds=runtime._memory.costs.measured)
        stack.enter_context(recorder)
        block.recorder = recorder
        stack.callback(setattr, block, "recorder", None)
        stack.callback(block.forget)
        yield runtime
