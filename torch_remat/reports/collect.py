"""One region's tape, read into a report.

In: a region, in whatever state it is. Kept: nothing. Out: its rows. Nothing is unpacked, so nothing is replayed.

NOTE [ Names of what is kept ]
1. An op's saved tensors have the names that the op gave them. An output that replay needs as an input stands with
   the op that made it, as ``out``, or ``0``, ``1``, ... if there are several.
2. A region's inputs are named by their place in the call: ``args[0]``, ``kwargs['mask']``.
3. What a replay has made for a tensor without a name is ``saved tensor 3``, by its place in forward. Error messages use
   the same names; they do not depend on when the report is made.
4. What a policy for ops keeps has its automatic name, also while forward runs and nothing is decided yet.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.earlier import earlier_label
from torch_remat.dispatch.forward_ops import ForwardOps
from torch_remat.dispatch.holder import OpHolder, is_parameter
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.policy_call import PolicyCall
from torch_remat.dispatch.record import NativeRecord, Record, WholeCallRecord
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.ledger import Ledger, Row
from torch_remat.reports.model import Kind, OpReport, RegionReport
from torch_remat.reports.pieces import pieces_in


def collect_parameters(region: Region, ledger: Ledger) -> None:
    """Count the parameters that a region knows."""
    for parameter in region.parameters:
        if parameter is not None:
            ledger.add_parameter(parameter)
    for entry in list(region.tape.saved):
        if isinstance(entry, torch.Tensor) and is_parameter(entry):
            ledger.add_parameter(entry)
    inputs = region.inputs
    if inputs is not None:
        for parameter in (*inputs.parameters(), *inputs.viewed_parameters()):
            ledger.add_parameter(parameter)


class _RegionRows:
    """The rows of one region while they are collected."""

    def __init__(self, region: Region, ledger: Ledger) -> None:
        self.name = region.name
        self.own: list[Row] = []
        records = list(region.tape.records.items())
        self.by_op: dict[str, list[Row]] = {name: [] for name, _ in records}
        self.policies = {name: record.policy.value for name, record in records}
        self._region = region
        self._ledger = ledger
        ops = _forward_of(region)
        self._undecided = [] if ops is None else list(ops.undecided())
        self._away = {(call.native, call.label(place)) for call in region.tape.calls for place in call.away}
        self._away |= {(op, label) for op, label, _, policy in self._undecided if policy is CheckpointPolicy.OFFLOAD}

    def collect(self) -> None:
        """Read the tape."""
        region, tape = self._region, self._region.tape
        inputs = region.inputs
        if inputs is not None:
            for place, kept in list(inputs.kept()):
                if not (isinstance(kept, torch.Tensor) and is_parameter(kept)):
                    self._add("", place, "input", kept, None, "replay")
        for index, entry in enumerate(list(tape.saved)):
            holder = entry() if type(entry) is ref else None
            if holder is not None and holder.value is not None:
                self._add("", f"saved tensor {index}", "refilled", holder.value, None, "backward")
            if (value := getattr(holder, "fingerprint", None)) is not None:
                self._add("", f"value of saved tensor {index}", "determinism check", value, None, "replay")
        if region.rng is not None:
            self._add_random_state("", region.rng)
        for named in list(tape.holders):
            if (op_holder := named()) is not None:
                self._add_holder(op_holder)
        for record in [*tape.records.values(), *tape.regions]:
            self._add_record(record)
        for call in list(tape.calls):
            self._add_call(call)
        for op, label, tensor, _ in self._undecided:
            self._add(op, label, "undecided", tensor, None, "replay")

    def _add_holder(self, holder: OpHolder) -> None:
        kept = holder.packed if holder.unpack is not None else holder.value
        kind: Kind = "saved" if holder.resident else "refilled"
        needed_by = f"backward of {holder.op}" if holder.op else "backward"
        self._add(holder.op, holder.tensor_name, kind, kept, holder.metadata[3], needed_by)

    def _add_record(self, record: Record) -> None:
        if record.drawn is not None:
            self._add_random_state(record.name, record.drawn)
        needed_by = f"replay of {record.name or 'an inner region'}"
        for slot in list(record.slots.values()):
            if slot.source is not None:
                op, place = slot.source
                self._add(
                    op, output_name(self._region, op, place), "kept for replay", slot.kept, slot.device, needed_by
                )
        if isinstance(record, (NativeRecord, WholeCallRecord)):
            for place, slot in list(record.returned.items()):
                name = output_name(self._region, record.name, place)
                self._add(record.name, name, "kept for replay", slot.kept, slot.device, "replay")
        if isinstance(record, NativeRecord):
            for _, slot, _ in list(record.written):
                self._add(record.name, "written", "kept for replay", slot.kept, slot.device, "replay")

    def _add_call(self, call: PolicyCall) -> None:
        """Add what the policy for ops keeps of one of them."""
        for place, slot in list(call.kept.items()):
            self._add(call.native, call.label(place), "kept for replay", slot.kept, slot.device, "replay")
        for slot in list(call.written):
            self._add(call.native, call.label(0), "kept for replay", slot.kept, slot.device, "replay")
        for at, slot in list(call.earlier.items()):
            self._add(call.native, earlier_label(call, at), "kept for replay", slot.kept, slot.device, "replay")
        if call.before is not None:
            self._add_random_state(call.native, call.before)

    def _add(self, op: str, label: str, kind: Kind, kept: Any, made_on: torch.device | None, needed_by: str) -> None:
        rows = self.by_op.setdefault(op, []) if op else self.own
        policy = self.policies.get(op, "") if op else ""
        if (not policy and kind in ("saved", "kept for replay", "undecided")) or (op, label) in self._away:
            policy = "offload" if (op, label) in self._away else "save"
        for piece in pieces_in(kept, made_on):
            if piece.besides is not None and not self._ledger.momentary:
                continue
            name = qualified_name(self.name, op, label)
            self._ledger.add(piece, name, label, kind, rows, [needed_by], policy)

    def _add_random_state(self, op: str, state: RngState) -> None:
        for tensor in state.kept():
            self._add(op, "random state", "random state", tensor, None, "replay")

    def finished(self, *, keep_empty: bool = False) -> RegionReport:
        """Return the rows as plain data; ops that keep nothing are left out unless asked for."""
        ops = [
            OpReport(name, self.policies.get(name) or rows[0].policy, tuple(row.finished() for row in rows))
            for name, rows in self.by_op.items()
            if rows or keep_empty
        ]
        return RegionReport(self.name, tuple(row.finished() for row in self.own), tuple(ops))


def _forward_of(region: Region) -> ForwardOps | None:
    """Return the ops of a region whose forward runs in this thread."""
    mode = current_mode()
    while mode is not None and mode.region is not region:
        mode = mode.parent
    return mode.ops if mode is not None and isinstance(mode.ops, ForwardOps) else None


def output_name(region: Region, op: str, place: int) -> str:
    """Return the name of an op's output: ``out``, or its place if there are several."""
    record = region.tape.records.get(op)
    if isinstance(record, (NativeRecord, WholeCallRecord)):
        return record.output_name(place)
    return str(place) if record is not None and record.as_tuple else "out"


def collect_region(region: Region, ledger: Ledger, *, keep_empty: bool = False) -> RegionReport:
    """Return what a region keeps.

    Args:
        region: The region.
        ledger: What was counted before, the region's parameters among it.
        keep_empty: Whether ops that keep nothing get a report, too.
    """
    rows = _RegionRows(region, ledger)
    rows.collect()
    return rows.finished(keep_empty=keep_empty)
