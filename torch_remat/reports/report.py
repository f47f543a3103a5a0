"""What all reports can do: show themselves as text and as HTML, and give themselves away as plain data.

A report is made once, as blocks: lines, with a table below them. Text and HTML are made of the same blocks.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch_remat._util.text import aligned, format_bytes
from torch_remat.reports.pictures import finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Block(NamedTuple):
    """A part of a report.

    Attributes:
        lines: Lines of text.
        rows: The table below them.
        right: Which of its columns are aligned to the right.
        indent: How far the table is indented.
    """

    lines: Sequence[str]
    rows: Sequence[Sequence[str]] = ()
    right: Collection[int] = (1,)
    indent: int = 0


class Data:
    """What gives itself away as plain data."""

    __slots__ = ()

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return it as dicts, lists, strings and numbers."""

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON.

        Args:
            indent: Spaces for each level, or None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)


class Pictured:
    """What has a picture."""

    __slots__ = ()

    @abstractmethod
    def draw(self) -> Figure:
        """Return the picture."""

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw it, for which matplotlib is loaded.

        Args:
            path: Where to write the picture; the ending gives the format. None writes nothing.

        Returns:
            The matplotlib figure; it is not shown.

        Raises:
            UsageError: matplotlib is not installed.
        """
        return finished(self.draw(), path)


class Report(Data):
    """A report, as text, HTML and data; a dataclass.

    Attributes:
        also: Properties that are in its data, besides its fields.
    """

    also: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def blocks(self) -> list[Block]:
        """Return what the report shows."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, with the sums beside the parts."""
        told: dict[str, Any] = as_data(self)
        return told

    def __str__(self) -> str:
        """Return the report as text, with layers that are alike told once."""
        return as_text(self.blocks())

    def _repr_html_(self) -> str:
        """Return the report as one table, without scripts, readable without colour."""
        blocks, rows = self.blocks(), []
        width = max((len(row) for block in blocks for row in block.rows), default=1)
        for block in blocks:
            rows += [f'<th colspan="{width}" {_LEFT}>{_cell(line)}</th>' for line in block.lines if line]
            for row in block.rows:
                sides = (_RIGHT if column in block.right else _LEFT for column in range(len(row)))
                rows.append("".join(f"<td {side}>{_cell(cell)}</td>" for side, cell in zip(sides, row, strict=True)))
        return f"<table><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


def as_text(blocks: Iterable[Block]) -> str:
    """Return blocks as text for terminals."""
    lines: list[str] = []
    for block in blocks:
        lines += [*block.lines, *(" " * block.indent + line for line in aligned(block.rows, block.right))]
    return "\n".join(lines)


_LEFT, _RIGHT = 'style="text-align: left"', 'style="text-align: right"'


def _cell(text: str) -> str:
    inner = text.lstrip(" ")
    return "\N{EM SPACE}" * ((len(text) - len(inner)) // 2) + escape(inner)


def as_data(value: Any) -> Any:
    """Return a value as dicts, lists, strings and numbers."""
    if is_dataclass(value):
        names = [*(field.name for field in fields(value)), *getattr(value, "also", ())]
        return {name: as_data(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: as_data(one) for key, one in value.items()}
    return [as_data(one) for one in value] if isinstance(value, (tuple, list)) else value


def format_sum(bytes_kept: int, offloaded_bytes: int) -> str:
    """Return bytes in place and elsewhere: ``24.0 MiB + 8.0 MiB offloaded``."""
    more = f" + {format_bytes(offloaded_bytes)} offloaded" if offloaded_bytes else ""
    return f"{format_bytes(bytes_kept)}{more}"


def sum_of(parts: Iterable[Any]) -> str:
    """Return the same of parts of a report, together."""
    kept = list(parts)
    return format_sum(sum(part.bytes for part in kept), sum(part.offloaded_bytes for part in kept))
