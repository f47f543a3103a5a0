"""Ambient state: what replay must see as forward did, though no argument carries it.

In: the state at a region's call. Kept: autocast and the default device as small values, torch-function modes until
replay; the state of a random generator only if the region drew from it. Out: the contexts in which replay runs,
entered only where they differ.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from torch_remat._compat import (
    accelerator_type,
    any_autocast_enabled,
    function_mode_depth,
    function_modes,
    with_function_mode,
)


class Ambient(NamedTuple):
    """Autocast, default device, current device and torch-function modes of users at the time of a region's call."""

    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    device: torch.device | None
    device_index: int | None
    modes: tuple[TorchFunctionMode, ...] = ()

    def contexts(self) -> list[AbstractContextManager[object]]:
        """Return the contexts that turn the present state into this one; usually an empty list."""
        present = capture_ambient()
        if present is self or present == self:
            return []
        needed: list[AbstractContextManager[object]] = []
        if present.autocast != self.autocast:
            needed += [torch.autocast(device, enabled=False) for device, *_ in present.autocast]
            needed += [
                torch.autocast(device, dtype=dtype, enabled=True, cache_enabled=cached)
                for device, dtype, cached in self.autocast
            ]
        if present.device != self.device:
            needed.append(self.device or torch.device("cpu"))
        if present.device_index != self.device_index:
            needed.append(torch.accelerator.device_index(self.device_index))
        # `Tensor.backward` is a torch function: the modes around it are off while it runs.
        needed += [with_function_mode(mode) for mode in self.modes if not any(mode is one for one in present.modes)]
        return needed


def capture_ambient() -> Ambient:
    """Return the present ambient state."""
    if not any_autocast_enabled() and not function_mode_depth() and len(_device_types()) == 1:
        return _PLAIN
    device, modes = (torch.get_default_device(), function_modes()) if function_mode_depth() else (None, ())
    return Ambient(_autocast_state(), device, _current_device_index(), modes)


_PLAIN = Ambient((), None, None)


@cache
def _device_types() -> tuple[str, ...]:
    found = accelerator_type()
    return ("cpu",) if found == "cpu" else ("cpu", found)


def _autocast_state() -> tuple[tuple[str, torch.dtype, bool], ...]:
    enabled = [device for device in _device_types() if torch.is_autocast_enabled(device)]
    if not enabled:
        return ()
    cached = torch.is_autocast_cache_enabled()
    return tuple((device, torch.get_autocast_dtype(device), cached) for device in enabled)


def _current_device_index() -> int | None:
    # Only CUDA says without side effects whether it is in use; elsewhere autograd's threads set the device.
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


class RngState:
    """The random generators that a region drew from, as they were at its start.

    Args:
        extra: Generators that the region got as arguments or reaches by itself, besides the default ones.
    """

    __slots__ = ("_states",)

    def __init__(self, extra: Sequence[torch.Generator]) -> None:
        if not extra and len(_device_types()) == 1:
            self._states = [(torch.default_generator, torch.default_generator.get_state())]
            return
        generators = {id(generator): generator for generator in (*_default_generators(), *extra)}
        self._states = [(generator, generator.get_state()) for generator in generators.values()]

    def keep_drawn(self) -> bool:
        """At the region's end: forget the generators that it did not draw from; return whether any is left.

        Code that draws and leaves a generator as it was at the region's start, by seeding it, is not recognized.
        """
        self._states = [(one, start) for one, start in self._states if not _equal(start, one.get_state())]
        return bool(self._states)

    @classmethod
    def of(cls, states: list[tuple[torch.Generator, torch.Tensor]]) -> RngState:
        """Return the given states as one."""
        made = cls.__new__(cls)
        made._states = states
        return made

    def present(self) -> RngState:
        """Return the present state of the same generators."""
        return RngState.of([(generator, generator.get_state()) for generator, _ in self._states])

    def drawn(self) -> RngState | None:
        """Return the present state of the generators that were drawn from since, or None if none was."""
        ends = []
        for generator, start in self._states:
            end = generator.get_state()
            if not _equal(start, end):
                ends.append((generator, end))
        return RngState.of(ends) if ends else None

    def kept(self) -> list[torch.Tensor]:
        """Return the states, as byte tensors."""
        return [state for _, state in self._states]

    def restore(self, among: RngState | None = None) -> None:
        """Put the generators into these states, by default all of them."""
        known = None if among is None else {id(generator) for generator, _ in among._states}
        for generator, state in self._states:
            if known is None or id(generator) in known:
                generator.set_state(state)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Let the region draw the same numbers again, and leave the generators as they are now."""
        present = self.present()
        self.restore()
        try:
            yield
        finally:
            present.restore()


class Draws:
    """Which calls of a region draw random numbers; asked once a call as long as none does.

    Whether the call drew the first state that differs, or earlier code did, is not known: it is noted anyway,
    since replay is to have it after the call in any case.

    Args:
        start: The state at the region's start.
    """

    def __init__(self, start: RngState) -> None:
        self._seen = start
        self._any = False

    def begin(self) -> None:
        """Note that a call begins."""
        if self._any:
            self._seen = self._seen.present()

    def end(self) -> RngState | None:
        """Return where a call left the generators; None if it did not draw."""
        drawn = self._seen.drawn()
        if drawn is not None:
            self._any = True
            self._seen = self._seen.present()
        return drawn


def _default_generators() -> Sequence[torch.Generator]:
    if len(_device_types()) == 1:
        return (torch.default_generator,)
    if torch.cuda.is_initialized():
        return (torch.default_generator, *torch.cuda.default_generators)
    if torch.xpu.is_initialized():
        return (torch.default_generator, *torch.xpu.default_generators)
    return (torch.default_generator,)


# It holds the interpreter's lock: that takes longer to release than a few kilobytes to compare.
_memcmp = ctypes.PyDLL(None).memcmp if os.name == "posix" else ctypes.PyDLL("msvcrt").memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # A generator's state is a byte tensor on the CPU. torch.equal would be an op, which dispatch modes would see.
    size = one.nbytes
    return size == other.nbytes and not _memcmp(one.data_ptr(), other.data_ptr(), size)
