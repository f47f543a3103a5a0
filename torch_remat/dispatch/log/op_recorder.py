"""Aten ops in forward: each runs, and is noted with what it reads, writes and makes, and with the decision about it.

In: each aten op of a region with a policy, or of a stretch of a region without one (a native region), and the tensors
that autograd saves meanwhile. Kept: saved results, until the end of forward tells which of them replay or backward need
(`needs`). Out: residents, and the entries of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from torch_remat._compat import CompiledCode, in_autocast, keep_from_compiler, kernel_of
from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.log.departures import Departures
from torch_remat.dispatch.log.earlier import Earlier
from torch_remat.dispatch.log.entry import (
    FIRST,
    ODD,
    ONE,
    WRITTEN,
    Entry,
    HandleCall,
    is_bookkeeping,
    names_of,
    written_arguments,
)
from torch_remat.dispatch.log.meta import Raised, dense_layout, described, key_of, layout_of, tensors_in
from torch_remat.dispatch.log.record import Record
from torch_remat.dispatch.log.results import Results
from torch_remat.dispatch.log.schema import Effects, effects_of
from torch_remat.dispatch.log.storages import Storages
from torch_remat.errors import PolicyError
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.policies.kinds import Decider, OpContext, OpPolicy

_new = object.__new__  # without a call of `__init__` for each op
_Noter = Callable[[Entry, Sequence[Any], Any], bool]
# Of an op: its effects; what notes a call of it in the short way, if it has one; whether the policy keeps its results,
# if it decides by the op alone; what runs it; and how many of its name there were in each module, less one.
_Plan = tuple[Effects, _Noter | None, bool | None, Callable[..., Any], dict[str, int]]
Observer = Callable[[Entry, Sequence[Any], Mapping[str, Any], Any], None]


class Owner(Protocol):
    """What of a region's recorder is asked here."""

    region: Any
    entries: list[Entry]
    storages: Storages
    results: Results
    departures: Departures
    opened: Any

    def rng_now(self) -> RngState | None:
        """Return the present state of the region's generators; None where nobody cares."""

    def in_recomputed_op(self) -> bool:
        """Whether the body of a RECOMPUTE op runs: replay runs all of it."""


