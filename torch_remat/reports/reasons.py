"""Why each named tensor of an op is kept or not, read from the tape after a region's forward.

In: the tape, and what the op saved and returned, as it was seen when its body ended. Kept: nothing. Out: a state and a
reason for each tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat.dispatch.elided import Elided
from torch_remat.dispatch.holder import Holder, OpHolder
from torch_remat.dispatch.policy_call import PolicyCall, SkippedOp
from torch_remat.dispatch.record import NativeRecord, Record, Slot, WholeCallRecord
from torch_remat.dispatch.region.region import Region
from torch_remat.dispatch.sender import Offloaded
from torch_remat.errors import qualified_name
from torch_remat.offload.transfer import may_travel
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.collect import output_name
from torch_remat.reports.consumers import SOME_OP, reader_among
from torch_remat.reports.explanation import State, TensorExplanation
from torch_remat.reports.model import RegionReport
from torch_remat.reports.pieces import pieces_in, storages_of, viewed_parameter
from torch_remat.reports.torch_checkpoint import is_of_checkpoint


@dataclass(frozen=True)
class Seen:
    """A named tensor of an op, as it was when the op's body ended.

    Attributes:
        label: Its name.
        bytes: Its storage's bytes.
        memory: The identity of its storage, or of its copy away.
        parameter: Whether it is a parameter or a view of one.
        guard: A weak reference, so that no other storage is taken for this one once it is freed.
    """

    label: str
    bytes: int
    memory: Hashable
    parameter: bool
    guard: StorageWeakRef | None = None

    @classmethod
    def of(cls, label: str, tensor: torch.Tensor) -> Seen:
        """Describe a tensor."""
        storages = storages_of(tensor)
        guard = StorageWeakRef(storages[0]) if storages else None
        memory = guard.cdata if guard is not None else 0
        return cls(
            label, sum(storage.nbytes() for storage in storages), memory, viewed_parameter(tensor) is not None, guard
        )

    @classmethod
    def of_kept(cls, label: str, kept: Any, sent: Mapping[int, StorageWeakRef]) -> Seen | None:
        """Describe what is kept under a name, in place or elsewhere; ``sent``: storages by the ids of their copies."""
        memory = [one for piece in pieces_in(kept) if piece.besides is None for one in piece.memory]
        if not memory:
            return None
        first = memory[0].owner
        guard = StorageWeakRef(first) if isinstance(first, torch.UntypedStorage) else sent.get(id(first))
        key = memory[0].key if guard is None else guard.cdata
        return cls(label, sum(one.bytes for one in memory), key, False, guard)


Told = tuple[Seen, State, str, Any]
"""A tensor, its state, the reason, and what is kept, if it is."""


def reasons(
    region: Region,
    ops: Sequence[tuple[Record, Sequence[Seen], Sequence[Seen]]],
    readers: Mapping[tuple[str, str], str],
) -> Iterator[tuple[TensorExplanation, ...]]:
    """Yield, for each op, an explanation for each tensor that it saved or returned.

    Args:
        region: The region.
        ops: Each op's record, what it saved, and what it returned.
        readers: What reads outputs, by op and name, as far as the graph shows.
    """
    kept_as = _KeptAs(region)
    told_of_saved: list[list[Told]] = []
    for record, saved, _ in ops:
        skipped = record.policy is not CheckpointPolicy.RECOMPUTE
        told_of_saved.append(list(_saved_by_skipped(region, record, saved) if skipped else _recomputed(record, saved)))
        for seen, state, _, kept in told_of_saved[-1]:
            kept_as.first(seen, state, kept, qualified_name(region.name, record.name, seen.label))
    for (record, _, outputs), told in zip(ops, told_of_saved, strict=True):
        every = [*told, *(_output(region, record, seen, kept_as.state_of(seen), readers) for seen in outputs)]
        yield tuple([_explained(region, record, *one, kept_as) for one in every])


def never_needed(region: Region, op: str, tensors: Sequence[Seen]) -> Iterator[TensorExplanation]:
    """Yield explanations for the tensors of an op in a region whose outputs need no gradient."""
    for seen in tensors:
        name = qualified_name(region.name, op, seen.label)
        yield TensorExplanation(name, seen.label, "not kept", seen.bytes, f"no backward of {region.name} is to come")


class _KeptAs:
    """Which tensor was told first of those in the same memory, in place or away; a region's inputs come before all."""

    def __init__(self, region: Region) -> None:
        self._first: dict[Hashable, tuple[str, State]] = {}
        inputs = region.inputs
        if inputs is None:
            return
        parameters = (*inputs.parameters(), *inputs.viewed_parameters())
        exists = {storage._cdata for parameter in parameters for storage in storages_of(parameter)}
        for place, given in inputs.kept():
            for piece in pieces_in(given):
                told: tuple[str, State] = (
                    qualified_name(region.name, None, place),
                    "offloaded" if piece.offloaded else "kept",
                )
                for key in {one.key for one in piece.memory} - exists if piece.besides is None else ():
                    self._first.setdefault(key, told)
                    self._first.setdefault(("seen", key), told)

    def first(self, seen: Seen, state: State, kept: Any, own: str) -> str | None:
        """Return the first tensor that is kept where this one is, unless it is the first, or is not kept."""
        if state not in ("kept", "offloaded"):
            return None
        # The same memory may be in place for one op and away for another.
        where = _memory_of(kept) or {("seen", seen.memory)}
        found = next((self._first[key][0] for key in where if key in self._first), own)
        for key in (*where, ("seen", seen.memory)):
            self._first.setdefault(key, (found, state))
        return None if found == own else found

    def state_of(self, seen: Seen) -> State | None:
        """Return where the memory of a tensor is, if something told before is kept in it."""
        found = self._first.get(("seen", seen.memory))
        return None if found is None else found[1]


