"""Numbers and tables as text: the one way in which bytes and columns are written."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """Return bytes with a binary unit: ``512 B``, ``24.0 MiB``."""
    unit, name = unit_of(count)
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} {name}"


def unit_of(count: int) -> tuple[int, str]:
    """Return the unit in which so many bytes read best: how many bytes it is, and its name."""
    place = 0
    while abs(count) >= 1024 ** (place + 1) and place < len(_BYTES) - 1:
        place += 1
    return 1024**place, _BYTES[place]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 op``, ``2 ops``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows as lines with columns of one width; those in ``right`` are aligned to the right."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
