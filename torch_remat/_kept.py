"""What a region keeps, as rows, for reports and budgets: the only file that reads the runtime's records for them.

In: a region, in whatever state it is. Kept: nothing; a row holds its tensor as long as the row lives. Out: rows in a
fixed order. Nothing is unpacked, brought back or replayed.

NOTE [ Names of what is kept ]
1. An op's saved tensors have the names that the op gave them. What a call of anything else saves is ``saved_0``,
   ``saved_1``, ...; in a native region it has the name of the op that made it or modified it last, such as ``mm_0_0``.
   A result that replay needs stands with the call that made it, as ``out``, or ``0``, ``1``, ... if there are several.
2. A region's inputs are named by their place in the call: ``args[0]``, ``kwargs['mask']``.
3. A tensor without a name is ``saved tensor 3``, by its place in forward. Error messages use the same names, which do
   not depend on when the report is made.
4. What a policy for aten ops keeps has its automatic name, also while forward runs and nothing is decided yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch

from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.holder import Holder, is_parameter
from torch_remat.dispatch.keys import key_of
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.ops.entry import Entry
from torch_remat.dispatch.region.forward import Recording
from torch_remat.dispatch.region.region import Region
from torch_remat.dispatch.slot import Slot
from torch_remat.policies.decision import CheckpointPolicy

Kind = Literal[
    "input",
    "saved",
    "kept for replay",
    "undecided",
    "refilled",
    "random state",
    "not gone yet",
    "brought back",
]
"""Why a tensor is there: replay starts from it; backward needs it; replay needs it; forward holds it until its end
decides whether anything needs it; a replay has just made it; replay draws its numbers from this state;
it is offloaded and is there as well: since it has not left, or since it has come
back for a backward that goes on."""


class Around(NamedTuple):
    """What an enclosing region recomputes, or knows as a parameter, or a view of one."""

    parameter: torch.Tensor | None


class Kept(NamedTuple):
    """One row of `kept_by`.

    Attributes:
        kind: Why it is kept.
        op: The name of the entry that made or saved it, with its scopes; empty for what belongs to no named entry.
        tensor: Its name there; see NOTE [ Names of what is kept ].
        value: The tensor, or what stands for it: an `Offloaded`, an `Around`, or whatever hooks around the region made
            of it. Its shape, storage and bytes are asked of this.
        made_on: The device on which forward had it; None if that is where the value is. If the value is a tensor
            elsewhere, hooks have moved it.
        needed_by: ``"replay"``, ``"backward"``, or ``"backward of attention"``, that of an op.
        decision: The decision about the entry, or about this result of it; None for what no decision is about.
    """

    kind: Kind
    op: str
    tensor: str
    value: Any
    made_on: torch.device | None = None
    needed_by: str = "replay"
    decision: CheckpointPolicy | None = None


def kept_by(region: Region) -> Iterator[Kept]:
    """Yield all that a region keeps now."""
    entries = [*region.tape.calls, *region.tape.functions.values()]
    decisions: dict[str, CheckpointPolicy] = {
        call.name: call.policy
        for call in list(region.tape.functions.values())
        if call.policy is CheckpointPolicy.OFFLOAD and call.is_saved
    }
    decisions |= decisions_of(region)
    undecided = list(_undecided_in(region))
    away = {(entry.group, entry.label(place)) for entry in entries for place in entry.away}
    away |= {(row.op, row.tensor) for row in undecided if row.decision is CheckpointPolicy.OFFLOAD}
    for row in chain(_unnamed(region), _named(region), _of_records(region), _of_entries(region, entries), undecided):
        decision = CheckpointPolicy.OFFLOAD if (row.op, row.tensor) in away else decisions.get(row.op)
        if decision is None and row.kind in ("saved", "kept for replay", "undecided"):
            decision = CheckpointPolicy.SAVE
        yield row._replace(value=held_in(row.value), decision=decision)


def in_partials(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the ``functools.partial`` that a function is has for it: it lives as long as the function."""
    while isinstance(function, partial):
        yield from ((f"function.args[{place}]", value) for place, value in enumerate(function.args))
        yield from ((f"function.keywords[{name!r}]", value) for name, value in function.keywords.items())
        function = function.func


def held_in(packed: Any) -> Any:
    """Return the value of a row, from what an autograd node or a region keeps of a tensor."""
    if region_behind(packed) is None:
        return packed
    return Around(None if isinstance(packed, Holder) else packed[0])


