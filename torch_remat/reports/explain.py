"""`explain`: what each region keeps, what its replay recomputes, and what keeping more would save.

In: one forward of a function, in which each region is recorded as in the first step of a budget. Kept: names and
numbers. Out: the calls of each region, and its ladder: which calls a price would keep, in how many bytes, and how long
the others take.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from torch_remat._compat import as_written, eager_only
from torch_remat._options import says_form
from torch_remat._util.text import format_bytes
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.options import Begun
from torch_remat.dispatch.region.region import Region, keeping
from torch_remat.errors import UsageError
from torch_remat.ladders.kinds import Kind, Timed
from torch_remat.ladders.ladder import Ladder, Rung
from torch_remat.ladders.record import Record
from torch_remat.reports.data import OpReport, RegionReport, report_of
from torch_remat.reports.fold import fold_series
from torch_remat.reports.report import Block, Report, format_sum

_MOST_NAMES = 2  # in a line of text


@dataclass(frozen=True)
class PricedCall:
    """A call of a function of torch.

    Attributes:
        name: Its name, as `torch_remat.list_names` and budgets have it.
        bytes: Its results that backward needs, or that it is kept for.
        seconds: How long its kernels took.
        policy: What the region's policy does with it: ``"save"``, ``"offload"``, or empty for nothing.
        rung: The first rung that keeps it; None if none does.
    """

    name: str
    bytes: int
    seconds: float
    policy: str
    rung: int | None


@dataclass(frozen=True)
class PricedRung:
    """What a region keeps at one price.

    Attributes:
        bytes: What it keeps, with its inputs.
        seconds: How long the kernels take that replay runs.
        price: Seconds that each byte saves, of those that it keeps more than the rung before.
        added: The calls that it keeps and the rung before does not.
        is_plain: Whether the region runs as plain code, which keeps everything.
    """

    bytes: int
    seconds: float
    price: float
    added: tuple[str, ...]
    is_plain: bool


@dataclass(frozen=True)
class RegionExplanation:
    """One region.

    Attributes:
        name: Its name.
        kept_bytes: What it keeps in place under its policy.
        offloaded_bytes: What it keeps elsewhere.
        input_bytes: The share of its inputs in what is in place.
        whole_bytes: What it would keep as plain code; 0 if that is not known, or excluded by calls with names.
        replay_seconds: How long the kernels take that replay runs.
        ops: Its calls with names and policies of their own.
        calls: Its calls of functions, in order.
        rungs: What it can keep, from what its policy keeps, or nothing, to the least time.
        no_prices: Why there are no calls and rungs, or just two rungs; empty if there are.
    """

    name: str
    kept_bytes: int
    offloaded_bytes: int
    input_bytes: int
    whole_bytes: int = 0
    replay_seconds: float = 0.0
    ops: tuple[OpReport, ...] = ()
    calls: tuple[PricedCall, ...] = ()
    rungs: tuple[PricedRung, ...] = ()
    no_prices: str = ""


@dataclass(frozen=True)
class Explanation(Report):
    """What regions keep, and what keeping more would save.

    Attributes:
        regions: The regions, in the order of forward.
    """

    regions: tuple[RegionExplanation, ...]

    def blocks(self) -> list[Block]:
        """Return the explanation, regions that are alike once."""
        alike: dict[Hashable, list[RegionExplanation]] = {}
        for region in self.regions:
            ops = ((op.name, op.policy, op.bytes, op.offloaded_bytes) for op in region.ops)
            alike.setdefault((replace(region, name="", ops=()), *ops), []).append(region)
        blocks = [block for regions in alike.values() for block in _blocks_of(regions)]
        return blocks[:-1] or [Block(["no region ran"])]


def _blocks_of(regions: Sequence[RegionExplanation]) -> Iterator[Block]:
    region, count = regions[0], len(regions)
    label = _some(label for label, _ in fold_series(regions, lambda one: one.name, lambda one: None))
    keeps = f"keeps {format_sum(region.kept_bytes, region.offloaded_bytes)}"
    keeps += f", of which {format_bytes(region.input_bytes)} inputs"
    if region.whole_bytes:
        keeps += f"; as plain code {format_bytes(region.whole_bytes)}; replay: {_ms(region.replay_seconds)} ms"
    lines = [f"{label} (each of {count})" if count > 1 else label, f"  {keeps}"]
    if region.no_prices:
        lines.append(f"  {region.no_prices}")
    ops = [[op.name, op.policy, format_sum(op.bytes, op.offloaded_bytes)] for op in region.ops]
    yield Block(lines, ops, (2,), 2)
    if region.calls:
        rows = [["call", "bytes", "ms", "from rung", ""], *map(_call_cells, region.calls)]
        yield Block([""], rows, (1, 2, 3), 2)
    if region.rungs:
        rows = [["rung", "keeps", "replay ms", "ms for a MiB", "keeps also"]]
        rows += [_rung_cells(number, rung) for number, rung in enumerate(region.rungs)]
        yield Block([""], rows, (0, 1, 2, 3), 2)
    yield Block([""])


def _call_cells(call: PricedCall) -> list[str]:
    size = format_bytes(call.bytes) if call.bytes else ""
    return [call.name, size, _ms(call.seconds), "" if call.rung is None else str(call.rung), call.policy]


def _rung_cells(number: int, rung: PricedRung) -> list[str]:
    added = _some(rung.added)
    price = f"{rung.price * 2**20 * 1e3:.3f}" if rung.price else ""
    return [str(number), format_bytes(rung.bytes), _ms(rung.seconds), price, "all" if rung.is_plain else added]


def _some(names: Iterable[str]) -> str:
    first, rest = (found := list(names))[:_MOST_NAMES], found[_MOST_NAMES:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


class _Recorded(Kind):
    """What learns of one forward; ``known`` has those of all regions."""

    timed: Timed | None = None

    def __init__(self, known: dict[Hashable, Timed]) -> None:
        super().__init__(None)
        self._known = known

    def learn(self, shapes: Hashable, record: Record) -> None:
        """Take the record of the forward; equal ones have the least times of all of them."""
        key = record.signature()
        if (timed := self._known.get(key)) is None:
            timed = self._known[key] = Timed(record)
        else:
            timed.add(record)
        self.timed = timed


class _Notes:
    """The keeper of one region: notes what it keeps."""

    owners: Sequence[Any] = ()

    def __init__(self, region: Region, begun: Begun | None) -> None:
        self.region: Region | None = region
        self.begun = begun
        self.functions = region.options.functions
        self.decides_by_op = region.options.policy is not None

    def finish(self) -> None:
        """Note what the region keeps, now that its forward is over."""
        assert self.region is not None
        lives_on = bool(self.region.tape.saved)
        self.report = report_of(self.region, keep_empty=True) if lives_on else RegionReport(self.region.name, (), ())
        self.region = None

    def reach(self) -> None:
        """Do nothing: backward may lower nothing."""

    def replay(self, replay: Callable[[], None]) -> None:
        """Run a replay of a function that runs its own backward."""
        replay()

    def ladder(self) -> tuple[Ladder | None, str]:
        """Return the region's ladder, and why it has no ladder, or one with two rungs."""
        if self.begun is None:
            if self.decides_by_op:
                return None, "no prices: its policy decides about aten ops, which remat.list_names shows"
            return None, "no prices: it is inside another region, or under saved-tensor hooks"
        kind, fixed = self.begun.kind, self.functions
        selected, left_out = ((), ()) if fixed is None else (fixed.decisions, fixed.left_out)
        why = f"all or nothing is kept: it {kind.communicates}" if kind.communicates else ""
        if not isinstance(kind, _Recorded):
            ladder = kind.ladder(self.begun.shapes, selected, left_out)
            return ladder, why or ("" if ladder else "no prices yet: its policy goes by price, and records it first")
        if kind.timed is None or not kind.timed.record.whole_bytes:
            return None, "backward needs nothing of it"
        if kind.timed.record.is_hidden:
            why = "all or nothing is kept: compiled code runs in it, or a gradient is taken"
        return kind.timed.ladder(selected, left_out, ends=False), why

    def told(self) -> RegionExplanation:
        """Return the explanation of the region."""
        report, (ladder, no_prices) = self.report, self.ladder()
        inputs = sum(one.bytes for one in report.tensors if one.kind == "input" and not one.offloaded)
        sums = report.bytes, report.offloaded_bytes
        if ladder is None:
            return RegionExplanation(report.name, *sums, inputs, ops=report.ops, no_prices=no_prices)
        steps = {step.name: step for step in ladder.record.steps}
        policies = {op.name: op.policy for op in report.ops if op.name in steps}
        assert self.begun is not None
        now, rungs = self.begun.rung or ladder.by_policy, _climbed(ladder, bool(self.begun.kind.communicates))
        if isinstance(self.begun.kind, _Recorded):  # its policy keeps nothing in this forward
            decisions = {} if self.functions is None else self.functions.decisions
            for name, size in ladder.by_policy.kept:
                if (decision := decisions.get(steps[name].function)) is not None:
                    policies[name] = "offload" if decision.offloads else "save"
                    sums = sums[0] + size * (not decision.offloads), sums[1] + size * decision.offloads
        more = sum(op.bytes + op.offloaded_bytes for op in report.ops if op.name not in steps)
        return RegionExplanation(
            report.name,
            *sums,
            inputs,
            0 if ladder.record.is_named else ladder.whole_bytes,
            _seconds_of(now),
            tuple(op for op in report.ops if op.name not in steps),
            tuple(_calls_of(ladder, rungs, policies)),
            tuple(_rungs_of(rungs, more)),
            no_prices,
        )


