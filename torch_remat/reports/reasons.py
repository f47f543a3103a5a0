"""Why each named tensor of an op is kept or not, and what a region would cost if its calls had other policies.

In: the steps of a region's forward, as `explain` saw them, with the storages that each reads, makes and saves; what its
ops saved and returned; and what it keeps, the rows of `kept_by`. Kept: nothing. Out: states and reasons of tensors, and
bytes and FLOPs under the policies that are asked for. No code of the user's runs again.

The rules of prices are those of `dispatch`:
1. Replay has the region's inputs, and what the steps make that it runs.
2. A call that it skips keeps what it saves, but for what replay has in place; and those of its results that replay
   reads.
3. Without a policy for aten ops replay runs all that it does not skip, up to the last tensor that backward needs; with
   one it runs what makes something that is needed.
Not in the prices: random state, and that an offloader may decline a tensor for another reason than its size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch

from torch_remat._kept import Around, Kept, calls_by_policy, decisions_of
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.data import KeptTensor, RegionReport
from torch_remat.reports.explanation import OpExplanation, State, TensorExplanation
from torch_remat.reports.graph import is_of_checkpoint


@dataclass
class Step:
    """One aten op of a region's forward that computes something; storages have numbers of their own."""

    op: str  # as ``aten.mm.default``; empty for the end of a call, at which a custom Function saves
    call: str  # the call that it ran in; empty outside of any
    inner: bool = False  # whether it ran in a region inside
    line: str = ""  # where the user's code called it, as ``model.py:12``
    reads: Collection[int] = ()  # the storages of its arguments
    makes: Collection[int] = ()  # those of its new results
    before: set[int] = field(default_factory=set)  # what autograd saved of its arguments, before it ran
    after: set[int] = field(default_factory=set)  # what it saved of results, or a call that ends here
    flops: int = 0
    names: Mapping[str, int] = field(default_factory=dict)  # of its tensor arguments
    outs: Sequence[ref[torch.Tensor]] = ()  # its results

    def as_reader(self) -> str:
        """Return in words what reads something here in replay."""
        if self.call:
            return f"the replay of {self.call}"
        return "the replay of an inner region" if self.inner else f"{SOME_OP} ({self.op.split('.')[1]})"


SOME_OP = "an op in replay"
"""The reader of a tensor, where no more is known of it."""


class Cost(NamedTuple):
    """What a region keeps under some policies, without its inputs, and what its replay runs."""

    bytes: int  # in place
    offloaded_bytes: int
    flops: int  # of replay
    ran: Sequence[Step]  # to which replay comes, in order; of the last it may need no more than what is saved
    # A step of replay that would read the result of a handle, which is an error, and that handle.
    refused: tuple[Step, str] | None = None


class Prices(NamedTuple):
    """The log of a region's forward."""

    steps: Sequence[Step]
    sizes: Mapping[int, int]  # the bytes of each storage
    inputs_away: Collection[int]  # the region's inputs that are elsewhere
    by_policy: Collection[int] | None  # what a policy for aten ops keeps; None without one
    handles: Collection[str]  # the calls whose results only calls may read in replay
    least: int  # from how many bytes on tensors are offloaded

    def under(self, policies: Mapping[str, CheckpointPolicy]) -> Cost:
        """Return what the region costs with policies for its calls, by name."""
        lacks: dict[int, Step] = {}  # what skipped steps have made
        kept: set[tuple[int, bool]] = {(number, True) for number in self.inputs_away}
        kept_by_policy = self.by_policy or ()

        def keep(number: int, step: Step) -> None:
            away = policies.get(step.call) is CheckpointPolicy.OFFLOAD and self.sizes[number] >= self.least
            kept.add((number, away))

        def skips(step: Step) -> bool:
            if step.call and policies.get(step.call) is not CheckpointPolicy.RECOMPUTE:
                return True
            return any(number in kept_by_policy for number in step.makes)

        for step in self.steps:
            if skips(step):
                lacks.update(dict.fromkeys(step.makes, step))
                for number in step.before | step.after:
                    if number in lacks or number in self.inputs_away:
                        keep(number, step)
        needed: set[int] = set()
        ran: list[Step] = []
        flops, refused, reached = 0, None, False
        for step in self.steps[::-1]:
            if skips(step):
                elided = (step.before | step.after) - lacks.keys() - set(self.inputs_away)
                for number in needed.intersection(step.makes):
                    keep(number, step)
                needed |= elided
                reached = reached or bool(elided)
                continue
            runs = reached if self.by_policy is None else not needed.isdisjoint(step.makes)
            needed |= step.before | step.after
            if runs or step.before or step.after:
                ran.append(step)
            if runs or step.after:
                flops += step.flops
                needed.update(step.reads)
                read = (lacks[number].call for number in step.reads if number in lacks)
                if self.by_policy is None and not (step.call or step.inner):
                    refused = next(((step, call) for call in read if call in self.handles), refused)
            reached = reached or runs or bool(step.before or step.after)
        in_place, away = (sum(self.sizes[one] for one, is_away in kept if is_away is where) for where in (False, True))
        return Cost(in_place, away, flops, ran[::-1], refused)


