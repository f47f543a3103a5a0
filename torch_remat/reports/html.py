"""Reports as HTML, for notebooks: one table, no scripts, readable without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from torch_remat.reports.data import KeptForBackward, KeptTensor, Sums
from torch_remat.reports.fold import fold
from torch_remat.reports.spans import Timeline
from torch_remat.reports.text import LEGEND, budgets_told, describe, format_bytes, headline, remarks, sum_of, table

_LEFT, _RIGHT = 'style="text-align: left"', 'style="text-align: right"'
_HEAD = ("kept", "bytes", "tensor", "policy", "why")


def report_as_html(report: KeptForBackward) -> str:
    """Return a report as a table: sums in bold, each with its parts below it."""
    rows = [_sum_row("kept for backward", [report])]
    for label, regions in fold(report.regions):
        region, count = regions[0], len(regions)
        told = label if count == 1 else f"{label} ({count} of {sum_of([region])} each)"
        rows += [_sum_row(told, regions), *(_tensor_row(tensor, tensor.label) for tensor in region.tensors)]
        for op in region.ops:
            rows += [_tensor_row(tensor, f"{op.name}.{tensor.label}") for tensor in op.tensors]
    if report.outside:
        rows.append(_sum_row("outside of regions", report.outside))
        rows += [_row(f"{node.node} ({node.count})", sum_of([node])) for node in report.outside]
    for name, existing in (("parameters", report.parameters), ("buffers", report.buffers)):
        if existing.count:
            rows.append(_row(f"{name}, apart ({existing.count})", format_bytes(existing.bytes)))
    return _table(_HEAD, rows)


def trace_as_html(trace: Timeline) -> str:
    """Return a trace as a table: a line for each region, and below it one for each of its ops."""
    rows = table(trace)
    whole = _table(rows[0], map(_trace_row, rows[1:])) if rows else ""
    below = [*([LEGEND] if rows else []), *budgets_told(trace)]
    return f"<p>{escape(headline(trace))}</p>{whole}{''.join(f'<p>{escape(line)}</p>' for line in below)}"


def _trace_row(cells: Sequence[str]) -> str:
    op = cells[0].lstrip(" ")
    first = _cell(f"\N{EM SPACE}{op}") if op != cells[0] else _cell(op, tag="th")
    return f"<tr>{first}{''.join(_cell(cell, _RIGHT) for cell in cells[1:])}</tr>"


def _tensor_row(tensor: KeptTensor, label: str) -> str:
    return _row(f"\N{EM SPACE}{label}", format_bytes(tensor.bytes), describe(tensor), tensor.policy, remarks(tensor))


def _sum_row(label: str, parts: Sequence[Sums]) -> str:
    head = f"{_cell(label, tag='th')}<th>{escape(sum_of(parts))}</th>"
    return f"<tr>{head}{'<td></td>' * 3}</tr>"


def _row(label: str, size: str, tensor: str = "", policy: str = "", why: str = "") -> str:
    return f"<tr>{_cell(label)}{_cell(size, _RIGHT)}{''.join(map(_cell, (tensor, policy, why)))}</tr>"


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    titles = "".join(_cell(title, tag="th") for title in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(text: str, style: str = _LEFT, tag: str = "td") -> str:
    return f"<{tag} {style}>{escape(text)}</{tag}>"