class OpRecorder:
    """The aten ops of one region's forward, as far as they are watched.

    Args:
        owner: The region's recorder.
        policy: The region's policy; None where only stretches are watched.
        paths: The paths of the modules that run, the innermost last.
        allow_mutation: Whether a kept tensor may be changed in place.
        observer: Is told each op.

    Attributes:
        native: The native region that runs, all of whose results are saved.
        skipped_op: The body of an op with a handle and policy SAVE; replay does not run it.
        earlier: What tensors from outside were before the region changed them.
        compiled_code: Notes whether compiled code runs, whose ops are not seen.
        has_random: Whether an op may have drawn random numbers.
    """

    def __init__(
        self,
        owner: Owner,
        policy: OpPolicy | None,
        paths: Sequence[str],
        allow_mutation: bool,
        observer: Observer | None,
    ) -> None:
        self.native: Record | None = None
        self.skipped_op: Any = None
        self.has_random = False
        self.compiled_code = CompiledCode()
        self._owner = owner
        self._departures = owner.departures
        self._entries = owner.entries
        self._storages = owner.storages
        self._results = owner.results
        self._decider: Decider | None = None if policy is None else policy.begin()
        self._paths = paths
        self._allow_mutation = allow_mutation
        self._observer = observer
        self._plans: dict[int, _Plan] = {}  # by the identity of each op
        self._counts: dict[str, dict[str, int]] = {}  # of ops by name, and by the path of their module
        self.earlier = Earlier(self._storages, self._entries)
        # What the stretch that runs has changed of what entries had made; what it has changed outside, by storage, with
        # the first entry that did, and the versions from before; and the generators before its first random op.
        self.rewritten: list[torch.Tensor] = []
        self.written: dict[int, list[tuple[torch.Tensor, tuple[int, int]]]] = {}
        self.versions: dict[int, int] = {}
        self.rng: RngState | None = None
        self._left_rng: RngState | None = None  # where the last random op left them, under a policy

    @keep_from_compiler
    def watch(self, _mode: Any, op: Any, _types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op, take the decision about it, and note what it did."""
        effects, noter, keeps, kernel, counts = self._plans.get(id(op)) or self._plan(op)
        if noter is None or self.skipped_op is not None or self._results.unread or self._departures.waiting:
            return self._watch_odd(op, args, kwargs, effects)
        # It computes new tensors or returns views, and does nothing else.
        entry = _new(Entry)
        entry.op, entry.effects, entry.path = op, effects, (path := self._paths[-1])
        entry.count = counts[path] = counts.get(path, -1) + 1
        try:
            result = kernel(*args, **kwargs)
        except Exception as error:
            self._note_raised(entry, error)
            raise
        if not noter(entry, args, result):
            self._note_odd(entry, args, kwargs, result)
        native = self.native
        if native is not None and self._decider is None:
            entry.group = native.name
            if effects.plain:
                self._keep(entry)
        elif keeps is None or native is not None:
            self._decide(entry, args, kwargs, result)
        elif keeps:
            entry.saved = FIRST if entry.kind == ONE else entry.all_places()
        if self._owner.opened is not None and self._owner.in_recomputed_op():
            entry.always = True
        if entry.saved:
            entry.layout = layout_of(args, kwargs) if entry.kind == ODD or entry.listed else dense_layout(args)
            if entry.kind == ONE:
                self._results.note_one(entry, result)
            else:
                self._results.note(entry, result)
        self._entries.append(entry)
        if self._observer is not None:
            self._observer(entry, args, kwargs, result)
        return result

    def _plan(self, op: Any) -> _Plan:
        effects = effects_of(op)
        decider = self._decider
        counts = self._counts.setdefault(effects.name, {})
        plan: _Plan = effects, None, None, op, counts
        if effects.plain:
            keeps = False if decider is None else decider.decide_op(op)
            plan = effects, self._storages.note_ordinary, keeps, kernel_of(op), counts
        elif effects.view:  # whose results are never kept, whatever the policy says
            keeps = None if decider is not None and decider.decide_op(op) is None else False
            plan = effects, self._storages.note_view, keeps, kernel_of(op), counts
        self._plans[id(op)] = plan
        return plan

    def _watch_odd(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], effects: Effects) -> Any:
        """Do the same for any op, wherever it runs."""
        if effects.cast and in_autocast():
            self._owner.region.inputs.note_histories()
        if is_bookkeeping(effects, args, kwargs):
            result = op(*args, **kwargs)
            if effects.cast:
                self._storages.note_foreign(result)
            return result
        if self.skipped_op is not None:
            if self.skipped_op.is_running():
                return op(*args, **kwargs)
            self.skipped_op = None
        if self._results.unread:
            self._results.read_versions()
        if effects.written:
            self.earlier.note_writes(written_arguments(effects, args, kwargs))
        before, moved = self._rng_before(effects)
        _, noter, _, _, counts = self._plans[id(op)]
        entry = _new(Entry)
        entry.op, entry.effects, entry.path = op, effects, (path := self._paths[-1])
        entry.count = counts[path] = counts.get(path, -1) + 1
        try:
            result = op(*args, **kwargs)
        except Exception as error:
            self._note_raised(entry, error)
            raise
        if self._departures.waiting:
            self._departures.send()
        if before is not None:
            entry.before, entry.moved, self._left_rng = before, moved, before.present()
        if noter is None or not noter(entry, args, result):
            self._note_odd(entry, args, kwargs, result)
        entry.always = self._owner.in_recomputed_op()
        self._decide(entry, args, kwargs, result)
        changed = entry.changed_arguments(args, kwargs) if entry.writes else []
        if changed and self._decider is None:
            self._note_written(entry, changed)
        if entry.saved:
            if not effects.written:  # ops resize what they write
                entry.layout = layout_of(args, kwargs)
            if entry.kind == ONE:
                self._results.note_one(entry, result)
            else:
                self._results.note(entry, result, changed)
        elif effects.reshapes:
            writer = self._storages.writer_of(args[0])
            if writer is not None and not self._results.is_written(*writer):  # by what nobody watched
                self._results.unread.append(writer[0])
            own = (one.touches() for one in self._entries if one.group == entry.group and not one.writes)
            if self.native is not None and not any(key_of(args[0]) in made for made in own):
                self.native.again = "it changed in place the shape of a tensor that was there before"
        self._entries.append(entry)
        if self._observer is not None:
            self._observer(entry, args, kwargs, result)
        return result

    def _rng_before(self, effects: Effects) -> tuple[RngState | None, bool]:
        """Return the generators' state before an op that may draw (a stretch: its first), and whether no op left it."""
        if not effects.random:
            return None, False
        self.has_random = True
        if self._decider is not None:
            before, left = self._owner.rng_now(), self._left_rng
            return before, before is not None and left is not None and left.differs_from(before)
        if self.rng is None:
            self.rng = self._owner.rng_now()
        return None, False

    def _note_raised(self, entry: Entry, error: Exception) -> None:
        entry.results = Raised(type(error), error.args)
        entry.group = self.native.name if self.native is not None else ""
        self._entries.append(entry)

    def _note_odd(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        given = () if entry.effects.namespace == "aten" else list(tensors_in(args, kwargs))
        entry.results = described(result, args[0] if args else None, given)
        self._storages.note(entry, args, kwargs, result)

    def _note_written(self, entry: Entry, changed: Sequence[torch.Tensor]) -> None:
        """Note what a stretch changes outside. Of what is changed in parts, all parts are listed."""
        for at, tensor in enumerate(changed):
            key = key_of(tensor)
            if not self._storages.has_changed(tensor):
                self.rewritten.append(tensor if tensor._base is None else tensor._base)
                continue
            known = self.written.setdefault(key, [])
            if not known and not tensor.is_inference():
                self.versions[key] = tensor._version  # autograd counts the op once it is over
            if not any(_covers(before, tensor) for before, _ in known):
                known[:] = [one for one in known if not _covers(tensor, one[0])]
                known.append((tensor, (len(self._entries), at)))

    def _decide(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        said: Sequence[Any] = ()
        if self._decider is not None:
            said = self._decider.decide(OpContext(result, entry.labels), entry.op, args, kwargs)
        if self.native is not None:
            entry.group = self.native.name
        if entry.effects.viewed is not None or entry.effects.reshapes:
            return
        # An op that changes what lies outside is not repeated, so that what else it makes cannot be made again.
        if entry.group or (entry.outside and entry.made):
            self._keep(entry)
        elif len(said) == 1:
            if said[0].keeps:
                entry.saved = FIRST if type(entry.results) is not list and not entry.writes else entry.all_places()
                if said[0].offloads:
                    entry.away = entry.saved
        else:
            places = [place for place, decision in enumerate(said) if decision.keeps]
            if places:
                entry.saved = frozenset((WRITTEN, *places))
                entry.away = frozenset(place for place in places if said[place].offloads)

    def _keep(self, entry: Entry) -> None:
        """Save all that an entry of a native region makes."""
        entry.saved = FIRST if entry.kind == ONE else entry.all_places()
        if self.native is not None and self.native.policy is CheckpointPolicy.OFFLOAD:
            entry.away = entry.saved

    def note_handle(self, entry: HandleCall, outputs: Sequence[torch.Tensor]) -> None:
        """Note an op with a handle and policy SAVE, once its body is over."""
        entry.saved = frozenset(range(len(outputs)))
        if entry.policy is CheckpointPolicy.OFFLOAD:
            entry.away = entry.saved
        self._storages.note_call(entry, outputs)
        self._entries.append(entry)
        self._results.note(entry, outputs)

    def forget_counts(self) -> None:
        """Count the ops anew: names in a native region begin with it."""
        for counts in self._counts.values():
            counts.clear()

    def runs_writer(self, tensor: torch.Tensor) -> bool:
        """Whether what wrote a tensor's storage last, as far as that was seen, runs in replay in any case."""
        writer = self._storages.writer_of(tensor)
        return writer is None or writer[0].always

    def give_name(self, tensor: torch.Tensor, name: str) -> None:
        """Give a tensor a name by hand, and keep it if the policy says so."""
        writer = self._storages.writer_of(tensor)
        if self._decider is None:
            return
        decision = self._decider.decide_name(name)
        if writer is None:
            return
        entry, place = writer
        entry.names = {**entry.names, place: name}
        if not decision.keeps or (place == WRITTEN and place not in entry.saved and len(entry.writes) > 1):
            return  # of several that an op has written, all would have to be at hand
        entry.saved |= {place}
        if decision.offloads:
            entry.away |= {place}
        self._results.note_named(entry, place, tensor)

    def check_matched(self, region: str) -> None:
        """Raise `PolicyError` if an entry of the policy has matched nothing."""
        error = None if self._decider is None else self._decider.unmatched(names_of(self._entries))
        if error is not None:
            raise PolicyError(error.what, region=region, tensor=error.tensor, remedy=error.remedy)


def _covers(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor lies wherever another of the same storage does, as far as that is easily told."""
    if tensor.layout is not torch.strided or (tensor.nbytes == tensor.untyped_storage().nbytes()):
        return True
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) == (
        other.shape, other.stride(), other.storage_offset(), other.dtype
    )  # fmt: skip
