"""The bench for dynamic rematerialization: what finding a victim takes, and how fast the simulator is.

Both are counted in CPU time, on one thread. They have no contenders and no bars.
"""

from __future__ import annotations

import random
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import process_time

from torch_remat.dtr import Log, LogWriter, simulate
from torch_remat.dtr._pool import make_pool
from torch_remat.dtr.heuristics import DtrEq

from .measure import undisturbed
from .tables import markdown

LIVE = (100, 1_000, 10_000)
SEARCHES = ("scan", "sample", "index")
EVICTIONS = 400
BLOCKS = (400, 800, 1_600)
ROUNDS = 5


class Block:
    """A storage, as heuristics see it."""

    def __init__(self, cost: int, parent: Block | None, clock: int) -> None:
        self.cost, self.size_bytes, self.last_access = cost, 4, clock
        self.resident, self.note, self.place = True, None, -1
        self.parents = [] if parent is None else [parent]
        self.children: list[Block] = []
        if parent is not None:
            parent.children.append(self)


def report(rounds: int) -> str:
    """Measure, and return both tables."""
    with undisturbed():
        return f"{search_table(min(rounds, ROUNDS))}\n\n{simulator_table(min(rounds, ROUNDS))}"


def search_table(rounds: int) -> str:
    """Return microseconds an eviction, by search and by how many storages are evictable."""
    rows = [
        [search, *(f"{median(_search_us(search, live) for _ in range(rounds)):,.0f}" for live in LIVE)]
        for search in SEARCHES
    ]
    return markdown(["dtr_eq, us an eviction, by live storages", *(f"{live:,}" for live in LIVE)], rows)


def _search_us(search: str, live: int) -> float:
    """Return the time of an eviction in a long chain, where a third of what was evicted comes back."""
    draw, heuristic = random.Random(0), DtrEq()
    pool = make_pool(heuristic, search)
    clock, last, out = 0, None, []
    for _ in range(live):
        clock += 1
        last = Block(draw.randint(1, 9), last, clock)
        pool.add(last)
    pool.victim(clock)
    spent = 0.0
    for number in range(EVICTIONS):
        clock += 1
        start = process_time()
        if number % 3 == 2:
            block = out.pop(draw.randrange(len(out)))
            block.resident, block.last_access = True, clock
            heuristic.rematerialized(block)
        else:
            block = last = Block(draw.randint(1, 9), last, clock)
        pool.add(block)
        victim = pool.victim(clock)
        pool.discard(victim)
        victim.resident = False
        heuristic.evicted(victim)
        spent += process_time() - start
        out.append(victim)
    return spent / EVICTIONS * 1e6


def simulator_table(rounds: int) -> str:
    """Return the time of whole simulations at half the peak, by the length of the log."""
    rows = []
    for blocks in BLOCKS:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "net.log")
            write_network(path, blocks)
            start = process_time()
            log = Log.load(path)
            loaded = process_time() - start
        exact = ["dtr"] if blocks == BLOCKS[0] else []  # its time grows with the square
        for heuristic in ("dtr_eq", "lru", *exact):
            times = []
            for _ in range(rounds):
                start = process_time()
                result = simulate(log, 0.5 * log.peak_bytes, heuristic)
                times.append(process_time() - start)
            verdict = "ran out" if result.ran_out else "stopped" if result.stopped else f"{result.overhead:.2f}"
            rows.append(
                [
                    heuristic,
                    f"{log.lines:,}",
                    f"{len(log.ops):,}",
                    f"{result.evictions:,}",
                    verdict,
                    f"{loaded:.2f}",
                    f"{median(times):.2f}",
                    f"{result.metadata_accesses / max(1, result.evictions):,.0f}",
                ]
            )
    header = ["simulation at half the peak", "lines", "ops", "evictions", "overhead", "load s", "run s"]
    return markdown([*header, "looked at, an eviction"], rows)


def write_network(path: Path, blocks: int) -> None:
    """Write the log of a residual network: a matmul, a norm, an activation and a sum a block, and their gradients."""
    draw = random.Random(0)
    with LogWriter(path) as log:

        def op(result: str, args: list[str], nanoseconds: int, size: int = 1000) -> None:
            log.call("op", args, [(result, size, -1)], nanoseconds * draw.uniform(0.8, 1.2))

        log.constant("x0", 1000)
        for block in range(blocks):
            log.constant(f"w{block}", 40)
            op(f"m{block}", [f"x{block}", f"w{block}"], 900)
            op(f"n{block}", [f"m{block}"], 200)
            op(f"a{block}", [f"n{block}"], 100)
            op(f"x{block + 1}", [f"x{block}", f"a{block}"], 100)
        op(f"d{blocks}", [f"x{blocks}"], 100)
        for block in reversed(range(blocks)):
            log.release(f"x{block + 1}")
            steps = [f"d{block + 1}", f"da{block}", f"dn{block}", f"dm{block}"]
            for (above, below), saved in zip(pairwise(steps), ("n", "m", "x"), strict=True):
                op(below, [above, f"{saved}{block}"], 400)
                if above != steps[0]:
                    log.release(above)
            op(f"dw{block}", [steps[-1], f"x{block}"], 900, 40)
            op(f"d{block}", [steps[-1], steps[0], f"w{block}"], 900)
            for name in ("m", "n", "a", "dm", "w", "dw"):
                log.release(f"{name}{block}")
            log.release(steps[0])
