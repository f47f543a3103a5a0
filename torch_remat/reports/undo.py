"""Puts back what a trial changes in place in tensors that were there before: running statistics, caches, counters.

In: each aten op of the trial, before it runs. Kept until the trial is over: a copy of each storage from outside that an
op writes. Out: the storages and version counters as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_remat._compat import TorchDispatchMode, set_version
from torch_remat.dispatch.log.meta import key_of, tensors_in
from torch_remat.dispatch.log.schema import argument, effects_of
from torch_remat.dispatch.placeholder import is_placeholder

# Written by batch norms, of which not all schemas say so.
_STATISTICS = {"running_mean", "running_var"}


class Undo(TorchDispatchMode):
    """Notes what ops write while it is entered; `restore` puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Copy what the op will write, and run it."""
        kwargs = kwargs or {}
        given = {key_of(tensor) for tensor in tensors_in(args, kwargs)}
        for tensor in _written(op, args, kwargs):
            self._note(tensor)
        result = op(*args, **kwargs)
        results = result if isinstance(result, (list, tuple)) else (result,)
        self._made.update(key for tensor in tensors_in(results, {}) if (key := key_of(tensor)) not in given)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        if is_placeholder(tensor) or tensor.layout is not torch.strided or (key := key_of(tensor)) in self._made:
            return
        if key not in self._before:
            storage = tensor.untyped_storage()
            self._before[key] = storage, storage.clone()
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))

    def restore(self) -> None:
        """Put back what was changed."""
        for storage, before in self._before.values():
            if storage.nbytes() == before.nbytes():  # else it was resized: its tensor is another one now
                storage.copy_(before)
        for tensor, version in self._versions[::-1]:
            set_version(tensor, version)
        self._before, self._versions = {}, []


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    effects = effects_of(op)
    where = list(effects.written)
    schema = getattr(op, "_schema", None)
    if schema is not None and "batch_norm" in effects.name:
        where += [(place, one.name) for place, one in enumerate(schema.arguments) if one.name in _STATISTICS]
    return tensors_in([argument(one, args, kwargs) for one in where], {})
