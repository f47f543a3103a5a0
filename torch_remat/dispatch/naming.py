"""Names: the scopes around ops, default names of regions, and where in the module tree an op runs.

In: the modules that run in a region. Kept: nothing past the forward. Out: a path from the region's root, such as
``attention.query``; empty in the root itself.

The stack shows which module runs. Hooks on modules, which `torch.utils.module_tracker` uses, make the whole step 7 %
slower, mostly in torch: a module without hooks is called in a shorter way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import unwrap
from typing import Any

from torch.nn import Module

_call: Any = Module.__call__
_CALL = _call.__code__


def default_name(function: Callable[..., Any] | str | None) -> str:
    """Return a readable name for a region that the user did not name: that of its function or module class.

    Args:
        function: The function, or its qualified name.
    """
    while isinstance(function, partial):
        function = function.func
    if getattr(function, "__func__", None) is _call:  # the call of a module's base class
        function = function.__self__  # type: ignore[union-attr]
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


class ModulePath:
    """Finds the paths of modules.

    Args:
        function: The region's function. A module, or the module whose method it is, is the root. Of a module that
            belongs to none that is known the path is its class.

    Attributes:
        end: The frame to which the stack is the region's; None once the function is over.
    """

    end: Any = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._names: dict[int, str] = {}  # by the identity of each module; empty until one runs
        self._known: list[Module] = []  # so that no other gets the identity

    def of(self, frame: Any) -> str:
        """Return the path of the module whose code runs in a frame, with a final dot unless it is empty."""
        end, code = self.end, _CALL
        if frame is end:
            return ""
        frame = frame.f_back  # the caller itself is no call of a module
        try:
            while frame is not end:
                if frame.f_code is code:
                    path = self._names.get(id(frame.f_locals["self"]))
                    return self._learn_around(frame) if path is None else path
                frame = frame.f_back
        except AttributeError:  # the stack of another thread, which a backward has, ends before
            return ""
        return ""

    def _learn_around(self, frame: Any) -> str:
        """Learn the modules that run around a frame, the outermost first; return the path of the innermost."""
        if not self._names:
            # A decorated method is known by its module: what it wraps is a function, which has none.
            root = unwrap(self._function, stop=lambda function: isinstance(_owner_of(function), Module))
            if isinstance(root := _owner_of(root), Module):
                self._learn(root, "")
        running: list[Module] = []
        while frame is not self.end and frame is not None:
            if frame.f_code is _CALL:
                running.append(frame.f_locals["self"])
            frame = frame.f_back
        for module in reversed(running):
            if id(module) not in self._names:
                self._learn(module, type(module).__name__)
        return self._names[id(running[0])]

    def _learn(self, module: Module, name: str) -> None:
        """Learn the names that `named_modules` gives, in its order, past its generators in each other."""
        names, todo = self._names, [(name + "." if name else "", module)]
        while todo:
            path, inner = todo.pop()
            if id(inner) not in names:
                names[id(inner)] = path
                self._known.append(inner)
                if children := inner._modules:
                    todo += [(f"{path}{key}.", child) for key, child in [*children.items()][::-1] if child is not None]


def _owner_of(function: Any) -> Any:
    return function if isinstance(function, Module) else getattr(function, "__self__", None)
