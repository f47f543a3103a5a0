"""Numbers and tables as text: the one way in which bytes, FLOPs and columns are written."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")


def format_bytes(count: int) -> str:
    """Return bytes with a binary unit: ``512 B``, ``24.0 MiB``."""
    return _scaled(count, *unit_of(count))


def format_flops(count: int) -> str:
    """Return floating-point operations with a decimal unit: ``134.2 MFLOP``."""
    return _scaled(count, *unit_of(count, 1000, _FLOPS))


def unit_of(count: int, base: int = 1024, units: Sequence[str] = _BYTES) -> tuple[int, str]:
    """Return the unit in which a number reads best: how many of the smallest it is, and its name."""
    place = 0
    while abs(count) >= base ** (place + 1) and place < len(units) - 1:
        place += 1
    return base**place, units[place]


def _scaled(count: int, unit: int, name: str) -> str:
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} {name}"


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
