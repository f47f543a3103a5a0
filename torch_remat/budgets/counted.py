"""What one region holds, counted in the ledgers of its budgets.

In: a region whose forward has ended, and what becomes of it. Kept: the addresses of what is counted for it. Out: bytes
that are added to the ledgers, and taken off them.
"""

from __future__ import annotations

from _thread import RLock
from collections.abc import Iterable, Sequence
from weakref import ref

from torch import Tensor, strided

from torch_remat._compat import storage_key
from torch_remat._util.storages import Ledger, parts_of
from torch_remat.dispatch.holder import Holder, ResidentRef
from torch_remat.dispatch.region.region import Region

# One for all budgets: regions of one may count towards others. Nothing else is waited for inside.
lock = RLock()


class Counted:
    """The bytes of one region.

    Args:
        region: The region.
        ledgers: Those of the budgets that it is in.

    Attributes:
        bytes: The bytes of what it keeps that were new to the first ledger when it was counted.
    """

    __slots__ = ("_buffers", "_keys", "_ledgers", "bytes")

    def __init__(self, region: Region, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = ledgers
        self._buffers = frozenset[int]() if region.outside is None else frozenset(region.outside.buffers())
        self._keys: list[int] = []
        self.bytes = 0

    def count(self, region: Region | None) -> None:
        """Count what the region keeps now, in place of what was counted before."""
        parts = {} if region is None else held_by(region)
        self.forget()
        self._keys = [key for key in parts if key not in self._buffers]
        for ledger in reversed(self._ledgers):
            self.bytes = 0
            for key in self._keys:
                self.bytes += ledger.add(key, parts[key])

    def forget(self) -> None:
        """Take off everything: the region is gone."""
        for ledger in self._ledgers:
            for key in self._keys:
                ledger.remove(key)
        self._keys = []


def held_by(region: Region) -> dict[int, Tensor]:
    """Return the ordinary tensors behind all that a region holds, by storage.

    These are inputs, what it keeps, and what a replay has filled.
    """
    found: dict[int, Tensor] = {}
    for value in _values_of(region):
        if type(value) is Tensor and value.layout is strided:
            found[storage_key(value)] = value
        elif isinstance(value, Tensor):
            found.update({storage_key(part): part for part in parts_of(value)})
    return found


def _values_of(region: Region) -> list[object]:
    values: list[object] = [] if region.inputs is None else [*region.inputs.held()]
    tape = region.tape
    if not region.finished or not (tape.records or tape.calls or tape.functions or region.replayed_in >= 0):
        return values  # it keeps nothing
    for entry in tape.saved:
        if type(entry) is ref or type(entry) is ResidentRef:
            holder: Holder | None = entry()
            if holder is not None and holder.value is not None:
                values.append(holder.value)
    entries: Iterable[object] = (*tape.calls, *tape.functions.values())
    for one in entries:
        if kept := one.kept:  # type: ignore[attr-defined]
            values += [slot.kept for slot in kept.values()]
    for call in tape.records.values():
        if call.inputs:
            values += [slot.kept for slot in call.inputs.values()]
    return values


class PlainBytes:
    """The bytes that a region without holders is counted with.

    Args:
        ledger: That of a budget that it is in.
        size: How many.
    """

    __slots__ = ("_ledger", "_size")

    def __init__(self, ledger: Ledger, size: int) -> None:
        self._ledger, self._size = ledger, size
        ledger.total += size

    def forget(self) -> None:
        """Take them off, once."""
        self._ledger.total -= self._size
        self._size = 0
