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
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.holder import Holder, is_parameter
from torch_remat.dispatch.log.earlier import earlier_label
from torch_remat.dispatch.log.entry import CALL, ONE, WRITTEN, Entry
from torch_remat.dispatch.log.meta import Meta
from torch_remat.dispatch.log.record import Record, Stretch
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.sender import Offloaded
from torch_remat.offload.transfer import may_travel
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.log.slot import Slot


class What(Enum):
    """What a row is about."""

    INPUT = "input"
    """A tensor among the arguments of the region's function."""
    RESIDENT = "resident"
    """A saved tensor that a saved entry keeps; its holder has the value from the start."""
    VALUE = "value"
    """A saved tensor whose holder a replay has filled."""
    EMPTY = "empty"
    """A saved tensor whose holder is empty: it costs nothing, and replay will make it."""
    SLOT = "slot"
    """A result of an entry, what one wrote, or what a tensor was before a write, which replay needs as an input."""
    RESULT = "result"
    """A result of one watched aten op, named after that, which replay does not make again."""
    UNDECIDED = "undecided"
    """A result that forward holds until its end tells whether replay needs it."""
    RANDOM_STATE = "random state"
    """The state of a random generator."""
    CHECK = "check"
    """A value that the determinism check compares with replay's."""


class Where(Enum):
    """Where the tensor of a row is."""

    HERE = "here"
    """`Kept.value` is the tensor."""
    AWAY = "away"
    """An offloader has it, or could not send it after all; `Kept.value` is an `Away`."""
    HOOKS = "hooks"
    """Saved-tensor hooks around the region have it; `Kept.value` is what they made of it, any object."""
    AROUND = "around"
    """A region around this one has it: makes it again, so that the value is None, or knows it as a parameter, or a view
    of one, which is the value."""
    NOWHERE = "nowhere"
    """It is not kept; the value is None."""


class Why(Enum):
    """Why a tensor is kept, or why not; `Kept.by` and `Kept.at` are the facts to it."""

    STARTS_REPLAY = "starts replay"
    """Replay starts from it."""
    BACKWARD = "backward"
    """Backward reads it: that of the entry ``by``, or of some op if ``by`` is empty."""
    ENTRY = "entry"
    """The entry ``by``, which replay runs, reads it."""
    INNER_REGION = "inner region"
    """A region inside, which replay runs, reads it."""
    OP = "op"
    """The aten op that made the result ``by``, which replay runs, reads it. It is part of the entry ``at``, or of none
    if ``at`` is empty."""
    REPLAY = "replay"
    """Replay reads it, or may read it; nothing tells which op does."""
    COMPARED = "compared"
    """Replay's value is compared with it."""
    FROM_OUTPUT = "from output"
    """Not kept: replay takes it from the output ``at`` of the entry ``by``, or from what that is a view of."""
    FROM_INPUT = "from input"
    """Not kept: replay takes it from the input ``at`` (a number from 0) of the entry ``by``, likewise."""
    AGAIN = "again"
    """Not kept: replay makes it again."""


class Stayed(Enum):
    """Why a tensor is in place though it was to be offloaded."""

    HOOKS = "hooks"
    """Saved-tensor hooks around the region decide where it is."""
    KIND = "kind"
    """Such a tensor does not travel; see `may_travel`."""
    STUCK = "stuck"
    """The offloader took it, but it could not leave."""
    DECLINED = "declined"
    """The offloader did not take it."""


class Away(NamedTuple):
    """A tensor that an offloader has.

    Attributes:
        key: The identity of what travelled, which several tensors may share; valid as long as ``owner`` lives.
            Observers get the same number in `Observer.offload_began`.
        owner: What has to live for that.
        bytes: How many bytes travelled.
        offloader: The class name of the offloader.
        shape: The tensor's shape.
        dtype: Its dtype.
        not_gone: The tensor in place, if it has not left yet or cannot leave; None if it is gone.
        came_back: The value that was brought back for a backward that goes on, of the bytes that travelled; None if
            there is none.
        stays: Whether it was taken and cannot leave.
    """

    key: int
    owner: object
    bytes: int
    offloader: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    not_gone: torch.Tensor | None
    came_back: torch.Tensor | None
    stays: bool

    @classmethod
    def of(cls, kept: Offloaded) -> Away:
        """Describe what stands for a tensor that is away."""
        copy, placement = kept.transfer.copy, kept.placement
        here = _told(copy, "still_here")
        return cls(
            id(copy),
            copy,
            copy.bytes,
            type(copy.offloader).__name__,
            tuple(placement.shape),
            placement.dtype,
            here if isinstance(here, torch.Tensor) else None,
            kept.transfer.value,
            _told(copy, "stays") is True,
        )


