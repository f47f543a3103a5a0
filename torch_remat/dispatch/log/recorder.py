"""The log of one region's forward: what has a name, the entries, what is kept at once, and what is kept in the end.

In: native regions and ops as they run, and the tensors that autograd saves. Kept: records and entries in the region's
log; until forward ends, what saved entries returned. Out: residents, and slots for what replay reads.

NOTE [ What is kept ]
1. A tensor that autograd saves is *resident* if a saved entry made it: its holder has the value from the start.
2. Of what saved entries returned, that is kept which replay reads: an entry that runs (`needs`), an op with a handle,
   an inner region, or, where nobody watches, an op that autograd recorded (`readers`). A result without a history, such
   as a router's choice, is kept wherever replay could read it.
3. What else may read a result, autograd does not show. Then the entry is made again: replay starts over.
4. A result that was changed in place by the end of forward is made again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, strided
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from torch_remat._compat import (
    SavedTensorHooks,
    detached,
    node_behind,
    node_number,
    sequence_number,
    storage_key,
)
from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.holder import Anchor, Holder, OpHolder, ResidentRef, metadata_of
from torch_remat.dispatch.log.entry import CALL, ONE, Entry, HandleCall
from torch_remat.dispatch.log.meta import key_of, keys_of, parts_of
from torch_remat.dispatch.log.needs import find_needs
from torch_remat.dispatch.log.op_recorder import Observer, OpRecorder
from torch_remat.dispatch.log.readers import read_outputs
from torch_remat.dispatch.log.record import Left, Record, Stretch
from torch_remat.dispatch.log.results import Results, Undecided
from torch_remat.dispatch.log.slot import counter_of, version_of
from torch_remat.dispatch.log.storages import Storages
from torch_remat.dispatch.mode import RematMode
from torch_remat.dispatch.offloading import Departures
from torch_remat.dispatch.placeholder import new_tuple
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.region.outputs import tensors_of
from torch_remat.dispatch.region.outside import State
from torch_remat.errors import UsageError
from torch_remat.offload.transfer import Placement
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.policies.kinds import OpPolicy

Root = tuple[int, int, int]  # the place of a holder that replay fills, its storage, and after how many entries


class Returned(NamedTuple):
    """A tensor that a native region returned and an entry made.

    Attributes:
        key: Its storage.
        node: Its autograd node; None without a history.
        output: Which of the node's outputs it is.
        first: The number of the first autograd node that the native region made.
        last: That of the first one after it.
        after: How many entries there were by then.
    """

    key: int
    node: torch.autograd.graph.Node | None
    output: int
    first: int
    last: int
    after: int


class Recorder:
    """The log of one region's forward.

    Attributes:
        entries: The entries, in order.
        has_policy: Whether the ops of the whole region are watched.
        roots: What replay must have for the holders that it fills.
        watch: The aten ops, once some are watched.
        packs: Whether it has to be asked about each tensor that autograd saves.
        skipped_any: Whether there was an op that replay skips, so that it may lack an input of another.
    """

    def __init__(self, forward: RematMode) -> None:
        self.region = forward.region
        self.region.recorder = self
        self.mode = forward
        self.entries: list[Entry] = []
        self.region.tape.calls = self.entries
        self.roots: list[Root] = []
        self.storages = Storages(self.region.hooks is not None)
        self.departures = Departures(forward)
        options = self.region.options
        self._allow_mutation: bool = options.allow_cache_entry_mutation
        nested = self.region.hooks is not None
        self.results = Results(self.storages, self.departures.slot_for, nested, self._allow_mutation)
        self._plain = not (nested or self._allow_mutation)
        self.has_policy: bool = options.policy is not None
        self._notes_packed = options.observer is not None  # who asks what autograd has saved
        self.watch: OpRecorder | None = None
        self.opened: Any = None  # the op with a handle that was begun last and has not ended
        self.calling: Any = None  # the function of torch's own that runs, or the call of `op`
        self.skipped_any = False
        self.packs = False
        self._read: list[tuple[int, int]] = []  # storages that replay reads in any case, each after how many entries
        self._returned: list[Returned] = []
        # Of what an unwatched op saves: the number of the first node that replay does not come to if this is the last
        # tensor that it fills, how many storages were known, and the storage if an entry made it.
        self._reads: list[tuple[int, int, int]] = []
        # The ranges of sequence numbers of autograd nodes that replay skips, so that they read nothing.
        self.skipped: list[tuple[int, int]] = []
        self._known: set[int] = set()  # the storages that entries made and that code that nobody watches may reach
        # The residents that an entry has made and hooks around the region have packed.
        self._packed: list[tuple[ref[OpHolder], tuple[Entry, int]]] = []
        # The storages of what these have made anew of one, each with its own, and after how many entries.
        self._adopted: list[tuple[int, int, int]] = []
        # What native regions left in tensors from outside: which of each, its storage, what shares its version counter,
        # and by how much this was ahead of the changes by native regions.
        self._left: list[tuple[Stretch, int, int, torch.Tensor, int]] = []
        self._changes: dict[int, int] = {}  # how many times native regions have changed a tensor from outside

    # What the recorder of aten ops asks.

    def rng_now(self) -> RngState | None:
        """Return the present state of the region's generators; None where nobody cares."""
        rng: RngState | None = self.region.rng
        return None if rng is None else rng.present()

    def resident(
        self, op: str, name: str, tensor: Tensor, policy: CheckpointPolicy, may_change: bool = False
    ) -> OpHolder:
        """Return a resident holder for a tensor that replay saves again, as a placeholder, at the same place."""
        holder = self.holder_for(op, name, tensor)
        self.keep(holder, tensor)
        if policy is CheckpointPolicy.OFFLOAD and self.region.hooks is None:
            self.departures.waiting.append((holder, tensor))
        if may_change and holder.value is not None:
            holder.value = holder.value.data  # with a version counter of its own
            holder.metadata = metadata_of(holder.value)
        self.region.tape.saved.append(ResidentRef(holder))
        return holder

    def holder_for(self, op: str, name: str, tensor: Tensor) -> OpHolder:
        """Return a holder without a value."""
        holder = OpHolder()
        holder.region = region = self.region
        holder.op = op
        holder.tensor_name = name
        holder.metadata = metadata_of(tensor)
        holder.value = holder.packed = holder.unpack = None
        holder.resident = True
        holder.key = 0
        region.tape.holders.append(ref(holder))
        return holder

    def keep(self, holder: OpHolder, tensor: Tensor) -> None:
        """Give a holder its value, or what the hooks around the region make of it."""
        hooks: SavedTensorHooks | None = self.region.hooks
        if hooks is not None:
            pack, holder.unpack = hooks
            holder.key = key_of(tensor)
            if (writer := self.storages.writers.get(holder.key)) is not None:
                self._packed.append((ref(holder), writer))
            with self.mode.unwatched():
                holder.packed = pack(tensor)
        else:
            holder.value = self.mode.alias_of(tensor)

    def adopt(self, holder: OpHolder, value: Tensor) -> None:
        """Take what hooks around the region have made anew of a resident as what the resident's entry has made."""
        for packed, writer in self._packed:
            if packed() is holder:
                self.storages.writers[key := key_of(value)] = writer
                self._adopted.append((key, holder.key, len(self.entries)))

    # What runs.

    def watch_all(self, policy: OpPolicy, path_of: Callable[[Any], str], observer: Observer | None) -> OpRecorder:
        """Watch the ops of the whole region, under a policy."""
        self.packs = True
        self.watch = OpRecorder(self, policy, path_of, observer)
        return self.watch

    def skips(self) -> bool:
        """Whether a native region runs that replay skips."""
        return self.calling is not None or (self.watch is not None and self.watch.native is not None)

    def running(self) -> str | None:
        """Return the name of the call or native region that runs now; None outside of such."""
        if self.calling is not None:
            return str(self.calling.record.name)
        return None if self.watch is None or self.watch.native is None else self.watch.native.name

    def note_record(self, record: Record) -> None:
        """Note what has a name, which must be a new one."""
        records = self.region.tape.records
        if record.name in records:
            raise UsageError(
                "the region already has an op of this name",
                region=self.region.name,
                op=record.name,
                remedy="Give each call a name of its own; remat.name_scope('block.0') prefixes the names inside it.",
            )
        records[record.name] = record
        record.saved_before = len(self.region.tape.saved)

    def states_outside(self) -> Sequence[State] | None:
        """Return what the region reaches, before a call that replay skips; None if it reaches nothing."""
        return None if self.region.outside is None else self.region.outside.states()

    def note_skipped(self, before: Sequence[State] | None) -> None:
        """Note what such a call has changed of it, once it is over."""
        if before is not None:
            self.region.outside.note_skipped(before, len(self.region.tape.records))

    def run_group(
        self, group: Stretch, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a native region or a call in a region whose ops are all watched: a part of the log, all of it saved."""
        assert self.watch is not None
        self.note_record(group)
        group.start = len(self.entries)
        self.watch.native = group
        first, before = sequence_number(), self.states_outside()
        try:
            return function(*args, **kwargs)
        except BaseException:
            group.raised = True
            raise
        finally:
            self.note_skipped(before)
            self.watch.native = None
            group.end = len(self.entries)
            self.skipped.append((first, sequence_number()))
            if self.results.unread:
                self.results.read_versions()

    def run_stretch(
        self, stretch: Stretch, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a native region, watching its ops, in a region whose ops are not watched."""
        self.note_record(stretch)
        self.skipped_any = True
        watch = self.watch
        if watch is None:
            self.packs = True
            watch = self.watch = OpRecorder(self, None, _in_root)
        stretch.start = len(self.entries)
        watch.native = stretch
        watch.forget_counts()
        first, before = sequence_number(), self.states_outside()
        leaves: Sequence[Any] = ()
        name = None
        try:
            result = self.mode.watched(watch.watch, function, args, kwargs)
            if isinstance(result, Tensor):
                leaves, name = (result,), "out"
            else:
                leaves = leaves_of((result,), {})
        except BaseException:
            stretch.raised = True
            raise
        finally:
            self.note_skipped(before)
            watch.native = None
            self._end_stretch(watch, stretch, first, leaves, name)
        return result

    def _end_stretch(
        self, watch: OpRecorder, stretch: Stretch, first: int, leaves: Sequence[Any], name: str | None
    ) -> None:
        start = stretch.start
        stretch.end = len(self.entries)
        last = sequence_number()
        self.skipped.append((first, last))
        if self.departures.waiting:
            self.departures.send()
        if self.results.unread:
            self.results.read_versions()
        if watch.rng is not None:
            stretch.drawn, watch.rng = watch.rng.drawn(), None
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                for hidden in tensors_of(leaf):  # in an object that is no pytree
                    self.note_returned(hidden, first, last)
                continue
            if (writer := self.note_returned(leaf, first, last)) is None:
                if not leaf.is_inference():
                    self.note_returned_view(stretch, place, leaf, last)
            elif writer[0].group == stretch.name and writer[1] not in writer[0].names:
                writer[0].names = {**writer[0].names, writer[1]: name or str(place)}
        for tensor in watch.rewritten:
            if key_of(tensor) in self._known:  # code outside goes on with it, returned or not
                self.note_returned(tensor, first, last)
        watch.rewritten = []
        if stretch.end != start + 1 or self.entries[start].storage not in self._known:
            # Of all that its ops made, only what is reached from outside is held on to.
            entries = self.entries[start:]
            touched = {key for entry in entries for key in entry.touches()}
            if not touched <= self._known:
                self._drop(entries, touched)
        if watch.written:
            self._note_left(watch, stretch)

    def _drop(self, entries: Sequence[Entry], touched: set[int]) -> None:
        """Let go of what a native region has made that nothing outside reaches."""
        needs = find_needs(entries, [(key, len(entries)) for key in touched & self._known], self.results.can_keep)
        self.results.drop(entries, needs.kept)
        entries[-1].gone = gone = touched - self._known
        self.storages.forget(gone)

    def note_result(self, entry: Entry, result: Tensor, first: int, last: int) -> None:
        """Note a call with its one result, an ordinary tensor in a storage of its own."""
        key = entry.storage
        self.storages.note_one(entry, key)
        self.results.note_one(entry, result)
        self.entries.append(entry)
        self._known.add(key)
        about = key, result.grad_fn, result.output_nr, first, last, len(self.entries)
        self._returned.append(new_tuple(Returned, about))

    def note_returned(self, leaf: Tensor, first: int, last: int) -> tuple[Entry, int] | None:
        """Note a tensor that a native region returned; return the entry that made it, and as which of its results."""
        found = None
        for key in reversed(keys_of(leaf)):
            if (writer := self.storages.writers.get(key)) is not None:
                found = writer
                self._known.add(key)
                about = key, node_behind(leaf), leaf.output_nr, first, last, len(self.entries)
                self._returned.append(new_tuple(Returned, about))
        return found

    def note_returned_view(self, stretch: Stretch, place: int, leaf: Tensor, last: int) -> None:
        """Note a returned tensor that no entry made."""

    def _note_left(self, watch: OpRecorder, stretch: Stretch) -> None:
        for key, parts in watch.written.items():
            times = parts[0][0]._version - watch.versions[key] if key in watch.versions else 0
            self._changes[key] = self._changes.get(key, 0) + times
            for tensor, place in parts:
                storage = StorageWeakRef(tensor.untyped_storage())
                slot = self.departures.slot_for(stretch.name, "written", tensor, stretch.policy)
                ahead = version_of(tensor) - self._changes[key]
                self._left.append((stretch, len(stretch.left), key, counter_of(tensor), ahead))
                stretch.left = [*stretch.left, Left(storage, slot, place, Placement.of(tensor))]
        watch.written, watch.versions = {}, {}

    def pack(self, tensor: Tensor) -> Holder | Anchor | None:
        """Return the holder for a tensor that a saved entry made; None for one that replay makes again, or has."""
        if self.results.unread:
            self.results.read_versions()
        held: Holder | Anchor | None = None
        kind, key = type(tensor), 0
        if kind is not Parameter or self.storages.has_writes:
            key = storage_key(tensor) if kind is Tensor and tensor.layout is strided else key_of(tensor)
            writer = self.storages.writers.get(key)
            if writer is not None:
                entry, place = writer
                if self._notes_packed:
                    entry.packed |= {place}
                if place in entry.saved:
                    held = self._pack_made(tensor, entry, place)
                else:
                    self.roots.append((len(self.region.tape.saved), key, len(self.entries)))
            elif not self.has_policy and self.watch is not None and self.watch.native is not None:
                held = self.pack_of_call(tensor)
            elif kind is not Tensor:
                place = len(self.region.tape.saved)
                self.roots += [(place, key_of(part), len(self.entries)) for part in parts_of(tensor)]
        if self.has_policy:
            return held
        watch, tape = self.watch, self.region.tape
        number = stop = sequence_number()
        buffer = False
        if watch is None or watch.native is None:
            node = tensor.grad_fn
            # A result is saved once its op has run, all else before. Of a tensor without a gradient nobody knows.
            if tensor.requires_grad if node is None else node_number(node) != number - 1:
                stop = number - 1
            if held is not None:
                self._reads.append((stop, len(self.entries), key))
            else:
                buffer = not tensor.requires_grad and tensor.is_floating_point()
        place = len(tape.saved) if held is None else len(tape.saved) - 1  # a resident has its place by now
        tape.numbers[place] = number, stop, buffer
        return held

    def _pack_made(self, tensor: Tensor, entry: Entry, place: int) -> OpHolder:
        label = entry.label(place)
        if entry.kind != ONE or entry.away or not self._plain or type(tensor) is not Tensor:
            policy = CheckpointPolicy.OFFLOAD if place in entry.away else CheckpointPolicy.SAVE
            return self.resident(entry.group, label, tensor, policy, self._allow_mutation)
        # What most are.
        holder = self.holder_for(entry.group, label, tensor)
        holder.value = alias = tensor.detach() if self.mode.watcher is None else detached(tensor)
        self.results.aliases[entry] = id(tensor), alias
        self.region.tape.saved.append(ResidentRef(holder))
        return holder

    def pack_of_call(self, tensor: Tensor) -> OpHolder | None:
        """Return the holder for a tensor that no entry made, if an op with a handle did and replay will not have it."""
        return None

    def note_reader(self, tensor: Tensor, after: int | None = None) -> bool:
        """Note that replay reads a tensor, here or after so many entries; return whether an entry made it."""
        key = key_of(tensor)
        if key in self.storages.writers:
            self._read.append((key, len(self.entries) if after is None else after))
            return True
        return False

    # The end.

    def undecided(self) -> Iterator[Undecided]:
        """Yield op, name, tensor and decision of what forward holds until its end tells whether anything needs it."""
        yield from self.results.undecided()

    def finish(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """Keep what replay or backward needs, once each entry of the policy is known to have matched."""
        region, tape = self.region, self.region.tape
        if self.watch is not None:
            self.watch.check_matched(region.name)
        if self.results.unread:
            self.results.read_versions()
        if self.departures.waiting:
            self.departures.send()
        if not self.entries:
            return
        for key, own, after in self._adopted:
            for entry in self.entries[after:]:
                if key in entry.reads:
                    entry.reads = [own if read == key else read for read in entry.reads]
        if self.has_policy:  # elsewhere the graph is asked
            self.results.let_go_of_graph()
        if self._left:
            self._run_what_is_changed_again()
        if self.storages.has_writes:
            note_early_reads(self.entries)
        tape.roots = roots = self._roots(boundary)
        runs: set[Entry] = set()
        needs = find_needs(self.entries, roots, self.results.can_keep, runs)
        while draws := self._draws_before(needs.run):
            runs.update(draws)
            needs = find_needs(self.entries, roots, self.results.can_keep, runs)
        while writers := self._writers_to_repeat(needs.run):
            runs.update(writers)
            for entry in writers:
                entry.repeats = True
            needs = find_needs(self.entries, roots, self.results.can_keep, runs)
        for entry in needs.run:
            entry.run = True
        for entry, places in needs.kept:
            self.results.keep(entry, places)
        if self.has_policy:
            self._finish_policy()
        elif self._changes and region.inputs is not None:
            # Replay does not change them again.
            changes = self._changes
            region.inputs.accept_changes(lambda tensor, times: changes.get(key_of(tensor)) == times)

    def _run_what_is_changed_again(self) -> None:
        """Let changes by native regions run in replay where code outside of them has changed the same tensor since."""
        for stretch, at, key, counter, ahead in self._left:
            if version_of(counter) - self._changes[key] != ahead:
                again = stretch.left[at]._replace(slot=None)
                stretch.left = [*stretch.left[:at], again, *stretch.left[at + 1 :]]
                for entry in self.entries[stretch.start : stretch.end]:
                    if key in entry.writes:
                        entry.always, entry.restored = True, False
        self._left = []

    def _draws_before(self, run: Sequence[Entry]) -> list[Entry]:
        """Return the ops that draw again, since one of the same native region does: only its last state is kept."""
        random = () if self.watch is None or self.has_policy else self.watch.random
        if not random:
            return []
        running = set(run)
        groups = {entry.group for entry in running.intersection(random)}
        return [entry for entry in random if entry.group in groups and entry not in running]

    def _writers_to_repeat(self, run: Sequence[Entry]) -> list[Entry]:
        """Return what replay must write again: small buffers that an op reads which it runs."""
        outside = self.region.outside
        if not (self.has_policy and self.storages.has_writes) or outside is None:
            return []
        keys = outside.repeatable() & {key for entry in run for key in entry.reads}
        writers = [
            entry for entry in self.entries if not entry.repeats and not keys.isdisjoint(map(_address, entry.outside))
        ]
        if not writers or any(not keys.issuperset(entry.writes) for entry in writers):
            return []
        outside.repeat(keys)
        for entry in self.entries:
            entry.early = [storage for storage in entry.early if storage.cdata not in keys]
        return writers

    def _finish_policy(self) -> None:
        watch, region = self.watch, self.region
        assert watch is not None
        for record in region.tape.records.values():
            if isinstance(record, HandleCall):
                self.results.keep_views(record)
        if self.storages.has_writes and region.inputs is not None:
            # Replay writes none of them again.
            region.inputs.accept_changes(lambda tensor, _: self.storages.has_changed(tensor))
        if watch.random:
            keep_random(region, watch.random)

    def _roots(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> list[tuple[int, int]]:
        """Return the storages that replay must have, each after how many entries."""
        region, entries = self.region, self.entries
        may_need, hooks = region.tape.may_need, region.hooks
        roots = [(key, after) for place, key, after in self.roots if may_need(place, hooks)]
        if self.storages.has_writes:  # an op may fill what it has saved just before (``F.rrelu`` its noise)
            roots = [
                (key, after + 1 if after < len(entries) and key in entries[after].writes else after)
                for key, after in roots
            ]
        if self.watch is not None and self.watch.compiled_code.ran:
            roots += self._read_by_compiled_code()
        roots += self._read
        if self.has_policy:
            return roots
        stop, end = self._stop()
        # Also where the graph of what saved it is gone: replay runs it all the same.
        read = [(key, after) for number, after, key in self._reads if number <= stop]
        roots += read
        # Where nothing is written a storage is what it is for all that read it: one of them is enough.
        known = set() if self.storages.has_writes else {key for key, _ in read}
        outputs: dict[tuple[torch.autograd.graph.Node, int], Returned] = {}
        for returned in self._returned:
            if returned.last >= end or returned.key in known:
                continue
            writer = self.storages.writers.get(returned.key)
            if returned.node is None or (writer is not None and self.results.is_written(*writer)):
                roots.append((returned.key, returned.after))
            elif returned.last < stop:
                outputs[returned.node, returned.output] = returned
        if outputs and stop:
            first = min(returned.first for returned in outputs.values())
            lasts = [returned.last for returned in self._returned]
            for returned, number in read_outputs(boundary, outputs, first, stop, self.skipped):
                before = self._returned[bisect_right(lasts, number) - 1]  # the native region before the reader
                roots.append((returned.key, before.after))
        return roots

    def _stop(self) -> tuple[int, int]:
        """Return how far replay comes; see `Tape.stop`."""
        region = self.region
        begins = [returned.first for returned in self._returned]
        stop: tuple[int, int] = region.tape.stop(region.hooks, region.options.early_stop, begins)
        return stop

    def _read_by_compiled_code(self) -> list[tuple[int, int]]:
        """Let replay run all ops, since compiled code may read whatever there is; return what ops with handles made."""
        roots = []
        for at, entry in enumerate(self.entries):
            if entry.kind == CALL:
                roots += [(key, at + 1) for _, key in entry.made]
            else:
                entry.always = True
        return roots

    def is_read(self, boundary: Sequence[torch.autograd.graph.Node | None], tensor: Tensor, last: int) -> bool:
        """Whether replay reads a tensor that was made before the node with the number ``last``."""
        stop, end = self._stop()
        node = tensor.grad_fn
        if last >= stop or node is None:
            return node is None and last < end
        output = {(node, tensor.output_nr): True}
        return bool(read_outputs(boundary, output, node_number(node), stop, self.skipped))

    def forget(self) -> None:
        """Let go of the graph."""
        self.region.recorder = self.watch = None
        self._returned, self._left = [], []
        del self.mode, self.departures


def _in_root(_frame: Any) -> str:
    return ""  # names in a native region begin with it


_address = attrgetter("cdata")


def note_early_reads(entries: Sequence[Entry]) -> None:
    """Note which entries read a tensor from outside before a later one changed it: replay does not undo the change."""
    written: dict[int, StorageWeakRef] = {}
    for entry in reversed(entries):
        if written and not (entry.is_view() or entry.effects.factory):
            entry.early = [written[key] for key in entry.reads if key in written]
        for storage in entry.outside:
            written[storage.cdata] = storage


def keep_random(region: Any, random: Sequence[Entry]) -> None:
    """Keep the generators' states where replay skips what drew before, and none if replay draws nothing."""
    skipped = any_skipped = False
    for entry in random:
        # Once an op was skipped, code that puts back a state that it has read puts back another one in replay.
        if not (entry.run and (skipped or (any_skipped and entry.moved))):
            entry.before = None
        skipped = not entry.run
        any_skipped = any_skipped or skipped
    if region.tape.drawn_by_ops():
        return
    if not any(entry.run for entry in random) and all(e.effects.namespace == "aten" for e in random):
        region.rng = None
