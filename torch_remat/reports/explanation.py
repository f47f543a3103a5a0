"""What `explain` says, as plain data and as text.

Explanation
└── RegionExplanation ── OpExplanation ─┬─ TensorExplanation   each named tensor, and why it is where it is
                                        └─ Alternative         what another policy would cost
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch_remat._util.text import format_bytes, format_flops, plural
from torch_remat.reports.fold import fold_series
from torch_remat.reports.report import Block, Report, format_sum

State = Literal["kept", "offloaded", "elided", "recomputed", "not kept"]
"""Where a tensor is between forward and backward: in place; elsewhere; with what replay makes or has anyway; nowhere,
replay makes it again; nowhere, since nothing needs it."""

Replay = Literal["ran", "skipped", "not reached", "no replay"]


@dataclass(frozen=True)
class TensorExplanation:
    """One named tensor of an op.

    Attributes:
        name: ``region::scope/op.tensor``.
        label: The last part of it.
        state: Where it is between forward and backward.
        bytes: Its storage's bytes, whether they are kept or not.
        why: Who needs it, or why it need not be kept.
        shared_with: The full name of an earlier tensor or input of the region that is kept in the same storage: one
            costs no more than both, and what is kept is the sum over tensors without it.
    """

    name: str
    label: str
    state: State
    bytes: int
    why: str
    shared_with: str | None = None


@dataclass(frozen=True)
class Alternative:
    """What would change if one op had another policy and all else stayed.

    Attributes:
        policy: The other policy.
        bytes_change: Bytes kept after forward, more (positive) or fewer.
        offloaded_bytes_change: The same for bytes kept elsewhere.
        flops_change: Floating-point operations of replay, more or fewer.
        error: Why it is not possible; None if it is.
    """

    policy: str
    bytes_change: int
    offloaded_bytes_change: int
    flops_change: int
    error: str | None = None


@dataclass
class OpExplanation:
    """One op.

    Attributes:
        name: Its name, with its scopes.
        policy: Its policy.
        replay: What replay did with it.
        forward_flops: Floating-point operations of its body in forward.
        replay_flops: The same in replay.
        tensors: Its named tensors: what it saves, then its outputs.
        alternatives: Other policies.
    """

    name: str
    policy: str
    replay: Replay = "no replay"
    forward_flops: int = 0
    replay_flops: int = 0
    tensors: tuple[TensorExplanation, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


@dataclass
class RegionExplanation:
    """One region.

    Attributes:
        name: Its name.
        kept_bytes: What it keeps in place after forward: inputs, residents, what replay needs, random state.
        offloaded_bytes: What it keeps elsewhere.
        input_bytes: The share of its inputs in what is in place.
        offloaded_input_bytes: Their share in what is elsewhere.
        unnamed: How many tensors without a name are recomputed.
        refilled_bytes: What it holds once replay has run: what would be kept without recomputing.
        replays: How often it was replayed.
        forward_ops: Aten ops in forward that compute something.
        replay_ops: The same in all replays.
        forward_flops: Floating-point operations in forward.
        replay_flops: The same in all replays.
        by_policy: What a policy for aten ops keeps.
        ops: Its ops, in order.
    """

    name: str
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    input_bytes: int = 0
    offloaded_input_bytes: int = 0
    unnamed: int = 0
    refilled_bytes: int = 0
    replays: int = 0
    forward_ops: int = 0
    replay_ops: int = 0
    forward_flops: int = 0
    replay_flops: int = 0
    by_policy: tuple[TensorExplanation, ...] = ()
    ops: tuple[OpExplanation, ...] = ()


@dataclass(frozen=True)
class Explanation(Report):
    """Why each tensor is kept or not, and what it would cost otherwise.

    Attributes:
        regions: The regions, in the order of forward.
        no_backward: Why `explain` ran no backward; None if it ran one. The function may have run one itself.
    """

    regions: tuple[RegionExplanation, ...]
    no_backward: str | None = None

    def blocks(self) -> list[Block]:
        """Return the explanation, regions that are alike told once."""
        if not self.regions:
            return [Block(["no region ran"])]
        blocks = []
        if self.no_backward is not None and any(map(_waits, self.regions)):
            blocks.append(Block([f"explain() ran no backward: {self.no_backward}", ""]))
        for label, group in fold_series(self.regions, lambda region: region.name, _facts):
            blocks += [*_region_blocks(label, group[0], len(group)), Block([""])]
        return blocks[:-1]


def _facts(region: RegionExplanation) -> Any:
    """Return all that is told of a region but its name."""
    told = json.dumps(asdict(region)).replace(json.dumps(f"{region.name}::")[1:-1], "")
    return told.replace(json.dumps(region.name), "")


def _region_blocks(label: str, region: RegionExplanation, count: int) -> Iterator[Block]:
    keeps = format_sum(region.kept_bytes, region.offloaded_bytes)
    keeps += f", of which {format_sum(region.input_bytes, region.offloaded_input_bytes)} inputs"
    forward = f"{plural(region.forward_ops, 'op')}, {format_flops(region.forward_flops)}"
    replay = f"no replay: {'no backward came to it' if _waits(region) else 'nothing has to be recomputed'}"
    if region.replays:
        keeps += f"; without recomputing {format_bytes(region.refilled_bytes)}"
        replay = f"replay: {plural(region.replay_ops, 'op')}, {format_flops(region.replay_flops)}"
    head = f"{label} (each of {count})" if count > 1 else label
    lines = [head, f"  keeps {keeps}", f"  forward: {forward}; {replay}"]
    if region.unnamed:
        lines.append(f"  {plural(region.unnamed, 'saved tensor')} without a name: recomputed")
    yield Block(lines, _rows(region, region.by_policy), (2,), 2)
    for op in region.ops:
        flops = f"{format_flops(op.forward_flops)} in forward, {format_flops(op.replay_flops)} in replay"
        yield Block([f"  {op.name}: {op.policy}, replay: {op.replay}, {flops}"], _rows(region, op.tensors), (2,), 4)
        yield Block([f"    {_alternative_text(other)}" for other in op.alternatives])


def _waits(region: RegionExplanation) -> bool:
    """Whether replay has something to make and has not run."""
    elided = any(tensor.state == "elided" for op in region.ops for tensor in op.tensors)
    return region.replays == 0 and (region.unnamed > 0 or elided)


def _rows(region: RegionExplanation, tensors: Sequence[TensorExplanation]) -> list[list[str]]:
    rows = []
    for one in tensors:
        other = (one.shared_with or "").removeprefix(f"{region.name}::")
        same = f" (same memory as {other})" if other and f"input {other}," not in one.why else ""
        rows.append([one.label, one.state, format_bytes(one.bytes), one.why + same])
    return rows


def _alternative_text(other: Alternative) -> str:
    if other.error is not None:
        return f"if {other.policy}: not possible: {other.error}"
    parts = [_change(other.bytes_change, format_bytes) + " kept"]
    if other.offloaded_bytes_change:
        parts.append(_change(other.offloaded_bytes_change, format_bytes) + " offloaded")
    parts.append(_change(other.flops_change, format_flops) + " in replay")
    return f"if {other.policy}: {', '.join(parts)}"


def _change(change: int, form: Any) -> str:
    return f"{'+' if change > 0 else '-' if change < 0 else '+-'}{form(abs(change))}"
