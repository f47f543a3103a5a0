"""Why each named tensor of an op is kept or not: the rows of `kept_by` in words.

In: a region after its forward, what its ops saved and returned, as it was seen when their bodies ended, and the steps
that its replay will run. Kept: nothing. Out: a state and a reason for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch_remat._kept import Around, Kept, decisions_of
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.data import KeptTensor, RegionReport
from torch_remat.reports.explanation import State, TensorExplanation
from torch_remat.reports.prices import SOME_OP, Step
from torch_remat.reports.torch_checkpoint import is_of_checkpoint


class Seen(NamedTuple):
    """A named tensor of an op, as it was when the op's body ended."""

    label: str
    bytes: int  # its storage's
    number: int  # that of its storage; see NOTE [ Numbers of storages ]
    parameter: bool = False  # whether it is a parameter or a view of one


class SeenOp(Protocol):
    """What is asked of an op: its name, what it saved by names of its own, and what it returned."""

    saved: list[Seen]
    outputs: list[Seen]

    @property
    def name(self) -> str:
        """Its name."""


def never_needed(region: Region, op: SeenOp) -> Iterator[TensorExplanation]:
    """Yield explanations for the tensors of an op in a region whose outputs need no gradient."""
    for seen in (*op.saved, *op.outputs):
        name = qualified_name(region.name, op.name, seen.label)
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
        """Yield why a policy for aten ops keeps what it keeps; see `checkpoint(policy=...)`."""
        results = {row.tensor: row for row in self._rows if not row.op and row.what == "result"}
        for tensor in self._report.tensors:
            if tensor.kind in ("saved", "kept for replay"):
                state: State = "offloaded" if tensor.offloaded else "kept"
                reader = "backward" if tensor.kind == "saved" else self._reader_of(results[tensor.label])
                why = f"{reader} reads it"
                yield TensorExplanation(tensor.name, tensor.label, state, tensor.bytes, why, tensor.shared_with)

    def of(self, op: SeenOp) -> Iterator[TensorExplanation]:
        """Yield an explanation for each tensor that an op saved or returned."""
        for seen, state, why in self._told_of(op):
            name = qualified_name(self._region.name, op.name, seen.label)
            shared = None
            if state in ("kept", "offloaded"):
                first, _ = self._first.setdefault(seen.number, (name, state))
                shared = self._counted[name][1] if name in self._counted else first
            yield TensorExplanation(name, seen.label, state, seen.bytes, why, None if shared == name else shared)

    def _told_of(self, op: SeenOp) -> Iterator[tuple[Seen, State, str]]:
        """Yield the tensors of an op, the state of each, and the reason."""
        rows = [row for row in self._rows if row.op == op.name]
        held = {row.tensor: row for row in rows if row.what in ("saved", "refilled", "empty")}
        slots = {row.tensor: row for row in rows if row.what == "slot"}
        known = {seen.label for seen in (*op.saved, *op.outputs)}
        # What a call saves without a name of its own, its holders tell.
        found = [(row, self._numbers_in(row.value)) for label, row in held.items() if label not in known]
        unnamed = [Seen(row.tensor, sum(memory.values()), next(iter(memory))) for row, memory in found if memory]
        is_recomputed = self._decisions[op.name] is CheckpointPolicy.RECOMPUTE  # in a native region not its own policy
        for seen in (*op.saved, *unnamed):
            if is_recomputed and not seen.parameter:
                yield seen, "recomputed", f"the replay of {op.name} makes it for its backward"
            elif not is_recomputed and seen.label in held:
                yield seen, *self._of_saved(op.name, held[seen.label])
            else:
                why = "a parameter: it exists anyway" if seen.parameter else f"no backward of {op.name} is to come"
                yield seen, "not kept", why
        for seen in op.outputs:
            slot, row = slots.get(seen.label), held.get(seen.label)
            if is_recomputed:
                yield seen, "recomputed", f"the replay of {op.name} makes it again"
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
            source = f"has it as input {row.at} of {row.by}" if row.why == "input of" else "makes it again"
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
            return "; the checkpoint around makes it again"
        return f"; {row.stayed}" if row.stayed and state == "kept" else ""
