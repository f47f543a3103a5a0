"""The ops of both phases, for ``debug=True``.

In: each aten op that the dispatch mode sees. Kept: a short text and the user's source line for each, at most
`MAX_OPS` a phase; replay's list starts anew with each replay. Out: both phases side by side, around the first
difference.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import optree
import torch
from torch.nn.parameter import is_lazy

from torch_remat._compat import keep_from_compiler
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
    """The ops of each region's forward and of its latest replay, as long as the region lives."""

    def __init__(self) -> None:
        self._ops: WeakKeyDictionary[object, dict[str, list[LoggedOp]]] = WeakKeyDictionary()

    def begin(self, region: object, phase: str) -> Callable[..., Any]:
        """Forget what the phase ``"forward"`` or ``"replay"`` was before; return the watcher that logs it."""
        ops = self._ops.setdefault(region, {"forward": [], "replay": []})[phase] = []
        return partial(_run_and_log, ops)

    def side_by_side(self, region: object) -> str:
        """Return the ops around the first difference of the two phases, with the user's source lines."""
        forward, replay = self._ops[region].values()
        pairs = list(enumerate(zip_longest(forward, replay)))
        first = next((at for at, (one, two) in pairs if one is None or two is None or one.text != two.text), len(pairs))
        rows = [f"  {'forward':{_WIDTH}}  | replay"]
        for at, pair in pairs[max(0, first - _CONTEXT) : first + _CONTEXT + 1]:
            left, right = ("" if op is None else _cut(f"{at}: {op.text}") for op in pair)
            rows.append(f"{'>' if at == first else ' '} {left:{_WIDTH}}  | {right}".rstrip())
            for file, line in dict.fromkeys((op.file, op.line) for op in pair if op is not None):
                rows.append(f"      {Path(file).name}:{line}: {linecache.getline(file, line).strip()}")
        return (
            f"Ops of forward ({len(forward)}) and of replay up to here ({len(replay)}), around the first difference "
            f"(op {first}):\n" + "\n".join(rows)
        )


OPS = OpLog()


@keep_from_compiler
def _run_and_log(
    log: list[LoggedOp], _mode: Any, op: Any, _types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    given: Any = (args, kwargs)
    text = _tensors(given)  # before it runs: compiled code empties the list that it gets
    result = op(*args, **kwargs)
    # The hooks of checkpointing detach tensors, not equally often in both phases.
    if len(log) < MAX_OPS and op is not torch.ops.aten.detach.default:
        log.append(LoggedOp(f"{op}({text}) -> {_tensors(result)}", *user_line()))
    return result


def _tensors(tree: Any) -> str:
    shown = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for leaf in optree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and not is_lazy(leaf)
    ]
    return ", ".join(shown)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