def _explained(
    region: Region, record: Record, seen: Seen, state: State, why: str, kept: Any, kept_as: _KeptAs
) -> TensorExplanation:
    name = qualified_name(region.name, record.name, seen.label)
    shared_with = kept_as.first(seen, state, kept, name)
    return TensorExplanation(name, seen.label, state, seen.bytes, why, shared_with)


def _memory_of(kept: Any) -> set[Hashable]:
    return {one.key for piece in pieces_in(kept) if piece.besides is None for one in piece.memory}


def _recomputed(record: Record, saved: Sequence[Seen]) -> Iterator[Told]:
    for seen in saved:
        if seen.parameter:
            yield seen, "not kept", "a parameter: it exists anyway", None
        else:
            yield seen, "recomputed", f"the replay of {record.name} makes it for its backward", None


def _saved_by_skipped(region: Region, record: Record, saved: Sequence[Seen]) -> Iterator[Told]:
    holders = holders_of(region, record.name)
    for seen in saved:
        holder = holders.get(seen.label)
        if holder is not None:
            yield (seen, *_held(region, record, holder), kept_in(holder))
        elif seen.parameter:
            yield seen, "not kept", "a parameter: it exists anyway", None
        else:
            yield seen, "not kept", f"no backward of {record.name} is to come", None
    for call, place, slot in _kept_of_native(region, record):
        label = call.label(place)
        seen_there = None if label in holders else Seen.of_kept(label, slot.kept, {})
        if seen_there is not None:
            state = _state_of(region, slot.kept, slot.device)
            why = f"{reader_among(region.tape.calls, call, place)} reads it"
            yield seen_there, state, why + _why_it_stayed(region, record, state, slot.kept), slot.kept


def is_told_by_aten_op(region: Region, record: Record) -> bool:
    """Whether a region with a policy for ops keeps something of a native region, which has names of its own."""
    return any(_kept_of_native(region, record))


def _kept_of_native(region: Region, record: Record) -> Iterator[tuple[PolicyCall, int, Slot]]:
    for call in region.tape.calls:
        if call.native == record.name and type(call) is not SkippedOp:
            for place, slot in call.kept.items():
                yield call, place, slot


def holders_of(region: Region, op: str) -> dict[str, OpHolder]:
    """Return the live holders of what an op saved, by name."""
    holders = [holder for entry in region.tape.holders if (holder := entry()) is not None]
    return {holder.tensor_name: holder for holder in holders if holder.op == op}


def _held(region: Region, record: Record, holder: OpHolder) -> tuple[State, str]:
    if holder.resident:
        kept = kept_in(holder)
        state = _state_of(region, kept, holder.metadata[3])
        why = f"the backward of {record.name} reads it"
        memory = _memory_of(kept)
        for place, given in region.inputs.kept() if region.inputs is not None else ():
            if memory & _memory_of(given):
                return state, f"{why}; it is the region's input {place}, {state} anyway"
        return state, why + _why_it_stayed(region, record, state, kept)
    for other in region.tape.records.values():
        found = _find(other.elided_outputs, holder)
        if found is not None:
            output = qualified_name(None, other.name, output_name(region, other.name, found.place))
            return "elided", f"replay makes it again, as {output}"
        found = _find(other.elided_inputs, holder)
        if found is not None:
            return "elided", f"replay has it as input {found.place} of {other.name}"
    return "elided", "replay makes it again"


