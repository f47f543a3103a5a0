"""What one region holds, counted in the ledgers of its budgets.

In: its inputs, each saved tensor as forward makes it, what its author saves. Kept: weak references to its holders, and
the addresses of what is counted for them. Out: bytes that are added to the ledgers, and taken off them.
"""

from __future__ import annotations

from _thread import RLock
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from weakref import ref

from torch import Tensor

from torch_remat._compat import storage_key
from torch_remat._kept import kept_by
from torch_remat._storages import Keys, Ledger, each, parts_of
from torch_remat.dispatch.holder import Holder
from torch_remat.dispatch.region.region import Region

# One for all budgets: regions of one may count towards others. Forward takes it for each saved tensor; nothing else is
# waited for inside.
lock = RLock()

_OWN = ("saved", "slot", "result")
"""What a region keeps for its author."""
_EXISTS: Keys = ()
"""In place of addresses: the tensor is a buffer of a module, which exists anyway."""
_NONE: set[int] = set()


class Counted:
    """The bytes of one region.

    Args:
        region: The region, whose forward begins.
        ledgers: Those of the budgets that it is in.
        fills: Whether a budget fills its holders; if not, all that it keeps is its author's.

    Attributes:
        refs: Weak references to the holders that came to the budget, in the order of forward.
        keys: For each the addresses that are counted; 0 where none is.
        fixed: The addresses of inputs, and of what the author saves.
        fixed_bytes: Bytes of these that were new to the first ledger.
        input_bytes: Bytes of the inputs, also if others hold them.
    """

    __slots__ = (
        "_buffers", "_inputs", "_ledgers", "_only", "fills", "fixed", "fixed_bytes", "input_bytes", "keys", "refs",
    )  # fmt: skip

    def __init__(self, region: Region, ledgers: Sequence[Ledger], fills: bool) -> None:
        self._ledgers = ledgers
        self._only = ledgers[0] if len(ledgers) == 1 else None
        self._buffers = _NONE if region.outside is None else region.outside.buffers()
        self.fills = fills
        self.refs: list[ref[Holder]] = []
        self.keys: list[Keys] = []
        self.fixed: list[int] = []
        self.fixed_bytes = 0
        assert region.inputs is not None
        self._fix(region.inputs.held())
        self._inputs = len(self.fixed)
        self.input_bytes = sum([ledgers[0].sizes[key] for key in set(self.fixed)]) if ledgers else 0

    def add(self, holder: Holder, entry: ref[Holder], value: Tensor) -> int:
        """Count the value of a holder; return the bytes that are new to the first ledger."""
        self.refs.append(entry)
        is_made = holder.producer is not NoneType
        if self._only is not None and type(value) is Tensor:  # for speed: what `_count` does
            try:
                key = storage_key(value)
            except (NotImplementedError, RuntimeError):  # sparse, or inside of a transform of functions
                pass
            else:
                if is_made or key not in self._buffers:
                    self.keys.append(key)
                    return self._only.add(key, value)
        if not is_made and not self._buffers.isdisjoint(map(storage_key, parts_of(value))):
            self.keys.append(_EXISTS)
            return 0
        keys, size = self._count(value)
        self.keys.append(keys)
        return size

    def add_empty(self, entry: ref[Holder]) -> None:
        """Note a holder that stays empty."""
        self.refs.append(entry)
        self.keys.append(0)

    def remove(self, place: int) -> int:
        """Take off what is counted for a holder; return the bytes that the first ledger counts no more."""
        keys, self.keys[place] = self.keys[place], 0
        return self._uncount(each(keys))

    def end(self, region: Region) -> None:
        """Forward is over: count what the region keeps for its author."""
        self._fix(self._own(region))

    def refresh(self, region: Region | None) -> None:
        """Compare what is counted with what is there: nodes die, replays fill, backwards release."""
        for place, entry in enumerate(self.refs):
            holder, keys = entry(), self.keys[place]
            value = None if holder is None else holder.value
            if value is None:
                self.remove(place)
            elif keys != _EXISTS and (not keys or (type(keys) is int and storage_key(value) != keys)):
                self.remove(place)
                self.keys[place] = self._count(value)[0]
        if region is None or region.inputs is None:
            self._unfix(0, self._inputs)
            self._inputs = 0
        own = [] if region is None or not region.finished else list(self._own(region))
        if [key for tensor in own for key in map(storage_key, parts_of(tensor))] != self.fixed[self._inputs :]:
            self._unfix(self._inputs, len(self.fixed))
            for tensor in own:
                self.fixed += each(self._count(tensor)[0])

    def filled(self, region: Region) -> tuple[int, int]:
        """Return how many saved tensors a replay has filled, and the bytes of what nothing else of the region keeps."""
        holders = [holder for entry in region.tape.saved if type(entry) is ref and (holder := entry()) is not None]
        values = [holder.value for holder in holders if isinstance(holder.value, Tensor)]
        found = Ledger(self._ledgers[0].device_type)
        for part in [part for value in values for part in parts_of(value)]:
            if (key := storage_key(part)) not in self.fixed and key not in self._buffers:
                found.add(key, part)
        return len(values), found.total

    def forget(self) -> None:
        """Take off everything: the region is gone."""
        for ledger in self._ledgers:
            ledger.remove_all(self.keys)
            ledger.remove_all(self.fixed)
        self.keys.clear()
        self.fixed.clear()

    def _own(self, region: Region) -> Iterator[Tensor]:
        """Yield what a region keeps for its author, and what a replay has filled of that."""
        tape = region.tape
        if tape.records or tape.calls or tape.functions or (not self.fills and region.replayed_in >= 0):
            for row in kept_by(region):
                own = row.what in _OWN or (row.what == "refilled" and (not self.fills or row.op))
                if own and isinstance(row.value, Tensor):
                    yield row.value

    def _fix(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            keys, size = self._count(tensor)
            self.fixed += each(keys)
            self.fixed_bytes += size

    def _unfix(self, first: int, end: int) -> None:
        self._uncount(self.fixed[first:end])
        del self.fixed[first:end]

    def _count(self, tensor: Tensor) -> tuple[Keys, int]:
        """Count a tensor's storages; return their addresses, and the bytes that are new to the first ledger."""
        parts = parts_of(tensor)
        keys, size = tuple(map(storage_key, parts)), 0
        for ledger in reversed(self._ledgers):
            size = sum(map(ledger.add, keys, parts))
        return keys[0] if len(keys) == 1 and parts[0] is tensor else keys or 0, size

    def _uncount(self, keys: Sequence[int]) -> int:
        freed = 0
        for ledger in reversed(self._ledgers):
            freed = sum(map(ledger.remove, keys))
        return freed
