"""What a call is given: its arguments, and the variables that its function reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, MappingProxyType
from typing import Any

import torch
from torch.nn import Module

from torch_remat.dispatch.keys import key_of, keys_of, version_of
from torch_remat.dispatch.reach import Place, reach

_NONE: Mapping[int, Any] = MappingProxyType({})


class Given:
    """The arguments of a call, then the variables that its function reaches, which are looked for when asked for.

    Args:
        function: The function; None if it has no variables.
        leaves: The leaves of the arguments.
        keys: The storages of all of them, if these are known.
    """

    used: Mapping[int, tuple[int, Any]] = _NONE  # places of variables that replay is to find, by their number
    before: Sequence[tuple[torch.Tensor, int]] = ()  # those that the call may modify, with their versions
    _places: Sequence[Place] | None = None
    _by_key: dict[int, int] | None = None
    _has_keys_of_variables = False

    def __init__(self, function: Any, leaves: Sequence[Any], keys: Sequence[int] | None = None) -> None:
        self.leaves = leaves
        self._function = function
        self._all_keys = keys

    def place_at(self, key: int) -> int | None:
        """Return which of them has a storage; None if none has. The variables are looked for if no argument has it."""
        if self._all_keys is not None and key not in self._all_keys:
            return None
        if self._by_key is None:
            self._by_key = {}
            for place, leaf in enumerate(self.leaves):
                for part in keys_of(leaf) if isinstance(leaf, torch.Tensor) else ():
                    self._by_key.setdefault(part, place)
        if key not in self._by_key and not self._has_keys_of_variables:
            self._has_keys_of_variables = True
            self.variables()
            for place, variable in enumerate(self._places or (), len(self.leaves)):
                if variable.tensor is not None and variable.tensor.layout is torch.strided:
                    self._by_key.setdefault(key_of(variable.tensor), place)
        return self._by_key.get(key)

    def variables(self) -> Sequence[torch.Tensor]:
        """Return the tensors that the function reaches besides."""
        if self._places is None:
            self._places = [] if self._function is None else variables_of(self._function, self.leaves)
        return [place.tensor for place in self._places if place.tensor is not None]

    def keys(self) -> Sequence[int]:
        """Return the storages of all of them."""
        self.place_at(-1)
        return () if self._by_key is None else list(self._by_key)

    def find(self, tensor: torch.Tensor, key: int) -> tuple[int, torch.Tensor] | None:
        """Return which of them a tensor is, or else shares the storage of, and that one; None if it is new."""
        for place, leaf in enumerate(self.leaves):
            if leaf is tensor:
                return place, leaf
        found = self.place_at(key)
        return None if found is None else (found, self.at(found))

    def at(self, place: int) -> Any:
        """Return one of them."""
        at = place - len(self.leaves)
        return self.leaves[place] if at < 0 or self._places is None else self._places[at].tensor

    def use(self, place: int) -> None:
        """Note that replay reads one of them."""
        at = place - len(self.leaves)
        if at >= 0 and self._places is not None:
            self.used = {**self.used, place: (at, self._places[at].key)}

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Whether the call has modified one of them so far."""
        return any(one is tensor and version_of(one) != version for one, version in self.before)

    def is_of_module(self, place: int) -> bool:
        """Whether it is a buffer or an attribute of a module, which no region makes."""
        at = place - len(self.leaves)
        if at < 0 or self._places is None:
            return False
        holder = self._places[at].holder
        return self._places[at].module is not None or (type(holder) is dict and "_parameters" in holder)


NOTHING = Given(None, ())


def variables_of(function: Any, leaves: Sequence[Any]) -> list[Place]:
    """Return where the tensors are that a call reaches besides its arguments, in the same order in both phases."""
    owner = getattr(function, "__self__", None)
    if type(function) is BuiltinFunctionType or isinstance(owner, type):  # or the ``apply`` of a custom Function
        return [Place(None, "self", owner, None)] if isinstance(owner, torch.Tensor) else []
    return reach(function, [leaf for leaf in leaves if isinstance(leaf, Module)]).tensors