def _seconds_of(rung: Rung) -> float:
    return 0.0 if rung.is_plain else sum(ns for _, ns in rung.runs) / 1e9


def _calls_of(ladder: Ladder, rungs: Sequence[Rung], policies: dict[str, str]) -> Iterator[PricedCall]:
    record = ladder.record
    first: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for number, rung in enumerate(rungs):
        for name, size in rung.kept:
            first.setdefault(name, number)
            sizes.setdefault(name, size)
    for step in record.steps:
        if step.function is not None and (step.writes or step.ns):
            saved = sum(record.sizes[unit] for unit in step.writes if unit in record.saved)
            at = first.get(step.name, len(rungs) - 1 if saved and rungs[-1].is_plain else None)
            size = saved or sizes.get(step.name, 0)
            yield PricedCall(step.name, size, step.ns / 1e9, policies.get(step.name, ""), at)


def _rungs_of(rungs: Sequence[Rung], more: int) -> Iterator[PricedRung]:
    """Yield what the region can keep; with ``more`` bytes, which calls with names keep in any case."""
    for low, high in pairwise([rungs[0], *rungs]):
        before, gain = dict(low.kept), high.bytes - low.bytes
        added = tuple(name for name, _ in high.kept if name not in before)
        price = (low.ns - high.ns) / 1e9 / gain if gain > 0 else 0.0
        yield PricedRung(high.bytes + more, _seconds_of(high), price, added, high.is_plain)