class Seen(NamedTuple):
    """A named tensor of an op, as it was when the op's body ended."""

    label: str
    bytes: int  # its storage's
    number: int  # that of its storage; see NOTE [ Numbers of storages ]
    parameter: bool = False  # whether it is a parameter or a view of one


@dataclass
class OpNotes:
    """What is known of an op when forward ends."""

    told: OpExplanation
    policy: CheckpointPolicy
    saved: list[Seen] = field(default_factory=list)  # what it saved by names of its own
    outputs: list[Seen] = field(default_factory=list)  # what it returned


def never_needed(region: Region, op: OpNotes) -> Iterator[TensorExplanation]:
    """Yield explanations for the tensors of an op in a region whose outputs need no gradient."""
    for seen in (*op.saved, *op.outputs):
        name = qualified_name(region.name, op.told.name, seen.label)
        yield TensorExplanation(name, seen.label, "not kept", seen.bytes, f"no backward of {region.name} is to come")


class Reasons:
    """Why a region keeps what it keeps.

    Args:
        region: The region.
        rows: What it keeps, of `kept_by`.
        report: The same, counted.
        numbers_in: Returns the numbers and bytes of the storages in a row's value.
        ran: The steps that its replay will run.
    """

    def __init__(
        self,
        region: Region,
        rows: Sequence[Kept],
        report: RegionReport,
        numbers_in: Callable[[Any], Mapping[int, int]],
        ran: Sequence[Step],
    ) -> None:
        self._region, self._report, self._numbers_in, self._ran = region, report, numbers_in, ran
        self._rows, self._decisions = rows, decisions_of(region)
        self._inputs = {one.name: one for one in report.tensors if one.kind == "input"}
        self._counted: dict[str, tuple[KeptTensor, str | None]] = {}  # with the tensor that has the memory, if another
        tensors = [("", one) for one in report.tensors]
        for name, tensor in tensors + [(op.name, one) for op in report.ops for one in op.tensors]:
            self._counted.setdefault(tensor.name, (tensor, tensor.shared_with))
            for alias in tensor.aliases:
                self._counted.setdefault(qualified_name(region.name, name, alias), (tensor, tensor.name))
        self._first: dict[int, tuple[str, State]] = {}  # by storage what is kept there
        for row in rows:
            for number in numbers_in(row.value):
                told = qualified_name(region.name, row.op, row.tensor), self._state_of(row)
                self._first.setdefault(number, told)

    def by_policy(self) -> Iterator[TensorExplanation]:
        """Yield why a policy keeps what it keeps, of calls of functions and of aten ops."""
        names = {call.name for call in calls_by_policy(self._region)}
        for op in self._report.ops:
            for tensor in op.tensors if op.name in names else ():
                state: State = "offloaded" if tensor.offloaded else "kept"
                why = "backward reads it" if tensor.kind == "saved" else "replay reads it"
                yield TensorExplanation(
                    tensor.name, f"{op.name}.{tensor.label}", state, tensor.bytes, why, tensor.shared_with
                )
        kept = {row.tensor: row for row in self._rows if not row.op and row.what in ("result", "slot")}
        for tensor in self._report.tensors:
            if tensor.kind in ("saved", "kept for replay"):
                state = "offloaded" if tensor.offloaded else "kept"
                reader = "backward" if tensor.kind == "saved" else self._reader_of(kept[tensor.label])
                why = f"{reader} reads it"
                yield TensorExplanation(tensor.name, tensor.label, state, tensor.bytes, why, tensor.shared_with)

    def of(self, op: OpNotes) -> Iterator[TensorExplanation]:
        """Yield an explanation for each tensor that an op saved or returned."""
        for seen, state, why in self._told_of(op):
            name = qualified_name(self._region.name, op.told.name, seen.label)
            shared = None
            if state in ("kept", "offloaded"):
                first, _ = self._first.setdefault(seen.number, (name, state))
                shared = self._counted[name][1] if name in self._counted else first
            yield TensorExplanation(name, seen.label, state, seen.bytes, why, None if shared == name else shared)

    def _told_of(self, op: OpNotes) -> Iterator[tuple[Seen, State, str]]:
        """Yield the tensors of an op, the state of each, and the reason."""
        name = op.told.name
        rows = [row for row in self._rows if row.op == name]
        held = {row.tensor: row for row in rows if row.what in ("saved", "refilled", "empty")}
        slots = {row.tensor: row for row in rows if row.what == "slot"}
        known = {seen.label for seen in (*op.saved, *op.outputs)}
        # What a call saves without a name of its own, its holders tell.
        found = [(row, self._numbers_in(row.value)) for label, row in held.items() if label not in known]
        unnamed = [Seen(row.tensor, sum(memory.values()), next(iter(memory))) for row, memory in found if memory]
        is_recomputed = self._decisions[name] is CheckpointPolicy.RECOMPUTE  # in a native region not its own policy
        for seen in (*op.saved, *unnamed):
            if is_recomputed and not seen.parameter:
                yield seen, "recomputed", f"the replay of {name} makes it for its backward"
            elif not is_recomputed and seen.label in held:
                yield seen, *self._of_saved(name, held[seen.label])
            else:
                why = "a parameter: it exists anyway" if seen.parameter else f"no backward of {name} is to come"
                yield seen, "not kept", why
        for seen in op.outputs:
            slot, row = slots.get(seen.label), held.get(seen.label)
            if is_recomputed:
                yield seen, "recomputed", f"the replay of {name} recomputes it"
            elif slot is not None:
                why = f"{self._reader_of(slot, seen.number)} reads it{self._why_it_stayed(slot)}"
                yield seen, self._state_of(slot), why
            elif row is not None and row.what == "saved":
                yield seen, self._state_of(row), "a backward outside of it reads it"
            elif seen.number in self._first:
                yield seen, self._first[seen.number][1], "no replay reads it, but its memory is kept"
            else:
                yield seen, "not kept", "nothing reads it in replay: a placeholder stands for it"

    def _of_saved(self, op: str, row: Kept) -> tuple[State, str]:
        if row.what != "saved":
            source = f"has it as {row.at} of {row.by}" if row.why == "input of" else "makes it again"
            return "elided", f"replay {source}"
        state, why = self._state_of(row), f"the backward of {op} reads it"
        shared = self._counted.get(qualified_name(self._region.name, op, row.tensor), (None, None))[1]
        if (given := self._inputs.get(shared or "")) is not None:
            return state, f"{why}; it is the region's input {given.label}, {state} anyway"
        return state, why + self._why_it_stayed(row)

    def _reader_of(self, row: Kept, *others: int) -> str:
        """Return in words what reads first, in replay, what a row stands for."""
        numbers = {*self._numbers_in(row.value), *others}
        return next((step.as_reader() for step in self._ran if not numbers.isdisjoint(step.reads)), SOME_OP)

    def _state_of(self, row: Kept) -> State:
        counted = self._counted.get(qualified_name(self._region.name, row.op, row.tensor))
        if counted is not None:
            return "offloaded" if counted[0].offloaded else "kept"
        hooks = self._region.hooks  # the hooks around have made something else of it
        made = isinstance(row.value, Around) or (hooks is not None and is_of_checkpoint(hooks[1]))
        return "recomputed" if made else "offloaded"

    def _why_it_stayed(self, row: Kept) -> str:
        state = self._state_of(row)
        if state == "recomputed":
            return "; the enclosing checkpoint recomputes it"
        return f"; {row.stayed}" if row.stayed and state == "kept" else ""
