"""Reports as HTML, for notebooks: one table, no scripts, readable without colour."""

from __future__ import annotations

from html import escape

from torch_remat.reports.data import KeptForBackward, KeptTensor
from torch_remat.reports.fold import Group, fold
from torch_remat.reports.spans import Timeline
from torch_remat.reports.text import LEGEND, budgets_told, describe, format_bytes, format_sum, headline, remarks, table

_LEFT, _RIGHT = 'style="text-align: left"', 'style="text-align: right"'
_HEAD = ("kept", "bytes", "tensor", "policy", "why")


def report_as_html(report: KeptForBackward) -> str:
    """Return a report as a table: sums in bold, each with its parts below it."""
    rows = [_sum_row("kept for backward", report.bytes, report.offloaded_bytes)]
    for group in fold(report.regions):
        rows += _group_rows(group)
    if report.outside:
        away = sum(node.offloaded_bytes for node in report.outside)
        rows.append(_sum_row("outside of regions", sum(node.bytes for node in report.outside), away))
        for node in report.outside:
            label = f"{node.node} ({node.count})"
            rows.append(_row(label, format_sum(node.bytes, node.offloaded_bytes), "", "", ""))
    for name, existing in (("parameters", report.parameters), ("buffers", report.buffers)):
        if existing.count:
            rows.append(_row(f"{name}, apart ({existing.count})", format_bytes(existing.bytes), "", "", ""))
    head = "".join(f"<th {_LEFT}>{title}</th>" for title in _HEAD)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def trace_as_html(trace: Timeline) -> str:
    """Return a trace as a table: a line for each region, and below it one for each of its ops."""
    head, *rows = table(trace) or [[]]
    body = "".join(f"<tr>{''.join(map(_trace_cell, range(len(row)), row))}</tr>" for row in rows)
    titles = "".join(f"<th {_LEFT}>{escape(title)}</th>" for title in head)
    whole = (
        f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table><p>{escape(LEGEND)}</p>" if rows else ""
    )
    budgets = "".join(f"<p>{escape(line)}</p>" for line in budgets_told(trace))
    return f"<p>{escape(headline(trace))}</p>{whole}{budgets}"


def _trace_cell(place: int, cell: str) -> str:
    if place:
        return f"<td {_RIGHT}>{escape(cell)}</td>"
    op = cell.lstrip(" ")
    return f"<td {_LEFT}>\N{EM SPACE}{escape(op)}</td>" if op != cell else f"<th {_LEFT}>{escape(cell)}</th>"


def _group_rows(group: Group) -> list[str]:
    region, count = group.regions[0], len(group.regions)
    each = format_sum(region.bytes, region.offloaded_bytes)
    label = group.label if count == 1 else f"{group.label} ({count} of {each} each)"
    rows = [_sum_row(label, count * region.bytes, count * region.offloaded_bytes)]
    rows += [_tensor_row(tensor, tensor.label) for tensor in region.tensors]
    for op in region.ops:
        rows += [_tensor_row(tensor, f"{op.name}.{tensor.label}") for tensor in op.tensors]
    return rows


def _tensor_row(tensor: KeptTensor, label: str) -> str:
    return _row(f"\N{EM SPACE}{label}", format_bytes(tensor.bytes), describe(tensor), tensor.policy, remarks(tensor))


def _sum_row(label: str, count: int, offloaded_bytes: int) -> str:
    head = f"<th {_LEFT}>{escape(label)}</th><th>{escape(format_sum(count, offloaded_bytes))}</th>"
    return f"<tr>{head}{'<td></td>' * 3}</tr>"


def _row(*cells: str) -> str:
    inner = [f"<td {_RIGHT if place == 1 else _LEFT}>{escape(cell)}</td>" for place, cell in enumerate(cells)]
    return f"<tr>{''.join(inner)}</tr>"
