"""What regions keep, counted: the bytes of each storage once, under the name that it was met with first.

In: what regions and autograd keep, with names, in whatever state they are. Kept, while a report is made: the storages
behind it, and what stands for those that are away, so that no address is used again. Out: rows, in which the bytes of
each storage stand once. Nothing is unpacked, so nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_remat._kept import Around, Kept, Kind, decisions_of, kept_by, parameters_of
from torch_remat._storages import Ledger, Memory, Piece, memory_of, pieces_in
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.reports.data import KeptTensor, OpReport, ParameterReport, RegionReport

PARAMETER, BUFFER = "parameter", "buffer"
"""Kinds of tensors that exist anyway."""


def row_of(piece: Piece, name: str, label: str, kind: Kind, needed_by: str, policy: str = "") -> KeptTensor:
    """Return the row for a kept tensor, before its bytes are counted."""
    look = (piece.shape, str(piece.dtype).removeprefix("torch."), piece.place)
    told = (piece.besides or kind, 0, *look, (needed_by,), (), None, piece.offloaded, policy)
    return KeptTensor(name, label, *told)


class Rows(list[KeptTensor]):
    """What is kept of one op, region or node, and which row stands for each memory."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[Hashable, int] = {}


class Counted:
    """Counts each storage once, and each offloaded tensor once, under the name that it was met with first."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._owners: dict[Hashable, str] = {}  # names; PARAMETER or BUFFER for what exists anyway
        self._alive: list[Any] = []  # no address may be used again meanwhile
        self._existing: dict[str, dict[int, torch.Tensor]] = {PARAMETER: {}, BUFFER: {}}
        self._existing_bytes = {PARAMETER: 0, BUFFER: 0}

    def add_existing(self, tensors: Iterable[torch.Tensor], kind: str = PARAMETER) -> None:
        """Count parameters, or buffers; what shares their storages counts as that from now on."""
        for tensor in tensors:
            self._existing[kind][id(tensor)] = tensor
            self._existing_bytes[kind] += sum(self._hold(memory, kind) for memory in memory_of(tensor))

    def existing(self, kind: str) -> ParameterReport:
        """Return how many parameters, or buffers, were counted, and their bytes."""
        return ParameterReport(len(self._existing[kind]), self._existing_bytes[kind])

    def _hold(self, memory: Memory, owner: str) -> int:
        """Count a memory for an owner; return its bytes if no other has it already."""
        self._owners.setdefault(memory.key, owner)
        self._alive.append(memory.owner)
        return self._ledger.hold(memory.key, memory.bytes)

    def add(self, tensor: KeptTensor, memory: Sequence[Memory], rows: Rows) -> None:
        """Count a tensor, and append it to ``rows``, unless it shares the memory of one that is there."""
        keys = [one.key for one in memory if one.key not in self._owners]
        shared = next((one.key for one in memory if one.key in self._owners), None)
        size = sum(self._hold(one, tensor.name) for one in memory)
        if shared is not None and not size:
            place = rows.places.get(shared)
            if place is not None:
                shown = rows[place]
                labels = dict.fromkeys((shown.label, *shown.aliases, tensor.label))
                needed_by = dict.fromkeys((*shown.needed_by, *tensor.needed_by))
                rows[place] = replace(shown, needed_by=tuple(needed_by), aliases=tuple(labels)[1:])
                return
            tensor = replace(tensor, shared_with=self._owners[shared])
            keys.append(shared)
        rows.places.update(dict.fromkeys(keys, len(rows)))
        rows.append(replace(tensor, bytes=size))


def report_of(
    region: Region,
    counted: Counted | None = None,
    *,
    momentary: bool = False,
    keep_empty: bool = False,
) -> RegionReport:
    """Return what a region keeps by itself, or beside what is counted already, its parameters among it.

    With ``momentary``, what is offloaded counts in place, too, while it has not left or has come back; with
    ``keep_empty``, ops that keep nothing are in it.
    """
    if counted is None:
        counted = Counted()
        counted.add_existing(parameters_of(region))
    decisions = decisions_of(region)
    own = Rows()
    by_op = {name: Rows() for name in decisions}
    for one in kept_by(region):
        if one.what == "empty" or isinstance(one.value, Around):
            continue
        kind: Kind = "kept for replay" if one.what == "slot" or one.what == "result" else one.what
        rows = by_op.setdefault(one.op, Rows()) if one.op else own
        name = qualified_name(region.name, one.op, one.tensor)
        policy = one.decision.value if one.decision else ""
        for piece in pieces_in(one.value, one.made_on):
            if piece.besides is None or momentary:
                tensor = row_of(piece, name, one.tensor, kind, what_needs(one), policy)
                counted.add(tensor, piece.memory, rows)
    ops = []
    for name, rows in by_op.items():
        if rows or keep_empty:
            policy = decisions[name].value if name in decisions else rows[0].policy
            ops.append(OpReport(name, policy, tuple(rows)))
    return RegionReport(region.name, tuple(own), tuple(ops))


def what_needs(one: Kept) -> str:
    """Return in words what needs what a row stands for."""
    if one.why != "backward":
        return "replay"
    return f"backward of {one.by}" if one.by else "backward"
