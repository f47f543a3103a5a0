"""Bytes by storage: who was counted first, and under which name.

In: pieces with their names. Kept, while a report is made: the storages and copies behind them. Out: rows, in which the
bytes of each stand once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_remat.reports.model import KeptTensor, Kind, ParameterReport
from torch_remat.reports.pieces import Piece, storages_of

PARAMETER, BUFFER = "parameter", "buffer"
"""What exists anyway."""


@dataclass
class Row:
    """A kept tensor, before aliases and sharing are known to the end."""

    name: str
    label: str
    kind: Kind
    tensor_shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int = 0
    needed_by: list[str] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    shared_with: str | None = None
    offloaded: bool = False
    policy: str = ""

    def finished(self) -> KeptTensor:
        """Return the row as plain data."""
        return KeptTensor(
            self.name,
            self.label,
            self.kind,
            self.bytes,
            self.tensor_shape,
            self.dtype,
            self.device,
            tuple(dict.fromkeys(self.needed_by)),
            tuple(dict.fromkeys(self.aliases)),
            self.shared_with,
            self.offloaded,
            self.policy,
        )


class Ledger:
    """Counts each storage once, and each stored copy of what is away.

    Args:
        momentary: Whether what is offloaded and at this moment in place as well, on its way or for a backward, counts.
    """

    def __init__(self, momentary: bool = True) -> None:
        self.momentary = momentary
        self._owners: dict[Hashable, Row | str] = {}  # PARAMETER or BUFFER for what exists anyway
        self._alive: list[Any] = []  # no address may be used again meanwhile
        self._shown: dict[tuple[int, Hashable], Row] = {}  # by the rows of an op or region, what stands for a storage
        self._existing: dict[str, dict[int, torch.Tensor]] = {PARAMETER: {}, BUFFER: {}}
        self._existing_bytes = {PARAMETER: 0, BUFFER: 0}

    def add_parameter(self, parameter: torch.Tensor, kind: str = PARAMETER) -> None:
        """Count a parameter, or a buffer; what shares its storage counts as that from now on."""
        if id(parameter) in self._existing[kind]:
            return
        self._existing[kind][id(parameter)] = parameter
        for storage in storages_of(parameter):
            if storage._cdata not in self._owners:
                self._owners[storage._cdata] = kind
                self._alive.append(storage)
                self._existing_bytes[kind] += storage.nbytes()

    def add_module(self, module: torch.nn.Module) -> None:
        """Count the parameters and buffers of a module."""
        for parameter in module.parameters():
            self.add_parameter(parameter)
        for buffer in module.buffers():
            self.add_parameter(buffer, BUFFER)

    def existing(self, kind: str) -> ParameterReport:
        """Return what was counted of the parameters or buffers."""
        return ParameterReport(len(self._existing[kind]), self._existing_bytes[kind])

    def add(
        self,
        piece: Piece,
        name: str,
        label: str,
        kind: Kind,
        rows: list[Row],
        needed_by: Iterable[str] = (),
        policy: str = "",
    ) -> None:
        """Count a tensor, and append its row to ``rows``, unless it shares the memory of one that is there.

        Args:
            piece: What is kept.
            name: Its full name.
            label: Its name within the op or region.
            kind: Why it is kept.
            rows: The rows of the same op or region.
            needed_by: What needs it.
            policy: The policy of what it belongs to.
        """
        dtype = str(piece.dtype).removeprefix("torch.")
        row = Row(name, label, piece.besides or kind, piece.shape, dtype, piece.place)
        row.needed_by += needed_by
        row.offloaded = piece.offloaded
        row.policy = policy
        met: list[Hashable] = []
        for key, memory, count in piece.memory:
            if key in self._owners:
                met.append(key)
            else:
                self._shown[id(rows), key] = row
                self._owners[key] = row
                self._alive.append(memory)
                row.bytes += count
        if met and not row.bytes:
            shown = self._shown.get((id(rows), met[0]))
            if shown is not None and any(shown is one for one in rows):
                shown.needed_by += row.needed_by
                if label != shown.label:
                    shown.aliases.append(label)
                return
            self._shown[id(rows), met[0]] = row
            owner = self._owners[met[0]]
            row.shared_with = owner if isinstance(owner, str) else owner.name
        rows.append(row)
