"""Why each named tensor of an op is kept or not: the rows of `kept_by` in words.

In: a region after its forward, and what its ops saved and returned, as it was seen when their bodies ended. Kept:
nothing. Out: a state and a reason for each tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.data import RegionReport
from torch_remat.reports.explanation import State, TensorExplanation
from torch_remat.reports.graph import SOME_OP
from torch_remat.reports.kept import Around, Kept, decisions_of, kept_by, parameters_of
from torch_remat.reports.ledger import pieces_in, storages_of, viewed_parameter
from torch_remat.reports.torch_checkpoint import is_of_checkpoint

Readers = Mapping[tuple[str, str], str]
Sent = Mapping[int, StorageWeakRef]
"""The storages that were offloaded, by what `Observer.offload_began` was told."""


@dataclass(frozen=True)
class Seen:
    """A named tensor of an op, as it was when the op's body ended."""

    label: str
    bytes: int  # its storage's bytes
    memory: Hashable  # the identity of its storage, or of what stands for it while it is away
    parameter: bool = False  # whether it is a parameter or a view of one
    # Weak, so that no other storage is taken for this one once it is freed.
    guard: StorageWeakRef | None = None

    @classmethod
    def of(cls, label: str, tensor: torch.Tensor) -> Seen:
        """Describe a tensor."""
        storages = storages_of(tensor)
        guard = StorageWeakRef(storages[0]) if storages else None
        size = sum(storage.nbytes() for storage in storages)
        return cls(label, size, guard.cdata if guard else 0, viewed_parameter(tensor) is not None, guard)

    @classmethod
    def of_kept(cls, row: Kept, sent: Sent) -> Seen | None:
        """Describe what is kept, in place or elsewhere."""
        memory = [one for piece in pieces_in(row.value) if piece.besides is None for one in piece.memory]
        if not memory:
            return None
        first = memory[0].owner
        guard = StorageWeakRef(first) if isinstance(first, torch.UntypedStorage) else sent.get(id(first))
        return cls(row.tensor, sum(one.bytes for one in memory), guard.cdata if guard else memory[0].key, guard=guard)


@dataclass
class SeenOp:
    """An op after forward."""

    name: str
    policy: CheckpointPolicy
    saved: list[Seen] = field(default_factory=list)  # what it saved by names of its own
    outputs: list[Seen] = field(default_factory=list)  # what it returned


class _Told(NamedTuple):
    """A tensor, its state, the reason, and the row of what is kept, if it is."""

    seen: Seen
    state: State
    why: str
    row: Kept | None = None


def never_needed(region: Region, op: str, tensors: Sequence[Seen]) -> Iterator[TensorExplanation]:
    """Yield explanations for the tensors of an op in a region whose outputs need no gradient."""
    for seen in tensors:
        name = qualified_name(region.name, op, seen.label)
        yield TensorExplanation(name, seen.label, "not kept", seen.bytes, f"no backward of {region.name} is to come")


def kept_by_policy(region: Region, report: RegionReport) -> Iterator[TensorExplanation]:
    """Yield why a policy for aten ops keeps what it keeps; see `checkpoint(policy=...)`."""
    readers = {row.tensor: _reader(row) for row in kept_by(region) if not row.op and row.what == "result"}
    for tensor in report.tensors:
        if tensor.kind in ("saved", "kept for replay"):
            state: State = "offloaded" if tensor.offloaded else "kept"
            reader = "backward" if tensor.kind == "saved" else readers.get(tensor.label, SOME_OP)
            why = f"{reader} reads it"
            yield TensorExplanation(tensor.name, tensor.label, state, tensor.bytes, why, tensor.shared_with)


