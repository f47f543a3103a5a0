"""A native region in forward: its ops run, and what backward and replay need of them is kept.

In: each aten op that runs inside, and the tensors that autograd saves meanwhile. Kept: residents, and on the tape the
sequence of ops, plain values that left the tensors (``.item()``), returned tensors that replay reads. Out: the
function's own result.

NOTE [ What is kept for a native region ]
1. A tensor that autograd saves inside is resident if it was born inside, or if a skipped op made it. All others stay
   recomputed: replay runs the function again, without its arithmetic, so that they come by once more.
2. Of what it returns, a tensor born inside is kept if something outside reads it in replay: an op that autograd
   recorded (`readers`), or one that saved it. What else may read it, autograd does not show; then replay runs the
   region once more.
3. Tensors from outside that it changed in place are kept as they were left: replay does not change them again, but a
   recomputed one must become what it was. For one that outlives the region that costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from torch_remat._compat import kernel_of, sequence_number
from torch_remat.dispatch.calls import (
    Meta,
    NativeCall,
    Raised,
    changed_arguments,
    described,
    is_kept_out,
    key_of,
    tensors_in,
)
from torch_remat.dispatch.holder import OpHolder
from torch_remat.dispatch.native import Native, Returned
from torch_remat.dispatch.placeholder import geometry_of
from torch_remat.dispatch.record import NativeRecord, Record, Written
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.schema import LIFT, Effects, effects_of

if TYPE_CHECKING:
    from torch_remat.dispatch.ambient import RngState
    from torch_remat.dispatch.forward_ops import ForwardOps


class NativeForward(Native):
    """One native region with policy SAVE, while forward runs.

    Args:
        ops: The ops of the region around it.
        record: Its record.
    """

    _versions: Mapping[int, int] = MappingProxyType({})  # of what it changes outside, before that

    def __init__(self, ops: ForwardOps, record: NativeRecord) -> None:
        super().__init__(ops)
        self.record: NativeRecord = record
        self._calls = record.calls
        # The storages made inside, and which result each is, of an aten op or of an op with a handle.
        self._born: dict[int, tuple[NativeCall | str, int]] = {}
        self._counts: dict[str, int] = {}
        # By their storages, each with its place: see `Written`. Of what is changed in parts, all parts are listed.
        self._written: dict[int, list[tuple[torch.Tensor, tuple[int, int]]]] = {}
        self._rng: RngState | None = None
        self._changes = False  # whether anything inside changes a tensor
        self._made_by: dict[int, NativeCall] = {}  # what made a returned tensor, by the place of that

    def watch(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an op and note it."""
        effects = effects_of(op)
        if effects.ignored or (effects.cast and is_kept_out(effects, args)):
            return op(*args, **kwargs)
        if self.skipped_op is not None:
            if self.skipped_op.is_running():
                return op(*args, **kwargs)
            self.skipped_op = None
        if effects.random and self._rng is None and (rng := self._ops.region.rng) is not None:
            self._rng = rng.present()
        name = effects.name
        self._counts[name] = count = self._counts.get(name, -1) + 1
        try:
            result = (kernel_of(op) if effects.plain else op)(*args, **kwargs)
        except Exception as error:
            self._calls.append(NativeCall(op, count, Raised(type(error), error.args)))
            raise
        if self._ops.departures.waiting:
            self._ops.departures.send()
        given = () if effects.namespace == "aten" else list(tensors_in(args, kwargs))
        results = described(result, args[0] if args else None, given)
        call = NativeCall(op, count, results)
        if effects.viewed is None and not effects.written:
            born = self._born
            call.outside = [
                (at, arg.shape) for at, arg in enumerate(args) if type(arg) is Tensor and key_of(arg) not in born
            ]
        self._calls.append(call)
        if self._written and not self.reads_written:
            self.reads_written = self._reads(effects, args, kwargs)
        if effects.written or effects.reshapes or given:
            self._changes = True
            for place, tensor in enumerate(changed_arguments(call, effects, args, kwargs)):
                key = key_of(tensor)
                if key not in self._born:
                    if key not in self._written and not tensor.is_inference():
                        # The op is counted once it is over.
                        self._versions = {**self._versions, key: tensor._version}
                    self._note_written(self._written.setdefault(key, []), tensor, place)
        if effects.viewed is None:
            if type(results) is Meta:
                if not results.alias and (not effects.written or effects.returned[0] < 0):
                    self._born[key_of(result)] = call, 0
            elif isinstance(result, (tuple, list)):
                self._note_born(call, result)
            elif isinstance(result, torch.Tensor):
                self._born[key_of(result)] = call, 0
        elif op is LIFT:  # at the address of something that was born inside and is gone
            self._born.pop(key_of(result), None)
        return result

    def _note_written(self, known: list[tuple[torch.Tensor, tuple[int, int]]], tensor: torch.Tensor, at: int) -> None:
        if any(_covers(before, tensor) for before, _ in known):
            return
        known[:] = [entry for entry in known if not _covers(tensor, entry[0])]
        known.append((tensor, (len(self._calls) - 1, at)))

    def _reads(self, effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an op makes something of a tensor from outside that was changed: then the region cannot run again."""
        if effects.viewed is not None or effects.written:
            return False
        return any(key_of(tensor) in self._written for tensor in tensors_in(args, kwargs))

    def note_op(self, record: Record, outputs: Sequence[torch.Tensor]) -> None:
        """Note the outputs of an op with a handle that ran inside."""
        self.skipped_op = None
        for place, tensor in enumerate(outputs):
            if tensor._base is None:
                self._born[key_of(tensor)] = record.name, place

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was born inside, or changed."""
        key = key_of(tensor)
        return key in self._born or key in self._written

    def _note_born(self, call: NativeCall, results: Sequence[Any]) -> None:
        for place, item in enumerate(results):
            if isinstance(item, torch.Tensor) and not getattr(call.results[place], "alias", False):
                key = key_of(item)
                if key not in self._written:
                    self._born[key] = call, place

    def pack(self, tensor: torch.Tensor) -> OpHolder | None:
        """Return the holder for a tensor that is resident, None for one that replay will have."""
        if type(tensor) is Parameter:
            return None
        key = key_of(tensor)
        born = self._born.get(key)
        if born is not None:
            name = f"{born[0]}_{born[1]}" if isinstance(born[0], str) else born[0].label(born[1])
        elif key in self._written:
            name = "written"  # replay would have it as it was before
        else:
            made = self._ops.source_of(tensor)
            if made is None:
                return None
            name = f"{made[0].rpartition('/')[2]}_{made[1]}"
        return self._ops.resident(self.record.name, name, tensor, self.record.policy)

    def returns(self, result: Any) -> None:
        """Note what the function returns."""
        self.last_number = sequence_number()
        self.record.single = isinstance(result, torch.Tensor)
        leaves = [result] if self.record.single else leaves_of((result,), {})
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and (key := key_of(leaf)) in self._born and not leaf.is_inference():
                self.returned.append(Returned.of(place, key, leaf))
                if not self._changes and type(call := self._born[key][0]) is NativeCall and _is_result(leaf, call):
                    self._made_by[place] = call
        self._end()

    def keep(self, stop: int) -> None:
        """At the end of forward: keep the returned tensors that replay reads."""
        super().keep(stop)
        for place, call in self._made_by.items():
            if place in self.record.returned:
                call.returned = place

    def left_by(self, error: BaseException) -> None:
        """Note that an exception left the function."""
        self.last_number = sequence_number()
        self.record.raised = True
        self._end()

    def _end(self) -> None:
        self._born = {}
        if self._ops.departures.waiting:
            self._ops.departures.send()
        self.record.once = self.reads_written
        if self._rng is not None:
            self.record.drawn = self._rng.drawn()
            self._rng = None
        policy = self.record.policy
        for tensor, place in chain.from_iterable(self._written.values()):
            storage = StorageWeakRef(tensor.untyped_storage())
            slot = self._ops.departures.slot_for(self.record.name, "written", tensor, policy)
            self.record.written.append(Written(storage, slot, place))
        if self._versions:
            written = self._written
            self.changes = {key: written[key][0][0]._version - version for key, version in self._versions.items()}
        self._written = {}


def _covers(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor lies wherever another of the same storage does, as far as that is easily told."""
    if tensor.layout is not torch.strided or (tensor.nbytes == tensor.untyped_storage().nbytes()):
        return True
    return geometry_of(tensor) == geometry_of(other) and tensor.dtype == other.dtype


def _is_result(leaf: torch.Tensor, call: NativeCall) -> bool:
    """Whether a tensor is the one result of a call in whose storage it lies, and no part or other shape of it."""
    return type(call.results) is Meta and call.results.describes(leaf)
