"""Real text that is on any machine with Python: the ``.py`` files of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

_LEFT_OUT = {
    *("site-packages", "dist-packages"),  # not the standard library
    *("test", "tests"),  # not installed everywhere
    "encodings",  # tables of characters, hardly text
}


def standard_library() -> Tensor:
    """Return the source of the running Python's standard library, uint8 of shape ``(bytes,)``.

    Files are sorted by path, so the same Python gives the same text.

    Raises:
        FileNotFoundError: This Python came without the source of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    kept = [root / path for path in paths if _LEFT_OUT.isdisjoint(Path(path).parts)]
    source = b"\n".join(path.read_bytes() for path in kept if path.is_file())
    if not source:
        raise FileNotFoundError(f"no .py files under {root}: this Python came without the source of its library")
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)


class Batches:
    """An endless, reproducible series of training batches.

    Args:
        text: Bytes, uint8 of shape ``(bytes,)``.
        batch: Sequences in a batch.
        context: Bytes in a sequence.
        seed: Batches drawn with the same seed are the same.
        device: Where the batches go.
    """

    def __init__(self, text: Tensor, *, batch: int, context: int, seed: int, device: torch.device) -> None:
        self._text = text
        self._shape = (batch, context)
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)  # its own: the global one belongs to dropout

    def next(self) -> tuple[Tensor, Tensor]:
        """Return tokens and the bytes that follow them, both int64 of shape ``(batch, context)``."""
        batch, context = self._shape
        starts = torch.randint(len(self._text) - context, (batch, 1), generator=self._generator)
        windows = self._text[starts + torch.arange(context + 1)].to(self._device, torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