class Reasons:
    """Why a region keeps what it keeps: its rows by op; of tensors in the same memory, the one explained first.

    ``readers`` are those of `readers_in_graph`.
    """

    def __init__(self, region: Region, readers: Readers, sent: Sent) -> None:
        self._region = region
        self._readers = readers
        self._sent = sent
        self._decisions = decisions_of(region)
        self._rows: dict[str, list[Kept]] = {}  # by op
        self._inputs: dict[Hashable, Kept] = {}  # by their memory
        # By memory, in place or away, and by the storage as it was seen: what was explained first; inputs come first.
        self._first: dict[Hashable, tuple[str, State]] = {}
        exists = {storage._cdata for parameter in parameters_of(region) for storage in storages_of(parameter)}
        for row in kept_by(region):
            self._rows.setdefault(row.op, []).append(row)
            for key in _memory_of(row) if row.what == "input" else ():
                self._inputs.setdefault(key, row)
                if key not in exists:
                    told = qualified_name(region.name, None, row.tensor), self._state_of(row)
                    self._first.setdefault(key, told)
                    self._first.setdefault(("seen", key), told)

    def of(self, ops: Sequence[SeenOp]) -> Iterator[tuple[TensorExplanation, ...]]:
        """Yield, for each op, an explanation for each tensor that it saved or returned."""
        saved = [tuple(self._explained(op, self._of_saved(op))) for op in ops]  # those of all ops before any output
        for op, told in zip(ops, saved, strict=True):
            yield (*told, *self._explained(op, [self._of_output(op, seen) for seen in op.outputs]))

    def _explained(self, op: SeenOp, told: Iterable[_Told]) -> Iterator[TensorExplanation]:
        for seen, state, why, row in told:
            name = qualified_name(self._region.name, op.name, seen.label)
            shared_with = self._shared_with(seen, state, row, name)
            yield TensorExplanation(name, seen.label, state, seen.bytes, why, shared_with)

    def _shared_with(self, seen: Seen, state: State, row: Kept | None, own: str) -> str | None:
        """Return the first tensor that is kept where this one is, unless it is the first, or is not kept."""
        if state not in ("kept", "offloaded"):
            return None
        # The same memory may be in place for one op and away for another.
        as_seen = ("seen", seen.memory)
        where = _memory_of(row) or {as_seen}
        found = next((self._first[key][0] for key in where if key in self._first), own)
        for key in (*where, as_seen):
            self._first.setdefault(key, (found, state))
        return None if found == own else found

    def _of_saved(self, op: SeenOp) -> Iterator[_Told]:
        """Yield the states of the tensors that an op saved."""
        rows = self._saved_by(op)
        known = {seen.label for seen in (*op.saved, *op.outputs)}
        # What a call saves without a name of its own, its holders tell.
        held = (Seen.of_kept(row, self._sent) for label, row in rows.items() if label not in known)
        for seen in (*op.saved, *(seen for seen in held if seen is not None)):
            if self._is_recomputed(op) and not seen.parameter:
                yield _Told(seen, "recomputed", f"the replay of {op.name} makes it for its backward")
            elif not self._is_recomputed(op) and seen.label in rows:
                yield self._held(op, seen, rows[seen.label])
            else:
                why = "a parameter: it exists anyway" if seen.parameter else f"no backward of {op.name} is to come"
                yield _Told(seen, "not kept", why)

    def _saved_by(self, op: SeenOp) -> dict[str, Kept]:
        rows = self._rows.get(op.name, ())
        return {row.tensor: row for row in rows if row.what in ("saved", "refilled", "empty")}

    def _held(self, op: SeenOp, seen: Seen, row: Kept) -> _Told:
        if row.what != "saved":
            if row.why == "input of":
                return _Told(seen, "elided", f"replay has it as input {row.at} of {row.by}")
            return _Told(seen, "elided", "replay makes it again")
        state, why = self._state_of(row), f"the backward of {op.name} reads it"
        given = next((self._inputs[key] for key in _memory_of(row) if key in self._inputs), None)
        if given is not None:
            return _Told(seen, state, f"{why}; it is the region's input {given.tensor}, {state} anyway", row)
        return _Told(seen, state, why + self._why_it_stayed(row), row)

    def _of_output(self, op: SeenOp, seen: Seen) -> _Told:
        if self._is_recomputed(op):
            return _Told(seen, "recomputed", f"the replay of {op.name} makes it again")
        rows = self._rows.get(op.name, ())
        slot = next((row for row in rows if row.what == "slot" and row.tensor == seen.label), None)
        if slot is not None:
            shown = None if slot.why == "op" else self._readers.get((op.name, seen.label))
            why = f"{shown or _reader(slot)} reads it{self._why_it_stayed(slot)}"
            return _Told(seen, self._state_of(slot), why, slot)
        row = self._saved_by(op).get(seen.label)
        if row is not None and row.what == "saved":
            return _Told(seen, self._state_of(row), "a backward outside of it reads it", row)
        first = self._first.get(("seen", seen.memory))
        if first is not None:
            return _Told(seen, first[1], "no replay reads it, but its memory is kept")
        return _Told(seen, "not kept", "nothing reads it in replay: a placeholder stands for it")

    def _is_recomputed(self, op: SeenOp) -> bool:
        return self._decisions[op.name] is CheckpointPolicy.RECOMPUTE  # in a native region not its own policy

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


def _memory_of(row: Kept | None) -> set[Hashable]:
    """Return the identities of the memory that a row stands for."""
    pieces = () if row is None else pieces_in(row.value)
    return {one.key for piece in pieces if piece.besides is None for one in piece.memory}


def _reader(row: Kept) -> str:
    """Return in words what reads the tensor of a row in replay."""
    if row.why == "op":
        return f"the replay of {row.at}" if row.at else f"{SOME_OP} ({row.by})"
    return SOME_OP
