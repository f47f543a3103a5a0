"""Buffers of the modules that a region reaches: changed once, in forward, whatever is recomputed.

In: the modules. Kept: their buffers, which of them forward has changed, and what small ones were before. Out: in a
replay the buffers as forward found them, and after it as it found them itself.

A buffer counts as changed if its version counter moved in forward, or if it was bound to another tensor. Statistics of
batch norms are written without being counted: what may be such, in a module in training, is put back in any case.
Of what ops that are watched have changed the log knows more, and replay starts from what forward left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from torch_remat._compat import BATCH_NORM, set_version, without_modes_for
from torch_remat.dispatch.log.meta import key_of
from torch_remat.dispatch.log.slot import COPIED_BYTES, UNCOUNTED, version_of


def buffered_globals(function: Any) -> list[Module]:
    """Return the modules with buffers among the global variables that a function names, or one defined in it."""
    if type(function) is MethodType:
        function = function.__func__
    if type(function) is not FunctionType:
        return []
    found: list[Module] = []
    code = function.__code__
    names: Sequence[str] = code.co_names
    if CodeType in map(type, code.co_consts):
        names = list(dict.fromkeys(_names_in(code)))
    for value in map(function.__globals__.get, names):
        if isinstance(value, Module):
            found += [module for module in value.modules() if module._buffers]
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if type(inner) is CodeType:
            yield from _names_in(inner)


_Place = tuple[dict[str, torch.Tensor | None], str]  # the buffers of a module, and a name there


class Buffer(NamedTuple):
    """A buffer at one time.

    Attributes:
        held: The buffers of its module.
        name: Its name there.
        tensor: The tensor.
        version: Its version counter.
        copy: What was in it; None if no copy was made.
    """

    held: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None


class Buffers:
    """The buffers that one region reaches.

    Args:
        modules: The modules that have some.
        has_policy: Whether a policy watches the region's ops.
    """

    __slots__ = ("_buffers", "_lazy", "_none", "_statistics")

    def __init__(self, modules: Sequence[Module], has_policy: bool) -> None:
        self._buffers: list[Buffer] = []
        self._statistics: set[int] = set()
        self._lazy: list[_Place] = []
        self._none: list[_Place] = []
        for module in modules:
            for name, tensor in module._buffers.items():
                if tensor is None:
                    if has_policy:  # by which replay must make it again, too
                        self._none.append((module._buffers, name))
                    continue
                if is_lazy(tensor):  # until the region initializes it
                    self._lazy.append((module._buffers, name))
                    continue
                if module.training and tensor.dim() == 1 and tensor.is_floating_point():
                    self._statistics.add(id(tensor))
                is_small = not tensor.is_sparse and tensor.nbytes <= COPIED_BYTES
                copied = is_small and not (has_policy or isinstance(module, BATCH_NORM))
                self._buffers.append(_as_it_is(module._buffers, name, tensor, copied))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield them."""
        for buffer in self._buffers:
            yield buffer.tensor

    def has_copy(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of them that replay finds as forward did."""
        key = key_of(tensor)
        return any(buffer.copy is not None and key_of(buffer.tensor) == key for buffer in self._buffers)

    def versions(self) -> list[int]:
        """Return how often each was changed."""
        return [version_of(buffer.tensor) for buffer in self._buffers]

    def leave_changed(self, versions: Sequence[int]) -> None:
        """Let those be as they are that an op has changed since, whose body replay does not run."""
        self._buffers = [
            buffer if version_of(buffer.tensor) == version else buffer._replace(copy=None)
            for buffer, version in zip(self._buffers, versions, strict=True)
        ]

    def finish(self, is_logged: Callable[[torch.Tensor], bool] | None, leaves_out: bool) -> bool:
        """At the end of forward: note what it has changed; return whether that is anything.

        Args:
            is_logged: Tells of a tensor whether the log knows of changes of it; None if there is no log.
            leaves_out: Whether replay does not run all of the region's Python.
        """
        changed = []
        for held, name in self._lazy:
            if (made := held.get(name)) is not None and not is_lazy(made):
                changed.append(_as_it_is(held, name, made, False))
        for buffer in self._buffers:
            held, name, tensor, version, copy = buffer
            if (
                version_of(tensor) != version
                or held.get(name) is not tensor
                or (id(tensor) in self._statistics and (copy is None or not _same(tensor, copy)))
            ):
                changed.append(buffer._replace(copy=None) if is_logged is not None and is_logged(tensor) else buffer)
        self._buffers, self._statistics = changed, set()
        self._none = [] if leaves_out else [(held, name) for held, name in self._none if held.get(name) is not None]
        return bool(changed or self._none)

    def go_back(self, is_logged: Callable[[torch.Tensor], bool] | None) -> list[Buffer]:
        """Return what buffers are now; let them be as forward found them, but for those that the log knows of.

        Args:
            is_logged: As for `finish`, while forward is not over.
        """
        now = []
        for held, name in [*((held, name) for held, name, *_ in self._buffers), *self._none]:
            if (tensor := held.get(name)) is not None:
                now.append(_as_it_is(held, name, tensor, True))
        for held, name in self._none:
            held[name] = None
        put_back([buffer for buffer in self._buffers if is_logged is None or not is_logged(buffer.tensor)])
        return now


def put_back(buffers: Sequence[Buffer]) -> None:
    """Let buffers be as they were, as far as that is known."""
    for held, name, tensor, version, copy in buffers:
        if copy is None:
            continue
        held[name] = tensor
        with without_modes_for(tensor), torch.no_grad():
            if tensor.shape != copy.shape:
                tensor.data = copy
            elif not _same(tensor, copy):  # what overlaps itself cannot be written
                tensor.data.copy_(copy)
        if version != UNCOUNTED:
            set_version(tensor, version)


def _as_it_is(held: dict[str, torch.Tensor | None], name: str, tensor: torch.Tensor, copied: bool) -> Buffer:
    copy = None
    if copied:
        with without_modes_for(tensor), torch.no_grad():
            copy = tensor.detach().clone()
    return Buffer(held, name, tensor, version_of(tensor), copy)


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.layout is not torch.strided:
        return False  # nobody knows
    with without_modes_for(tensor):
        return tensor.shape == copy.shape and torch.equal(tensor, copy)