def _find(waiting: Sequence[Elided], holder: OpHolder) -> Elided | None:
    return next((elided for elided in waiting if elided.holder() is holder), None)


def kept_in(holder: OpHolder) -> Any:
    """Return what a holder keeps: a tensor, what hooks or an offloader made of it, or None."""
    return holder.value if holder.unpack is None else holder.packed


def _state_of(region: Region, kept: Any, made_on: torch.device) -> State:
    pieces = list(pieces_in(kept, made_on))
    if not pieces and region.hooks is not None:  # the hooks around have made something else of it
        in_checkpoint = isinstance(kept, Holder) or is_of_checkpoint(region.hooks[1])
        return "recomputed" if in_checkpoint else "offloaded"
    return "offloaded" if any(piece.offloaded for piece in pieces) else "kept"


def _why_it_stayed(region: Region, record: Record, state: State, kept: Any) -> str:
    if state == "recomputed":
        return "; the checkpoint around makes it again"
    if record.policy is not CheckpointPolicy.OFFLOAD or state == "offloaded":
        return ""
    if region.hooks is not None:
        return "; hooks around the region decide where it is"
    if isinstance(kept, torch.Tensor) and not may_travel(kept):
        return "; such a tensor does not travel"
    if isinstance(kept, Offloaded):
        return "; the offloader took it, but it could not leave"
    return "; the offloader did not take it"


def _output(
    region: Region, record: Record, seen: Seen, otherwise: State | None, readers: Mapping[tuple[str, str], str]
) -> Told:
    if record.policy is CheckpointPolicy.RECOMPUTE:
        return seen, "recomputed", f"the replay of {record.name} makes it again", None
    slots = list(_slots_of(region, record, seen.label))
    if slots:
        known = dict.fromkeys(reader for reader, _ in slots if reader is not None)
        if any(reader is None for reader, _ in slots):
            other = readers.get((record.name, seen.label))
            if other is not None or not known:
                known[other or SOME_OP] = None
        names = ", ".join(known)
        states = [_state_of(region, slot.kept, slot.device) for _, slot in slots]
        kept = slots[0][1].kept
        state: State = "kept" if "kept" in states else states[0]
        why = f"{names} {'reads' if len(known) == 1 else 'read'} it"
        return seen, state, why + _why_it_stayed(region, record, state, kept), kept
    holder = holders_of(region, record.name).get(seen.label)
    if holder is not None and holder.resident:
        return (
            seen,
            _state_of(region, kept_in(holder), holder.metadata[3]),
            "a backward outside of it reads it",
            kept_in(holder),
        )
    if otherwise is not None:
        return seen, otherwise, "no replay reads it, but its memory is kept", None
    return seen, "not kept", "nothing reads it in replay: a placeholder stands for it", None


def kept_by_policy(region: Region, report: RegionReport) -> tuple[TensorExplanation, ...]:
    """Return why a policy for ops keeps what it keeps; see `checkpoint(policy=...)`."""
    if not region.tape.calls:
        return ()
    told = []
    calls: dict[str, tuple[PolicyCall | None, int]] = {
        call.label(place): (call, place) for call in region.tape.calls if not call.native for place in call.kept
    }
    for tensor in report.tensors:
        if tensor.kind in ("saved", "kept for replay"):
            state: State = "offloaded" if tensor.offloaded else "kept"
            call, place = calls.get(tensor.label, (None, 0))
            reader = SOME_OP if call is None else reader_among(region.tape.calls, call, place)
            why = "backward reads it" if tensor.kind == "saved" else f"{reader} reads it"
            told.append(TensorExplanation(tensor.name, tensor.label, state, tensor.bytes, why, tensor.shared_with))
    return tuple(told)


def _slots_of(region: Region, record: Record, label: str) -> Iterator[tuple[str | None, Slot]]:
    """Yield what keeps an output for replay: its reader, if the tape tells, and the slot."""
    is_named = False
    for reader in (*region.tape.records.values(), *region.tape.regions):
        for slot in reader.slots.values():
            source = slot.source
            if source and source[0] == record.name and output_name(region, record.name, source[1]) == label:
                is_named = True
                yield f"the replay of {reader.name or 'an inner region'}", slot
    if isinstance(record, (NativeRecord, WholeCallRecord)):
        for place, slot in record.returned.items():
            if output_name(region, record.name, place) == label:
                yield None, slot
    for call in region.tape.calls:
        if call.native == record.name and type(call) is SkippedOp:
            for place, slot in call.kept.items():
                if call.label(place) == label:
                    # The call that reads it may be one in the body of the op that was told.
                    yield None if is_named else reader_among(region.tape.calls, call, place), slot
