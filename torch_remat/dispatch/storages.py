"""The storages of a region with a policy: who made each, and who changed it last.

In: each call with its arguments and results. Kept, until forward ends: addresses. Out: what a call reads and writes.

A storage is known by its address while forward runs: a new result that lies at a known address means that the old
storage is gone, and what comes later means the new one. What was made by no op that was seen comes from outside.

NOTE [ Changes that a version counter does not show ]
Results of ``_unsafe_view`` (which ends ``x @ w`` where x has three dimensions) and of ``unsafe_split`` share a storage
with their argument, but no version counter. So whether a saved result was changed in forward is told by its storage's
last writer, and for later its aliases of this kind are kept, with the counters of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from torch_remat._compat import storage_key
from torch_remat.dispatch.calls import (
    NOT_LAZY,
    Given,
    Meta,
    changed_arguments,
    described,
    key_of,
    tensors_in,
)
from torch_remat.dispatch.placeholder import Geometry, new_tuple
from torch_remat.dispatch.policy_call import ONE, SEVERAL, VIEW, WRITTEN, PolicyCall
from torch_remat.dispatch.schema import LIFT

_VALUES = frozenset((int, float, bool, complex, type(None), list, torch.dtype, torch.device))


class Storages:
    """The storages of one forward.

    Args:
        nested: Whether there are saved-tensor hooks around the region, which may be those of another region.

    Attributes:
        has_writes: Whether a call has written an argument.
        writers: The call that made or changed a storage last, and as which of its results it did; not for those from
            outside, unless a call has written them.
    """

    __slots__ = ("_aliases", "_foreign", "_nested", "has_writes", "writers")

    def __init__(self, nested: bool) -> None:
        self._nested = nested
        self.has_writes = False
        self.writers: dict[int, tuple[PolicyCall, int]] = {}
        self._foreign: set[int] = set()  # those from outside that a call has written
        self._aliases: dict[int, list[torch.Tensor]] = {}

    def is_changed(self, call: PolicyCall, tensor: torch.Tensor) -> bool:
        """Whether a call after one that made or wrote a tensor changed it; `Tensor._version` may not tell."""
        if not self.has_writes:
            return False
        writer = self.writers.get(key_of(tensor))
        return writer is not None and writer[0] is not call and writer[1] == WRITTEN

    def aliases_of(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the aliases of a saved result that count their versions for themselves."""
        return self._aliases.get(key_of(tensor), ()) if self._aliases else ()

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Whether a call has written a tensor from outside."""
        return key_of(tensor) in self._foreign

    def let_go_of_graph(self) -> None:
        """Hold aliases without their history."""
        for aliases in self._aliases.values():
            aliases[:] = [alias.detach() for alias in aliases]

    def is_foreign(self, key: int) -> bool:
        """Whether a storage comes from outside."""
        return key not in self.writers or key in self._foreign

    def note(self, call: PolicyCall, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what a call reads, writes and makes."""
        reads = []
        versions = []
        for at, tensor in enumerate(tensors_in(args, kwargs)):
            key = key_of(tensor)
            reads.append(key)
            if self.is_foreign(key) and not tensor.is_inference():
                versions.append((at, tensor._version))
            if type(tensor) is not Tensor and type(tensor) is not Parameter:
                reads += map(key_of, parts_of(tensor))
        call.reads = reads
        call.versions = versions
        effects = call.effects
        if effects.viewed is not None or effects.reshapes:
            return
        if effects.written or effects.namespace != "aten":
            self._note_writes(call, args, kwargs)
        if isinstance(result, torch.Tensor):
            if getattr(call.results, "alias", False):
                self._note_alias(result)
            elif not (effects.returned and effects.returned[0] >= 0):
                call.made = ((0, self._new(call, 0, result)),)
        elif isinstance(result, (tuple, list)):
            for item, meta in zip(result, call.results, strict=True):
                if getattr(meta, "alias", False):
                    self._note_alias(item)
            returned = effects.returned if len(effects.returned) == len(result) else ()
            call.made = [
                (place, self._new(call, place, item))
                for place, (item, meta) in enumerate(zip(result, call.results, strict=True))
                if isinstance(item, torch.Tensor)
                and type(meta) is not Given
                and not getattr(meta, "alias", False)
                and not (returned and returned[place] >= 0)
                and not (len(effects.returned) == 1 and effects.returned[0] >= 0)
            ]

    def note_plain(self, call: PolicyCall, args: Sequence[Any], result: Any) -> bool:
        """Do the same for a call of a plain op, and describe its results; return False if it is not that simple."""
        writers, foreign = self.writers, self._foreign
        reads: list[int] = []
        versions: tuple[tuple[int, int], ...] = ()
        try:
            for arg in args:
                kind = type(arg)
                if kind is Tensor or kind is Parameter:
                    key = storage_key(arg)
                    if key not in writers or key in foreign:
                        versions += ((len(reads), arg._version),)
                    reads.append(key)
                elif kind not in _VALUES and isinstance(arg, Tensor):
                    return False
            if type(result) is not Tensor:
                return self._note_several(call, reads, versions, result)
            key = storage_key(result)
        except RuntimeError:  # sparse tensors have no storage, and inference tensors no version
            return False
        dtype = result.dtype
        if key in reads or dtype.is_complex:  # a view though the schema does not say so
            return False
        call.kind = ONE
        geometry = new_tuple(Geometry, (result.shape, result.stride(), result.storage_offset()))
        call.results = new_tuple(Meta, (geometry, dtype, result.device, False, NOT_LAZY))
        call.reads = reads
        if versions:
            call.versions = versions
        if foreign:
            foreign.discard(key)
        writers[key] = call, 0
        call.storage = key
        return True

    def _note_several(
        self, call: PolicyCall, reads: list[int], versions: tuple[tuple[int, int], ...], results: Any
    ) -> bool:
        if type(results) is not tuple or any(type(item) is not Tensor or item.dtype.is_complex for item in results):
            return False
        keys = [storage_key(item) for item in results]
        if len({*keys, *reads}) < len(keys) + len({*reads}):
            return False
        call.kind = SEVERAL
        call.results = described(results, None)
        call.reads = reads
        call.versions = versions
        self._foreign.difference_update(keys)
        for place, key in enumerate(keys):
            self.writers[key] = call, place
        call.made = list(enumerate(keys))
        return True

    def note_view(self, call: PolicyCall, args: Sequence[Any], result: Any) -> bool:
        """Do the same for a call of a view op."""
        base = args[0]
        kind = type(base)
        if (kind is not Tensor and kind is not Parameter) or base.layout is not torch.strided:
            return False
        key = storage_key(base)
        call.kind = VIEW
        call.results = described(result, None)
        call.reads = (key,)
        if call.op is LIFT:  # at the address of something that a call made and that is gone
            self.writers.pop(key, None)
            call.made = ((0, key),)
        if self.is_foreign(key) and not base.is_inference():
            call.versions = ((0, base._version),)
        return True

    def _note_alias(self, tensor: torch.Tensor) -> None:
        key = key_of(tensor)
        writer = self.writers.get(key)
        if writer is not None and writer[1] in writer[0].saved:  # else the alias would keep it alive
            self._aliases.setdefault(key, []).append(tensor)

    def note_made(self, call: PolicyCall, results: Sequence[torch.Tensor]) -> None:
        """Note what an op made that is no aten op."""
        call.made = [
            (place, self._new(call, place, tensor)) for place, tensor in enumerate(results) if tensor._base is None
        ]

    def _new(self, call: PolicyCall, place: int, tensor: torch.Tensor) -> int:
        key = key_of(tensor)
        self._foreign.discard(key)
        self.writers[key] = call, place
        return key

    def _note_writes(self, call: PolicyCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        written = changed_arguments(call, call.effects, args, kwargs)
        self.has_writes = True
        call.writes = [key_of(tensor) for tensor in written]
        outside = []
        for tensor, key in zip(written, call.writes, strict=True):
            if self.is_foreign(key):
                self._foreign.add(key)
                if tensor.layout is torch.strided:
                    outside.append(StorageWeakRef(tensor.untyped_storage()))
            self.writers[key] = call, WRITTEN
            # In the replay of a region around this one placeholders would not tell.
            if self._nested or tensor.layout is not torch.strided or tensor.nbytes != tensor.untyped_storage().nbytes():
                call.whole = False
        call.outside = outside


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what a wrapper has inside, which an op on the wrapper reads; no op tells that it was wrapped."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            yield part
            yield from parts_of(part)