def _climbed(ladder: Ladder, ends: bool) -> list[Rung]:
    """Return what the region keeps by its policy, and the rungs that keep more and take less time, or plain code."""
    first = ladder.by_policy
    higher = (rung for rung in ladder.rungs if rung.is_plain or (rung.bytes > first.bytes and not ends))
    return [first, *(rung for rung in higher if rung.ns < first.ns)]


class _Explaining:
    """What regions ask meanwhile, in place of a budget: each is recorded, and keeps what its author says."""

    registers: Sequence[Any] = ()

    def __init__(self) -> None:
        self.notes: list[_Notes] = []
        self._known: dict[Hashable, Timed] = {}

    def begin(self, options: Any, function: Any, leaves: Any, kind: Kind, shapes: Hashable) -> Begun:
        """Have a region recorded."""
        return Begun(_Recorded(self._known), shapes, is_new=True)

    def keeper(self, region: Region, begun: Begun | None) -> _Notes:
        """Take notes of a region whose forward begins."""
        self.notes.append(_Notes(region, begun))
        return self.notes[-1]


_FORM = "remat.explain(function)(*args, **kwargs)"


@eager_only
@says_form(f"The form is {_FORM}.")
def explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """Run a function once, and say what its regions keep, and what keeping more would save.

    Each region is recorded as in the first step of a `torch_remat.budget`, which buys by the same numbers: the calls of
    functions in it, with the bytes of their results and the time of their kernels; and its *rungs*, from nothing kept
    to plain code, each with the calls that it keeps and the price of its bytes. Equal regions have the least times of
    all of them. No backward runs, but for one that the function itself runs. Run a step before, since first kernels
    are slow.

    There are no prices for a region inside another one, or with a policy for aten ops. In a region with calls that have
    names of their own, the ops in these count as run in each rung.

    Args:
        function: What contains the regions, such as a model; called with the arguments of the second call.

    Returns:
        A callable that takes the function's arguments and returns the explanation: plain data, and text with ``print``.

    Raises:
        UsageError: It was called inside a region, ``function`` cannot be called, or its arguments are in the same call.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
        >>> explanation = remat.explain(remat.checkpoint(region_name="block")(block))(torch.randn(2, 4))
        >>> [(call.name, call.bytes) for call in explanation.regions[0].calls]
        [('0.linear_0', 64), ('1.gelu_0', 64), ('2.linear_0', 0)]
    """
    if not callable(function):
        raise UsageError(f"explain() cannot run a {type(function).__name__}", remedy=f"The form is {_FORM}.")

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        if current_mode() is not None or torch.is_inference_mode_enabled():
            where = "inside a region" if current_mode() is not None else "under torch.inference_mode()"
            raise UsageError(f"explain() was called {where}", remedy="Call it outside, around the whole model.")
        explaining = _Explaining()
        token = keeping.set(explaining)
        try:
            with as_written(), torch.enable_grad():
                function(*args, **kwargs)
        finally:
            keeping.reset(token)
        return Explanation(tuple(note.told() for note in explaining.notes))

    return explained
