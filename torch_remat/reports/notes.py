"""Watches a run for `explain`: which ops ran in which phase, what they saved and returned, aten ops and FLOPs.

In: calls of the runtime, and each aten op, seen by a dispatch mode. Kept: numbers and names. Out: an explanation for
each region. FLOPs are those of ``torch.utils.flop_counter``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from torch_remat._compat import TorchDispatchMode, node_number
from torch_remat.dispatch.holder import Holder
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.observe import Observer, WatchedOp
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.dispatch.region.region import Region
from torch_remat.offload.transfer import Transfer
from torch_remat.reports.collect import collect_parameters, collect_region
from torch_remat.reports.consumers import Stretch, readers_in_graph
from torch_remat.reports.explanation import Alternative, OpExplanation, RegionExplanation, Replay, TensorExplanation
from torch_remat.reports.ledger import Ledger
from torch_remat.reports.model import RegionReport
from torch_remat.reports.reasons import (
    Seen,
    holders_of,
    is_told_by_aten_op,
    kept_by_policy,
    kept_in,
    never_needed,
    reasons,
)


@dataclass
class Counts:
    """Aten ops that compute something, and their FLOPs, by phase."""

    ops: dict[str, int] = field(default_factory=lambda: {"forward": 0, "replay": 0})
    flops: dict[str, int] = field(default_factory=lambda: {"forward": 0, "replay": 0})


@dataclass
class OpNotes:
    """One op."""

    name: str
    policy: str
    counts: Counts = field(default_factory=Counts)
    replay: Replay = "no replay"
    saved: list[Seen] = field(default_factory=list)
    outputs: list[Seen] = field(default_factory=list)
    numbers: tuple[int, int] = (0, 0)
    made: dict[str, tuple[int, int]] = field(default_factory=dict)  # nodes and outputs, by name
    tensors: tuple[TensorExplanation, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


@dataclass
class RegionNotes:
    """One region."""

    name: str
    counts: Counts = field(default_factory=Counts)
    ops: dict[str, OpNotes] = field(default_factory=dict)
    report: RegionReport | None = None
    by_policy: tuple[TensorExplanation, ...] = ()
    unnamed: int = 0
    replays: int = 0
    refilled_bytes: int = 0
    stretches: list[Stretch] = field(default_factory=list)  # of inner regions

    def explained(self) -> RegionExplanation:
        """Return the notes as plain data."""
        report, counts = self.report, self.counts
        inputs = [tensor for tensor in report.tensors if tensor.kind == "input"] if report else []
        return RegionExplanation(
            self.name,
            report.bytes if report else 0,
            report.offloaded_bytes if report else 0,
            sum(tensor.bytes for tensor in inputs if not tensor.offloaded),
            sum(tensor.bytes for tensor in inputs if tensor.offloaded),
            self.unnamed,
            self.refilled_bytes,
            self.replays,
            counts.ops["forward"],
            counts.ops["replay"],
            counts.flops["forward"],
            counts.flops["replay"],
            self.by_policy,
            tuple(
                OpExplanation(
                    op.name,
                    op.policy,
                    op.replay if op.replay != "no replay" or not self.replays else "not reached",
                    op.counts.flops["forward"],
                    op.counts.flops["replay"],
                    op.tensors,
                    op.alternatives,
                )
                for op in self.ops.values()
            ),
        )


class _Running(threading.local):
    """What runs in this thread: the counts to add to, with the phase; None hides what is around."""

    def __init__(self) -> None:
        self.stack: list[tuple[Counts, str] | None] = []


class Notes(Observer):
    """Takes notes of all regions whose forward this thread runs outside of replays.

    Args:
        after_forward: Called with each region and its notes once its forward is over.

    Attributes:
        regions: Notes by the regions' serial numbers.
        paused: Whether regions are passed over.
    """

    def __init__(self, after_forward: Callable[[Region, RegionNotes], None]) -> None:
        self.regions: dict[int, RegionNotes] = {}
        self.paused = False
        self._after_forward = after_forward
        self._thread = threading.get_ident()
        self._running = _Running()
        self._storages: dict[int, StorageWeakRef] = {}  # by the id of the stored copy, what was sent

    def begin_region(self, region: Region, phase: str) -> None:
        """Begin to count for a region."""
        mode = current_mode()
        mine = threading.get_ident() == self._thread and not self.paused
        if phase == "forward" and mine and mode is not None and not mode.recomputing:
            self.regions[region.serial] = RegionNotes(region.name)
        notes = None if self.paused else self.regions.get(region.serial)
        self._running.stack.append(None if notes is None else (notes.counts, phase))
        if notes is not None and phase == "replay":
            notes.replays += 1

    def end_region(self, region: Region, phase: str) -> None:
        """Count for the region around, if any; after replay, note what is there now."""
        self._running.stack.pop()
        notes = None if self.paused else self.regions.get(region.serial)
        if notes is not None and phase == "replay":
            report = report_of(region)
            notes.refilled_bytes = max(notes.refilled_bytes, report.bytes + report.offloaded_bytes)

    def begin_op(self, region: Region, op: WatchedOp, phase: str) -> None:
        """Begin to count for an op."""
        notes = None if self.paused else self.regions.get(region.serial)
        if notes is not None and phase == "forward":
            notes.ops.setdefault(op.name, OpNotes(op.name, op.policy.value))
        found = None if notes is None else notes.ops.get(op.name)
        self._running.stack.append(None if found is None else (found.counts, phase))

    def end_op(self, region: Region, op: WatchedOp, phase: str) -> None:
        """Note what an op saved and returned."""
        self._running.stack.pop()
        notes = None if self.paused else self.regions.get(region.serial)
        found = None if notes is None else notes.ops.get(op.name)
        if found is None:
            return
        if phase == "replay":
            found.replay = "skipped" if op.outputs_made is None else "ran"
        elif op.outputs_made is not None and not found.outputs:
            made = {
                str(place) if op.as_tuple else "out": tensor
                for place, tensor in enumerate(op.outputs_made)
                if isinstance(tensor, torch.Tensor)
            }
            found.numbers = op.numbers
            for label, tensor in made.items():
                if tensor.grad_fn is not None:
                    found.made[label] = node_number(tensor.grad_fn), tensor.output_nr
            found.saved = [Seen.of(label, tensor) for label, tensor in op.named.items() if tensor is not None]
            found.outputs = [Seen.of(label, tensor) for label, tensor in made.items()]

    def offload_began(self, tensor: torch.Tensor, transfer: Transfer) -> None:
        """Note which storage a transfer stands for."""
        self._storages[id(transfer.copy)] = StorageWeakRef(tensor.untyped_storage())

    def finish_region(self, region: Region, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """Read the tape, now that forward is over."""
        notes = None if self.paused else self.regions.get(region.serial)
        if notes is None:
            return
        if region.last_number < 0:  # it does not outlive its forward
            for op in notes.ops.values():
                op.tensors = tuple(never_needed(region, op.name, (*op.saved, *op.outputs)))
            return
        notes.report = report_of(region)
        notes.by_policy = kept_by_policy(region, notes.report)
        # An op in the body of a skipped one is part of that.
        notes.ops = {name: op for name, op in notes.ops.items() if name in region.tape.records}
        notes.unnamed = sum(type(holder) is Holder for holder in region.tape.empty())
        for name, op in notes.ops.items():
            if not op.saved:
                # A native region, of which no name was told.
                held = [
                    Seen.of_kept(label, kept_in(one), self._storages) for label, one in holders_of(region, name).items()
                ]
                op.saved = [seen for seen in held if seen is not None]
            if is_told_by_aten_op(region, region.tape.records[name]):
                op.outputs = []  # they are told by aten op and result
        records = [(region.tape.records[name], op.saved, op.outputs) for name, op in notes.ops.items()]
        readers = self._readers(region, notes, boundary)
        for op, tensors in zip(notes.ops.values(), reasons(region, records, readers), strict=True):
            op.tensors = tensors
        self._after_forward(region, notes)

    def _readers(
        self, region: Region, notes: RegionNotes, boundary: Sequence[torch.autograd.graph.Node | None]
    ) -> dict[tuple[str, str], str]:
        """Return what reads the outputs of ops, as far as the graph shows; note that this region reads in another."""
        stretches = [
            Stretch(*op.numbers, f"the replay of {op.name}" if op.policy == "recompute" else None)
            for op in notes.ops.values()
        ]
        made = {(op.name, label): at for op in notes.ops.values() for label, at in op.made.items()}
        found = readers_in_graph(boundary, region, made, [*stretches, *notes.stretches])
        mode = current_mode()
        around = None if mode is None else self.regions.get(mode.region.serial)
        if around is not None:
            whole = Stretch(region.first_number, region.last_number + 1, "the replay of an inner region")
            around.stretches.append(whole)
        return found

    def count(self, flops: int) -> None:
        """Count an aten op for all that runs in this thread, up to what hides the rest."""
        if self.paused:
            return
        for running in self._running.stack[::-1]:
            if running is not None:
                counts, phase = running
                counts.ops[phase] += 1
                counts.flops[phase] += flops


class CountAten(TorchDispatchMode):
    """Tells ``count(flops)`` of each aten op that computes something; ops on placeholders compute nothing."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op and tell of it."""
        out = op(*args, **(kwargs or {}))
        if not op.is_view and not any(is_placeholder(arg) for arg in args if isinstance(arg, torch.Tensor)):
            self._count(flops_of(op, args, kwargs or {}, out))
        return out


def flops_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return an aten op's FLOPs as ``torch.utils.flop_counter`` counts them; 0 for ops that it does not know."""
    packet = op.overloadpacket
    count = flop_registry.get(packet)
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    if packet.__name__ == "_scaled_dot_product_flash_attention_for_cpu":  # as its counterparts on other devices
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    return 0


def report_of(region: Region) -> RegionReport:
    """Return what a region keeps by itself, once what is on its way has left."""
    ledger = Ledger(momentary=False)
    collect_parameters(region, ledger)
    return collect_region(region, ledger)
