"""What ``torch.utils.checkpoint`` keeps, beside and around our regions: its arguments and random state.

In: an unpack hook, as it stands in a saved tensor. Kept: nothing. Out: the tensors that its closure keeps. Torch has no
public way to ask; where its closures look otherwise, nothing is found, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_BEFORE_ARGUMENTS = 2  # an empty tensor and the keyword arguments


class TorchCheckpoint:
    """Stands for a saved tensor that ``torch.utils.checkpoint`` recomputes; it has what that keeps instead."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of what the checkpoint keeps: its arguments and random state."""
        for index, argument in _arguments(self._frame):
            tensor = argument if isinstance(argument, torch.Tensor) else _data(argument)
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
        return None if frame is None else cls(frame)


def is_of_checkpoint(hook: Any) -> bool:
    """Whether an unpack hook is that of ``torch.utils.checkpoint``."""
    return getattr(hook, "__module__", None) == "torch.utils.checkpoint"


def _arguments(frame: Any) -> Iterator[tuple[int, Any]]:
    saved = getattr(frame, "saved_args", None)
    if isinstance(saved, list):
        yield from enumerate(saved)
        return
    # Before 2.12 torch has them saved by an autograd node, among other things.
    node: Any = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
    places = _closure(getattr(node, "get_args", None)).get("idx2saved_idx")
    if isinstance(places, dict):
        try:
            saved = node._raw_saved_tensors
        except RuntimeError:  # released
            return
        for place, at in places.items():
            if place >= _BEFORE_ARGUMENTS:
                yield place - _BEFORE_ARGUMENTS, saved[at]


def _data(argument: Any) -> Any:
    try:
        return getattr(argument, "data", None)
    except RuntimeError:  # released
        return None


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
