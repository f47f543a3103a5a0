"""Budgets over ranks: what is kept is decided between steps, and is the same on each rank.

In: blocks of a budget with a group, one for each step. Kept: for each bucket of lengths what its regions were like, and
what was bought for them. Out: regions that keep the same on each rank.

NOTE [ How ranks agree ]
1. No rank decides anything alone. Before the first region of each block all ranks reduce four numbers: a hash of the
   regions of the block before, twice, by how much that block passed the limit, and the bytes of the first region's
   inputs. What the ranks do next follows from the most of each, and from what they have reduced before.
2. The bytes give a bucket of lengths. A bucket for which nothing was bought recomputes everything: that is equal on
   each rank, and fits if anything does. When the forwards of such a block were recorded on all ranks, these exchange
   the seconds and bytes of each call: of the most of each number all make the same ladders, and buy the same from them.
   If ranks have run other calls in a region, or it communicates, it keeps everything or nothing: where calls are
   skipped, a replay may start over on one rank, whose collectives nobody would join.
3. A rank that passes the limit goes on: alone it may give nothing up. The next block of that bucket recomputes
   everything, and what is bought then has that much less room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import zip_longest
from typing import Any, NamedTuple

from torch_remat.budgets import price
from torch_remat.budgets.budget import UNLIMITED, Budget, may_be_plain
from torch_remat.budgets.counted import lock
from torch_remat.budgets.group import Ranks
from torch_remat.budgets.kept import Asked, bytes_of
from torch_remat.budgets.plan import Plan, plan_of
from torch_remat.budgets.price import Part
from torch_remat.budgets.steps import Row, Step
from torch_remat.dispatch.options import Begun
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import UsageError
from torch_remat.ladders.kinds import Kind
from torch_remat.ladders.ladder import Ladder, Rung
from torch_remat.ladders.record import Record

_MEASURED = 3
"""So many blocks record before anything is bought."""


class _Told(NamedTuple):
    """What a rank says of one of its regions.

    Attributes:
        digest: A hash of what the region ran.
        communicates: Whether it communicates.
        is_named: Whether its author decides about calls inside.
        numbers: The bytes and nanoseconds of its record.
        ends: Those of its record as plain code alone.
        more_bytes: What it keeps besides.
    """

    digest: int
    communicates: bool
    is_named: bool
    numbers: Sequence[float]
    ends: Sequence[float]
    more_bytes: int


class _Bucket:
    """What is known of steps of about one length.

    Attributes:
        blocks: How many have recorded.
        over: How many bytes what was bought has passed the limit by, in all.
        bought: What regions keep, with what they could keep, by name and number; None if that is to be recorded.
        plan: The same as a plan.
        limit: The most that they keep by it.
    """

    def __init__(self) -> None:
        self.blocks = self.over = 0
        self.bought: dict[tuple[str, int], Row] | None = None
        self.plan: Plan | None = None
        self.limit: float = UNLIMITED


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
        self._names: list[str] = []  # of the regions in the block, in order
        self._numbers: Counter[str] = Counter()  # how many have had a name
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
            self._names = []
        self._block += 1
        super().__exit__(kind, *raised)

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

    def meet(self, kind: Kind | None, shapes: Hashable, own: int) -> None:
        """Choose what is bought, as all ranks do: the first region of a block is about to begin.

        Args:
            kind: Its kind, if it goes by price.
            shapes: The shapes of its arguments.
            own: The bytes of these.

        Raises:
            UsageError: The ranks have run other regions.
            RematError: A rank has failed.
        """
        self.is_to_meet = False
        names = self._names
        blocks = [self._block] if self._has_failed else [self._block - 1, self._block]
        digest = _digest((self._block, names))
        first, last, over, size = map(int, self._ranks.most([digest, -digest, self._over, own], blocks))
        if first != -last:
            raise _others([f"block {self._block}", *names], self._ranks)
        if self._bucket is not None and names:
            self._end_block(self._bucket, over)
        self._bucket = self._buckets.setdefault(bucket_of(size), _Bucket())
        self._names, self._over = [], 0.0
        self._numbers.clear()
        with lock:
            self._first_step = self.step_count
            if self.share is not None:
                self.limit = self._bucket.limit
            self._begin_step(kind, shapes, own)

    def _end_block(self, bucket: _Bucket, over: int) -> None:
        """Take what the block before was like, and buy if it is time; ``over`` is the most of all ranks."""
        if bucket.bought is not None:
            if over and any(one.rung and (one.rung.acts or one.rung.is_plain) for one in bucket.bought.values()):
                bucket.over, bucket.bought = bucket.over + over, None
            return
        bucket.blocks += 1
        steps = list(self.steps)[self._first_step - self.step_count :]
        rows = [row for step in steps for row in step.rows if row.kind is not None]
        for row in rows:
            row.learn()
        if max(one.blocks for one in self._buckets.values()) < _MEASURED:
            return
        other = sum(step.other_bytes() for step in steps)
        told = [_told(row) for row in rows] if all(row.part is not None for row in rows) else []
        limits, others, ranks = zip(*self._ranks.all_of((self.limit, other, told)).values(), strict=True)
        if not all(len(told) == len(rows) > 0 for told in ranks):
            return
        other, parts = max(others), _agree(rows, ranks)
        most, least = price.ends(parts)
        bucket.limit = min(limits)
        if self.share is not None and self.share < 1:
            bucket.limit = least + other + self.share * (most - least)
        choice = price.choose(parts, bucket.limit - bucket.over - other, self.share is None)
        step = Step(bucket.limit, rows=list(map(_bought, rows, parts, choice.rungs)))
        bucket.bought = {(row.name, row.number): row for row in step.rows}
        bucket.plan = Plan(plan_of(step), self._ranks.world)

    # What regions ask.

    def begin(self, asked: Asked) -> Begun:
        """Say what a region keeps that is about to begin."""
        if self.is_to_meet:
            self.meet(asked.kind, asked.shapes, bytes_of(asked.leaves))
        name, bucket = asked.name, self._bucket
        number = self._numbers[name]
        self._numbers[name] += 1
        self._names.append(name)
        row = Row(name, asked.kind, number, asked.shapes, asked.options.functions)
        bought = None if bucket is None or bucket.bought is None else bucket.bought.get((name, number))
        if bought is None:
            return Begun(asked.kind, asked.shapes, is_new=asked.kind.is_new(asked.shapes), entry=row)
        part, row.rung = bought.part, bought.rung
        assert part is not None
        row.part = part._replace(scale=bytes_of(asked.leaves) / bought.input_bytes if bought.input_bytes else 1.0)
        with lock:
            self.forget_dead()
            return self._begun(asked, row, may_be_plain(asked))

    def expect(self, region: Region) -> None:
        """Note a region that begins, and does not go by price."""
        if self.is_to_meet:
            assert region.inputs is not None
            self.meet(None, None, bytes_of(region.inputs.given))
        if region.options.price is None:  # else it may be plain code, on one rank alone
            self._names.append(f"{region.name} (not by price)")

    def make_room(self) -> None:
        """Note by how much the limit is exceeded: giving something up is not for this rank to decide."""
        self._over = max(self._over, self.ledger.total - self.limit)
        self.note_too_much()

    def _like(self) -> tuple[Step | None, float]:
        return None, 1.0  # ranks have bought together


def _digest(value: object) -> int:
    return int(sha256(repr(value).encode()).hexdigest()[:12], 16)


def _structure(record: Record) -> object:
    """Return what is equal for records whose numbers can be compared."""
    steps = [
        (step.name, step.number, step.reads, step.writes, step.results, step.random, step.saves)
        for step in record.steps
    ]
    return steps, len(record.sizes), sorted(record.saved), sorted(record.inputs), record.is_hidden, record.is_named


def _numbers(record: Record, scale: float) -> list[float]:
    """Return the bytes and nanoseconds of a record, for a region that is larger."""
    numbers = record.whole_bytes, record.whole_ns, *record.sizes, *(step.ns for step in record.steps)
    return [number * scale for number in numbers]


def _told(row: Row) -> _Told:
    """Return what this rank says of a region."""
    assert row.part is not None
    record, scale = row.part.ladder.record, row.part.scale
    ends = _numbers(_ends_of(record, record.is_named), scale)
    communicates = bool(row.kind and row.kind.communicates)
    return _Told(
        _digest(_structure(record)), communicates, record.is_named, _numbers(record, scale), ends, row.more_bytes
    )


def _agree(rows: Sequence[Row], ranks: Sequence[Sequence[_Told]]) -> list[Part]:
    """Return what regions can keep, by the most of all ranks' numbers."""
    parts, ladders = [], dict[Any, Ladder]()
    for row, told in zip(rows, zip(*ranks, strict=True), strict=True):
        assert row.part is not None
        record, is_named = row.part.ladder.record, any(one.is_named for one in told)
        is_same = len({one.digest for one in told}) == 1 and not any(one.communicates for one in told)
        if not is_same:
            record = _ends_of(record, is_named)
        most = [max(column) for column in zip(*(one.numbers if is_same else one.ends for one in told), strict=True)]
        fixed = ((), ()) if row.fixed is None else (tuple(row.fixed.decisions), tuple(row.fixed.left_out))
        key = told[0].digest if is_same else is_named, tuple(most), fixed
        if (ladder := ladders.get(key)) is None:
            ladder = ladders[key] = Ladder(_with_numbers(record, most), *fixed)
        parts.append(Part(ladder, 1.0, max(one.more_bytes for one in told)))
    return parts


