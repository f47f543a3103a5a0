"""Budgets over ranks: what is evicted is decided between steps, and is the same on each rank.

In: blocks of a budget with a group, one for each step. Kept: for each bucket of lengths what regions take, and the plan
that came of it. Out: regions that the plan keeps, and others that keep nothing.

NOTE [ How ranks agree ]
1. No rank decides anything alone. Before the first region of each block all ranks reduce four numbers: a hash of the
   regions of the block before, twice, by how much that block passed the limit, and the bytes of the first region's
   inputs. What the ranks do next follows from the most of each, and from what they have reduced before.
2. The bytes give a bucket of lengths. A bucket without a plan recomputes everything: that is equal on each rank, and
   fits if anything does. Replays tell what regions would keep, and their time. After three such blocks, or one if
   another bucket has its plan, the most of these numbers over the ranks are solved for a plan: no clock, no use counts,
   of equals the first.
3. A rank that passes the limit under a plan goes on with it: alone it may evict nothing. The next block of that bucket
   recomputes everything, and the next plan has that much less room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate, zip_longest
from typing import Any

from torch import Tensor

from torch_remat.budgets.budget import UNLIMITED, Budget
from torch_remat.budgets.counted import lock
from torch_remat.budgets.group import Ranks
from torch_remat.budgets.kept import Inside, KeptRegion, Owner
from torch_remat.budgets.plain import Key
from torch_remat.budgets.plan import Plan
from torch_remat.budgets.steps import Planned, Row, Step
from torch_remat.dispatch.options import Keeper, Options
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import UsageError

_MEASURED = 3
"""So many blocks measure before the first plan."""
_UNKNOWN = (0.0, 0.0, 0.0, 0.0)


class _Bucket:
    """What is known of steps of about one length.

    Attributes:
        blocks: How many have measured.
        rows: The latest row of each region that was measured, by name.
        numbers: The most fixed bytes, saved bytes and saved tensors of each region in a step, and its time, negative.
        over: How many bytes plans have passed the limit by, in all.
        plan: What regions keep; None if that is to be measured.
        limit: The most that they keep by it.
    """

    def __init__(self) -> None:
        self.blocks = self.over = 0
        self.rows: dict[str, Row] = {}
        self.numbers: dict[str, Sequence[float]] = {}
        self.plan: Plan | None = None
        self.limit: float = UNLIMITED

    def measure(self, steps: Iterable[Step]) -> None:
        """Note what regions took in a block that has recomputed everything: the most bytes, and the least time."""
        self.blocks += 1
        for step in steps:
            for name, rows in step.by_name():
                self.rows[name] = rows[-1]
                sums = [sum(getattr(row, field) for row in rows) for field in ("fixed_bytes", "saved_bytes")]
                found = [*sums, max(row.tensors for row in rows), -sum(row.replay_seconds for row in rows)]
                self.numbers[name] = [*map(max, found, self.numbers.get(name, found))]


class AgreedBudget(Budget):
    """A budget that ranks share; see `budget`.

    Args:
        budget_bytes: The budget.
        share: The budget as a share, which is measured.
        reserve_bytes: How much of it is held in reserve; None learns that on an accelerator.
        ranks: The ranks.
    """

    def __init__(self, budget_bytes: int, share: float | None, reserve_bytes: int | None, ranks: Ranks) -> None:
        super().__init__(budget_bytes, share, reserve_bytes)
        self.decides_alone = self.is_to_meet = self._has_failed = False
        self._ranks = ranks
        self._buckets: dict[int, _Bucket] = {}
        self._bucket: _Bucket | None = None
        self._names: dict[str, None] = {}  # of the regions in the block, in order
        self._block = self._first_step = 0
        self._over = 0.0

    def __enter__(self) -> AgreedBudget:
        super().__enter__()
        self.is_to_meet = True
        return self

    def __exit__(self, kind: Any, *raised: object) -> None:
        self._has_failed = kind is not None
        if self._has_failed:
            self._ranks.leave_word(self._block, kind)
            self._names = {}
        self._block += 1
        super().__exit__(kind, *raised)

    def inside(self, around: Sequence[Owner]) -> Inside:
        """Return what regions in a block ask."""
        return _Inside(self, (self, *around))

    def plan(self) -> Plan:
        """Return the plan of the longest steps, on which all ranks have agreed; another world refuses it.

        Raises:
            UsageError: The ranks have not agreed yet.
        """
        plans = [bucket.plan for _, bucket in sorted(self._buckets.items()) if bucket.plan is not None]
        if not plans:
            raise UsageError(
                "the ranks have not agreed on a plan", remedy=f"They do after {_MEASURED} blocks, one for each step."
            )
        return plans[-1]

    # Between steps.

    def meet(self, leaves: Sequence[Any]) -> None:
        """Choose the plan, as all ranks do: the first region of a block is about to begin, with these inputs.

        Raises:
            UsageError: The ranks have run other regions.
            RematError: A rank has failed.
        """
        self.is_to_meet = False
        names, own = list(self._names), sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        blocks = [self._block] if self._has_failed else [self._block - 1, self._block]
        digest = int(sha256(repr((self._block, names)).encode()).hexdigest()[:12], 16)
        first, last, over, size = map(int, self._ranks.most([digest, -digest, self._over, own], blocks))
        if first != -last:
            raise _others([f"block {self._block}", *names], self._ranks)
        if self._bucket is not None and names:
            self._end_block(self._bucket, names, over, blocks)
        self._bucket = self._buckets.setdefault(bucket_of(size), _Bucket())
        self._names, self._over = {}, 0.0
        with lock:
            self._first_step = self.step_count
            if self.share is not None:
                self.limit = self._bucket.limit
            self._begin_step(own)

    def _end_block(self, bucket: _Bucket, names: Sequence[str], over: int, blocks: Sequence[int]) -> None:
        """Take what the block before was like, and agree on a plan if it is time; ``over`` is the most of all ranks."""
        if bucket.plan is not None:
            if over and any(not entry.evicted_tensors for entry in bucket.plan.values()):
                bucket.over, bucket.plan = bucket.over + over, None
            return
        bucket.measure(list(self.steps)[self._first_step - self.step_count :])
        if max(one.blocks for one in self._buckets.values()) < _MEASURED:
            return
        mine = [number for name in names for number in bucket.numbers.get(name, _UNKNOWN)]
        *numbers, least = self._ranks.most([*mine, -self.limit], blocks)
        fixed, saved, tensors, times = (numbers[first::4] for first in range(4))
        if self.share is None or self.share >= 1:
            bucket.limit = -least - bucket.over
        else:
            bucket.limit = sum(fixed) + self.share * sum(saved) - bucket.over
        kept = chosen(fixed, saved, [-time for time in times], bucket.limit)
        bucket.plan = Plan({}, self._ranks.world)
        for place, name in enumerate(names):
            if count := int(tensors[place]):  # one that no backward has come to recomputes everything
                bucket.plan[name] = Planned(
                    0 if kept[place] else count, count, int(saved[place]) * kept[place], -times[place] * kept[place]
                )

    # What regions ask.

    def runner(self, key: Key) -> Callable[..., Any] | None:
        """Return what runs a region without holders; None if it has some, or keeps nothing."""
        name: str = key[0]
        self._names.setdefault(name)
        return super().runner(key) if self._keeps(name) else None

    def add(self, kept: KeptRegion) -> None:
        """Take a region that begins: it keeps all, or nothing."""
        self._names.setdefault(kept.row.name)
        self.take(kept)
        if not self._keeps(kept.row.name):
            bucket = self._bucket
            kept.begin_empty(None if bucket is None or bucket.plan is None else bucket.rows.get(kept.row.name))
        if self.ledger.total > self.limit:
            self.make_room()

    def make_room(self, more: int = 0) -> None:
        """Note by how much the limit is exceeded: evicting something is not for this rank to decide."""
        if self._changed:
            self._changed = False
            self.refresh()
        over = self.ledger.total + more - self.limit
        if over > self._over:
            self._over = over
            self.note_too_much()

    def _keeps(self, name: str) -> bool:
        plan = None if self._bucket is None else self._bucket.plan
        return plan is not None and name in plan and not plan[name].evicted_tensors


class _Inside(Inside):
    """What regions ask in a block of a budget with a group."""

    __slots__ = ("_budget",)

    def __init__(self, budget: AgreedBudget, registers: Sequence[Owner]) -> None:
        super().__init__(registers)
        self._budget = budget

    def runner(
        self, options: Options, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """Return what runs a function as plain autograd; None for one that runs as a region."""
        if self._budget.is_to_meet:
            self._budget.meet(leaves_of(args, kwargs))
        return super().runner(options, function, args, kwargs)

    def begin(self, region: Region) -> Keeper | None:
        """Return what keeps a region's saved tensors."""
        if self._budget.is_to_meet:
            assert region.inputs is not None
            self._budget.meet(region.inputs.given)
        return super().begin(region)


