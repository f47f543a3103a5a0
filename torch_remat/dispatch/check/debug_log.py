"""The ops of both phases, for ``debug=True``.

In: each aten op that the dispatch mode sees. Kept: a short text and the user's source line for each, at most
`MAX_OPS` a phase; replay's list starts anew with each replay. Out: both phases side by side, around the first
difference.
"""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch

from torch_remat.errors import user_line

MAX_OPS = 10_000
_CONTEXT = 5
_WIDTH = 56


class LoggedOp(NamedTuple):
    """One op of a phase."""

    text: str
    file: str
    line: int


class OpLog:
    """The ops of a region's forward and of its latest replay."""

    __slots__ = ("_forward", "_replay")

    def __init__(self) -> None:
        self._forward: list[LoggedOp] = []
        self._replay: list[LoggedOp] = []

    def forward(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Watcher of forward: run the op and log it."""
        return _run_and_log(self._forward, op, args, kwargs)

    def begin_replay(self) -> Any:
        """Forget the previous replay's ops; return the watcher of the next."""
        log: list[LoggedOp] = []
        self._replay = log

        def watch(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return _run_and_log(log, op, args, kwargs)

        return watch

    def side_by_side(self) -> str:
        """Return the ops around the first difference of the two phases, with the user's source lines."""
        forward, replay = self._forward, self._replay
        first = next(
            (at for at, pair in enumerate(zip(forward, replay, strict=False)) if pair[0].text != pair[1].text),
            min(len(forward), len(replay)),
        )
        rows = [f"  {'forward':{_WIDTH}}  | replay"]
        start, stop = max(0, first - _CONTEXT), first + _CONTEXT + 1
        for at in range(start, min(stop, max(len(forward), len(replay)))):
            left, right = _at(forward, at), _at(replay, at)
            mark = ">" if at == first else " "
            rows.append(f"{mark} {_cut(_text(left, at)):{_WIDTH}}  | {_cut(_text(right, at))}".rstrip())
            rows += [f"      {line}" for line in _sources(left, right)]
        return (
            f"Ops of forward ({len(forward)}) and of replay up to here ({len(replay)}), around the first difference "
            f"(op {first}):\n" + "\n".join(rows)
        )


def _run_and_log(log: list[LoggedOp], op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    result = op(*args, **kwargs)
    # The hooks of checkpointing detach tensors, not equally often in both phases.
    if len(log) < MAX_OPS and op is not torch.ops.aten.detach.default:
        text = f"{op}({_tensors((args, kwargs))}) -> {_tensors(result)}"
        log.append(LoggedOp(text, *user_line()))
    return result


def _tensors(tree: Any) -> str:
    shown = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for leaf in optree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    ]
    return ", ".join(shown)


def _at(log: list[LoggedOp], index: int) -> LoggedOp | None:
    return log[index] if index < len(log) else None


def _text(op: LoggedOp | None, index: int) -> str:
    return "" if op is None else f"{index}: {op.text}"


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _sources(left: LoggedOp | None, right: LoggedOp | None) -> list[str]:
    places = dict.fromkeys((op.file, op.line) for op in (left, right) if op is not None)
    return [f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}" for file, line in places]
