"""What ``torch.utils.checkpoint`` keeps, beside and around our regions: its arguments and random state.

In: an unpack hook, as it stands in a saved tensor. Kept: nothing. Out: the tensors that its closure keeps, and the
checkpoint around it. Torch has no public way to ask; where its closures look otherwise, nothing is found, and nothing
fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

_BEFORE_ARGUMENTS = 2  # an empty tensor and the keyword arguments


@dataclass(frozen=True)
class TorchCheckpoint:
    """One call of ``torch.utils.checkpoint``, which keeps its arguments instead of saved tensors."""

    frame: Any

    def kept(self) -> Iterator[tuple[str, Any]]:
        """Yield what the checkpoint keeps, with names: arguments, random state, what a backward has recomputed.

        A value is a tensor, something that has tensors in it, what hooks around the checkpoint made of a tensor, or,
        if that was a checkpoint, that one.
        """
        for index, argument in _arguments(self.frame):
            yield f"args[{index}]", packed_in(argument) if hasattr(type(argument), "unpack_hook") else argument
        for name, value in _closure(getattr(self.frame, "recompute_fn", None)).items():
            if name == "kwargs" and isinstance(value, dict):
                yield from ((f"kwargs[{key!r}]", argument) for key, argument in value.items())
            elif isinstance(value, (torch.Tensor, list, tuple)):
                yield "state", value
        for made in list(getattr(self.frame, "recomputed", {}).values()):
            yield "recomputed", list(made.data.values())

    @classmethod
    def behind(cls, hook: Any) -> TorchCheckpoint | None:
        """Return the checkpoint that an unpack hook belongs to, if any."""
        if not is_of_checkpoint(hook):
            return None
        frame = _closure(hook).get("frame")
        return None if frame is None else cls(frame)

    @staticmethod
    def with_those_around(found: Iterable[TorchCheckpoint]) -> list[TorchCheckpoint]:
        """Return checkpoints, each once, and those around them, which recompute the arguments of those inside."""
        once = list(dict.fromkeys(found))
        for checkpoint in once:  # grows meanwhile
            around = (value for _, value in checkpoint.kept() if isinstance(value, TorchCheckpoint))
            once += [one for one in dict.fromkeys(around) if one not in once]
        return once


def packed_in(saved: Any) -> Any:
    """Return what stands in a saved tensor of autograd: a tensor, or what hooks made of it; None if it is released."""
    try:
        packed = saved.data
        if packed is None or isinstance(packed, torch.Tensor):
            return packed
        return TorchCheckpoint.behind(saved.unpack_hook) or packed
    except RuntimeError:  # released meanwhile
        return None


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
    with suppress(RuntimeError):  # released
        for place, at in places.items() if isinstance(places, dict) else ():
            if place >= _BEFORE_ARGUMENTS:
                yield place - _BEFORE_ARGUMENTS, node._raw_saved_tensors[at]


def _closure(function: Any) -> dict[str, Any]:
    names, cells = getattr(getattr(function, "__code__", None), "co_freevars", ()), getattr(function, "__closure__", ())
    found = {}
    for name, cell in zip(names, cells or (), strict=False):
        with suppress(ValueError):  # it is not set
            found[name] = cell.cell_contents
    return found
