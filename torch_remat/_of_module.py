"""Callables that are attributes of modules, for which an attribute must not be a bound method.

In: a module. Kept: a weak reference to it, so that the attribute makes no cycle. Out: a callable that a copy of the
module, a deep one or an unpickled one, has for itself.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any
from weakref import ref

from torch.nn import Module

from torch_remat.errors import UsageError


class OfModule:
    """A callable that belongs to a module and is copied and pickled with it.

    Args:
        module: The module; None for one that is gone.
    """

    __slots__ = ("__weakref__", "_reference")

    def __init__(self, module: Module | None) -> None:
        self._reference = _nothing if module is None else ref(module)

    @abstractmethod
    def parts(self, memo: dict[int, Any] | None) -> tuple[Any, ...]:
        """Return what ``__init__`` takes besides the module; for a deep copy if there is a memo."""

    @property
    def module(self) -> Module:
        """The module.

        Raises:
            UsageError: It is gone.
        """
        module = self._reference()
        if module is None:
            raise UsageError(
                "the module that this function belongs to is gone",
                remedy="Keep the module as long as what was taken from it; copy the module, not its function.",
            )
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> OfModule:
        return type(self)(memo.get(id(self._reference())), *self.parts(memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._reference(), *self.parts(None))


def _nothing() -> None:
    return None
