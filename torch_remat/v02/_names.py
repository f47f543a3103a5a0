"""Checks of names, whose errors are also of the types that 0.2.x raises."""

from __future__ import annotations

from torch_remat.errors import UsageError


class EmptyNameError(UsageError, ValueError):
    """A name is empty."""


def checked(name: object, what: str) -> str:
    """Return a name if it is a string with something in it.

    Args:
        name: The name.
        what: What it names, as in ``"a region"``.

    Raises:
        UsageError: It is no string, or (an `EmptyNameError`) it is empty.
    """
    if not isinstance(name, str):
        raise UsageError(f"the name of {what} must be a string, and is {name!r}")
    if not name:
        raise EmptyNameError(f"the name of {what} must not be empty")
    return name
