"""Watches a run for `explain`: which ops ran in which phase, what they saved and returned, aten ops and FLOPs.

In: calls of the runtime, and each aten op, seen by a dispatch mode. Kept: numbers and names. Out: an explanation for
each region. FLOPs are those of ``torch.utils.flop_counter``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from torch_remat._compat import TorchDispatchMode, node_number
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.placeholder import is_placeholder
from torch_remat.dispatch.region.region import Region
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.reports.data import RegionReport
from torch_remat.reports.explanation import Alternative, OpExplanation, RegionExplanation, Replay, TensorExplanation
from torch_remat.reports.graph import INNER_REGION, Stretch, readers_in_graph
from torch_remat.reports.kept import decisions_of, kept_by
from torch_remat.reports.ledger import report_of
from torch_remat.reports.observer import Observer
from torch_remat.reports.reasons import Reasons, Seen, SeenOp, kept_by_policy, never_needed
from torch_remat.reports.watch import WatchedOp

Counts = Counter[str]
"""How many aten ops computed something, and their FLOPs: ``forward_ops``, ``replay_flops``, ..."""


@dataclass
class OpNotes(SeenOp):
    """One op."""

    counts: Counts = field(default_factory=Counter)
    replay: Replay = "no replay"
    numbers: tuple[int, int] = (0, 0)
    made: dict[str, tuple[int, int]] = field(default_factory=dict)  # nodes and outputs, by name
    tensors: tuple[TensorExplanation, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    def explained(self, replays: int) -> OpExplanation:
        """Return the notes as plain data."""
        flops = self.counts["forward_flops"], self.counts["replay_flops"]
        replay = self.replay if self.replay != "no replay" or not replays else "not reached"
        return OpExplanation(self.name, self.policy.value, replay, *flops, self.tensors, self.alternatives)


@dataclass
class RegionNotes:
    """One region."""

    name: str
    counts: Counts = field(default_factory=Counter)
    ops: dict[str, OpNotes] = field(default_factory=dict)
    report: RegionReport = field(default_factory=lambda: RegionReport("", (), ()))
    by_policy: tuple[TensorExplanation, ...] = ()
    unnamed: int = 0
    replays: int = 0
    refilled_bytes: int = 0
    stretches: list[Stretch] = field(default_factory=list)  # of inner regions

    def explained(self) -> RegionExplanation:
        """Return the notes as plain data."""
        report, counts = self.report, self.counts
        inputs = RegionReport("", tuple(tensor for tensor in report.tensors if tensor.kind == "input"), ())
        kept = report.bytes, report.offloaded_bytes, inputs.bytes, inputs.offloaded_bytes
        counted = counts["forward_ops"], counts["replay_ops"], counts["forward_flops"], counts["replay_flops"]
        ops = tuple(op.explained(self.replays) for op in self.ops.values())
        again = self.unnamed, self.refilled_bytes, self.replays
        return RegionExplanation(self.name, *kept, *again, *counted, self.by_policy, ops)


class Notes(Observer):
    """Takes notes of all regions whose forward this thread runs outside of replays, by their serial numbers.

    ``after_forward`` is called with each region and its notes once its forward is over; meanwhile nothing is noted.
    """

    def __init__(self, after_forward: Callable[[Region, RegionNotes], None] | None) -> None:
        self.regions: dict[int, RegionNotes] = {}
        self._paused = False
        self._after_forward = after_forward
        self._thread = get_ident()
        # What runs, by thread, innermost last: the counts to add to, and the phase; None if it is not noted.
        self._running: dict[int, list[tuple[Counts, str] | None]] = defaultdict(list)
        self._sent: dict[int, StorageWeakRef] = {}  # by what `offload_began` was told

    def begin(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        """Begin to count for an op, or for a region."""
        mode = current_mode()
        mine = get_ident() == self._thread and not self._paused
        if op is None and phase == "forward" and mine and mode is not None and not mode.recomputing:
            self.regions[region.serial] = RegionNotes(region.name)
        notes = self._of(region)
        found: RegionNotes | OpNotes | None = notes
        if notes is not None and op is not None:
            if phase == "forward":
                notes.ops.setdefault(op.name, OpNotes(op.name, op.policy))
            found = notes.ops.get(op.name)
        elif notes is not None and phase == "replay":
            notes.replays += 1
        self._running[get_ident()].append(None if found is None else (found.counts, phase))

    def end(self, region: Region, op: WatchedOp | None, phase: str) -> None:
        """Count for what is around again; note what an op saved and returned, and what a region holds after replay."""
        self._running[get_ident()].pop()
        notes = self._of(region)
        if notes is None:
            return
        if op is not None and op.name in notes.ops:
            _note_end(notes.ops[op.name], op, phase)
        elif op is None and phase == "replay":
            report = report_of(region)
            notes.refilled_bytes = max(notes.refilled_bytes, report.bytes + report.offloaded_bytes)

    def _of(self, region: Region) -> RegionNotes | None:
        return None if self._paused else self.regions.get(region.serial)

    def offload_began(self, tensor: torch.Tensor, key: int) -> None:
        """Note which storage has left."""
        self._sent[key] = StorageWeakRef(tensor.untyped_storage())

    def finish(self, region: Region, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """Explain what the region keeps, now that its forward is over."""
        notes = self._of(region)
        if notes is None:
            return
        if region.last_number < 0:  # it does not outlive its forward
            for op in notes.ops.values():
                op.tensors = tuple(never_needed(region, op.name, (*op.saved, *op.outputs)))
            return
        notes.report = report_of(region)
        notes.by_policy = tuple(kept_by_policy(region, notes.report))
        # Left out: ops in the body of a skipped op, which are part of that.
        notes.ops = {name: notes.ops[name] for name in decisions_of(region) if name in notes.ops}
        for row in kept_by(region):
            notes.unnamed += row.what == "empty" and not row.op
        ops = list(notes.ops.values())
        found = Reasons(region, self._readers(region, notes, boundary), self._sent)
        for op, tensors in zip(ops, found.of(ops), strict=True):
            op.tensors = tensors
        if self._after_forward is not None:
            self._paused = True
            try:
                self._after_forward(region, notes)
            finally:
                self._paused = False

    def _readers(
        self, region: Region, notes: RegionNotes, boundary: Sequence[torch.autograd.graph.Node | None]
    ) -> dict[tuple[str, str], str]:
        """Return what reads the outputs of ops, as far as the graph shows; note this region as a reader."""
        stretches: list[Stretch] = [
            (*op.numbers, f"the replay of {op.name}" if op.policy is CheckpointPolicy.RECOMPUTE else None)
            for op in notes.ops.values()
        ]
        made = {(op.name, label): at for op in notes.ops.values() for label, at in op.made.items()}
        found = readers_in_graph(boundary, region, made, [*stretches, *notes.stretches])
        mode = current_mode()
        around = None if mode is None else self.regions.get(mode.region.serial)
        if around is not None:
            around.stretches.append((region.first_number, region.last_number + 1, INNER_REGION))
        return found

    def count(self, flops: int) -> None:
        """Count an aten op for every op and region that runs in this thread."""
        if self._paused:
            return
        for running in self._running[get_ident()][::-1]:
            if running is not None:
                counts, phase = running
                counts[f"{phase}_ops"] += 1
                counts[f"{phase}_flops"] += flops


def _note_end(found: OpNotes, op: WatchedOp, phase: str) -> None:
    """Note what an op saved and returned, or whether replay ran it."""
    if phase == "replay":
        found.replay = "skipped" if op.outputs is None else "ran"
    elif op.outputs is not None and not found.outputs:
        made = {
            str(place) if op.as_tuple else "out": tensor
            for place, tensor in enumerate(op.outputs)
            if isinstance(tensor, torch.Tensor)
        }
        found.numbers = op.numbers
        nodes = {label: one.grad_fn for label, one in made.items()}
        found.made = {label: (node_number(node), made[label].output_nr) for label, node in nodes.items() if node}
        first, end = op.numbers
        if not found.made and first < end:  # inside the body of a handle, whose one node they are to have
            found.made = {label: (first, place) for place, label in enumerate(made)}
        found.saved = [Seen.of(label, tensor) for label, tensor in op.named.items() if tensor is not None]
        found.outputs = [Seen.of(label, tensor) for label, tensor in made.items()]


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
