"""Buffers of the modules that a region reaches: changed once, in forward, whatever is recomputed.

In: the modules. Kept: their buffers, and which of them forward has changed. Out: after a replay, the same buffers as
before it.

A buffer counts as changed if its version counter moved in forward, or if it was bound to another tensor. Statistics of
batch norms are written without being counted: what may be such, in a module in training, is put back in any case. In
replay a region reads what forward left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module

from torch_remat._compat import set_version, without_dispatch_modes
from torch_remat.dispatch.log.slot import UNCOUNTED, version_of

Buffer = tuple[dict[str, torch.Tensor | None], str, torch.Tensor]  # the buffers of a module, the name, the tensor


class Buffers:
    """The buffers that one region reaches.

    Args:
        modules: The modules that have some.
    """

    __slots__ = ("_buffers", "_changed", "_statistics", "_versions")

    def __init__(self, modules: Sequence[Module]) -> None:
        self._buffers: Sequence[Buffer] = [
            (module._buffers, name, tensor)
            for module in modules
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        self._versions = [version_of(tensor) for _, _, tensor in self._buffers]
        names = {id(module._buffers) for module in modules if module.training}
        self._statistics = [
            id(held) in names and tensor.dim() == 1 and tensor.is_floating_point() for held, _, tensor in self._buffers
        ]
        self._changed: Sequence[Buffer] | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield them, while forward runs."""
        for _, _, tensor in self._buffers:
            yield tensor

    def finish(self) -> bool:
        """At the end of forward: note what it has changed; return whether that is anything."""
        self._changed = [
            buffer
            for buffer, version, is_statistic in zip(self._buffers, self._versions, self._statistics, strict=True)
            if is_statistic or version_of(buffer[2]) != version or buffer[0].get(buffer[1]) is not buffer[2]
        ]
        self._buffers = self._versions = self._statistics = ()  # type: ignore[assignment]
        return bool(self._changed)

    def now(self) -> list[tuple[Buffer, torch.Tensor, int]]:
        """Return those buffers before a replay, with copies of what is in them, and their versions."""
        saved = []
        with without_dispatch_modes(), torch.no_grad():
            for held, name, _ in self._buffers if self._changed is None else self._changed:
                if (tensor := held.get(name)) is not None:
                    saved.append(((held, name, tensor), tensor.detach().clone(), version_of(tensor)))
        return saved


def put_back(saved: Sequence[tuple[Buffer, torch.Tensor, int]]) -> None:
    """Leave buffers as `Buffers.now` found them."""
    with without_dispatch_modes(), torch.no_grad():
        for (held, name, tensor), value, version in saved:
            held[name] = tensor
            if tensor.shape == value.shape:
                tensor.data.copy_(value)
            else:
                tensor.data = value
            if version != UNCOUNTED:
                set_version(tensor, version)