def _bought(row: Row, part: Part, rung: Rung) -> Row:
    """Return what a region keeps by what all ranks have agreed on."""
    bought = Row(row.name, number=row.number)
    bought.part, bought.rung, bought.input_bytes = part, rung, row.input_bytes
    bought.kept_bytes = int(rung.bytes) + part.more_bytes
    return bought


def _ends_of(record: Record, is_named: bool) -> Record:
    """Return a record of the same region with no more than what it keeps as plain code, and how long it takes."""
    size = sum(record.sizes[unit] for unit in record.inputs)
    return Record(
        sizes=[size],
        writers=[[]],
        inputs={0},
        whole_bytes=record.whole_bytes,
        whole_ns=record.whole_ns,
        is_hidden=True,
        is_named=is_named,
    )


def _with_numbers(record: Record, numbers: Sequence[float]) -> Record:
    """Return a record with the numbers of all ranks."""
    whole_bytes, whole_ns, *others = map(int, numbers)
    sizes, times = others[: len(record.sizes)], others[len(record.sizes) :]
    steps = [replace(step, ns=ns) for step, ns in zip(record.steps, times, strict=True)]
    return replace(record, steps=steps, sizes=sizes, whole_bytes=whole_bytes, whole_ns=whole_ns)


def bucket_of(size: int) -> int:
    """Return the number of a bucket of lengths: four to each factor of two.

    Example:
        >>> [bucket_of(size) for size in (64, 72, 80, 128)]
        [28, 28, 29, 32]
    """
    bits = size.bit_length()
    return 4 * bits + (size >> bits - 3 & 3 if bits > 2 else 0)


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