def _told(copy: Any, method: str) -> Any:
    """Return what one of the offloader's optional methods tells of what was sent; None if it tells nothing."""
    ask = getattr(copy.offloader, method, None)
    try:
        return None if ask is None else ask(copy.ticket)
    except Exception:
        return None  # a report does not fail because of an offloader


class Kept(NamedTuple):
    """One row of `Region.kept`.

    Attributes:
        what: What it is.
        op: The name of the entry that made or saved it, with its scopes; empty for what belongs to no named entry.
        tensor: Its name there; see NOTE [ Names of what is kept ]. It is unique among the rows of the same kind and op,
            random states and tensors that were written apart.
        where: Where it is; tells what ``value`` is.
        value: The tensor, or what stands for it. Its shape, storage and bytes are asked of this.
        made_on: The device on which forward had it; None if that is where the value is. If the value is a tensor
            elsewhere, hooks have moved it.
        decision: The decision about the entry, or about this result of it; None for what no decision is about.
        why: Why it is kept, or why not.
        by: A fact to ``why``; empty if there is none.
        at: Another one.
        stayed: Why it is in place though the decision is OFFLOAD; None if it has left, or was not to.
    """

    what: What
    op: str
    tensor: str
    where: Where
    value: Any
    made_on: torch.device | None
    decision: CheckpointPolicy | None
    why: Why
    by: str = ""
    at: str = ""
    stayed: Stayed | None = None


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


def held_in(packed: Any) -> tuple[Where, Any]:
    """Return where a tensor is, and its value as in a row, from what an autograd node or a region keeps of it."""
    if packed is None:
        return Where.NOWHERE, None
    if isinstance(packed, torch.Tensor):
        return Where.HERE, packed
    if type(packed) is Offloaded:
        return Where.AWAY, Away.of(packed)
    if isinstance(packed, Holder):
        return Where.AROUND, None
    if type(packed) is tuple and len(packed) == 3 and hasattr(packed[2], "tape"):  # an `Anchor`
        return Where.AROUND, packed[0]
    return Where.HOOKS, packed


def replay_now(region: Any) -> None:
    """Replay a region as a backward that reads all of its saved tensors would; not if they are all there."""
    if empty := region.tape.empty():
        region.refill(empty[0])


def kept_by(region: Any) -> Iterator[Kept]:
    """Yield the rows of `Region.kept`."""
    rows = _Rows(region)
    yield from rows.of_region()
    yield from rows.of_holders()
    for record in [*region.tape.records.values(), *region.tape.regions]:
        yield from rows.of_record(record)
    for call in rows.calls:
        yield from rows.of_call(call)
    for op, label, tensor, _ in rows.undecided:
        yield rows.row(What.UNDECIDED, op, label, tensor)


