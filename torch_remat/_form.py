"""Calls of functions that take the user's function first and its arguments in a second call: errors say that form."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from torch_remat.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def with_form(form: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function say its form where arguments do not fit its signature.

    Args:
        form: How the function is called, as ``remat.explain(function)(*args, **kwargs)``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(function)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                parameters.bind(*args, **kwargs)
            except TypeError as error:
                raise UsageError(f"{function.__name__}(): {error}", remedy=f"The form is {form}.") from None
            return function(*args, **kwargs)

        return checked

    return decorate
