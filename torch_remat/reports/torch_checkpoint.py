"""What ``torch.utils.checkpoint`` keeps, beside and around our regions: its arguments and random state.

In: an unpack hook, as it stands in a saved tensor. Kept: nothing. Out: the tensors that its closure keeps. Torch has no
public way to ask; where its closures look otherwise, nothing is found, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class TorchCheckpoint:
    """Stands for a saved tensor that ``torch.utils.checkpoint`` recomputes; it has what that keeps instead."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of what the checkpoint keeps: its arguments and random state."""
        for index, argument in enumerate(self._frame.saved_args):
            tensor = argument if isinstance(argument, torch.Tensor) else getattr(argument, "data", None)
            if isinstance(tensor, torch.Tensor):
                yield f"args[{index}]", tensor
        for value in _closure(getattr(self._frame, "recompute_fn", None)).values():
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield "state", tensor

    @classmethod
    def behind(cls, hook: Any) -> TorchCheckpoint | None:
        """Return it if an unpack hook is that of such a checkpoint."""
        if not is_of_checkpoint(hook):
            return None
        frame = _closure(hook).get("frame")
        return cls(frame) if isinstance(getattr(frame, "saved_args", None), list) else None


def is_of_checkpoint(hook: Any) -> bool:
    """Whether an unpack hook is that of ``torch.utils.checkpoint``."""
    return getattr(hook, "__module__", None) == "torch.utils.checkpoint"


def _closure(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True) if _is_set(cell)}


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
