"""Public names whose modules are loaded when somebody first asks for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any


def loaded_on_use(
    package: str, names: Mapping[str, Sequence[str]], others: Sequence[ModuleType] = ()
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: Its name.
        names: The public names by the module that has them; the name of a module for itself.
        others: Modules in which a name may be meant that the package does not have.
    """
    module_of = {name: module for module, listed in names.items() for name in listed}

    def load(name: str) -> Any:
        if name not in module_of:
            hint = next((f"; it is {one.__name__}.{name}" for one in others if name in one.__all__), "")
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules.get(package)
            )
        module = import_module(f"{package}.{module_of[name]}")
        value = module if name == module_of[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load
