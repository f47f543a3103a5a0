"""Aten ops in forward: each runs, and is noted with what it reads, writes and makes, and with the decision about it.

In: each aten op of a region with a policy, or of a stretch of a region without one (a native region), and the tensors
that autograd saves meanwhile. Kept: saved results, until the end of forward tells which of them replay or backward need
(`needs`). Out: residents, and the entries of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import _getframe
from typing import Any

import torch
from torch import Tensor, strided

from torch_remat._compat import CompiledCode, Handler, in_autocast, keep_from_compiler, storage_key
from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.log.entry import (
    FIRST,
    ODD,
    ONE,
    VIEW,
    WRITTEN,
    Entry,
    HandleCall,
    entry_of,
    is_bookkeeping,
    names_of,
)
from torch_remat.dispatch.log.meta import (
    USUAL,
    Meta,
    Raised,
    dense_layout,
    described,
    key_of,
    layout_of,
    tensors_in,
)
from torch_remat.dispatch.log.record import Record
from torch_remat.dispatch.log.schema import Effects
from torch_remat.dispatch.placeholder import NOT_LAZY, new_tuple
from torch_remat.errors import PolicyError
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.policies.kinds import RECOMPUTED, Decider, OpContext, OpPolicy

_new = object.__new__  # without a call of `__init__` for each op
# Of an op: the kind of its entries (`ONE` and `VIEW` are noted in a short way); whether the policy keeps its results,
# if it decides by the op alone; how many of its name there were in each module, less one (None as long as nobody sees
# names of its kind); and the class of its entries.
_Plan = tuple[int, bool | None, dict[str, int] | None, type[Entry]]
Observer = Callable[[Entry, Sequence[Any], Mapping[str, Any], Any], None]


class OpRecorder:
    """The aten ops of one region's forward, as far as they are watched.

    Without a policy only stretches are watched. ``path_of`` tells the path of the module whose code runs in a frame.

    Attributes:
        native: The native region that runs, all of whose results are saved.
        compiled_code: Notes whether compiled code runs, whose ops are not seen.
        random: The entries of ops that may have drawn random numbers.
    """

    def __init__(
        self, owner: Any, policy: OpPolicy | None, path_of: Callable[[Any], str], observer: Observer | None = None
    ) -> None:
        self.native: Record | None = None
        self.random: list[Entry] = []
        self.compiled_code = CompiledCode()
        self._owner = owner
        self._departures = owner.departures
        self._entries = owner.entries
        self._storages = owner.storages
        self._results = owner.results
        self._decider: Decider | None = None if policy is None else policy.begin()
        # Whether all ops are named; else those of a kind from the first on that is saved, of a list's kinds all.
        self._names_all = observer is not None or self._decider is None or self._decider.reads_names
        self._path_of = path_of
        self._observer = observer
        self._plans: dict[int, _Plan] = {}  # by the identity of each op
        self._counts: dict[str, dict[str, int]] = {}  # of ops by name, and by the path of their module
        # What the stretch that runs has changed of what entries had made; what it has changed outside, by storage, with
        # the first entry that did, and the versions from before; and the generators before its first random op.
        self.rewritten: list[torch.Tensor] = []
        self.written: dict[int, list[tuple[torch.Tensor, tuple[int, int]]]] = {}
        self.versions: dict[int, int] = {}
        self.rng: RngState | None = None
        self._left_rng: RngState | None = None  # where the last random op left them, under a policy

    @property
    @keep_from_compiler
    def watch(self) -> Handler:
        """What runs an op, takes the decision about it, and notes what it did: a closure, since it runs for each."""
        plans, path_of, observer, note = self._plans, self._path_of, self._observer, self._entries.append
        owner, storages, results = self._owner, self._storages, self._results
        unread, waiting, note_ordinary = results.unread, self._departures.waiting, storages.note_ordinary

        def watch(_mode: Any, op: Any, _types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            kind, keeps, counts, make = plans.get(id(op)) or self._plan(op)
            if not kind or unread or waiting or owner.opened is not None:
                return self._watch_odd(op, args, kwargs)
            # It computes new tensors or returns views, and does nothing else.
            entry = _new(make)
            if counts is not None:
                entry.path = path = path_of(_getframe(1))
                entry.count = counts[path] = counts.get(path, -1) + 1
            try:
                result = make.kernel(*args, **kwargs)
            except Exception as error:
                self._note_raised(entry, error)
                raise
            if kind == ONE:
                is_noted = note_ordinary(entry, args, result)
            else:
                is_noted = False
                base = args[0]
                if type(result) is Tensor and type(base) in USUAL and base.layout is strided and not (
                    (dtype := result.dtype).is_complex or storages.has_lazy
                ):  # fmt: skip
                    geometry = result.shape, result.stride(), result.storage_offset()
                    entry.results = new_tuple(Meta, (geometry, dtype, result.device, False, NOT_LAZY))
                    entry.reads, is_noted = (storage_key(base),), True
            if not is_noted:
                self._note_odd(entry, args, kwargs, result)
            if keeps is None or self.native is not None:
                self._decide(entry, args, kwargs, result)
            elif keeps:
                entry.saved = FIRST if entry.kind == ONE else entry.all_places()
            if entry.saved:
                if entry.count < 0:
                    self._begin_counting(entry, _getframe(1))
                entry.layout = dense_layout(args) if is_noted and not entry.listed else layout_of(args, kwargs)
                if entry.kind == ONE:
                    results.note_one(entry, result)
                else:
                    results.note(entry, result)
            note(entry)
            if observer is not None:
                observer(entry, args, kwargs, result)
            return result

        return watch

    def _plan(self, op: Any) -> _Plan:
        made, decider = entry_of(op), self._decider
        keeps = None if decider is None else decider.decide_op(op)
        if made.kind == VIEW and keeps is not None:  # whose results are never kept, whatever the policy says
            keeps = False
        counts = self._counts.get(made.effects.name)
        if counts is None and (self._names_all or (decider is not None and made.kind != VIEW and decider.may_save(op))):
            counts = self._counts[made.effects.name] = {}
        plan = self._plans[id(op)] = made.kind, keeps, counts, made
        return plan

    def _begin_counting(self, entry: Entry, frame: Any) -> None:
        """Give the first saved op of a kind its name, and count the ops of this kind from now on."""
        name = entry.effects.name
        entry.path = path = self._path_of(frame)
        counts = self._counts.setdefault(name, {})
        entry.count = counts[path] = counts.get(path, -1) + 1
        for key, (kind, keeps, _, make) in self._plans.items():
            if make.effects.name == name:
                self._plans[key] = kind, keeps, counts, make

    def _watch_odd(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do the same for any op, wherever it runs."""
        kind, _, counts, make = self._plans[id(op)]
        effects = make.effects
        if effects.cast and in_autocast():
            self._owner.region.inputs.note_histories()
        if is_bookkeeping(effects, args, kwargs):
            result = op(*args, **kwargs)
            if effects.cast:
                self._storages.note_foreign(result)
            return result
        opened = self._owner.opened
        in_body = opened is not None and opened.is_running()
        if in_body and opened.record.policy is not CheckpointPolicy.RECOMPUTE:
            return op(*args, **kwargs)
        if self._results.unread:
            self._results.read_versions()
        before, moved = self._rng_before(effects)
        entry = _new(make)
        if effects.random:
            self.random.append(entry)
        if counts is not None:
            entry.path = path = self._path_of(_getframe(2))
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
        if kind != ONE or not self._storages.note_ordinary(entry, args, result):
            self._note_odd(entry, args, kwargs, result)
        entry.always = in_body
        self._decide(entry, args, kwargs, result)
        changed = entry.changed_arguments(args, kwargs) if entry.writes else []
        if changed and self._decider is None:
            self._note_written(entry, changed)
        if entry.saved:
            if entry.count < 0:
                self._begin_counting(entry, _getframe(2))
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
        if self._decider is not None:
            before, left = self._owner.rng_now(), self._left_rng
            return before, before is not None and left is not None and left.differs_from(before)
        if self.rng is None:
            self.rng = self._owner.rng_now()
        return None, False

    def _note_raised(self, entry: Entry, error: Exception) -> None:
        entry.kind = ODD
        entry.results = Raised(type(error), error.args)
        entry.group = self.native.name if self.native is not None else ""
        self._entries.append(entry)

    def _note_odd(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        entry.kind = ODD
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
            context = OpContext(result, entry if entry.count >= 0 else None)
            said = self._decider.decide(context, entry.op, args, kwargs)
        if self.native is not None:
            entry.group = self.native.name
        elif said is RECOMPUTED and not entry.outside:
            return
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
