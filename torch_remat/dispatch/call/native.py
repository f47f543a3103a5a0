"""A native region: a call whose Python runs in both phases, and whose ops run in forward only.

In: the ops of its function, and what autograd saves meanwhile. Kept: residents, and the list of the ops with what they
returned. Out: in replay each op is answered from the list, by a placeholder or a plain value; then the kept results
take their places in what the function returned.

The function's effects on Python objects are right in replay too, since its Python runs again; a tensor that it leaves
there is a placeholder. A tensor that it saves but did not make is saved as outside native regions, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_remat._compat import (
    Handler,
    as_written,
    count_of_modes,
    in_autocast,
    keep_from_compiler,
    optree,
    storage_key,
    without_dispatch_modes,
)
from torch_remat.dispatch.call.call import refuse_gradient
from torch_remat.dispatch.call.entry import Call, Given
from torch_remat.dispatch.call.loading import Loading
from torch_remat.dispatch.call.log import Log, Running
from torch_remat.dispatch.call.result import flatten, is_flat
from torch_remat.dispatch.holder import Anchor, Holder
from torch_remat.dispatch.keys import USUAL, key_of, keys_of, tensors_in, version_of
from torch_remat.dispatch.ops.answer import OpAnswerer
from torch_remat.dispatch.ops.entry import ONE, Entry, entry_of, is_bookkeeping
from torch_remat.dispatch.ops.meta import Meta, Raised, described, leaves_of_result, unboxed
from torch_remat.dispatch.ops.record import note_odd, note_raised
from torch_remat.dispatch.ops.schema import LIFT
from torch_remat.dispatch.ops.storages import Storages
from torch_remat.dispatch.placeholder import Placeholder, Source, is_of_placeholders
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.slot import placement_in, slot_for

_new = object.__new__  # without a call of `__init__` for each op


class RunningNative(Running):
    """A native region while forward runs.

    Attributes:
        answers: Its ops so far.
        inside: The storages that these read, wrote and made.
    """

    def __init__(
        self, ops: Log, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(ops, call, Given(function, args if is_flat(args, kwargs) else leaves_of(args, kwargs)))
        self.answers: list[Entry] = []
        self.inside = Storages(ops.region.hooks is not None, None)
        self._counts: dict[str, int] = {}
        self._of_handles: list[int] = []  # the storages of what these made inside
        self._draws = False  # whether an op may have drawn random numbers
        self._read: list[tuple[Entry, int, Tensor]] = []  # what higher-order ops read: who made it, as which result

    def has_made(self, key: int) -> bool:
        """Whether a storage was made inside."""
        return not self.inside.is_foreign(key)

    @property
    @keep_from_compiler
    def watch(self) -> Handler:
        """What runs an op and notes what it returned: a closure, since it runs for each."""
        answers, counts, inside = self.answers, self._counts, self.inside
        note_ordinary, note_view = inside.note_ordinary, inside.note_view
        ops, waiting = self.ops, self.ops.departures.waiting

        def watch(mode: Any, op: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if (types or count_of_modes() > mode.below) and mode.is_foreign(types):
                self._note_read(tensor for tensor in tensors_in(args, kwargs) if type(tensor) in USUAL)
                return op(*args, **kwargs)
            make = entry_of(op)
            kind = make.kind
            if not kind or waiting or ops.opened:
                return self._watch_odd(make, op, args, kwargs)
            entry = _new(make)
            name = make.effects.name
            entry.count = counts[name] = counts.get(name, -1) + 1
            try:
                result = make.kernel(*args, **kwargs)
            except Exception as error:
                note_raised(answers, entry, error)
                raise
            answers.append(entry)
            is_noted = note_ordinary(entry, args, result) if kind == ONE else note_view(entry, args[0], result)
            if not is_noted:
                note_odd(inside, entry, args, kwargs, result)
            return result

        return watch

    def _watch_odd(self, make: type[Entry], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do the same for any op."""
        ops, effects = self.ops, make.effects
        if effects.random and not self._draws:
            self._draws = True
            if ops.draws is not None:
                ops.draws.begin()
        if effects.cast and in_autocast():
            ops.region.inputs.note_histories()
        if is_bookkeeping(effects, args, kwargs) or ops.is_in_skipped_body():
            result = op(*args, **kwargs)
            if effects.cast:  # it may have the memory of a result that is gone
                self.inside.note_foreign(result)
                ops.storages.note_foreign(result)
            return result
        entry = _new(make)
        entry.count = self._counts[effects.name] = self._counts.get(effects.name, -1) + 1
        self._note_writes(args[:1] if effects.reshapes else entry.changed_arguments(args, kwargs))
        given = unboxed(args) if effects.higher else args
        try:
            returned = result = op(*args, **kwargs)
        except Exception as error:
            note_raised(self.answers, entry, error)
            raise
        if effects.higher:
            args = given
            self._note_read(tensors_in(args, kwargs))
            result, entry.form = leaves_of_result(returned)
        if ops.departures.waiting:
            ops.departures.send()
        self.answers.append(entry)
        note_odd(self.inside, entry, args, kwargs, result)
        if op is LIFT:  # replay comes to no call only to fill what autograd saves of a number
            self.inside.note_results(entry, [(0, result)])
        if effects.foreign:  # it may return what it has changed without a word
            self._note_writes(entry.changed_arguments(args, kwargs))
        return returned

    def _note_read(self, tensors: Iterable[Tensor]) -> None:
        """Let replay have what a higher-order op reads, or a trace for one, which placeholders would break."""
        for tensor in tensors:
            maker = self._maker_of(tensor)
            if maker is None:
                self.ops.note_readers((tensor,))
            elif not tensor._version and not isinstance(maker[0], Call) and type(maker[0].meta(maker[1])) is Meta:
                self._read.append((*maker, tensor))
            else:  # modified in place, say: it is a placeholder in replay, and the code runs as it is written
                self.call.higher = True

    def _keep_read(self) -> None:
        """Keep what higher-order ops have read."""
        ops, call = self.ops, self.call
        for entry, place, tensor in self._read:
            if place not in entry.kept:
                with without_dispatch_modes(), torch.no_grad():
                    made = placement_in(entry.meta(place)).seen_in(tensor.detach())
                slot = slot_for(ops.region.hooks, ops.departures, call.name, entry.label(place), made, call.policy)
                entry.kept = {**entry.kept, place: slot}

    def _note_writes(self, changed: Sequence[Tensor]) -> None:
        """Note what an op modifies that was there before the region."""
        for tensor in changed:
            if not all(map(self.has_made, keys_of(tensor))):
                self.note_written(tensor, version_of(tensor))

    def pack(self, tensor: Tensor) -> Holder | Anchor | None:
        """Return the holder for a tensor that the region has made, or one that replay will not have."""
        ops, call = self.ops, self.call
        maker = self._maker_of(tensor) if type(tensor) is not Parameter else None
        if maker is None:
            if (outer := ops.made_by_handle(tensor)) is None:
                return ops.pack(tensor)
            label = f"{outer[0].name.rpartition('/')[2]}_{outer[1]}"
        else:
            entry, place = maker
            label = f"{entry.name.rpartition('/')[2]}_{place}" if isinstance(entry, Call) else entry.label(place)
        return ops.resident(call.name, ops.name_of(tensor, label), tensor, call.policy)

    def _maker_of(self, tensor: Tensor) -> tuple[Entry, int] | None:
        """Return the op or handle that made a tensor, or modified it last, and as which of its results."""
        return self.inside.writer_of(tensor) if self.has_made(key_of(tensor)) else None

    def note_handle(self, call: Call, outputs: Sequence[Tensor]) -> None:
        """Note an op with a handle that has run inside: its ops are not listed, its outputs are made inside."""
        made = [(at, output) for at, output in enumerate(outputs) if not any(map(self.has_made, keys_of(output)))]
        self._of_handles += [key for _, key in self.inside.note_results(call, made)]

    def returns(self, result: Any) -> None:
        """Note what the region returns."""
        call = self.call
        self.watch_end(self._draws)
        call.answers = self.answers
        call.reads = self._reads()
        if self._read:
            self._keep_read()
        if (
            type(result) is Tensor and result._base is None and result.layout is torch.strided
            and not result.dtype.is_complex and self.has_made(key := storage_key(result))
        ):  # fmt: skip
            self.ops.note_result(call, result, key)
            self._end((result,))
        else:
            self._returns_several(result)

    def _reads(self) -> list[int]:
        """Return the storages that its ops read and had not made."""
        found, made = set[int](), set(self._of_handles)
        for entry in self.answers:
            found.update([key for key in entry.reads if key not in made])
            if entry.kind == ONE:
                made.add(entry.storage)
            else:
                made.update(entry.touches())
        return list(map(self.ops.storages.read_as, found))

    def _returns_several(self, result: Any) -> None:
        ops, call = self.ops, self.call
        is_one = isinstance(result, Tensor)
        leaves, form = ([result], None) if is_one else flatten(result)
        made = []
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and any(map(self.has_made, keys_of(leaf))):
                made.append((at, leaf))
        call.template = () if form is None or form.is_leaf() else (form,)
        metas = [described(leaf, None) if isinstance(leaf, Tensor) else None for leaf in leaves]
        call.results = metas if call.template else metas[0]
        call.gradients = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        ops.note_results(call, leaves, made)
        self._end(leaves)

    def left_by(self, error: BaseException) -> None:
        """Note that an exception left the region; its Python raises it again."""
        if isinstance(error, Exception):
            self.call.results = Raised(type(error), error.args)
        self.watch_end(True)
        self.call.answers = self.answers
        self.call.reads = self._reads()
        self.ops.entries.append(self.call)
        self._end(())

    def _end(self, leaves: Sequence[Any]) -> None:
        if self.last > self.first:
            refuse_gradient(self.ops.region, self.call.name, self.first, leaves)
        if self.written:
            self.ops.note_writes(self)

    def let_go(self) -> None:
        """Let go of what only the run needs."""
        super().let_go()
        del self.inside
        self._read.clear()