def region_behind(packed: Any) -> Region | None:
    """Return the region whose `Holder` or `Anchor` that is, if any."""
    if isinstance(packed, Holder):
        return packed.region  # type: ignore[return-value]
    return packed[2] if type(packed) is tuple and len(packed) == 4 and isinstance(packed[2], Region) else None


def _unnamed(region: Region) -> Iterator[Kept]:
    """Yield inputs, saved tensors without a name, and the random state before forward."""
    for label, leaf in () if region.inputs is None else list(region.inputs.kept()):
        if not (isinstance(leaf, torch.Tensor) and is_parameter(leaf)):
            yield Kept("input", "", label, leaf)
    calls = [call for call in region.tape.functions.values() if call.is_saved and region.finished]
    made = {key: call for call in calls for _, key in call.made}
    for place, entry in enumerate(list(region.tape.saved)):
        if type(entry) is ref and type(holder := entry()) is Holder:
            label = f"saved tensor {place}"
            if holder.value is not None and made and (call := made.get(key_of(holder.value))) is not None:
                yield Kept("saved", call.name, call.label(0), holder.value, needed_by=_backward_of(call.name))
                continue
            if holder.value is not None:
                yield Kept(_filled(region), "", label, holder.value, needed_by="backward")
    yield from _of_state(region.rng, "")


def _named(region: Region) -> Iterator[Kept]:
    """Yield saved tensors that have names."""
    for holder in region.tape.named_holders():
        packed = holder.value if holder.unpack is None else holder.packed
        if packed is not None:
            kind: Kind = "saved" if holder.resident else _filled(region)
            yield Kept(kind, holder.op, holder.name, packed, holder.metadata[3], _backward_of(holder.op))


def _backward_of(op: str) -> str:
    return f"backward of {op}" if op else "backward"


def _filled(region: Region) -> Kind:
    return "refilled" if region.finished else "undecided"


def _of_records(region: Region) -> Iterator[Kept]:
    """Yield the random states of calls, and results for which no placeholder can stand in."""
    for call in [*region.tape.records.values(), *region.tape.functions.values()]:
        yield from _of_state(call.drawn, call.name)
        yield from _of_inputs(call.inputs)
        for at, form in enumerate(call.results if type(call.results) is list else (call.results,)):
            if isinstance(form, Slot):
                yield _of_slot(form, call.name, f"result {at}")
    for slots in list(region.tape.entered):
        yield from _of_inputs(slots)


def _of_inputs(slots: Mapping[int, Slot]) -> Iterator[Kept]:
    return (_of_slot(slot, *slot.sources[-1]) for slot in slots.values())


def _of_entries(region: Region, entries: Sequence[Entry]) -> Iterator[Kept]:
    """Yield what a policy for aten ops keeps, and the outputs of calls."""
    for entry in entries:
        if not (entry.is_call or region.finished):
            continue  # undecided
        for place, slot in list(entry.kept.items()):
            yield _of_slot(slot, entry.group, entry.label(place))
        before = f" before {entry.effects.name}" if not entry.is_call else ""
        yield from (row._replace(tensor=row.tensor + before) for row in _of_state(entry.before, entry.group))


def _of_slot(slot: Slot, op: str, label: str) -> Kept:
    return Kept("kept for replay", op, label, slot.kept, slot.device)


def _of_state(state: RngState | None, op: str) -> Iterator[Kept]:
    for tensor in () if state is None else state.kept():
        yield Kept("random state", op, "random state", tensor)


def _undecided_in(region: Region) -> Iterator[Kept]:
    """Yield what the region holds until the end of its forward, if that runs in this thread."""
    mode = current_mode()
    while mode is not None and mode.region is not region:
        mode = mode.parent
    if isinstance(mode, Recording) and mode.ops is not None:
        for op, label, tensor, policy in mode.ops.results.undecided():  # not those of a replay
            yield Kept("undecided", op, label, tensor, decision=policy)


def decisions_of(region: Region) -> dict[str, CheckpointPolicy]:
    """Return the decision about each entry that has a name, in the order of forward; aten ops have none."""
    return {name: record.policy for name, record in list(region.tape.records.items())}


def parameters_of(region: Region) -> Iterator[torch.Tensor]:
    """Yield the parameters that a region knows, some several times: they exist anyway, and so does their memory."""
    saved = [entry for entry in list(region.tape.saved) if isinstance(entry, torch.Tensor) and is_parameter(entry)]
    given = () if region.inputs is None else region.inputs.parameters()
    for parameter in (*region.parameters, *saved, *given):
        if parameter is not None:
            yield parameter
