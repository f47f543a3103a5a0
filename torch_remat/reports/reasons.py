"""Why each named tensor of an op is kept or not: the rows of `kept_by` in words.

In: a region after its forward, what its ops saved and returned, as it was seen when their bodies ended, and the steps
that its replay will run. Kept: nothing. Out: a state and a reason for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from torch_remat._storages import storages_of
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.count import pieces_in
from torch_remat.reports.data import RegionReport
from torch_remat.reports.explanation import State, TensorExplanation
from torch_remat.reports.kept import Around, Kept, decisions_of, parameters_of
from torch_remat.reports.prices import SOME_OP, Step
from torch_remat.reports.torch_checkpoint import is_of_checkpoint


class Seen(NamedTuple):
    """A named tensor of an op, as it was when the op's body ended.

    Attributes:
        label: Its name.
        bytes: Its storage's bytes.
        number: That of its storage; see NOTE [ Numbers of storages ].
        parameter: Whether it is a parameter or a view of one.
    """

    label: str
    bytes: int
    number: int
    parameter: bool = False


class SeenOp(Protocol):
    """What is asked of an op: its name, what it saved by names of its own, and what it returned."""

    name: str
    saved: list[Seen]
    outputs: list[Seen]


class _Told(NamedTuple):
    """A tensor, its state, the reason, and where it is kept, if it is: the storage, and whether elsewhere."""

    seen: Seen
    state: State
    why: str
    where: Iterable[tuple[int, bool]] = ()


def never_needed(region: Region, op: str, tensors: Sequence[Seen]) -> Iterator[TensorExplanation]:
    """Yield explanations for the tensors of an op in a region whose outputs need no gradient."""
    for seen in tensors:
        name = qualified_name(region.name, op, seen.label)
        yield TensorExplanation(name, seen.label, "not kept", seen.bytes, f"no backward of {region.name} is to come")


class Reasons:
    """Why a region keeps what it keeps; of tensors in the same memory, the one explained first has it.

    Args:
        region: The region.
        rows: What it keeps, of `kept_by`.
        numbers_in: Returns the numbers and bytes of the storages in a row's value.
        ran: The steps that its replay will run.
    """

    def __init__(
        self, region: Region, rows: Sequence[Kept], numbers_in: Callable[[Any], Mapping[int, int]], ran: Sequence[Step]
    ) -> None:
        self._region = region
        self._numbers_in = numbers_in
        self._ran = ran
        self._decisions = decisions_of(region)
        self._rows = [row for row in rows if row.op]
        self._results = {row.tensor: row for row in rows if not row.op and row.what == "result"}
        self._inputs: dict[int, Kept] = {}  # by their storage
        # By storage, and whether elsewhere: what was explained first, and its state; inputs come first.
        self._first: dict[tuple[int, bool], tuple[str, State]] = {}
        exists = {one._cdata for parameter in parameters_of(region) for one in storages_of(parameter)}
        for row in rows:
            if row.what == "input":
                shared = not exists.isdisjoint(one.key for piece in pieces_in(row.value) for one in piece.memory)
                for where in self._places(row):
                    self._inputs.setdefault(where[0], row)
                    if not shared:
                        told = qualified_name(region.name, None, row.tensor), self._state_of(row)
                        self._first.setdefault(where, told)

    def by_policy(self, report: RegionReport) -> Iterator[TensorExplanation]:
        """Yield why a policy for aten ops keeps what it keeps; see `checkpoint(policy=...)`."""
        for tensor in report.tensors:
            if tensor.kind in ("saved", "kept for replay"):
                state: State = "offloaded" if tensor.offloaded else "kept"
                reader = "backward" if tensor.kind == "saved" else self._reader_of(self._results.get(tensor.label))
                why = f"{reader} reads it"
                yield TensorExplanation(tensor.name, tensor.label, state, tensor.bytes, why, tensor.shared_with)

    def of(self, ops: Sequence[SeenOp]) -> Iterator[list[TensorExplanation]]:
        """Yield, for each op, an explanation for each tensor that it saved or returned."""
        saved = [list(map(self._explained, self._of_saved(op), repeat(op.name))) for op in ops]
        for op, told in zip(ops, saved, strict=True):  # what all ops saved comes before any output
            yield [*told, *(self._explained(self._of_output(op, seen), op.name) for seen in op.outputs)]

    def _explained(self, told: _Told, op: str) -> TensorExplanation:
        """Return the explanation, with the first tensor that is kept where this one is, unless it is the first."""
        seen, state, why, where = told
        name = qualified_name(self._region.name, op, seen.label)
        places = list(where) or [(seen.number, False)]
        shared = None
        if state in ("kept", "offloaded"):
            shared = next((self._first[place][0] for place in places if place in self._first), None)
            for place in places:
                self._first.setdefault(place, (shared or name, state))
        return TensorExplanation(name, seen.label, state, seen.bytes, why, None if shared == name else shared)

    def _of_saved(self, op: SeenOp) -> Iterator[_Told]:
        """Yield the states of the tensors that an op saved."""
        rows = self._saved_by(op)
        known = {seen.label for seen in (*op.saved, *op.outputs)}
        # What a call saves without a name of its own, its holders tell.
        held = [(row, self._numbers_in(row.value)) for label, row in rows.items() if label not in known]
        unnamed = [Seen(row.tensor, sum(found.values()), next(iter(found))) for row, found in held if found]
        for seen in (*op.saved, *unnamed):
            if self._is_recomputed(op) and not seen.parameter:
                yield _Told(seen, "recomputed", f"the replay of {op.name} makes it for its backward")
            elif not self._is_recomputed(op) and seen.label in rows:
                yield self._held(op, seen, rows[seen.label])
            else:
                why = "a parameter: it exists anyway" if seen.parameter else f"no backward of {op.name} is to come"
                yield _Told(seen, "not kept", why)

    def _saved_by(self, op: SeenOp) -> dict[str, Kept]:
        kinds = ("saved", "refilled", "empty")
        return {row.tensor: row for row in self._rows if row.op == op.name and row.what in kinds}

    def _held(self, op: SeenOp, seen: Seen, row: Kept) -> _Told:
        if row.what != "saved":
            source = f"has it as input {row.at} of {row.by}" if row.why == "input of" else "makes it again"
            return _Told(seen, "elided", f"replay {source}")
        state, why, where = self._state_of(row), f"the backward of {op.name} reads it", self._places(row)
        given = next((self._inputs[number] for number, _ in where if number in self._inputs), None)
        if given is not None:
            return _Told(seen, state, f"{why}; it is the region's input {given.tensor}, {state} anyway", where)
        return _Told(seen, state, why + self._why_it_stayed(row), where)

    def _of_output(self, op: SeenOp, seen: Seen) -> _Told:
        if self._is_recomputed(op):
            return _Told(seen, "recomputed", f"the replay of {op.name} makes it again")
        rows = [row for row in self._rows if row.op == op.name and row.tensor == seen.label]
        for row in rows:
            if row.what == "slot":
                why = f"{self._reader_of(row, seen)} reads it{self._why_it_stayed(row)}"
                return _Told(seen, self._state_of(row), why, self._places(row))
        for row in rows:
            if row.what == "saved":
                return _Told(seen, self._state_of(row), "a backward outside of it reads it", self._places(row))
        for away in (False, True):
            if (first := self._first.get((seen.number, away))) is not None:
                return _Told(seen, first[1], "no replay reads it, but its memory is kept", [(seen.number, away)])
        return _Told(seen, "not kept", "nothing reads it in replay: a placeholder stands for it")

    def _reader_of(self, row: Kept | None, seen: Seen | None = None) -> str:
        """Return in words what reads first, in replay, what a row stands for."""
        numbers = set() if row is None else set(self._numbers_in(row.value))
        if seen is not None:
            numbers.add(seen.number)
        return next((step.as_reader() for step in self._ran if not numbers.isdisjoint(step.reads)), SOME_OP)

    def _is_recomputed(self, op: SeenOp) -> bool:
        return self._decisions[op.name] is CheckpointPolicy.RECOMPUTE  # in a native region not its own policy

    def _places(self, row: Kept) -> list[tuple[int, bool]]:
        away = self._state_of(row) == "offloaded"
        return [(number, away) for number in self._numbers_in(row.value)]

    def _state_of(self, row: Kept) -> State:
        pieces = list(pieces_in(row.value, row.made_on))
        hooks = self._region.hooks
        if not pieces and hooks is not None:  # the hooks around have made something else of it
            return "recomputed" if isinstance(row.value, Around) or is_of_checkpoint(hooks[1]) else "offloaded"
        return "offloaded" if any(piece.offloaded for piece in pieces) else "kept"

    def _why_it_stayed(self, row: Kept) -> str:
        state = self._state_of(row)
        if state == "recomputed":
            return "; the checkpoint around makes it again"
        return f"; {row.stayed}" if row.stayed and state == "kept" else ""
