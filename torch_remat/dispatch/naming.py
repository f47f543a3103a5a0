"""Default names of regions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def default_name(function: Callable[..., Any] | None) -> str:
    """Return a readable name for a region that the user did not name: that of its function or module class."""
    while isinstance(function, partial):
        function = function.func
    name: str = getattr(function, "__qualname__", None) or type(function).__name__
    return name.rpartition("<locals>.")[2]
