"""What one region's forward notes of its calls, and under a policy of its ops.

In: what calls save, return and modify. Kept: calls and entries on the tape; until forward ends, what saved entries
returned, and what `ending` asks then. Out: residents. The `Recorder` is all of it, and runs the calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, strided
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from torch_remat._compat import (
    has_returned,
    node_number,
    sequence_number,
    storage_key,
    top_saved_tensors_hooks,
    without_dispatch_modes,
)
from torch_remat.dispatch.ambient import Draws
from torch_remat.dispatch.call.entry import Call, Given
from torch_remat.dispatch.departures import Departures
from torch_remat.dispatch.holder import Anchor, Holder, OpHolder, ResidentRef, metadata_of, read
from torch_remat.dispatch.keys import key_of, keys_of, parts_of, version_of
from torch_remat.dispatch.mode import RematMode
from torch_remat.dispatch.ops.entry import FIRST, ONE, Entry
from torch_remat.dispatch.ops.meta import Meta
from torch_remat.dispatch.ops.results import Results
from torch_remat.dispatch.ops.storages import Storages
from torch_remat.dispatch.placeholder import NOT_LAZY, Placeholder, new_tuple
from torch_remat.dispatch.reach import node_of
from torch_remat.dispatch.region.outside import Before
from torch_remat.dispatch.region.region import OpenRegion
from torch_remat.dispatch.slot import Slot, placement_in, slot_for
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy

_RECOMPUTE, _OFFLOAD, _SAVE = CheckpointPolicy.RECOMPUTE, CheckpointPolicy.OFFLOAD, CheckpointPolicy.SAVE
_NONE: Mapping[int, Any] = MappingProxyType({})
Root = tuple[int, int, int]  # the place of a holder that replay fills, its storage, and after how many entries


class Running(ABC):
    """A saved call while forward runs, whatever runs.

    Attributes:
        call: What the log keeps of it.
        given: Its arguments and variables.
        first: The number of the first autograd node that it may make.
        last: That of the first one after it.
        outputs: The nodes of its result, with which of the node's outputs each is.
        written: The tensors that were there before the call and that it modified, by storage: each with its version
            before, and whether an autograd node of the region had made it.
        draws: Whether it may have drawn random numbers.
    """

    # What most calls have none of is not set for each.
    last = -1
    draws = False
    outputs: set[tuple[Node, int]] | None = None
    written: Mapping[int, tuple[Tensor, int, bool]] = _NONE

    def __init__(self, ops: Log, call: Call, given: Given) -> None:
        self.ops = ops
        self.call = call
        self.given = given
        self.first = sequence_number()

    @abstractmethod
    def returns(self, result: Any) -> None:
        """Note what the call returns."""

    def has_made(self, key: int) -> bool:
        """Whether it has made a storage, as far as somebody watches."""
        return False

    def note_written(self, tensor: torch.Tensor, version: int) -> None:
        """Note a tensor that the call modifies, with its version before, unless it has made it."""
        node = node_of(tensor)
        is_own = node is not None and node_number(node) >= self.ops.region.first_number
        for key in keys_of(tensor):
            if not self.has_made(key) and key not in self.written:
                self.written = {**self.written, key: (tensor, version, is_own)}

    def end(self) -> None:
        """Note at the end of the call what leaves the device, and the random generators."""
        ops = self.ops
        if ops.departures.waiting:
            ops.departures.send()
        if self.draws and ops.draws is not None:
            self.call.drawn = ops.draws.end()
        self.last = sequence_number()

    def note_handle(self, call: Call, outputs: Sequence[Tensor]) -> None:
        """Note an op with a handle that has run inside: of any call but a native region it is a part like any other."""
        return

    def raises(self) -> None:
        """Note that an exception left the call, which replay runs again."""
        self.call.is_saved, self.call.always = False, True
        self.end()
        self.ops.entries.append(self.call)


class Log:
    """What one region's forward has noted.

    Attributes:
        entries: The entries, in order: saved calls, and under a policy all ops.
        roots: What replay must have for the holders that it fills.
        needed: The storages that replay reads in any case, each after how many entries.
        calling: The saved call that runs, if one does.
        opened: The handles that have begun and not ended, each after a weak reference to its autograd context.
        saving: The call that saves what autograd saves now: one that runs, or a handle whose body has just ended.
        named: What that call saves, by the names that its author gives.
        awaited: What it has yet to save, the last first.
        given: To that call, as far as it is known.
        number: That of the autograd node after it, if it is a handle; else -1.
        draws: Which calls draw random numbers; None where nobody cares.
        by_handles: The outputs of saved handles by their storage, in a region without a policy.
        known: These storages: as long as this is there, no address comes again.
    """

    def __init__(self, forward: RematMode, region: OpenRegion) -> None:
        self.region = region
        self.mode = forward
        self.entries: list[Entry] = []
        region.tape.calls = self.entries
        options, hooks = region.options, region.hooks
        nested = hooks is not None
        self.storages = Storages(nested, region.outside)
        self.departures = Departures(region.sender, region.holds, forward.unwatched)
        self._allow_mutation: bool = options.allow_cache_entry_mutation
        make_slot = partial(slot_for, hooks, self.departures)
        self.results = Results(self.storages, make_slot, nested, self._allow_mutation)
        self.has_policy: bool = options.policy is not None
        self._notes_packed = False  # whether the policy asks what autograd has saved
        self.draws = None if region.rng is None else Draws(region.rng)
        self.calling: Running | None = None
        self.opened: list[tuple[ref[Any], Call]] = []
        self.saving: Call | None = None
        self.named: Sequence[tuple[str, Tensor | None]] = ()
        self.awaited: list[Tensor] = []
        self.given: Given | None = None
        self.number = -1
        self.roots: list[Root] = []
        self.needed: list[tuple[int, int]] = []
        self.by_handles: dict[int, list[tuple[Call, int]]] = {}
        self.known: list[object] = []

    # What is asked while forward runs.

    def name_of(self, tensor: Tensor, automatic: str) -> str:
        """Return the name of a tensor that the call saves; each that its author gives is given once."""
        for at, (name, named) in enumerate(self.named):
            if named is tensor:
                self.named = (*self.named[:at], *self.named[at + 1 :])
                return name
        return automatic

    def body(self) -> Call | None:
        """Return the innermost handle whose body runs, or has raised an error that is still there.

        Raises:
            UsageError: A body returned without its outputs being recorded.
        """
        while self.opened:
            known, call = self.opened[-1]
            if (ctx := known()) is not None and not has_returned(ctx):
                return call
            self.opened.pop()
            if ctx is not None:
                raise UsageError(
                    "the op's forward returned without calling handle.record_outputs",
                    region=self.region.name,
                    op=call.name,
                    remedy="End the forward with `return handle.record_outputs(out)`.",
                )
        return None

    def is_in_skipped_body(self) -> bool:
        """Whether the body of a saved handle runs."""
        call = self.body() if self.opened else None
        return call is not None and call.policy is not _RECOMPUTE

    def made_by_handle(self, tensor: Tensor) -> tuple[Call, int] | None:
        """Return the handle that made a tensor, and as which of its outputs."""
        if (outputs := self.by_handles.get(key_of(tensor))) is not None:
            return outputs[-1]
        maker, place = self.storages.writer_of(tensor) or (None, 0)
        return (maker, place) if isinstance(maker, Call) and maker.is_handle else None

    def is_state(self, tensor: Tensor) -> bool:
        """Whether a tensor is a small buffer, which a call may have modified without its version counter."""
        if tensor.requires_grad or self.region.outside is None or type(tensor) is not Tensor:
            return False
        return key_of(tensor) in self.small

    @cached_property
    def small(self) -> frozenset[int]:
        """The storages of the small buffers, whose values are state."""
        outside = self.region.outside
        return frozenset() if outside is None else frozenset(outside.small())

    # What autograd saves.

    def resident(
        self, op: str, name: str, tensor: Tensor, policy: CheckpointPolicy, may_change: bool = False
    ) -> OpHolder:
        """Return a resident holder for a tensor that replay saves again, as a placeholder, at the same place."""
        region = self.region
        holder = OpHolder()
        holder.region, holder.op, holder.tensor_name = region, op, name
        holder.metadata = metadata_of(tensor)
        holder.value = value = self.mode.alias_of(tensor)
        if region.hooks is not None:
            self._give_to_hooks(holder, tensor)
        elif policy is _OFFLOAD:
            self.departures.waiting.append((holder, tensor))
        if may_change:
            holder.value = value = value.data  # with a version counter of its own
            holder.metadata = metadata_of(value)
        region.tape.saved.append(ResidentRef(holder))
        return holder

    def _give_to_hooks(self, holder: OpHolder, tensor: Tensor) -> None:
        """Give a holder's tensor to the enclosing hooks, whatever becomes of the holder later.

        An enclosing region runs this forward again, where other tensors live longer: it must meet the same ones.
        """
        if (hooks := self.region.hooks) is not None:
            pack, holder.unpack = hooks
            with self.mode.unwatched():
                holder.packed = pack(tensor)

    def pack(self, tensor: Tensor) -> Holder | Anchor | None:
        """Return the holder for a tensor that a saved entry made; None for one that replay recomputes, or has."""
        if self.results.unread:
            self.results.read_versions()
        held: Holder | Anchor | None = None
        if (kind := type(tensor)) is Tensor and tensor.layout is strided:
            key = storage_key(tensor)
        else:
            key = 0 if kind is Parameter and not self.storages.has_writes else key_of(tensor)
        maker = self.storages.writers.get(key)
        if maker is not None:
            entry, at = maker
            if self._notes_packed:
                entry.packed |= {at}
            if at in entry.saved:
                policy = _OFFLOAD if at in entry.away else _SAVE
                held = self.resident(entry.group, entry.label(at), tensor, policy, self._allow_mutation)
            else:
                self.roots.append((len(self.region.tape.saved), key, len(self.entries)))
        elif kind is not Tensor and key:
            place = len(self.region.tape.saved)
            self.roots += [(place, key_of(part), len(self.entries)) for part in parts_of(tensor)]
        return held

    # What calls return, and what replay reads.

    def note_result(self, call: Call, result: Tensor, key: int) -> None:
        """Note a call with its one result, an ordinary tensor in a storage of its own: what most calls return."""
        geometry = result.shape, result.stride(), result.storage_offset()
        call.kind, call.storage, call.saved = ONE, key, FIRST
        call.kept = {0: self._slot_now(result)}
        call.results = new_tuple(Meta, (geometry, result.dtype, result.device, False, NOT_LAZY))
        call.gradients = (result.requires_grad,)
        if call.policy is _OFFLOAD:
            call.away = FIRST
        self.storages.note_one(call, key)
        self.entries.append(call)

    def note_results(self, call: Call, leaves: Sequence[Any], made: Sequence[tuple[int, Tensor]]) -> None:
        """Note a call with its result: the leaves, and those among them that it has made, by place."""
        call.made = self.storages.note_results(call, made)
        call.saved = frozenset(place for place, _ in made)
        if call.policy is _OFFLOAD:
            call.away = call.saved
        call.kept = {place: self._slot_now(leaf) for place, leaf in made}
        self.entries.append(call)
        if self.by_handles:
            self.note_readers([leaf for leaf in leaves if isinstance(leaf, Tensor) and key_of(leaf) in self.by_handles])

    def note_readers(self, tensors: Iterable[Any]) -> None:
        """Note that replay may read tensors here; the outputs of handles behind them must then be there themselves."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            if self.storages.writer_of(tensor) is not None:
                self.needed.append((key_of(tensor), len(self.entries)))
            for call, place in self.by_handles.get(key_of(tensor), ()):
                if place not in call.kept:
                    output = tensor if tensor._base is None else tensor._base
                    if type(meta := call.meta(place)) is Meta:
                        with without_dispatch_modes(), torch.no_grad():
                            output = placement_in(meta).seen_in(tensor.detach())
                    call.kept = {**call.kept, place: self._slot_of(call, place, output, False)}

    def note_inputs(self, call: Call, inputs: Sequence[Any]) -> None:
        """Note what a handle reads that replay runs."""
        if self.has_policy:
            self.note_readers(inputs)
        else:
            call.inputs = self.inputs_from_handles(inputs)

    def inputs_from_handles(self, leaves: Sequence[Any], for_now: bool = False) -> Mapping[int, Slot]:
        """Keep those of some inputs that saved handles made, by their number; ``for_now`` where few will be needed."""
        if not self.by_handles:
            return _NONE
        found = {}
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and (outputs := self.by_handles.get(key_of(leaf))) is not None:
                call, place = outputs[-1]
                found[at] = slot = Slot(leaf, None) if for_now else self._slot_of(call, place, leaf)
                slot.sources = [(one.name, one.label(at)) for one, at in outputs]
        return found

    def _slot_now(self, tensor: Tensor) -> Slot:
        """Keep a result at once; the end of forward decides whether it stays, and where."""
        if tensor.is_inference():
            return Slot(tensor, None, False)
        if self.mode.watcher is None or type(tensor) is Tensor:
            return Slot.of_alias(self.mode.alias_of(tensor))
        with self.mode.unwatched():
            return Slot.of_alias(tensor.detach())

    def _slot_of(self, call: Call, place: int, tensor: Tensor, requires_grad: bool | None = None) -> Slot:
        label = call.label(place)
        return slot_for(self.region.hooks, self.departures, call.name, label, tensor, call.policy, requires_grad)

    # What calls modify.

    def note_outside(self, call: Call, before: Before) -> None:
        """Note what a call has changed of what the region reaches."""
        outside = self.region.outside
        assert outside is not None
        number = len(self.entries) + 1 if self.has_policy else len(self.region.tape.records)
        call.touched, names = outside.after(before, call.name, number)
        call.wrote = [*call.wrote, *names]

    def note_writes(self, running: Running) -> None:
        """Note which earlier tensors a call modified: those outside the region are modified once."""
        call, given = running.call, running.given
        for key, (tensor, version, is_own) in running.written.items():
            owner = tensor if tensor._base is None else tensor._base
            if running.outputs is not None and (node := owner.grad_fn) is not None:
                running.outputs.add((node, owner.output_nr))
            place = given.place_at(key)
            if self._outlives(tensor, key) or (place is not None and given.is_of_module(place)):
                self.note_outer(call, key, version)
                if (storage := _weak(tensor)) is not None:
                    call.outside = [*call.outside, storage]
            elif place is not None or key in self.by_handles or self.storages.writer_of(tensor) is not None:
                call.why = "it modified a tensor of the region in place"
                if place is not None and (storage := _weak(tensor)) is not None:
                    call.modified = [*call.modified, (place, storage)]
            elif not is_own and (storage := _weak(tensor)) is not None:
                # A native region modified what nobody knows: if the region made it, replay finds it recomputed.
                self.note_outer(call, key, version)
                call.outside = [*call.outside, storage]

    def _outlives(self, tensor: Tensor, key: int) -> bool:
        """Whether a modified tensor outlives the region, as far as that is known."""
        region, owner = self.region, tensor if tensor._base is None else tensor._base
        if owner.is_leaf and owner.requires_grad:
            return True
        return region.inputs.lies_with(key) or (region.outside is not None and region.outside.holds(key))

    def check_inputs(self, call: Call, inputs: Sequence[tuple[Tensor, int]]) -> None:
        """Refuse a saved handle that has modified an input which the region made."""
        for tensor, version in inputs:
            if version_of(tensor) == version:
                continue
            if not self._outlives(tensor, key_of(tensor)):
                raise UsageError(
                    "this saved op modified an input in place, and replay, which skips the op, would not modify it",
                    region=self.region.name,
                    op=call.name,
                    remedy="Return a new tensor instead, or give the op the policy RECOMPUTE.",
                )
            self.note_outer(call, key_of(tensor), version)

    def note_outer(self, call: Call, key: int, version: int) -> None:
        """Note that a call modified a tensor that outlives the region, and had this version before."""
        call.touched = self.storages.has_writes = True
        if key not in self.small:
            call.wrote = [*call.wrote, "a tensor created outside the region"]

    # Ops with handles.

    def end_handle(self, call: Call, outs: tuple[Tensor, ...], entered: int, before: Before) -> None:
        """Note a saved handle whose body has ended.

        Args:
            call: It.
            outs: Its outputs.
            entered: How many inner regions had begun before it.
            before: What the region reached then.
        """
        region = self.region
        del region.tape.entered[entered:]  # replay does not come there; but to those of a body that raised
        call.end = len(region.tape.saved)
        calling = self.calling
        if calling is None:
            if self.draws is not None:
                call.drawn = self.draws.end()
            if region.outside is not None:
                self.note_outside(call, before)
            call.saved = frozenset(range(len(outs)))
            if call.policy is _OFFLOAD:
                call.away = call.saved
            if self.has_policy:
                self._note_outputs(call, outs)
            else:
                self._know_outputs(call, outs)
            self.entries.append(call)
        else:
            calling.note_handle(call, outs)

    def _note_outputs(self, call: Call, outs: tuple[Tensor, ...]) -> None:
        """Note the outputs of a handle under a policy, which sees who reads them, but not who reads views."""
        call.views = [place for place, out in enumerate(outs) if out._base is not None]
        made = [(place, out) for place, out in enumerate(outs) if place not in call.views]
        call.made = self.storages.note_results(call, made)
        call.kept = {place: self._slot_now(out) for place, out in enumerate(outs)}

    def _know_outputs(self, call: Call, outs: tuple[Tensor, ...]) -> None:
        """Know the outputs of a handle again, without holding them: few are read by what replay runs."""
        for place, out in enumerate(outs):
            for part in parts_of(out):
                # What an enclosing region answers is a placeholder in its replay.
                known = part.source if isinstance(part, Placeholder) else _weak(part)
                if known is not None:
                    self.known.append(known)
                    self.by_handles.setdefault(key_of(part), []).append((call, place))

    def expect(self, call: Call, named: Sequence[tuple[str, Tensor | None]], args: Sequence[Any]) -> None:
        """Let a handle save what comes before any other node; ``args`` are its inputs, if known.

        Other hooks, entered inside the region, take it instead, such as those of torch's checkpoint.
        """
        hooks = top_saved_tensors_hooks()
        if hooks is not None and hooks[1] is read:
            self.saving, self.named, self.number = call, named, sequence_number()
            self.awaited = [tensor for _, tensor in reversed(named) if tensor is not None]
            self.given = Given(None, args) if args else None


def _weak(tensor: Tensor) -> StorageWeakRef | None:
    part = next(parts_of(tensor))
    is_there = part.layout is strided and not isinstance(part, Placeholder)
    return StorageWeakRef(part.untyped_storage()) if is_there else None