def bucket_of(size: int) -> int:
    """Return the number of a bucket of lengths: four to each factor of two.

    Example:
        >>> [bucket_of(size) for size in (64, 72, 80, 128)]
        [28, 28, 29, 32]
    """
    bits = size.bit_length()
    return 4 * bits + (size >> bits - 3 & 3 if bits > 2 else 0)


def chosen(fixed: Sequence[float], saved: Sequence[float], seconds: Sequence[float], limit: float) -> list[bool]:
    """Return which regions keep all, so that the least time is recomputed, as far as the greedy choice finds it.

    The regions are in the order of forward. While backward goes down them, one that keeps nothing is filled again.

    Args:
        fixed: What each region keeps in any case, in bytes.
        saved: What it keeps besides, if it keeps all.
        seconds: How long its replay takes.
        limit: The most that all keep at any moment, in bytes.

    Example:
        >>> chosen([1, 1, 1], [6, 4, 6], [3.0, 1.0, 3.0], 13)
        [False, True, True]
    """
    kept = [False] * len(fixed)

    def most() -> float:
        """Return the most that regions keep at once: after forward, or when one of them is filled again."""
        sums = accumulate(one + other * keeps for one, other, keeps in zip(fixed, saved, kept, strict=True))
        filled = (other * (not keeps) for other, keeps in zip(saved, kept, strict=True))
        return max(map(float.__add__, map(float, sums), map(float, filled)), default=0.0)

    for place in sorted(range(len(fixed)), key=lambda place: (-seconds[place] / (saved[place] or 1), place)):
        kept[place] = True
        kept[place] = most() <= limit
    return kept


def _others(mine: list[str], ranks: Ranks) -> UsageError:
    """Return the error of ranks that have run other regions, which names the first difference."""
    (rank, here), *rest = ranks.all_of(mine).items()
    other, there = next(pair for pair in rest if pair[1] != here)
    one, its = next(pair for pair in zip_longest(here, there, fillvalue="no further region") if pair[0] != pair[1])
    return UsageError(
        f"the ranks of this budget do not run the same regions: {one} on rank {rank}, {its} on rank {other}",
        remedy="The group is that of ranks that share collectives inside regions, not of stages of a pipeline. They "
        "run the same regions in the same order, and as many blocks.",
    )
