"""The table of storages of a region's forward: which entry made each, and which changed it last.

In: each entry with its arguments and results. Kept, until forward ends: addresses. Out: what an entry reads and writes.

A storage is known by its address while forward runs: a new result at a known address means that the old
storage is gone, and what comes later means the new one. What no entry made comes from outside: from outside the
region, or from ops of the region that nobody watched.

NOTE [ Changes that a version counter does not show ]
Results of ``_unsafe_view`` (which ends ``x @ w`` where x has three dimensions) and of ``unsafe_split`` share a storage
with their argument, but no version counter. So the last writer of its storage, and the counters of its aliases of this
kind, show whether a saved result was changed in forward; the aliases are kept to detect later changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from torch_remat._compat import storage_key, with_shared_versions
from torch_remat.dispatch.keys import USUAL, key_of, keys_of, parts_of, tensors_in, version_of
from torch_remat.dispatch.ops.entry import LEFT, SEVERAL, VIEW, WRITTEN, Entry
from torch_remat.dispatch.ops.meta import Given, GivenView, Meta
from torch_remat.dispatch.ops.schema import LIFT
from torch_remat.dispatch.placeholder import NOT_LAZY, new_tuple
from torch_remat.dispatch.region.outside import Outside

_VALUES = frozenset((int, float, bool, complex, type(None), torch.dtype, torch.device))


def let_go(gradient: torch.Tensor) -> torch.Tensor:
    """Return an alias: autograd takes over a gradient that nobody else has, and copies one that somebody has."""
    if gradient.layout is not torch.strided:
        return gradient
    with with_shared_versions():  # code outside may change it
        return gradient.detach()


class Storages:
    """The storages of one forward.

    Attributes:
        aliases: By storage, aliases of saved results that count their versions for themselves, and these.
        has_lazy: Whether a view may be a lazy conjugate, or a lazy negative: a part of one.
        has_writes: Whether an entry has written an argument.
        writers: The entry that made or changed a storage last, and as which of its results it did; not for those from
            outside, unless an entry has written them.
    """

    def __init__(self, nested: bool, outside: Outside | None) -> None:
        self._nested = nested  # in hooks, which may be those of another region
        self._outside = outside
        self._state: set[int] | None = None  # the small buffers, once an entry has written what is from outside
        self.has_lazy = False
        self.has_writes = False
        self.writers: dict[int, tuple[Entry, int]] = {}
        self._foreign: set[int] = set()  # those from outside that an entry has written
        self.aliases: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._reused: set[int] = set()  # addresses of what entries made, where something from outside lay later
        self._sizes: dict[int, int] = {}  # how many bytes an entry made, of those that another has written since

    def writer_of(self, tensor: torch.Tensor) -> tuple[Entry, int] | None:
        """Return the entry that made or changed a tensor last, and as which of its results."""
        return self.writers.get(key_of(tensor))

    def is_changed(self, entry: Entry, tensor: torch.Tensor) -> bool:
        """Whether an entry after one that made or wrote a tensor changed it; `Tensor._version` may not tell."""
        writer = self.writers.get(key_of(tensor))
        return writer is not None and writer[0] is not entry and writer[1] == WRITTEN

    def aliases_of(self, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, int]]:
        """Return the aliases of a saved result that count their versions for themselves, and these."""
        return self.aliases.get(key_of(tensor), ()) if self.aliases else ()

    def is_changed_by_alias(self, tensor: torch.Tensor) -> bool:
        """Whether an op that is no entry changed one of these."""
        return any(version_of(alias) != version for alias, version in self.aliases_of(tensor))

    def count_anew(self, entry: Entry) -> None:
        """Read the counters of the aliases of what an entry wrote, once it is over."""
        for key in entry.writes if self.aliases else ():
            if key in self.aliases:
                self.aliases[key] = [(alias, version_of(alias)) for alias, _ in self.aliases[key]]

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Whether an entry has written a tensor created outside the region."""
        key = key_of(tensor)
        return key in self._foreign or (self.has_writes and key in self.writers and self.is_state(key))

    def let_go_of_graph(self) -> None:
        """Hold aliases without their `grad_fn`."""
        for aliases in self.aliases.values():
            aliases[:] = [(alias.detach(), version) for alias, version in aliases]

    def is_state(self, key: int) -> bool:
        """Whether a storage is that of a small buffer, which entries write again: replay starts from what it was."""
        if self._state is None:
            self._state = set() if self._outside is None else self._outside.state_of_ops()
        return key in self._state

    def note_foreign(self, tensor: torch.Tensor) -> None:
        """Note a new tensor that is no entry's result; it may lie where one lay that is gone."""
        for key in keys_of(tensor):
            self._foreign.discard(key)
            if self.writers.pop(key, None) is not None:
                self._reused.add(key)

    def read_as(self, key: int) -> int:
        """Return a storage as it is read: not as that of an entry whose address it has."""
        return -key if key in self._reused and key not in self.writers else key

    def is_foreign(self, key: int) -> bool:
        """Whether a storage comes from outside, though an entry may have written it."""
        return key not in self.writers or key in self._foreign

    def note(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note what an entry reads, writes and makes."""
        entry.reads = reads = [self.read_as(key) for tensor in tensors_in(args, kwargs) for key in keys_of(tensor)]
        effects = entry.effects
        if effects.reshapes and self.is_foreign(key_of(args[0])):
            entry.version = version_of(args[0])
        if effects.view and type(args[0]) in USUAL and args[0].layout is torch.strided:
            entry.kind = VIEW
            self.has_lazy = self.has_lazy or any(tensor.is_complex() for tensor in tensors_in((*args, result), {}))
            if entry.op is LIFT:  # at the address of something that an entry made and that is gone
                self.writers.pop(reads[0], None)
                entry.made, entry.reads = ((0, reads[0]),), ()
        if (effects.viewed is not None and reads) or effects.reshapes:
            return
        if effects.written or effects.foreign:
            self._note_writes(entry, args, kwargs)
        several = isinstance(result, (tuple, list))
        returned = effects.returned if not several or len(effects.returned) == len(result) else ()
        made: list[tuple[int, int]] = []
        for place, item in enumerate(result if several else (result,)):
            if not isinstance(item, torch.Tensor):
                continue
            meta = entry.meta(place)
            if getattr(meta, "alias", False):
                self._note_alias(item)
            elif type(meta) not in (Given, GivenView) and not (returned and returned[place] >= 0) and not (
                several and len(effects.returned) == 1 and effects.returned[0] >= 0
            ):  # fmt: skip
                made += [(place, key) for key in self._new(entry, place, item)]
        entry.made = made

    def note_ordinary(self, entry: Entry, args: Sequence[Any], result: Any, is_listed: bool = False) -> bool:
        """Do the same for an op that makes new tensors and no more; return False if it is not that simple."""
        reads: list[int] = []
        try:
            for arg in args:
                kind = type(arg)
                if kind is Tensor or kind is Parameter:
                    reads.append(storage_key(arg))
                elif kind is list:
                    if not _VALUES.issuperset(map(type, arg)):
                        return self.note_ordinary(entry, without_lists(args), result, is_listed=True)
                elif kind not in _VALUES and isinstance(arg, Tensor):
                    return False
            if self._reused:
                reads = [self.read_as(key) for key in reads]
            if type(result) is not Tensor:
                return self._note_several(entry, reads, result)
            key = storage_key(result)
        except RuntimeError:  # sparse tensors have no storage
            return False
        dtype = result.dtype
        is_view = key in reads  # though the schema does not say so
        if dtype.is_complex or (is_view and (key != reads[0] or is_listed or not isinstance(args[0], Tensor))):
            return False
        geometry = result.shape, result.stride(), result.storage_offset()
        entry.results = new_tuple(Meta, (geometry, dtype, result.device, is_view, NOT_LAZY))
        entry.reads = reads
        if is_view:
            entry.kind = VIEW
            self._note_alias(result)
            return True
        if self._foreign:
            self._foreign.discard(key)
        self.writers[key] = entry, 0
        entry.storage = key
        return True

    def note_view(self, entry: Entry, base: Any, result: Any) -> bool:
        """Do the same for an op that returns views of its first argument and does no more."""
        if type(result) is not Tensor or type(base) not in USUAL or base.layout is not torch.strided:
            return False
        if (dtype := result.dtype).is_complex or self.has_lazy:
            return False
        geometry = result.shape, result.stride(), result.storage_offset()
        entry.results = new_tuple(Meta, (geometry, dtype, result.device, False, NOT_LAZY))
        entry.reads = (storage_key(base),)
        return True

    def _note_several(self, entry: Entry, reads: list[int], results: Any) -> bool:
        if type(results) is not tuple:
            return False
        keys, metas = [], []
        for item in results:
            if type(item) is not Tensor or (dtype := item.dtype).is_complex:
                return False
            keys.append(storage_key(item))
            geometry = item.shape, item.stride(), item.storage_offset()
            metas.append(new_tuple(Meta, (geometry, dtype, item.device, False, NOT_LAZY)))
        if len({*keys, *reads}) < len(keys) + len({*reads}):
            return False
        entry.kind, entry.results, entry.reads = SEVERAL, metas, reads
        if self._foreign:
            self._foreign.difference_update(keys)
        entry.made = made = [*enumerate(keys)]
        for place, key in made:
            self.writers[key] = entry, place
        return True

    def note_one(self, entry: Entry, key: int) -> None:
        """Note a call whose one result is an ordinary tensor in a new storage."""
        if self._foreign:
            self._foreign.discard(key)
        self.writers[key] = entry, 0

    def note_results(self, entry: Entry, made: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, int]]:
        """Note the tensors that an entry made, by their place in its result; return the places with their storages."""
        return [(place, key) for place, tensor in made for key in self._new(entry, place, tensor)]

    def _note_alias(self, tensor: torch.Tensor) -> None:
        key = key_of(tensor)
        writer = self.writers.get(key)
        if writer is not None and writer[1] in writer[0].saved:  # else the alias would keep it alive
            alias = tensor if torch.is_grad_enabled() else let_go(tensor)
            self.aliases.setdefault(key, []).append((alias, version_of(alias)))

    def _new(self, entry: Entry, place: int, tensor: torch.Tensor) -> Sequence[int]:
        keys = keys_of(tensor)
        for key in keys:
            self._foreign.discard(key)
            self.writers[key] = entry, place
        return keys

    def _note_writes(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        changed = entry.changed_arguments(args, kwargs)
        self.has_writes = True
        writes: list[int] = []
        outside = []
        saved = away = bool(changed)
        for tensor in changed:
            for part in parts_of(tensor):
                key = key_of(part)
                writes.append(key)
                if self.is_foreign(key) and not self.is_state(key):
                    self._foreign.add(key)
                    if part.layout is torch.strided:
                        outside.append(StorageWeakRef(part.untyped_storage()))
                before = self.writers.get(key)
                saved = saved and before is not None and before[1] in before[0].saved
                away = away and before is not None and before[1] in before[0].away
                if not self._is_whole(part, key, before):
                    entry.whole = False
                self.writers[key] = entry, WRITTEN
        entry.writes = writes
        entry.outside = outside
        if saved and entry.whole and not outside:  # what is left of a saved result is saved in its place
            entry.saved = LEFT
            entry.away = LEFT if away else entry.away

    def _is_whole(self, tensor: torch.Tensor, key: int, before: tuple[Entry, int] | None) -> bool:
        """Whether a written tensor is all that there is in its storage."""
        if tensor.layout is not torch.strided:
            return False
        if before is not None and before[1] != WRITTEN:
            meta = before[0].meta(before[1])
            self._sizes[key] = meta.geometry[0].numel() * meta.dtype.itemsize if type(meta) is Meta else -1
        if (size := self._sizes.get(key)) is not None and before is not None:
            return tensor.numel() * tensor.dtype.itemsize == size
        # In the replay of an enclosing region placeholders would not tell.
        return not self._nested and tensor.nbytes == tensor.untyped_storage().nbytes()


def without_lists(args: Sequence[Any]) -> list[Any]:
    """Return an op's positional arguments with what is in lists among them in place of the lists."""
    return [item for arg in args for item in (arg if type(arg) is list else (arg,))]
