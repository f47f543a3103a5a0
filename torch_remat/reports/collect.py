"""What regions keep, counted: the rows of `Region.kept` become reports.

In: a region, in whatever state it is. Kept: nothing. Out: its report. Nothing is unpacked, so nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_remat.dispatch.kept import Around, Kept, decisions_of, parameters_of
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.reports.data import Kind, OpReport, RegionReport
from torch_remat.reports.ledger import Ledger, Rows, pieces_in

Annotate = Callable[[torch.Tensor], str | None]
"""Says something of a kept tensor, such as where it was allocated, or nothing."""


def report_of(
    region: Region,
    ledger: Ledger | None = None,
    *,
    momentary: bool = False,
    keep_empty: bool = False,
    annotate: Annotate | None = None,
) -> RegionReport:
    """Return what a region keeps.

    Args:
        region: The region.
        ledger: What has been counted before, the parameters of the region among it; None for the region by itself.
        momentary: Whether what is offloaded counts in place, too, while it has not left or has come back.
        keep_empty: Whether ops that keep nothing are in it.
        annotate: What it says of a tensor becomes its note.
    """
    if ledger is None:
        ledger = Ledger()
        ledger.add_existing(parameters_of(region))
    decisions = decisions_of(region)
    own = Rows()
    by_op = {name: Rows() for name in decisions}
    for one in region.kept():
        if one.what == "empty" or isinstance(one.value, Around):
            continue
        kind: Kind = "kept for replay" if one.what == "slot" or one.what == "result" else one.what
        rows = by_op.setdefault(one.op, Rows()) if one.op else own
        name = qualified_name(region.name, one.op, one.tensor)
        policy = one.decision.value if one.decision else ""
        note = annotate(one.value) if annotate is not None and isinstance(one.value, torch.Tensor) else None
        for piece in pieces_in(one.value, one.made_on):
            if piece.besides is None or momentary:
                tensor = piece.kept_as(name, one.tensor, kind, _needed_by(one), policy, note)
                ledger.add(tensor, piece.memory, rows)
    ops = []
    for name, rows in by_op.items():
        if rows or keep_empty:
            policy = decisions[name].value if name in decisions else rows[0].policy
            ops.append(OpReport(name, policy, tuple(rows)))
    return RegionReport(region.name, tuple(own), tuple(ops))


def _needed_by(one: Kept) -> str:
    if one.why == "backward":
        return f"backward of {one.by}" if one.by else "backward"
    if one.why == "entry":
        return f"replay of {one.by}"
    return "replay of an inner region" if one.why == "inner region" else "replay"
