"""Ops under a policy in forward: each runs, and is noted with what it reads, writes and makes, and its decision.

In: each aten op of a region with a policy, and the tensors that autograd saves meanwhile. Kept: saved results, until
the end of forward decides which of them replay or backward need (`needs`). Out: residents, and the entries of the log.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from sys import _getframe
from typing import Any

import torch

from torch_remat._compat import CompiledCode, Handler, count_of_modes, in_autocast, keep_from_compiler
from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.call.log import Log
from torch_remat.dispatch.keys import USUAL, layout_of, tensors_in
from torch_remat.dispatch.naming import ModulePath
from torch_remat.dispatch.ops.entry import (
    FIRST,
    LEFT,
    NOTHING,
    ODD,
    ONE,
    VIEW,
    WRITTEN,
    Entry,
    entry_of,
    is_bookkeeping,
    names_of,
)
from torch_remat.dispatch.ops.meta import Raised, described, described_higher, leaves_of_result, unboxed
from torch_remat.dispatch.ops.storages import Storages
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import PolicyError
from torch_remat.policies.decision import RECOMPUTED, Decision
from torch_remat.policies.nothing import is_new, note_first
from torch_remat.policies.policy import Decider, OpContext, OpPolicy

_new = object.__new__  # without a call of `__init__` for each op
# Of an op: whether the policy keeps its results, if it decides by the op alone; how many of its name there were in each
# module, less one (None as long as nobody sees names of its kind); and the class of its entries.
_Plan = tuple[bool | None, dict[str, int] | None, type[Entry]]


class OpRecorder:
    """The ops of one forward under a policy.

    Attributes:
        path: Gives the path of the module whose code runs in a frame.
        compiled_code: Notes whether compiled code runs, whose ops are not seen.
        random: The entries of ops that may have drawn random numbers.
        higher: Those of higher-order ops, each with its place in the log.
    """

    def __init__(self, owner: Log, decider: Decider, path: ModulePath) -> None:
        self.random: list[Entry] = []
        self.higher: list[tuple[int, Entry]] = []
        self.compiled_code = CompiledCode()
        self._owner = owner
        self._departures = owner.departures
        self._entries = owner.entries
        self._storages = owner.storages
        self._results = owner.results
        self._decider = decider
        # Whether all ops are named; else those of a kind from the first on that is saved, of a list's kinds all.
        self._names_all = decider.reads_names
        self.path = path
        self._plans: dict[int, _Plan] = {}  # by the identity of each op
        self._counts: dict[str, dict[str, int]] = {}  # of ops by name, and by the path of their module

    @property
    @keep_from_compiler
    def watch(self) -> Handler:
        """What runs an op, takes the decision about it, and notes what it did: a closure, since it runs for each."""
        plans, path_of, note = self._plans, self.path.of, self._entries.append
        owner, decide = self._owner, self._decider.decide
        unread, waiting = self._results.unread, self._departures.waiting
        note_ordinary, note_view = self._storages.note_ordinary, self._storages.note_view

        def watch(mode: Any, op: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if (types or count_of_modes() > mode.below) and mode.is_foreign(types):
                owner.note_readers([tensor for tensor in tensors_in(args, kwargs) if type(tensor) in USUAL])
                return op(*args, **kwargs)
            keeps, counts, make = plans.get(id(op)) or self._plan(op)
            if not (kind := make.kind) or unread or waiting or owner.opened:
                return self._watch_odd(op, args, kwargs)
            # It computes new tensors or returns views, and does nothing else.
            entry = _new(make)
            if counts is not None:
                entry.path = path = path_of(_getframe(1))
                entry.count = counts[path] = counts.get(path, -1) + 1
            try:
                result = make.kernel(*args, **kwargs)
            except Exception as error:
                note_raised(self._entries, entry, error)
                raise
            is_noted = note_ordinary(entry, args, result) if kind == ONE else note_view(entry, args[0], result)
            if not is_noted:
                note_odd(self._storages, entry, args, kwargs, result)
            if keeps is None:
                said = decide(OpContext(result, None if counts is None else entry), op, args, kwargs)
                if said is not RECOMPUTED or entry.outside:
                    self._decide(entry, said)
            elif keeps:
                entry.saved = FIRST if entry.kind == ONE else entry.all_places()
            if entry.saved:
                self._note_saved(entry, args, kwargs, result, _getframe(1))
            note(entry)
            return result

        return watch

    def _plan(self, op: Any) -> _Plan:
        decider = self._decider
        if (known := decider.plans.get(id(op))) is None:
            make, keeps = entry_of(op), decider.decide_op(op)
            if make.kind == VIEW and keeps is not None:  # whose results are never kept, whatever the policy says
                keeps = False
            known = decider.plans[id(op)] = keeps, make.kind != VIEW and decider.may_save(op), make
        keeps, is_named, make = known
        counts, name = None, make.effects.name
        if is_named or self._names_all or name in self._counts:
            counts = self._counts.setdefault(name, {})
        plan = self._plans[id(op)] = keeps, counts, make
        return plan

    def _note_saved(
        self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, frame: Any
    ) -> None:
        """Hold what an op returned and wrote until the end of forward; from its kind's first on these have names."""
        if entry.count < 0:
            name = entry.effects.name
            entry.path = path = self.path.of(frame)
            counts = self._counts.setdefault(name, {})
            entry.count = counts[path] = counts.get(path, -1) + 1
            for key, (keeps, _, make) in self._plans.items():
                if make.effects.name == name:
                    self._plans[key] = keeps, counts, make
        if not entry.effects.written:  # ops resize what they write
            entry.layout = layout_of(args, kwargs)
        if entry.kind == ONE:
            self._results.note_one(entry, result)
        else:
            self._results.note(entry, result, entry.changed_arguments(args, kwargs) if entry.writes else ())

    def _watch_odd(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do the same for any op, wherever it runs."""
        _, counts, make = self._plans[id(op)]
        effects = make.effects
        if effects.cast and in_autocast():
            self._owner.region.inputs.note_histories()
        if is_bookkeeping(effects, args, kwargs):
            result = op(*args, **kwargs)
            if effects.cast:
                self._storages.note_foreign(result)
            return result
        if effects.higher:
            self.compiled_code.note_seen(op)
        if self._owner.is_in_skipped_body():
            return op(*args, **kwargs)
        if self._results.unread:
            self._results.read_versions()
        entry = _new(make)
        if effects.random:
            entry.before = self._rng_now()
            self.random.append(entry)
        if counts is not None:
            entry.path = path = self.path.of(_getframe(2))
            entry.count = counts[path] = counts.get(path, -1) + 1
        given = unboxed(args) if effects.higher else args
        try:
            returned = result = op(*args, **kwargs)
        except Exception as error:
            note_raised(self._entries, entry, error)
            raise
        if effects.higher:
            args = given
            result, entry.form = leaves_of_result(returned)
            self.higher.append((len(self._entries), entry))
        if self._departures.waiting:
            self._departures.send()
        if make.kind != ONE or not self._storages.note_ordinary(entry, args, result):
            note_odd(self._storages, entry, args, kwargs, result)
        entry.always = self._owner.body() is not None
        context = OpContext(returned, None if counts is None else entry)
        self._decide(entry, self._decider.decide(context, op, args, kwargs))
        if entry.saved:
            self._note_saved(entry, args, kwargs, result, _getframe(2))
        elif effects.reshapes:
            writer = self._storages.writer_of(args[0])
            if writer is not None and not self._results.is_written(*writer):  # by what nobody watched
                self._results.unread.append(writer[0])
        self._entries.append(entry)
        return returned

    def _decide(self, entry: Entry, said: Sequence[Decision]) -> None:
        """Note what the policy has said about an entry."""
        if said is RECOMPUTED and not entry.outside:
            return
        if entry.effects.viewed is not None or entry.effects.reshapes:
            return
        # An op that modifies a tensor created outside is not repeated, so its other results cannot be recomputed.
        if entry.outside and entry.made:
            entry.saved = FIRST if entry.kind == ONE else entry.all_places()
        elif len(said) == 1:
            if said[0].keeps:
                entry.saved = FIRST if type(entry.results) is not list and not entry.writes else entry.all_places()
                if said[0].offloads:
                    entry.away = entry.saved
            elif said[0] is Decision.LEFT_OUT:
                entry.saved, entry.barred = NOTHING, entry.all_places()
        else:
            places = [place for place, decision in enumerate(said) if decision.keeps]
            if places:
                entry.saved = frozenset((WRITTEN, *places))
                entry.away = frozenset(place for place in places if said[place].offloads)
            entry.barred = frozenset(place for place, decision in enumerate(said) if decision is Decision.LEFT_OUT)
        if WRITTEN in entry.saved and any(map(self._storages.is_state, entry.writes)):
            entry.saved -= (
                LEFT  # what is kept of a small buffer is its own memory, where replay puts the state of forward
            )

    def give_name(self, tensor: torch.Tensor, name: str) -> None:
        """Give a tensor a name by hand, and keep it if the policy says so."""
        writer = self._storages.writer_of(tensor)
        decision = self._decider.decide_name(name)
        if writer is None:
            return
        entry, place = writer
        entry.names = {**entry.names, place: name}
        if decision is Decision.LEFT_OUT:
            self._leave_out(entry, place, name)
        if not decision.keeps or place in entry.barred:
            return
        if place == WRITTEN and place not in entry.saved and len(entry.writes) > 1:
            return  # of several that an op has written, all would have to be at hand
        entry.saved |= {place}
        if decision.offloads:
            entry.away |= {place}
        self._results.note_named(entry, place, tensor)

    def _leave_out(self, entry: Entry, place: int, name: str) -> None:
        """Keep a result no longer; what a call returned and what is written outside stay, since these run once."""
        if entry.is_call or entry.outside:
            return
        if place in entry.saved and place in entry.packed:
            automatic = entry.labels()[max(place, 0)]
            raise PolicyError(
                f"{name!r} cannot be excluded: it was kept for backward before it got this name",
                region=self._owner.region.name,
                tensor=automatic,
                remedy=f"Leave it out by its automatic name, {automatic!r}, or name it before anything reads it.",
            )
        entry.barred |= {place}
        entry.saved -= {place}

    def check_matched(self, policy: OpPolicy, code: Hashable) -> None:
        """Raise `PolicyError` if an entry of the policy has matched nothing; warn, once, if all of it selects nothing.

        Args:
            policy: The policy.
            code: What identifies the region's function.
        """
        error = self._decider.unmatched(names_of(self._entries))
        if error is not None:
            raise PolicyError(error.what, region=self._owner.region.name, tensor=error.tensor, remedy=error.remedy)
        if is_new(policy, code) and (ops := [entry for entry in self._entries if not entry.is_call]):
            names, selects = [entry.effects.name for entry in ops], any(entry.saved for entry in self._entries)
            note_first(policy, code, self._owner.region.name, names, selects)

    # The end.

    def drawn_so_far(self) -> RngState | None:
        """Return the present state of the random generators; None if no op has drawn yet that replay might skip."""
        return self._rng_now() if self.random else None

    def _rng_now(self) -> RngState | None:
        rng = self._owner.region.rng
        return None if rng is None else rng.present()

    def note_draws(self, call: Entry, before: RngState) -> None:
        """Note the state of the generators before a call that drew: it may run whole after ops that replay skips."""
        call.before = before
        self.random.append(call)

    def finish(self) -> None:
        """Keep the random state that replay needs."""
        if self.random:
            keep_random(self._owner.region, self.random)


def note_raised(entries: list[Entry], entry: Entry, error: Exception) -> None:
    """Note an op that raised an error."""
    entry.kind = ODD
    entry.results = Raised(type(error), error.args)
    entries.append(entry)


def note_odd(storages: Storages, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    """Note what an op of any kind returned, read, wrote and made."""
    entry.kind = ODD
    given = () if entry.effects.namespace == "aten" else list(tensors_in(args, kwargs))
    if entry.effects.higher:
        entry.results = described_higher(result, given)
    else:
        entry.results = described(result, args[0] if args else None, given)
    storages.note(entry, args, kwargs, result)


def keep_random(region: Region, random: Sequence[Entry]) -> None:
    """Keep the generators' states from the first op on that replay skips, and none if replay draws nothing."""
    any_skipped = False
    for entry in random:
        if not (entry.run and any_skipped):
            entry.before = None
        any_skipped = any_skipped or not (entry.run or entry.is_call)  # replay draws what a skipped call drew
    if region.tape.has_drawn():
        return
    if not any(entry.run for entry in random) and all(e.effects.namespace == "aten" for e in random):
        region.rng = None
