"""What a region keeps, as rows for reports: the only file that reads the runtime's records for them.

In: a region, in whatever state it is. Kept: nothing; a row holds its tensor as long as the row lives. Out: rows in a
fixed order. Nothing is unpacked, brought back or replayed.

NOTE [ Names of what is kept ]
1. An op's saved tensors have the names that the op gave them. An output that replay needs as an input stands with
   the op that made it, as ``out``, or ``0``, ``1``, ... if there are several.
2. A region's inputs are named by their place in the call: ``args[0]``, ``kwargs['mask']``.
3. A tensor without a name is ``saved tensor 3``, by its place in forward. Error messages use the same names, which do
   not depend on when the report is made.
4. What a policy for aten ops keeps has its automatic name, also while forward runs and nothing is decided yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch

from torch_remat.dispatch.handle.saved_call import LeftOut
from torch_remat.dispatch.holder import Holder, is_parameter
from torch_remat.dispatch.log.earlier import earlier_label
from torch_remat.dispatch.log.entry import CALL, Entry
from torch_remat.dispatch.log.record import Stretch
from torch_remat.dispatch.log.slot import Slot
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.offloading import Offloaded
from torch_remat.offload.transfer import may_travel
from torch_remat.policies.decision import CheckpointPolicy

What = Literal[
    "input",  # a tensor among the arguments of the region's function
    "saved",  # a saved tensor that a saved entry keeps
    "refilled",  # a saved tensor that a replay has made
    "empty",  # a saved tensor that replay will make: it costs nothing
    "slot",  # a result of an entry, what one wrote, or what a tensor was before a write, which replay needs as an input
    "result",  # a result of one watched aten op, named after that, which replay does not make again
    "undecided",  # a result that forward holds until its end tells whether replay needs it
    "random state",
    "determinism check",  # a value that is compared with replay's
]
Why = Literal[
    "backward",  # the backward of the entry `by` reads it, or of some op if that is empty
    "entry",  # the entry `by`, which replay runs, reads it
    "inner region",  # a region inside, which replay runs, reads it
    "op",  # the aten op that made the result `by`, which replay runs, reads it; it is part of the entry `at`, if any
    "replay",  # nothing tells which op of replay reads it
    "output of",  # not kept: replay takes it from output `at` of the entry `by`, or from what that is a view of
    "input of",  # not kept: replay takes it from input `at` (a number from 0) of the entry `by`, likewise
    "again",  # not kept: replay makes it again
]


class Around(NamedTuple):
    """What a region around this one makes again, or knows as a parameter, or a view of one."""

    parameter: torch.Tensor | None


class Kept(NamedTuple):
    """One row of `Region.kept`.

    Attributes:
        what: What it is about.
        op: The name of the entry that made or saved it, with its scopes; empty for what belongs to no named entry.
        tensor: Its name there; see NOTE [ Names of what is kept ]. It is unique among the rows of the same kind and op,
            random states and tensors that were written apart.
        value: The tensor, or what stands for it: an `Offloaded`, an `Around`, whatever hooks around the region made of
            it, or None if it is not kept. Its shape, storage and bytes are asked of this.
        made_on: The device on which forward had it; None if that is where the value is. If the value is a tensor
            elsewhere, hooks have moved it.
        why: Why it is kept, or why not; ``by`` and ``at`` are the facts to it.
        decision: The decision about the entry, or about this result of it; None for what no decision is about.
        stayed: Why it is in place though the decision is OFFLOAD, in words; empty if it has left, or was not to.
    """

    what: What
    op: str
    tensor: str
    value: Any
    made_on: torch.device | None = None
    why: Why = "replay"
    by: str = ""
    at: str = ""
    decision: CheckpointPolicy | None = None
    stayed: str = ""


def kept_by(region: Any) -> Iterator[Kept]:
    """Yield the rows of `Region.kept`."""
    calls, undecided = list(region.tape.calls), list(_undecided_in(region))
    decisions = decisions_of(region)
    away = {(call.group, call.label(place)) for call in calls for place in call.away}
    away |= {(op, label) for op, label, _, policy in undecided if policy is CheckpointPolicy.OFFLOAD}
    held = (Kept("undecided", op, label, tensor) for op, label, tensor, _ in undecided)
    for row in chain(_unnamed(region), _named(region), _of_records(region), _of_calls(region, calls), held):
        value = held_in(row.value)
        decision = decisions.get(row.op)
        if (row.op, row.tensor) in away:
            decision = CheckpointPolicy.OFFLOAD
        elif decision is None and row.what in ("saved", "slot", "result", "undecided"):
            decision = CheckpointPolicy.SAVE
        stayed = _why_it_stayed(region, value) if decision is CheckpointPolicy.OFFLOAD else ""
        yield row._replace(value=value, decision=decision, stayed=stayed)


def held_in(packed: Any) -> Any:
    """Return the value of a row, from what an autograd node or a region keeps of a tensor."""
    if isinstance(packed, Holder):
        return Around(None)
    if type(packed) is tuple and len(packed) == 4 and hasattr(packed[2], "tape"):  # an `Anchor`
        return Around(packed[0])
    return packed


def _why_it_stayed(region: Any, value: Any) -> str:
    if isinstance(value, Offloaded):
        return "the offloader took it, but it could not leave" if told_of(value, "stays") is True else ""
    if region.hooks is not None and value is not None:
        return "hooks around the region decide where it is"
    if not isinstance(value, torch.Tensor):
        return ""
    return "the offloader did not take it" if may_travel(value) else "such a tensor does not travel"


def _unnamed(region: Any) -> Iterator[Kept]:
    """Yield inputs, saved tensors without a name, and the random state before forward."""
    for label, leaf in () if region.inputs is None else list(region.inputs.kept()):
        if not (isinstance(leaf, torch.Tensor) and is_parameter(leaf)):
            yield Kept("input", "", label, leaf)
    for place, entry in enumerate(list(region.tape.saved)):
        holder = entry() if type(entry) is ref else None
        if holder is not None:
            label = f"saved tensor {place}"
            if holder.value is None:
                yield Kept("empty", "", label, None, why="again")
            else:
                yield Kept("refilled", "", label, holder.value, why="backward")
            if (value := getattr(holder, "fingerprint", None)) is not None:
                yield Kept("determinism check", "", f"value of {label}", value)
    if region.rng is not None:
        for tensor in region.rng.kept():
            yield Kept("random state", "", "random state", tensor)


def _named(region: Any) -> Iterator[Kept]:
    """Yield saved tensors that have names."""
    sources: dict[int, tuple[Why, str, str]] = {}  # of elided ones, by the holder
    for record in region.tape.records.values():
        for elided in record.elided_outputs or ():
            sources[id(elided.holder())] = "output of", record.name, _output_name(region, record.name, elided.place)
        for elided in record.elided_inputs or ():
            sources.setdefault(id(elided.holder()), ("input of", record.name, str(elided.place)))
    for entry in list(region.tape.holders):
        if (holder := entry()) is not None:
            packed = holder.value if holder.unpack is None else holder.packed
            op, name, made_on = holder.op, holder.tensor_name, holder.metadata[3]
            if packed is None:
                yield Kept("empty", op, name, None, made_on, *sources.get(id(holder), ("again",)))
            else:
                yield Kept("saved" if holder.resident else "refilled", op, name, packed, made_on, "backward", op)


def _of_records(region: Any) -> Iterator[Kept]:
    """Yield what entries with names, and inner regions, keep for replay."""
    for record in [*region.tape.records.values(), *region.tape.regions]:
        for tensor in () if record.drawn is None else record.drawn.kept():
            yield Kept("random state", record.name, "random state", tensor)
        why: Why = "entry" if record.name else "inner region"
        for slot in list(record.slots.values()):
            if slot.source is not None:
                name = _output_name(region, *slot.source)
                yield Kept("slot", slot.source[0], name, slot.kept, slot.device, why, record.name)
        for at, form in enumerate(record.forms if isinstance(record, LeftOut) else ()):
            if isinstance(form, Slot):
                yield Kept("slot", record.name, f"result {at}", form.kept, form.device)
        if isinstance(record, Stretch):
            for place, slot in list(record.returned.items()):
                yield Kept("slot", record.name, str(place), slot.kept, slot.device)
            for slot in [left.slot for left in record.left if left.slot is not None]:
                yield Kept("slot", record.name, "written", slot.kept, slot.device)


def _of_calls(region: Any, calls: Sequence[Entry]) -> Iterator[Kept]:
    """Yield what a policy for aten ops keeps, and the outputs of calls."""
    readers = _readers_among(calls)
    for call in calls:
        what: What = "slot" if call.kind == CALL or region.options.policy is None else "result"
        for place, slot in list(call.kept.items()):
            row = Kept(what, call.group, call.label(place), slot.kept, slot.device)
            reader = readers.get((id(call), place))
            yield row if reader is None else row._replace(why="op", by=reader.label(0), at=reader.group)
        changed = [(call.label(0), slot) for slot in list(call.written)]
        changed += [(earlier_label(call, at), slot) for at, slot in list(call.earlier.items())]
        for label, slot in changed:
            yield Kept("slot", call.group, label, slot.kept, slot.device)
        for tensor in () if call.before is None else call.before.kept():
            yield Kept("random state", call.group, "random state", tensor)


def _output_name(region: Any, op: str, place: int) -> str:
    record = region.tape.records.get(op)
    return "out" if record is None else record.label(place)


def _undecided_in(region: Any) -> Iterator[tuple[str, str, torch.Tensor, CheckpointPolicy]]:
    """Yield what the region holds until the end of its forward, if that runs in this thread."""
    mode = current_mode()
    while mode is not None and mode.region is not region:
        mode = mode.parent
    if mode is not None and mode.ops is not None and not mode.replaying:
        yield from mode.ops.undecided()  # not those of a replay


def _readers_among(calls: Sequence[Entry]) -> Mapping[tuple[int, int], Entry]:
    """Return, by the id of a call and a result's place, the first later call that replay runs and that reads it."""
    found: dict[tuple[int, int], Entry] = {}
    following: dict[int, Entry] = {}  # by storage
    for call in reversed(calls):
        made = dict(call.made)
        for place in call.kept:
            if (reader := following.get(made.get(place, call.storage))) is not None:
                found[id(call), place] = reader
        for storage in (call.storage, *made.values()):
            following.pop(storage, None)  # what is read later is another tensor, at the same address
        if call.run:
            following.update((storage, call) for storage in call.reads if storage)
    return found


def told_of(away: Offloaded, method: str) -> Any:
    """Return what one of the offloader's optional methods tells of what it has; None if it tells nothing."""
    copy = away.transfer.copy
    ask = getattr(copy.offloader, method, None)
    try:
        return None if ask is None else ask(copy.ticket)
    except Exception:
        return None  # a report does not fail because of an offloader


def decisions_of(region: Any) -> dict[str, CheckpointPolicy]:
    """Return the decision about each entry that has a name, in the order of forward; aten ops have none."""
    return {name: record.policy for name, record in list(region.tape.records.items())}


def parameters_of(region: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that a region knows, some several times: they exist anyway, and so does their memory."""
    saved = [entry for entry in list(region.tape.saved) if isinstance(entry, torch.Tensor) and is_parameter(entry)]
    inputs = region.inputs
    given = () if inputs is None else (*inputs.parameters(), *inputs.viewed_parameters())
    for parameter in (*region.parameters, *saved, *given):
        if parameter is not None:
            yield parameter


def replay_now(region: Any) -> None:
    """Replay a region as a backward that reads all of its saved tensors would; not if they are all there."""
    if empty := region.tape.empty():
        region.refill(empty[0])
