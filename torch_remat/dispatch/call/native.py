"""A native region: a call whose Python runs in both phases, and whose ops run in forward only.

In: the ops of its function, and what autograd saves meanwhile. Kept: residents, and the list of the ops with what they
returned. Out: in replay each op is answered from the list, by a placeholder or a plain value; then the kept results
take their places in what the function returned.

The function's effects on Python objects are right in replay too, since its Python runs again; a tensor that it leaves
there is a placeholder. A tensor that it saves but did not make is saved as outside native regions, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_remat._compat import (
    Handler,
    count_of_modes,
    in_autocast,
    keep_from_compiler,
    storage_key,
    without_dispatch_modes,
)
from torch_remat.dispatch.call.call import refuse_gradient
from torch_remat.dispatch.call.entry import Call, Given
from torch_remat.dispatch.call.log import Log, Running
from torch_remat.dispatch.call.result import flatten, is_flat
from torch_remat.dispatch.holder import Anchor, Holder
from torch_remat.dispatch.keys import USUAL, key_of, keys_of, tensors_in, version_of
from torch_remat.dispatch.ops.entry import ONE, Entry, entry_of, is_bookkeeping
from torch_remat.dispatch.ops.meta import Meta, described, leaves_of_result, unboxed
from torch_remat.dispatch.ops.record import note_odd, note_raised
from torch_remat.dispatch.ops.schema import LIFT
from torch_remat.dispatch.ops.storages import Storages
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
        call.answers = self.answers
        self.inside = Storages(ops.region.hooks is not None, None)
        self._counts: dict[str, int] = {}
        self._of_handles: list[int] = []  # the storages of what these made inside
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
        if effects.random and not self.draws:
            self.draws = True
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
            self.note_written(tensor, version_of(tensor))

    def pack(self, tensor: Tensor) -> Holder | Anchor | None:
        """Return the holder for a tensor that the region has made, or one that replay will not have."""
        ops, call = self.ops, self.call
        maker = self._maker_of(tensor) if type(tensor) is not Parameter else None
        if maker is None:
            if (outer := ops.made_by_handle(tensor)) is not None:
                label = f"{outer[0].name.rpartition('/')[2]}_{outer[1]}"
            elif ops.is_state(tensor):  # of which replay has what forward began with, until the region is over
                label = "state"
            else:
                return ops.pack(tensor)
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
        self.end()
        if self._read:
            self._keep_read()
        if (
            type(result) is Tensor and result._base is None and result.layout is torch.strided
            and not result.dtype.is_complex and self.has_made(key := storage_key(result))
        ):  # fmt: skip
            self.ops.note_result(call, result, key)
            self._check_left((result,))
        else:
            self._returns_several(result)

    def end(self) -> None:
        """Note also the storages that its ops read and had not made."""
        super().end()
        found, made = set[int](), set(self._of_handles)
        for entry in self.answers:
            found.update([key for key in entry.reads if key not in made])
            if entry.kind == ONE:
                made.add(entry.storage)
            else:
                made.update(entry.touches())
        self.call.reads = list(map(self.ops.storages.read_as, found))

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
        self._check_left(leaves)

    def _check_left(self, leaves: Sequence[Any]) -> None:
        if self.last > self.first:
            refuse_gradient(self.ops.region, self.call.name, self.first, leaves)
        if self.written:
            self.ops.note_writes(self)
