"""Callables that are attributes of modules, for which an attribute must not be a bound method.

In: a module. Kept: a weak reference to it, so that the attribute makes no cycle. Out: a callable that a copy of the
module, a deep one or an unpickled one, has for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch.compiler import is_compiling
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

    def parts(self, memo: dict[int, Any] | None) -> tuple[Any, ...]:
        """Return what ``__init__`` takes besides the module; for a deep copy if there is a memo."""
        raise NotImplementedError

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


def method_of(function: Any, module: Module, named: bool) -> Callable[..., Any]:
    """Return a function as a method of a module.

    Args:
        function: The function.
        module: The module.
        named: Whether names of ops have to begin below the module. What looks for it there follows ``__wrapped__`` of a
            decorated function, which leads past the method to a function that knows no module.
    """
    if named and hasattr(function, "__wrapped__") and not is_compiling():
        function = _without_wrapped(function)
    method: Callable[..., Any] = function.__get__(module)  # MethodType is unknown to the compiler
    return method


def _without_wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(module: Module, /, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    forward.__qualname__ = function.__qualname__
    return forward
