"""The simulator: what a heuristic would cost on a log, at a budget.

It runs the log's ops in order in a memory of so many bytes, evicts storages when there is no room, and runs ops again
when something that was evicted is needed. Nothing is computed; time is the log's nanoseconds.

The rules stand in `_simulated.py` and, with what they leave open, in `docs/dtr.md`.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from torch_remat.dtr._pool import Search, make_pool
from torch_remat.dtr._simulated import Deallocation, Run
from torch_remat.dtr.heuristics import Heuristic, resolve
from torch_remat.dtr.log import Log
from torch_remat.errors import UsageError


@dataclass(frozen=True)
class Simulation:
    """What came out of `simulate`.

    Attributes:
        base_compute: Nanoseconds that the ops of the whole log take, each once.
        total_compute: Nanoseconds of all ops that were run, up to where the run ended.
        overhead: Total by base compute; 1 where the log takes no time.
        evictions: Storages evicted to make room.
        rematerializations: Ops run again.
        peak_bytes: The most bytes in use at once.
        metadata_accesses: Storages that were looked at to choose what to evict.
        ran_out: Whether there was no room and nothing more to evict.
        stopped: Whether ops run again took more than ``(max_overhead - 1) * base_compute``.
    """

    base_compute: float
    total_compute: float
    overhead: float
    evictions: int
    rematerializations: int
    peak_bytes: int
    metadata_accesses: int
    ran_out: bool
    stopped: bool


def simulate(
    log: Log,
    budget_bytes: float,
    heuristic: str | type[Heuristic] | Heuristic,
    deallocation: Deallocation = "eager",
    *,
    max_overhead: float = 2.0,
    search: Search | None = None,
    seed: int = 0,
    progress: Callable[[int], Any] | None = None,
) -> Simulation:
    """Run a log under a budget.

    Args:
        log: What the program did.
        budget_bytes: Most bytes in use at once, constants included; `Log.peak_bytes` is the natural unit.
        heuristic: What is evicted: a name, a class or an instance.
        deallocation: What happens when the program drops its last name of a storage. ``"eager"``: it is evicted at
            once. ``"ignore"``: nothing. ``"banish"``: it is removed for good once nothing evicted depends on it;
            what was made from it is pinned, since it can no longer be made again.
        max_overhead: The run stops when ops run again take more than this less 1 times the log's compute.
        search: How the victim is found: ``"index"``, ``"scan"`` or ``"sample"``; None takes the index where the
            heuristic has one.
        seed: Of the sample.
        progress: Called with the number of log steps done, every so often.

    Raises:
        UsageError: The heuristic, the kind of deallocation or the budget is none.

    Example:
        >>> log = Log.parse([])
        >>> simulate(log, 100, "dtr_eq").overhead
        1.0
    """
    if deallocation not in get_args(Deallocation):
        near = difflib.get_close_matches(str(deallocation), get_args(Deallocation), n=1)
        remedy = f"Did you mean {near[0]!r}?" if near else "It is 'eager', 'ignore' or 'banish'."
        raise UsageError(f"there is no deallocation {deallocation!r}", remedy=remedy)
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, numbers.Real) or not budget_bytes >= 0:
        raise UsageError(f"budget_bytes is a number of bytes, not {budget_bytes!r}")
    chooser = resolve(heuristic)
    pool = make_pool(chooser, search, seed)
    base = log.base_compute
    run = Run(log, budget_bytes, chooser, pool, deallocation, (max_overhead - 1) * base)
    run.run(progress)
    return Simulation(
        base_compute=base,
        total_compute=run.clock,
        overhead=run.clock / base if base else 1.0,
        evictions=run.evictions,
        rematerializations=run.rematerializations,
        peak_bytes=run.peak_bytes,
        metadata_accesses=chooser.accesses + pool.scored,
        ran_out=run.ran_out,
        stopped=run.stopped,
    )
