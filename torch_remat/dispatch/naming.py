"""Names: the scopes around ops, and default names of regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch.nn import Module


def default_name(function: Callable[..., Any] | str | None) -> str:
    """Return a readable name for a region that the user did not name: that of its function or module class.

    Args:
        function: The function, or its qualified name.
    """
    while isinstance(function, partial):
        function = function.func
    # A module looks in Python for what it does not have.
    own = None if isinstance(function, Module) else getattr(function, "__qualname__", None)
    name: str = function if isinstance(function, str) else own or type(function).__name__
    # Without the functions around it, and of ``torch.sin`` without a class that nobody knows.
    return name.rpartition("<locals>.")[2].removeprefix("_VariableFunctionsClass.")


# What `name_scope` puts before the names of ops. A replay has the scopes that were around its region.
scope: ContextVar[str] = ContextVar("torch_remat_name_scope", default="")


@contextmanager
def scope_restored(prefix: str) -> Iterator[None]:
    """Run with the given scopes instead of the present ones."""
    token = scope.set(prefix)
    try:
        yield
    finally:
        scope.reset(token)
