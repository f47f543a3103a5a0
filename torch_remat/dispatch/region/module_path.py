"""Where in the module tree an op runs, for automatic names.

In: the modules that run in a region. Kept: nothing past the forward. Out: a path from the region's root, such as
``attention.query``; empty in the root itself.

`torch.utils.module_tracker` names modules in the same way, but also follows the backward: for that it runs ops of its
own, which would be ops of the region, and hangs hooks into the region's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from threading import get_ident
from typing import Any
from weakref import ref

from torch.compiler import is_compiling
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModulePath:
    """The path of the module that runs; a context manager around the region's function.

    Args:
        function: The region's function. A module, or the module whose method it is, is the root. Of a module that
            belongs to none that is known the path is its class.

    Attributes:
        stack: The paths of the modules that run, the innermost last, each with a final dot unless it is empty.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.stack = [""]
        self._function = function
        self._names: dict[ref[Module], str] = {}  # empty until a module runs

    def __enter__(self) -> ModulePath:
        """Begin to follow the modules of this thread."""
        self._thread = get_ident()
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        return self

    def __exit__(self, *exception: object) -> None:
        """Let go of the modules."""
        for hook in self._hooks:
            hook.remove()

    def _learn_root(self) -> None:
        # A decorated method is known by its module: what it wraps is a function, which tells of none.
        root = unwrap(self._function, stop=lambda function: isinstance(_owner_of(function), Module))
        if isinstance(root := _owner_of(root), Module):
            self._learn(root, "")

    def _learn(self, module: Module, name: str) -> None:
        for path, inner in module.named_modules(prefix=name):
            self._names.setdefault(ref(inner), path + "." if path else "")

    def _enter(self, module: Module, _args: Any) -> None:
        if is_compiling():
            return
        if get_ident() == self._thread:
            if not self._names:
                self._learn_root()
            name = self._names.get(ref(module))
            if name is None:
                self._learn(module, type(module).__name__)
                name = self._names[ref(module)]
            self.stack.append(name)

    def _leave(self, _module: Module, _args: Any, _output: Any) -> None:
        if is_compiling():
            return
        if get_ident() == self._thread and len(self.stack) > 1:
            self.stack.pop()


def _owner_of(function: Any) -> Any:
    return function if isinstance(function, Module) else getattr(function, "__self__", None)
