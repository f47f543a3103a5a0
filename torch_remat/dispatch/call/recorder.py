"""The log of one region's forward: its calls, under a policy its ops, and what autograd saves of them.

In: calls and ops as they run, and the tensors that autograd saves. Kept: calls and entries on the tape; until forward
ends, what saved entries returned, and what `ending` asks then. Out: residents.

NOTE [ What is kept ]
1. What a saved call saves is its *range* of the tape. Its holders keep their values past forward, but those of tensors
   that replay has as an argument or a variable of the call *wait*: they are filled when replay comes to the call.
   Outside of calls, a tensor that a saved call or op made is *resident*: its holder has the value from the start. A
   leaf that requires a gradient is never kept: the graph has it.
2. What a call returned is kept if replay goes on past the call: nobody asks who reads it. Under a policy, a result is
   kept only if an entry that runs in replay reads it (`needs`).
3. A policy does not see readers that are no ops. If there is one, replay starts over and runs every entry.
4. Without a policy, the output of a handle is kept by the handle, call or inner region that reads it, as its argument:
   for a native reader it is a placeholder, whose error says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, NoneType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, strided
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from torch_remat._compat import (
    OF_TRACES,
    detached,
    has_returned,
    is_traceable_wrapper,
    node_number,
    sequence_number,
    storage_key,
    top_saved_tensors_hooks,
    without_dispatch_modes,
)
from torch_remat.dispatch.ambient import Draws
from torch_remat.dispatch.call.call import Given, Running, RunningCall, is_builtin, is_whole_call
from torch_remat.dispatch.call.entry import Call, Origin, Waiting
from torch_remat.dispatch.call.handle import ForwardOp, SavedOp
from torch_remat.dispatch.call.native import RunningNative
from torch_remat.dispatch.call.result import identity_of
from torch_remat.dispatch.holder import (
    AUTOCAST_DTYPES,
    NOBODY,
    UNKNOWN_LAYOUT,
    Anchor,
    Holder,
    Layout,
    OpHolder,
    ResidentRef,
    Saver,
    metadata_of,
    parameter_behind,
    read,
)
from torch_remat.dispatch.keys import key_of, parts_of, version_of
from torch_remat.dispatch.mode import RematMode
from torch_remat.dispatch.naming import ModulePath
from torch_remat.dispatch.ops.entry import FIRST, ONE, Entry
from torch_remat.dispatch.ops.meta import Meta
from torch_remat.dispatch.ops.record import OpRecorder
from torch_remat.dispatch.ops.results import Results, Undecided
from torch_remat.dispatch.ops.storages import Storages
from torch_remat.dispatch.options import DEFAULTS
from torch_remat.dispatch.placeholder import NOT_LAZY, Placeholder, new_tuple
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.region.outside import State
from torch_remat.dispatch.region.region import OpenRegion
from torch_remat.dispatch.slot import Slot, placement_in, slot_for
from torch_remat.errors import UsageError
from torch_remat.offload.sender import Departures
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.policies.policy import OpPolicy

_RECOMPUTE, _OFFLOAD = CheckpointPolicy.RECOMPUTE, CheckpointPolicy.OFFLOAD
_new = object.__new__  # without a call of `__init__`, which would be a tenth of what a handle costs
_NONE: Mapping[int, Slot] = MappingProxyType({})
_INPUT = (None, NoneType)  # of a holder's `plain`, where the tensor may be something else than the result of an op
Root = tuple[int, int, int]  # the place of a holder that replay fills, its storage, and after how many entries


class Recorder:
    """The log of one region's forward.

    Attributes:
        entries: The entries, in order: saved calls, and under a policy all ops.
        roots: What replay must have for the holders that it fills.
        needed: The storages that replay reads in any case, each after how many entries.
        runs: The saved calls, but those of handles and of torch's own functions.
        pointed: The storages to whose memory there was access, if the policy names functions.
        changes: The storages of tensors that outlive the region and that skipped calls have modified.
        watch: The ops, under a policy.
        packs: Whether it has to be asked about each tensor that autograd saves.
        calling: The saved call that runs, if one does.
        opened: The handles that have begun and not ended, each after a weak reference to its autograd context.
        saving: The call that saves what autograd saves now: one that runs, or a handle whose body has just ended.
        named: What that call saves, by the names that its author gives.
        number: That of the autograd node after it, if it is a handle; else -1.
        alive: What it has saved, where hooks around the region must meet all of it.
        draws: Which calls draw random numbers; None where nobody cares.
        recomputing: In how many calls of the policy RECOMPUTE code runs.
        by_handles: The outputs of saved handles by their storage, in a region without a policy.
        has_results: Whether a call has returned what it made.
    """

    def __init__(self, forward: RematMode, region: OpenRegion) -> None:
        self.region = region
        region.recorder = self
        self.mode = forward
        self.entries: list[Entry] = []
        region.tape.calls = self.entries
        self.roots: list[Root] = []
        options, hooks = region.options, region.hooks
        nested = hooks is not None
        self.storages = Storages(nested, region.outside)
        self.departures = Departures(region, forward.unwatched)
        self._allow_mutation: bool = options.allow_cache_entry_mutation
        make_slot = partial(slot_for, hooks, self.departures)
        self.results = Results(self.storages, make_slot, nested, self._allow_mutation)
        self._plain = not (nested or self._allow_mutation)
        self.is_usual = options is DEFAULTS and not nested
        self.has_policy: bool = options.policy is not None
        self._notes_packed = False  # whether the policy asks what autograd has saved
        self.watch: OpRecorder | None = None
        self.calling: Running | None = None
        self.opened: list[tuple[ref[Any], Call]] = []
        self.saving: Call | None = None
        self.named: Sequence[tuple[str, Tensor | None]] = ()
        self.alive: list[Holder] = []
        self._awaited: list[Tensor] = []  # what it has yet to save, the last first
        self._given: Given | None = None  # to that call, as far as it is known
        self.number = -1
        self.draws = None if region.rng is None else Draws(region.rng)
        self.recomputing = 0
        self.packs = self.has_results = False
        self.needed: list[tuple[int, int]] = []
        self.runs: list[Running] = []
        self.pointed: dict[int, StorageWeakRef | None] = {}  # whose references keep addresses from coming again
        self.changes: set[int] = set()
        self.by_handles: dict[int, list[tuple[Call, int]]] = {}
        self.known: list[object] = []  # these storages: as long as this is there, no address comes again

    # What is asked while forward runs.

    def free_name(self, name: str) -> str:
        """Return a name that no call has yet."""
        records, number = self.region.tape.records, 0
        own = name
        while own in records:
            number += 1
            own = f"{name}_{number}"
        return own

    def skips(self) -> bool:
        """Whether a call runs that replay skips."""
        return self.calling is not None

    def is_native(self) -> bool:
        """Whether a native region runs."""
        return type(self.calling) is RunningNative

    def running(self) -> str | None:
        """Return the name of the call that runs now; None outside of calls."""
        if self.calling is not None:
            return self.calling.call.name
        return self.saving.name if self.saving is not None and self.saving.function is not None else None

    def saver(self, tensor: Tensor) -> Saver:
        """Return the call that saves a tensor now, and what it calls it."""
        call = self.saving if self.calling is None else self.calling.call
        return NOBODY if call is None else (call.name, self.name_of(tensor, "") if self.named else "")

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

    def maker_of(self, tensor: Tensor) -> tuple[Entry, int] | None:
        """Return the entry that made a tensor's storage, or modified it last, and as which of its results."""
        return self.storages.writers.get(key_of(tensor)) if self.storages.writers else None

    def made_by_handle(self, tensor: Tensor) -> tuple[Call, int] | None:
        """Return the handle that made a tensor, and as which of its outputs."""
        if (outputs := self.by_handles.get(key_of(tensor))) is not None:
            return outputs[-1]
        maker, place = self.maker_of(tensor) or (None, 0)
        return (maker, place) if isinstance(maker, Call) and maker.is_handle else None

    # What autograd saves.

    def holder_for(self, op: str, name: str, tensor: Tensor) -> OpHolder:
        """Return a holder without a value."""
        holder = OpHolder()
        holder.region = self.region
        holder.op = op
        holder.tensor_name = name
        holder.metadata = metadata_of(tensor)
        holder.value = None
        return holder

    def keep(self, holder: OpHolder, tensor: Tensor) -> None:
        """Give a holder its value, and give it to the enclosing hooks, whatever becomes of the holder later.

        An enclosing region runs this forward again, where other tensors live longer: it must meet the same ones.
        """
        holder.value = self.mode.alias_of(tensor)
        self._give_to_hooks(holder, tensor)

    def _give_to_hooks(self, holder: OpHolder, tensor: Tensor) -> None:
        if (hooks := self.region.hooks) is not None:
            pack, holder.unpack = hooks
            with self.mode.unwatched():
                holder.packed = pack(tensor)

    def resident(
        self, op: str, name: str, tensor: Tensor, policy: CheckpointPolicy, may_change: bool = False
    ) -> OpHolder:
        """Return a resident holder for a tensor that replay saves again, as a placeholder, at the same place."""
        holder = self.holder_for(op, name, tensor)
        self.keep(holder, tensor)
        if policy is _OFFLOAD and self.region.hooks is None:
            self.departures.waiting.append((holder, tensor))
        if may_change and holder.value is not None:
            holder.value = holder.value.data  # with a version counter of its own
            holder.metadata = metadata_of(holder.value)
        self.region.tape.saved.append(ResidentRef(holder))
        return holder

    def saves_now(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd saves is the next one of the handle that saves, before any other node.

        Also torch's checkpoint saves tensors, without a node.
        """
        if self._awaited and self._awaited[-1] is tensor and sequence_number() == self.number:
            self._awaited.pop()
            return True
        self.settle()
        return False

    def open(self, call: Call, leaves: Sequence[Any], keys: Sequence[int]) -> None:
        """Begin the range of a call, which has these arguments, in these storages."""
        if self.number >= 0:
            self.settle()
        call.start = len(self.region.tape.saved)
        self.saving, self._given = call, Given(None, leaves, keys)

    def give_up(self, call: Call) -> None:
        """Keep nothing of a call that replay runs: its holders are filled as if nobody had named it."""
        if self.saving is call:
            call.end = len(self.region.tape.saved)
            self.saving = self._given = None
            self.alive.clear()
        call.is_saved, call.waiting = False, ()
        for entry in self.region.tape.saved[call.start : call.end]:
            if type(entry) is ref and type(holder := entry()) is OpHolder:
                holder.resident, holder.packed, holder.unpack = False, None, None

    def settle(self) -> None:
        """End the range of the call that saves: what replay has as an argument or variable waits, the rest is kept."""
        call, given = self.saving, self._given
        if call is None:
            return
        saved = self.region.tape.saved
        call.end = len(saved)
        count = 0
        for place in range(call.start, call.end):
            entry = saved[place]
            if type(entry) is not ref:
                continue  # a leaf, which the graph owns
            count += 1
            holder = entry()
            if type(holder) is not OpHolder or (tensor := holder.value) is None:
                continue
            holder.tensor_name = f"saved_{count - 1}"
            if self.named:
                holder.tensor_name = self.name_of(tensor, holder.tensor_name)
            if holder.unpack is not None:
                continue  # a leaf's cast, made anew when it is read
            if given is not None and self._waits(call, holder, tensor, given):
                holder.resident = False
            elif tensor._version != holder.metadata[0]:
                continue  # an error where it is read: no hook may take it for what was saved
            elif self.region.hooks is not None:
                self._give_to_hooks(holder, tensor)
            elif call.policy is _OFFLOAD and not self._stays(tensor):
                self.departures.waiting.append((holder, tensor))
        self.saving = self._given = None
        self.named, self.number = (), -1
        self.alive.clear()
        self._awaited.clear()
        if self.departures.waiting:
            self.departures.send()

    def _stays(self, tensor: Tensor) -> bool:
        """Whether a call of a function has made a tensor that stays on the device, so that its readers keep no copy."""
        maker = self.storages.writers.get(key_of(tensor)) if self.storages.writers else None
        entry = None if maker is None else maker[0]
        return type(entry) is Call and len(entry.held) > 0 and entry.policy is CheckpointPolicy.SAVE

    def _waits(self, call: Call, holder: OpHolder, tensor: Tensor, given: Given) -> bool:
        """Let replay take a saved tensor from an argument or a variable; return whether it can."""
        region, inputs, calling = self.region, self.region.inputs, self.calling
        key = storage_key(tensor) if type(tensor) is Tensor and tensor.layout is strided else key_of(tensor)
        if type(calling) is RunningNative and calling.has_made(key):
            return False  # what a handle inside saves is a placeholder in replay
        owner = tensor if tensor._base is None else tensor._base
        maker = self.storages.writers.get(key)
        if maker is None and holder.plain not in _INPUT and region.hooks is None and key not in self.by_handles:
            # What most are that a call has not made: an argument, no view, that an op of the region has made, or one
            # view of it, such as a product takes of what has three dimensions.
            for place, leaf in enumerate(given.leaves):
                if (
                    leaf is owner
                    and (leaf is tensor or _is_laid_out(tensor, leaf, holder.layout))
                    and leaf.layout is strided
                    and not (given.before and given.has_changed(leaf))
                    and holder.metadata[0] == tensor._version
                ):
                    view = (None, None) if leaf is tensor else (holder.layout, leaf.shape)
                    call.waiting = [*call.waiting, new_tuple(Waiting, (ref(holder), place, *view, None))]
                    return True
        if id(owner) in inputs.originals or (inputs.packed and inputs.shares(owner)):
            return False  # the inputs have its memory
        if holder.metadata[0] != tensor._version:
            return False
        is_kept = key in self.by_handles or (
            maker is not None
            and (isinstance(maker[0], Call) or maker[1] in maker[0].saved or self.storages.has_changed(tensor))
        )
        is_by_price = maker is not None and isinstance(maker[0], Call) and maker[0].is_by_price
        if is_kept and not is_by_price:
            return False  # replay will not have it
        found = given.find(tensor, key)
        if found is None or found[1].layout is not strided:
            return False
        place, source = found
        if given.before and given.has_changed(source):
            return False
        if region.hooks is not None and source.grad_fn is None:
            return False  # replay of an enclosing region may skip what changed it
        origin = None
        if source is not tensor:
            if is_traceable_wrapper(source) or is_traceable_wrapper(tensor):
                return False  # a wrapper is no strided view of what it wraps
            base = source if source._base is None else source._base
            if inputs.shares(base):
                return False  # a view without a base, such as a detached one, does
            origin = _origin_of(base, region.first_number)
        waiting = Waiting.of(tensor, holder, place, source, origin)
        if is_kept:  # as long as replay does not run what makes it
            assert maker is not None
            call.may_wait = [*call.may_wait, (maker[0], waiting)]
            return False
        call.waiting = [*call.waiting, waiting]
        given.use(place)
        if maker is not None:
            self.needed.append((key, len(self.entries)))
        return True

    def pack_by_log(self, tensor: Tensor) -> Holder | Anchor | None:
        """Return the holder for a tensor that no call saves itself; None if replay recomputes it, or has it."""
        if type(tensor) in OF_TRACES and not self.region.traced:
            return None
        return self.pack(tensor) if self.calling is None else self.calling.pack(tensor)

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
                held = self._pack_made(tensor, entry, at)
            else:
                self.roots.append((len(self.region.tape.saved), key, len(self.entries)))
        elif kind is not Tensor and key:
            place = len(self.region.tape.saved)
            self.roots += [(place, key_of(part), len(self.entries)) for part in parts_of(tensor)]
        return held

    def _pack_made(self, tensor: Tensor, entry: Entry, place: int) -> OpHolder:
        label = entry.label(place)
        if entry.kind != ONE or entry.away or not self._plain or type(tensor) is not Tensor:
            policy = _OFFLOAD if place in entry.away else CheckpointPolicy.SAVE
            return self.resident(entry.group, label, tensor, policy, self._allow_mutation)
        # What most are.
        holder = self.holder_for(entry.group, label, tensor)
        holder.value = tensor.detach() if self.mode.watcher is None else detached(tensor)
        self.region.tape.saved.append(ResidentRef(holder))
        return holder

    # What runs.

    def watch_all(self, policy: OpPolicy) -> None:
        """Watch the ops of the whole region, under a policy."""
        self.packs = True
        decider = policy.begin()
        self._notes_packed = decider.notes_packed
        self.watch = OpRecorder(self, decider, ModulePath(self.region.function))

    def note_call(self, call: Call) -> None:
        """Note what has a name, which must be a new one."""
        calls = self.region.tape.records
        if call.name in calls:
            raise UsageError(
                "the region already has an op with this name",
                region=self.region.name,
                op=call.name,
                remedy="Give each call its own name; remat.name_scope('block.0') prefixes the names inside it.",
            )
        calls[call.name] = call
        call.start = len(self.region.tape.saved)

    def run(
        self, is_native: bool, name: str, policy: CheckpointPolicy, function: Callable[..., Any],
        args: Sequence[Any], kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Run a native region, or a call of `op`; see `RematMode.run_native`."""
        if self.number >= 0:
            self.settle()
        if self.calling is not None or (self.opened and self.is_in_skipped_body()):
            return self.mode.user_code(function, args, kwargs)
        call = Call(name, policy, identity_of(function))
        self.note_call(call)
        if self.results.unread:  # before the call modifies them, too
            self.results.read_versions()
        if policy is _RECOMPUTE:
            call.inputs = self.inputs_from_handles(leaves_of(args, kwargs))
            return self._run_recomputed(function, args, kwargs)
        is_whole = is_whole_call(function, args, kwargs)
        of_torch = is_whole and is_builtin(function)
        is_native = is_native and not is_whole
        self.packs = True
        running: Running
        if is_native:
            running = RunningNative(self, call, function, args, kwargs)
        else:
            running = RunningCall(self, call, function, args, kwargs, of_torch)
            self.saving, self._given = call, running.given
        call.inputs = self.inputs_from_handles(running.given.leaves, True)  # it may run whole
        self.calling = running
        before = None if of_torch or self.region.outside is None else self.region.outside.before()
        drawn = None if self.watch is None else self.watch.drawn_so_far()
        compiled = None if self.watch is None else self.watch.compiled_code.so_far()
        try:
            if type(running) is RunningNative:
                result = self.mode.watched(running.watch, function, args, kwargs)
            elif self.mode.watcher is None:
                result = self.mode.user_code(function, args, kwargs)
            else:
                with self.mode.unwatched():
                    result = self.mode.user_code(function, args, kwargs)
            self.settle()
            if before is not None:
                self._note_outside(call, before)
            running.returns(result)
            if call.why or (self.has_policy and not (of_torch or is_native)):  # what it reads where it runs whole
                call.reads = [*call.reads, *running.given.keys()]
            if self.watch is not None and drawn is not None and call.drawn is not None:
                self.watch.note_draws(call, drawn)
        except BaseException as error:
            self.settle()
            running.left_by(error)
            raise
        finally:
            self.calling = None
            call.end = len(self.region.tape.saved)
            if self.watch is not None and compiled is not None:  # it reads nothing that replay does not give the call
                self.watch.compiled_code.forget_since(compiled)
            if not of_torch:
                running.let_go()
                self.runs.append(running)
        return result

    def _run_recomputed(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.recomputing += 1
        try:
            return self.mode.user_code(function, args, kwargs)
        finally:
            self.recomputing -= 1

    def _note_outside(self, call: Call, before: Sequence[State]) -> None:
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
                self.note_outer(call, key, tensor, version)
                if (storage := _weak(tensor)) is not None:
                    call.outside = [*call.outside, storage]
            elif place is not None or key in self.by_handles or self.maker_of(tensor) is not None:
                call.why = "it modified a tensor of the region in place"
                if place is not None and (storage := _weak(tensor)) is not None:
                    given.use(place)
                    call.modified = [*call.modified, (place, storage)]
            elif not is_own and (storage := _weak(tensor)) is not None:
                # A native region modified what nobody knows: if the region made it, replay finds it recomputed.
                self.note_outer(call, key, tensor, version)
                call.outside = [*call.outside, storage]
        if given.used:
            call.places = given.used

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
            self.note_outer(call, key_of(tensor), tensor, version)

    def note_outer(self, call: Call, key: int, tensor: Tensor | None, version: int) -> None:
        """Note that a call modified a tensor that outlives the region."""
        if tensor is not None and version >= 0:
            self.changes.add(key)
        call.touched = self.storages.has_writes = True
        outside = self.region.outside
        if outside is None or key not in outside.small():
            call.wrote = [*call.wrote, "a tensor created outside the region"]

    def note_result(self, call: Call, result: Tensor, key: int) -> None:
        """Note a call with its one result, an ordinary tensor in a storage of its own: what most calls return."""
        geometry = result.shape, result.stride(), result.storage_offset()
        self.has_results = True
        call.kind, call.storage, call.saved = ONE, key, FIRST
        call.results = new_tuple(Meta, (geometry, result.dtype, result.device, False, NOT_LAZY))
        call.gradients = (result.requires_grad,)
        if call.policy is _OFFLOAD:
            call.away = FIRST
        self.storages.note_one(call, key)
        self.results.note_one(call, result)
        self.entries.append(call)

    def note_results(self, call: Call, leaves: Sequence[Any], made: Sequence[tuple[int, Tensor]]) -> None:
        """Note a call with its result: the leaves, and those among them that it has made, by place."""
        self.has_results = True
        call.made = self.storages.note_results(call, made)
        call.saved = frozenset(place for place, _ in made)
        if call.policy is _OFFLOAD:
            call.away = call.saved
        self.results.note(call, leaves)
        self.entries.append(call)
        if self.by_handles:
            self.note_readers([leaf for leaf in leaves if isinstance(leaf, Tensor) and key_of(leaf) in self.by_handles])

    # What replay reads.

    def note_readers(self, tensors: Iterable[Any]) -> None:
        """Note that replay may read tensors here; the outputs of handles behind them must then be there themselves."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            if self.maker_of(tensor) is not None:
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

    def _slot_of(self, call: Call, place: int, tensor: Tensor, requires_grad: bool | None = None) -> Slot:
        label = call.label(place)
        return slot_for(self.region.hooks, self.departures, call.name, label, tensor, call.policy, requires_grad)

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Keep what an inner region gets from handles; a policy sees what it reads."""
        if self.number >= 0:
            self.settle()
        if self.region.tape.records:
            self.region.tape.entered.append(self.inputs_from_handles(leaves_of(args, kwargs)))
        return args, kwargs

    # Ops with handles.

    def begin(self, name: str, policy: CheckpointPolicy, ctx: Any) -> ForwardOp | None:
        """Begin a handle; None if it is part of a call that replay skips. Only `get_handle` calls it."""
        if self.number >= 0:
            self.settle()
        calling = self.calling
        if calling is not None and type(calling) is not RunningNative:
            return None  # it is part of the call
        if self.opened and self.is_in_skipped_body():
            return None
        if calling is not None:
            policy = CheckpointPolicy.SAVE  # it follows the enclosing native region
        op: ForwardOp
        call: Call = _new(Call)
        # What is read of it is set, also where the class has the same: Python finds the former far sooner.
        call.name = call.group = name
        call.policy = policy
        call.waiting = ()
        call.drawn = call.function = None
        if policy is _RECOMPUTE:
            op = _new(ForwardOp)
        else:
            op = _new(SavedOp)
            op.entered = len(self.region.tape.entered)
            call.plain = ()
            if self.draws is not None and calling is None:
                self.draws.begin()
            if self.region.outside is not None and calling is None:
                op.before = self.region.outside.before()
        tape = self.region.tape
        if name in tape.records:
            self.note_call(call)
        else:  # what it does, for the usual op
            tape.records[name] = call
            call.start = len(tape.saved)
        op._ctx = ctx
        op._name = name
        op._step = -1
        op.args = ()
        op.ops = self
        op.call = call
        op.depth = len(self.opened)
        self.opened.append((ref(ctx), call))
        return op

    def end_handle(self, op: SavedOp, outs: tuple[Tensor, ...]) -> None:
        """Note a saved handle whose body has ended."""
        call, region = op.call, self.region
        del region.tape.entered[op.entered :]  # replay does not come there; but to those of a body that raised
        call.end = len(region.tape.saved)
        calling = self.calling
        if calling is None:
            if self.draws is not None:
                call.drawn = self.draws.end()
            if region.outside is not None:
                self._note_outside(call, op.before)
                op.before = ()
            call.saved = frozenset(range(len(outs)))
            if call.policy is _OFFLOAD:
                call.away = call.saved
            if self.has_policy:
                self._note_outputs(call, outs)
            else:
                self._know_outputs(call, outs)
            self.entries.append(call)
        elif isinstance(calling, RunningNative):
            calling.note_handle(call, outs)

    def _note_outputs(self, call: Call, outs: tuple[Tensor, ...]) -> None:
        """Note the outputs of a handle under a policy, which sees who reads them, but not who reads views."""
        call.views = [place for place, out in enumerate(outs) if out._base is not None]
        made = [(place, out) for place, out in enumerate(outs) if place not in call.views]
        call.made = self.storages.note_results(call, made)
        self.results.note(call, outs)

    def _know_outputs(self, call: Call, outs: tuple[Tensor, ...]) -> None:
        """Know the outputs of a handle again, without holding them: few are read by what replay runs."""
        for place, out in enumerate(outs):
            for part in parts_of(out):
                # What an enclosing region answers is a placeholder in its replay.
                known = part.source if isinstance(part, Placeholder) else _weak(part)
                if known is not None:
                    self.known.append(known)
                    self.by_handles.setdefault(key_of(part), []).append((call, place))

    def know_parameters(self, args: Sequence[Any]) -> None:
        """Let the parameters among a handle's inputs stay, which is to be offloaded."""
        self.region.sender().know_parameters(args)

    def expect(self, call: Call, named: Sequence[tuple[str, Tensor | None]], args: Sequence[Any]) -> None:
        """Let a handle save what comes before any other node; ``args`` are its inputs, if known.

        Other hooks, entered inside the region, take it instead, such as those of torch's checkpoint.
        """
        hooks = top_saved_tensors_hooks()
        if hooks is not None and hooks[1] is read:
            self.saving, self.named, self.number = call, named, sequence_number()
            self._awaited = [tensor for _, tensor in reversed(named) if tensor is not None]
            self._given = Given(None, args) if args else None

    def undecided(self) -> Iterator[Undecided]:
        """Yield op, name, tensor and decision of what forward holds until its end decides whether anything needs it."""
        yield from self.results.undecided()

    def forget(self) -> None:
        """Let go of what an exception has left open, and of the graph."""
        self.region.recorder = self.watch = None
        self.opened, self.calling = [], None
        self.runs = []
        self.by_handles, self.known = {}, []
        self.saving = self._given = None
        self.named = ()
        del self.mode, self.departures


def _weak(tensor: Tensor) -> StorageWeakRef | None:
    part = next(parts_of(tensor))
    is_there = part.layout is strided and not isinstance(part, Placeholder)
    return StorageWeakRef(part.untyped_storage()) if is_there else None


def _is_laid_out(view: Tensor, base: Tensor, layout: Layout | None) -> bool:
    """Whether a layout and a shape tell all of what is a view of a tensor."""
    if layout is None or layout is UNKNOWN_LAYOUT or view.dtype is not base.dtype:
        return False
    return not (view.is_conj() or view.is_neg())


def _origin_of(owner: Tensor, first_number: int) -> Origin:
    """Return what made an input, and where it comes from, which replay compares as it does for what is recomputed."""
    node, leaf = owner.grad_fn, None
    if type(owner) is not Tensor or owner.dtype in AUTOCAST_DTYPES:
        leaf = parameter_behind(owner)
    outside = owner.requires_grad if node is None else node_number(node) < first_number
    return type(node), ref(owner) if outside and leaf is None else leaf
