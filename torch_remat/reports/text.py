"""Reports as text, for terminals: aligned columns, no line that a person would not read."""

from __future__ import annotations

from collections.abc import Sequence

from torch_remat.reports.data import KeptForBackward, KeptTensor, NodeReport, OpReport, RegionReport
from torch_remat.reports.fold import Group, fold


def format_bytes(count: int) -> str:
    """Return bytes with a binary unit: ``512 B``, ``24.0 MiB``."""
    amount, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, bigger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"


def format_region(region: RegionReport) -> str:
    """Return one region's report."""
    return "\n".join([_headline(region.name, 1, region.bytes, region.offloaded_bytes), *_body(region)])


def format_report(report: KeptForBackward) -> str:
    """Return a whole report, with layers that are alike told once."""
    lines = [f"kept for backward: {format_sum(report.bytes, report.offloaded_bytes)}"]
    if len(report.bytes_by_device) > 1:
        parts = (f"{device} {format_bytes(count)}" for device, count in report.bytes_by_device.items())
        lines.append(f"  by device: {', '.join(parts)}")
    for name, existing in (("parameters", report.parameters), ("buffers", report.buffers)):
        if existing.count:
            lines.append(f"{name}, apart: {format_bytes(existing.bytes)} in {existing.count}")
    groups = fold(report.regions)
    if groups:
        lines += ["", f"in {plural(len(report.regions), 'region')}: {_sum_of(report.regions)}"]
    for group in groups:
        lines += [_indented(line) for line in format_group(group).splitlines()]
    if report.outside:
        lines += ["", f"outside of regions: {_sum_of(report.outside)}"]
        lines += [f"  {line}" for line in aligned([_node_cells(node) for node in report.outside], right={1})]
    return "\n".join(lines)


def format_group(group: Group) -> str:
    """Return regions that are alike, as one."""
    region = group.regions[0]
    count = len(group.regions)
    return "\n".join([_headline(group.label, count, region.bytes, region.offloaded_bytes), *_body(region)])


def aligned(rows: Sequence[Sequence[str]], right: set[int] | None = None) -> list[str]:
    """Return rows as lines with columns of one width; those in ``right`` are aligned to the right."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in (right or ()) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def describe(tensor: KeptTensor) -> str:
    """Return dtype, shape and device: ``float32[4, 16] cpu``."""
    return f"{tensor.dtype}{list(tensor.shape)} {tensor.device}"


def remarks(tensor: KeptTensor) -> str:
    """Return why a tensor is kept, and with which others it shares its storage."""
    parts: list[str] = [tensor.kind if tensor.kind != "saved" else ""]
    if tensor.kind == "kept for replay":
        readers = [reader.removeprefix("replay of ") for reader in tensor.needed_by if reader.startswith("replay of ")]
        parts = [f"for the replay of {', '.join(readers)}" if readers else "for replay"]
    elif tensor.kind == "undecided":
        parts = ["the end of forward decides"]
    if tensor.aliases:
        parts.append(f"also {', '.join(tensor.aliases)}")
    if tensor.shared_with is not None:
        parts.append(f"counted as {tensor.shared_with}")
    if tensor.offloaded:
        parts.append("offloaded")
    return ", ".join(part for part in parts if part)


def _headline(label: str, count: int, bytes_kept: int, offloaded_bytes: int) -> str:
    each = " each" if count > 1 else ""
    total = f", {format_sum(count * bytes_kept, count * offloaded_bytes)} in {count}" if count > 1 else ""
    return f"{label}: {format_sum(bytes_kept, offloaded_bytes)}{each}{total}"


def _body(region: RegionReport) -> list[str]:
    rows = [_cells(tensor, tensor.label) for tensor in region.tensors]
    for op in region.ops:
        rows += _op_rows(op)
    return [_indented(line) for line in aligned(rows, right={1})]


def _op_rows(op: OpReport) -> list[list[str]]:
    if not op.tensors:
        return [[f"{op.name}", "0 B", "", op.policy]]
    return [_cells(tensor, f"{op.name}.{tensor.label}") for tensor in op.tensors]


def _cells(tensor: KeptTensor, label: str) -> list[str]:
    note = ", ".join(part for part in (tensor.policy, remarks(tensor)) if part)
    return [label, format_bytes(tensor.bytes), describe(tensor), note]


def _node_cells(node: NodeReport) -> list[str]:
    labels = list(dict.fromkeys(tensor.label for tensor in node.tensors))
    shown = ", ".join(labels[:4]) + (", ..." if len(labels) > 4 else "")
    return [node.node, format_sum(node.bytes, node.offloaded_bytes), f"{plural(node.count, 'node')}: {shown}"]


def format_sum(bytes_kept: int, offloaded_bytes: int) -> str:
    """Return bytes in place and elsewhere: ``24.0 MiB + 8.0 MiB offloaded``."""
    more = f" + {format_bytes(offloaded_bytes)} offloaded" if offloaded_bytes else ""
    return f"{format_bytes(bytes_kept)}{more}"


def _sum_of(parts: Sequence[RegionReport] | Sequence[NodeReport]) -> str:
    return format_sum(sum(part.bytes for part in parts), sum(part.offloaded_bytes for part in parts))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 op``, ``2 ops``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _indented(line: str) -> str:
    return f"  {line}"