class _Rows:
    """What the rows of one region have in common."""

    def __init__(self, region: Any) -> None:
        self.region = region
        self.calls = list(region.tape.calls)
        self.undecided = list(_undecided_in(region))
        self._decisions = decisions_of(region)
        self._away = {(call.group, call.label(place)) for call in self.calls for place in call.away}
        self._away |= {(op, label) for op, label, _, policy in self.undecided if policy is CheckpointPolicy.OFFLOAD}
        self._readers = _readers_among(self.calls)

    def row(
        self,
        what: What,
        op: str,
        tensor: str,
        packed: Any,
        made_on: torch.device | None = None,
        why: Why = Why.REPLAY,
        by: str = "",
        at: str = "",
    ) -> Kept:
        """Return a row; ``packed`` is what stands in the record."""
        where, value = held_in(packed)
        decision = self._decisions.get(op)
        if (op, tensor) in self._away:
            decision = CheckpointPolicy.OFFLOAD
        elif decision is None and what in (What.RESIDENT, What.SLOT, What.RESULT, What.UNDECIDED):
            decision = CheckpointPolicy.SAVE
        stayed = self._stayed(where, value) if decision is CheckpointPolicy.OFFLOAD else None
        return Kept(what, op, tensor, where, value, made_on, decision, why, by, at, stayed)

    def _stayed(self, where: Where, value: Any) -> Stayed | None:
        if where in (Where.AWAY, Where.NOWHERE):
            return Stayed.STUCK if where is Where.AWAY and value.stays else None
        if self.region.hooks is not None:
            return Stayed.HOOKS
        return Stayed.DECLINED if where is Where.HERE and may_travel(value) else Stayed.KIND

    def of_region(self) -> Iterator[Kept]:
        """Yield inputs, saved tensors without a name, and the random state before forward."""
        region = self.region
        for label, leaf in () if region.inputs is None else list(region.inputs.kept()):
            if not (isinstance(leaf, torch.Tensor) and is_parameter(leaf)):
                yield self.row(What.INPUT, "", label, leaf, why=Why.STARTS_REPLAY)
        for place, entry in enumerate(list(region.tape.saved)):
            holder = entry() if type(entry) is ref else None
            if holder is not None:
                what, why = (What.EMPTY, Why.AGAIN) if holder.value is None else (What.VALUE, Why.BACKWARD)
                yield self.row(what, "", f"saved tensor {place}", holder.value, why=why)
                if (value := getattr(holder, "fingerprint", None)) is not None:
                    yield self.row(What.CHECK, "", f"value of saved tensor {place}", value, why=Why.COMPARED)
        if region.rng is not None:
            yield from self._random_state("", region.rng)

    def of_holders(self) -> Iterator[Kept]:
        """Yield saved tensors that have names."""
        sources = self._sources()
        for entry in list(self.region.tape.holders):
            if (holder := entry()) is not None:
                packed = holder.value if holder.unpack is None else holder.packed
                made_on, name = holder.metadata[3], holder.tensor_name
                if packed is None:
                    source = sources.get(id(holder), (Why.AGAIN, "", ""))
                    yield self.row(What.EMPTY, holder.op, name, packed, made_on, *source)
                else:
                    what = What.RESIDENT if holder.resident else What.VALUE
                    yield self.row(what, holder.op, name, packed, made_on, Why.BACKWARD, holder.op)

    def _sources(self) -> dict[int, tuple[Why, str, str]]:
        """Return, by the id of each elided holder, from where replay fills it."""
        found: dict[int, tuple[Why, str, str]] = {}
        for record in self.region.tape.records.values():
            for elided in record.elided_outputs or ():
                label = self._output_name(record.name, elided.place)
                found[id(elided.holder())] = Why.FROM_OUTPUT, record.name, label
            for elided in record.elided_inputs or ():
                found.setdefault(id(elided.holder()), (Why.FROM_INPUT, record.name, str(elided.place)))
        return found

    def of_record(self, record: Record) -> Iterator[Kept]:
        """Yield what one entry with a name, or an inner region, keeps for replay."""
        if record.drawn is not None:
            yield from self._random_state(record.name, record.drawn)
        reader = (Why.ENTRY, record.name) if record.name else (Why.INNER_REGION, "")
        for slot in list(record.slots.values()):
            if slot.source is not None:
                op, place = slot.source
                yield self.row(What.SLOT, op, self._output_name(op, place), slot.kept, slot.device, *reader)
        if isinstance(record, Stretch):
            for place, slot in list(record.returned.items()):
                yield self.row(What.SLOT, record.name, str(place), slot.kept, slot.device)
            for _, slot, _ in list(record.left):
                yield self.row(What.SLOT, record.name, "written", slot.kept, slot.device)

    def of_call(self, call: Entry) -> Iterator[Kept]:
        """Yield what a policy for aten ops keeps of one of them, or of the outputs of an op with a handle."""
        what = What.SLOT if call.kind == CALL or self.region.options.policy is None else What.RESULT
        for place, slot in list(call.kept.items()):
            reader = self._readers.get((id(call), place))
            why = (Why.REPLAY,) if reader is None else (Why.OP, reader.label(0), reader.group)
            yield self.row(what, call.group, call.label(place), slot.kept, slot.device, *why)
        changed: list[tuple[str, Slot]] = [(call.label(0), slot) for slot in list(call.written)]
        changed += [(earlier_label(call, at), slot) for at, slot in list(call.earlier.items())]
        for label, slot in changed:
            yield self.row(What.SLOT, call.group, label, slot.kept, slot.device)
        if call.before is not None:
            yield from self._random_state(call.group, call.before)

    def _random_state(self, op: str, state: RngState) -> Iterator[Kept]:
        for tensor in state.kept():
            yield self.row(What.RANDOM_STATE, op, "random state", tensor)

    def _output_name(self, op: str, place: int) -> str:
        record = self.region.tape.records.get(op)
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


class Result(NamedTuple):
    """A result of one aten op, as a policy sees it; see `torch_remat.NamedResult` for its attributes."""

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    needed: bool
    kept: bool


def results_of(call: Entry) -> Iterator[Result]:
    """Yield the results of an op that `Options.observer` was told of, once forward is over."""
    results = call.results if type(call.results) is list else [call.results]
    made = {0} if call.kind == ONE else {place for place, _ in call.made}
    returned = call.effects.returned
    for place, meta in enumerate(results):
        if type(meta) is Meta:
            changed = place < len(returned) and returned[place] >= 0
            booked = WRITTEN if changed else place
            needed = booked in call.packed
            kept = booked in call.saved and (needed or (bool(call.written) if changed else place in call.kept))
            owns = (needed or kept) if changed else (call.effects.viewed is None and place in made)
            shape, dtype = torch.Size(meta.geometry.shape), str(meta.dtype).removeprefix("torch.")
            size = meta.dtype.itemsize * shape.numel() if owns else 0
            yield Result(call.label(place), str(call.op), tuple(shape), dtype, size, needed, kept)
