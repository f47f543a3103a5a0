"""Results that are sequences of rows, and print as a table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

Row = TypeVar("Row")


class Table(Sequence[Row]):
    """Rows, each a dataclass, in order; prints as a table."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._rows = list(rows)

    def __getitem__(self, index: Any) -> Any:
        """Return a row, or a list of rows."""
        return self._rows[index]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain dicts."""
        rows: list[Any] = self._rows
        return [asdict(row) for row in rows]

    @abstractmethod
    def __str__(self) -> str:
        """Return the table as text."""

    def __repr__(self) -> str:
        """Return the table as text."""
        return str(self)
