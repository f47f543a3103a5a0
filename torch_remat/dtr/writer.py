"""Writes event logs, in the format that `torch_remat.dtr.log` tells of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch_remat.dtr.log import START


class LogWriter:
    """Writes a log; each event reaches the file whole, so that the log is sound wherever it ends.

    Args:
        path: The file, which is written anew.

    Example:
        >>> with LogWriter("step.log") as writer:
        ...     writer.constant("w", size_bytes=4)
        ...     writer.call("aten.neg", ["w"], [("y", 4, -1)], nanoseconds=10)
        ...     writer.release("w")
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self.annotate(START)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def annotate(self, annotation: str) -> None:
        """Write a mark, such as ``BACKWARD``."""
        self._write({"INSTRUCTION": "ANNOTATE", "ANNOTATION": annotation})

    def constant(self, name: str, size_bytes: int) -> None:
        """Write that a tensor comes from outside."""
        self._write({"INSTRUCTION": "CONSTANT", "NAME": name}, _memory(name, size_bytes))

    def call(self, name: str, args: Sequence[str], results: Sequence[tuple[str, int, int]], nanoseconds: float) -> None:
        """Write that an op ran.

        Args:
            name: Of the op.
            args: Names of the tensors that it read.
            results: For each result its name, its size in bytes, and the index of the argument whose storage it
                shares, or -1.
            nanoseconds: What it took.
        """
        records: list[dict[str, Any]] = [
            {
                "INSTRUCTION": "CALL",
                "NAME": name,
                "ARGS": list(args),
                "RESULT": [result for result, _, _ in results],
                "TIME": str(round(nanoseconds)),
            }
        ]
        for result, size_bytes, alias in results:
            records += [_memory(result, size_bytes), {"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": str(alias)}]
        self._write(*records)

    def mutate(self, name: str, args: Sequence[str], indices: Sequence[int], nanoseconds: float) -> None:
        """Write that an op changed the arguments at these indices in place."""
        self._write(
            {
                "INSTRUCTION": "MUTATE",
                "NAME": name,
                "ARGS": list(args),
                "MUTATE": [str(index) for index in indices],
                "TIME": str(round(nanoseconds)),
            }
        )

    def copy(self, target: str, source: str) -> None:
        """Write that a new name means the same tensor."""
        self._write({"INSTRUCTION": "COPY", "DST": target, "SRC": source})

    def copy_from(self, target: str, source: str) -> None:
        """Write that a known name now means the tensor of another."""
        self._write({"INSTRUCTION": "COPY_FROM", "DST": target, "SRC": source})

    def release(self, name: str) -> None:
        """Write that the program let go of a name."""
        self._write({"INSTRUCTION": "RELEASE", "NAME": name})

    def _write(self, *records: dict[str, Any]) -> None:
        self._file.write("".join(json.dumps(record) + "\n" for record in records))


def _memory(name: str, size_bytes: int) -> dict[str, Any]:
    return {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size_bytes)}
