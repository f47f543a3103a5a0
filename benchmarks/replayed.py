"""Counts the ops that replay runs, from outside: a dispatch mode around the backward, which no contender knows of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .contenders import FLOOR, NONE
from .workloads import Workload, clear_gradients


def replayed_ops(workload: Workload) -> dict[str, Mapping[str, int]]:
    """Return, for each contender that replays, which ops its backward runs beyond those of ``none``.

    Views and empty tensors are not counted: they compute nothing.
    """
    own = _backward_ops(workload, NONE)
    return {name: _backward_ops(workload, name) - own for name in workload.forwards if name not in (NONE, FLOOR)}


def _backward_ops(workload: Workload, contender: str) -> Counter[str]:
    clear_gradients(workload)
    with _Count() as ops:
        # Forward runs under the mode too: some of torch's functions take other ways where a mode sees them.
        output = workload.forwards[contender]()
        ops.counts.clear()
        output.backward(workload.output_grad)
    return ops.counts


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and func.overloadpacket.__name__ not in _FREE:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


_FREE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"))
