"""Modules found by patterns, and callables that are attributes of modules.

In: a model and patterns; a module. Kept: a weak reference to it, so that an attribute makes no cycle. Out: the modules
that a pattern matches; a callable that a copy of the module, a deep one or an unpickled one, has for itself.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from weakref import ref

from torch.compiler import is_compiling
from torch.nn import Module

from torch_remat._compat import WRAPPED_BY_COMPILE, WRAPPED_BY_FSDP1
from torch_remat.errors import UsageError

Pattern = str | type[Module]


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

    def module_if_there(self) -> Module | None:
        """Return the module; None if it is gone."""
        return self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> OfModule:
        return type(self)(memo.get(id(self._reference())), *self.parts(memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._reference(), *self.parts(None))


def _nothing() -> None:
    return None


class ForwardOfModule(OfModule):
    """A ``forward`` that is an attribute of a module, around what the module runs without it.

    Args:
        module: The module.
        earlier: What was the module's ``forward`` before, unless that is the one of its class.
    """

    __slots__ = ("earlier",)

    def __init__(self, module: Module | None, earlier: Callable[..., Any] | None = None) -> None:
        super().__init__(module)
        self.earlier = earlier

    def parts(self, memo: dict[int, Any] | None) -> tuple[Any, ...]:
        """Return what was ``forward`` before."""
        return (self.earlier if memo is None else deepcopy(self.earlier, memo),)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What was ``forward`` before, whose signature this has."""
        if self.earlier is not None:
            return self.earlier
        module = self.module
        forward: Any = type(module).forward  # of its class as it is now: fully_shard changes it
        # The compiler does not know, in Python 3.10, `__get__`.
        function: Callable[..., Any] = partial(forward, module) if is_compiling() else forward.__get__(module)
        return function

    def remove(self) -> None:
        """Make the module what it was."""
        module = self.module_if_there()
        if module is None or vars(module).get("forward") is not self:
            return
        if self.earlier is None:
            del module.forward
        else:
            module.forward = self.earlier


def is_pattern(value: object) -> bool:
    """Whether a value is a non-empty pattern on names, or a class of modules."""
    return issubclass(value, Module) if isinstance(value, type) else isinstance(value, str) and value != ""


def callable_modules(model: Module) -> Iterator[tuple[str, Module]]:
    """Yield the submodules that have a forward, by each of their names, but no wrappers of torch's around another."""
    for path, module in model.named_modules(remove_duplicate=False):
        name = ".".join(part for part in path.split(".") if part not in _WRAPPED)
        if name and _WRAPPED.isdisjoint(module._modules) and _has_forward(module):
            yield name, module


# Of such a wrapper the module inside is what a pattern means. A region inside of FSDP's is as if it had been made
# before: what FSDP does to parameters is outside of it.
_WRAPPED = frozenset((WRAPPED_BY_COMPILE, WRAPPED_BY_FSDP1))


def _has_forward(module: Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not Module.forward


def matches(name: str, module: Module, pattern: Pattern) -> bool:
    """Whether a module of a name is one that a pattern means."""
    return fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern)


def near(pattern: Pattern, named: Sequence[tuple[str, Module]]) -> str:
    """Return what may have been meant by a pattern that matches nothing."""
    if not isinstance(pattern, str):
        classes = dict.fromkeys(type(module).__qualname__ for _, module in named)
        return f"Classes in it: {', '.join([*classes][:8]) or 'none'}."
    names = list(dict.fromkeys(name for name, _ in named))
    near = get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:5]
    series = dict.fromkeys(re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name) for name in names)
    meant = "".join(f"Did you mean {one!r}? " for one in get_close_matches(pattern, series, n=1))
    return f"{meant}Near names: {', '.join(sorted(near, key=names.index)) or 'none'}."


def told(pattern: object) -> str:
    """Return a pattern as text."""
    return pattern.__qualname__ if isinstance(pattern, type) else repr(pattern)
