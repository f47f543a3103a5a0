"""What regions keep, counted: the rows of `Region.kept` become reports.

In: a region, in whatever state it is. Kept: nothing. Out: its report. Nothing is unpacked, so nothing is replayed.
"""

from __future__ import annotations

from torch_remat.dispatch.kept import Kept, What, Where, Why, decisions_of, parameters_of
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import qualified_name
from torch_remat.reports.data import Kind, OpReport, RegionReport
from torch_remat.reports.ledger import Ledger, Row, pieces_in

_KINDS: dict[What, Kind] = {
    What.INPUT: "input",
    What.RESIDENT: "saved",
    What.VALUE: "refilled",
    What.SLOT: "kept for replay",
    What.RESULT: "kept for replay",
    What.UNDECIDED: "undecided",
    What.RANDOM_STATE: "random state",
    What.CHECK: "determinism check",
}


def collect_region(region: Region, ledger: Ledger, *, keep_empty: bool = False) -> RegionReport:
    """Return what a region keeps, whose parameters the ledger has counted already; see `report_of`."""
    decisions = decisions_of(region)
    own: list[Row] = []
    by_op: dict[str, list[Row]] = {name: [] for name in decisions}
    for one in region.kept():
        if one.what is What.EMPTY or one.where is Where.AROUND:
            continue
        rows = by_op.setdefault(one.op, []) if one.op else own
        name = qualified_name(region.name, one.op, one.tensor)
        policy = one.decision.value if one.decision else ""
        for piece in pieces_in(one.value, one.made_on):
            if piece.besides is None or ledger.momentary:
                ledger.add(piece, name, one.tensor, _KINDS[one.what], rows, _needed_by(one), policy)
    ops = [
        OpReport(
            name, decisions[name].value if name in decisions else rows[0].policy, tuple(row.finished() for row in rows)
        )
        for name, rows in by_op.items()
        if rows or keep_empty
    ]
    return RegionReport(region.name, tuple(row.finished() for row in own), tuple(ops))


def report_of(region: Region, *, momentary: bool = False, keep_empty: bool = False) -> RegionReport:
    """Return what a region keeps by itself, also of ops that keep nothing if ``keep_empty``.

    With ``momentary``, what is offloaded counts in place, too, while it has not left or has come back.
    """
    ledger = Ledger(momentary)
    for parameter in parameters_of(region):
        ledger.add_parameter(parameter)
    return collect_region(region, ledger, keep_empty=keep_empty)


def _needed_by(one: Kept) -> str:
    if one.why is Why.BACKWARD:
        return f"backward of {one.by}" if one.by else "backward"
    if one.why is Why.ENTRY:
        return f"replay of {one.by}"
    return "replay of an inner region" if one.why is Why.INNER_REGION else "replay"