def replay_native(
    answerer: Loading, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run a native region's function again and answer its ops; return its result with the kept tensors in it."""
    replay = answerer.replay
    assert call.answers is not None
    ops = answerer.native_ops
    if ops is None:
        ops = answerer.native_ops = OpAnswerer(replay, answerer.suppressed, answerer.load)
    ops.expect(call.answers, call.name)
    outer, answerer.ops = answerer.ops, ops
    answerer.native = call
    # With placeholders the compiler cannot trace what a higher-order op compiles for itself.
    context = as_written() if call.higher else nullcontext()
    try:
        with context:
            result = replay.watched(ops.answer, function, args, kwargs)
    except BaseException as error:
        if type(call.results) is Raised and not replay.over and not is_of_placeholders(error):
            _end(answerer, call, ops)
        raise
    finally:
        answerer.native, answerer.ops = None, outer
    _end(answerer, call, ops)
    if type(result) is Placeholder:
        if call.kept:
            return answerer.kept_or_stand_in(call, 0)
        result.source = result.source._replace(output=call.label(0))
        return result
    leaves, form = flatten(result)
    sources: dict[int, Source] = {}  # views of one tensor share one
    for place, leaf in enumerate(leaves):
        if place in call.kept and isinstance(leaf, Tensor):
            leaves[place] = answerer.kept_or_stand_in(call, place)
        elif type(leaf) is Placeholder and leaf.source.op == call.name:
            source = leaf.source
            leaf.source = sources.setdefault(id(source), source._replace(output=call.label(place)))
    return optree.tree_unflatten(form, leaves) if call.kept else result


def _end(answerer: Loading, call: Call, ops: OpAnswerer) -> None:
    if (error := ops.missing()) is not None:
        answerer.replay.fail(error)
    if answerer.suppressed.pending:
        answerer.suppressed.restore()
    answerer.leave(call)
