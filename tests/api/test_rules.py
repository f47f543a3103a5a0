"""The rules of the package: who imports whom, and where private torch names may stand.

errors, _compat  <-  policies/, offload/, ladders/  <-  dispatch/  <-  face  <-  reports/, budgets/, dtr/

An arrow points to what may be imported.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torch_remat"
NAME = "torch_remat"
FILES = sorted(PACKAGE.rglob("*.py"))
ALLOWED = {"torch", "optree", "networkx", NAME} | set(sys.stdlib_module_names)
# What is loaded only where it is used, and does not know who loads it; the first is for type checkers.
LAZY = {
    (NAME, f"{NAME}.dtr"),
    (f"{NAME}._checkpoint", f"{NAME}.reports.debug_log"),
    (f"{NAME}._checkpoint", f"{NAME}.reports.watch"),
}


MAX_FUNCTION_LINES = 60  # without the docstring


def lines_of_functions(tree: ast.AST) -> list[tuple[str, int]]:
    """Return each function with the number of its lines after the docstring."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found.append((node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0))
    return found


def module_of(path: Path) -> str:
    """Return a file's dotted module name."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    """Return how high a module of the package stands."""
    parts = module.split(".")[1:]
    if not parts:
        return 5  # the package itself gathers the public names
    if parts[0] == "dtr":
        return 6  # the bench: nothing imports it
    if parts[0] in {"errors", "_compat", "_requires", "_version"} or parts[:2] == ["_util", "lazy"]:
        return 0
    return {"policies": 1, "offload": 1, "ladders": 1, "dispatch": 2, "reports": 4, "budgets": 4}.get(parts[0], 3)


def imports(tree: ast.AST, module: str, is_package: bool) -> list[str]:
    """Return the dotted names that a file imports, at any depth; of the package, the modules."""
    found = []
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            of_package = base.split(".")[0] == NAME
            found += [base if of_package and not is_module(name) else name for name in names]
    return found


def is_module(name: str) -> bool:
    """Tell whether a dotted name is a module of the package."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def wrong_directions(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return the package's modules that a file imports and must not; the package itself has the public names."""
    names = [name for name in imports(ast.parse(source), module, is_package) if name.split(".")[0] == NAME]
    return [name for name in names if layer(name) > layer(module) and (module, name) not in LAZY]


def dotted(node: ast.AST) -> str | None:
    """Return `a.b.c` for an attribute chain on a plain name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def private_names(source: str, *_: object) -> list[str]:
    """Return the private torch names that a file takes: imports, attribute chains, `getattr` with a literal."""
    tree = ast.parse(source)
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    names = imports(tree, "x", is_package=False)
    for node in ast.walk(tree):
        chain = dotted(node)
        if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) > 1:
            literal = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            chain = f"{dotted(node.args[0])}.{literal}"
        if chain:
            root, _, rest = chain.partition(".")
            names.append(f"{aliases.get(root, root)}.{rest}")
    return sorted({name for name in names if name.split(".")[0] == "torch" and any(map(is_private, name.split(".")))})


def is_private(part: str) -> bool:
    """Tell whether one part of a dotted name is private; `__version__` is not."""
    return part.startswith("_") and not part.startswith("__")


def foreign_modules(source: str, module: str, is_package: bool = False) -> list[str]:
    """Return the imports from elsewhere than torch, optree, networkx and the standard library.

    `typing_extensions` is for type checkers alone.
    """
    source = source.replace("if TYPE_CHECKING:\n    from typing_extensions import Unpack\n", "")
    names = {name.split(".")[0] for name in imports(ast.parse(source), module, is_package) if name}
    return sorted(names - ALLOWED - ({"matplotlib"} if layer(module) in (4, 6) else set()))


def assert_none(found: Callable[[str, str, bool], object], allowed: tuple[str, ...] = ()) -> None:
    """Assert that a rule finds nothing in any file; it takes the source, the module and whether that is a package."""
    wrong = {
        str(path.relative_to(PACKAGE)): breaks
        for path in FILES
        if path.name not in allowed
        and (breaks := found(path.read_text(encoding="utf-8"), module_of(path), path.name == "__init__.py"))
    }
    assert wrong == {}


def test_files_keep_to_the_import_direction():
    assert_none(wrong_directions)


def test_only_compat_names_private_torch_symbols():
    assert_none(private_names, allowed=("_compat.py",))


def test_files_import_nothing_but_their_packages_and_the_standard_library():
    assert_none(foreign_modules)


def test_files_say_what_they_are_for_and_their_functions_are_short():
    assert_none(lambda source, *_: not ast.get_docstring(ast.parse(source)))
    assert_none(
        lambda source, *_: [name for name, lines in lines_of_functions(ast.parse(source)) if lines > MAX_FUNCTION_LINES]
    )


def test_no_files_import_each_other_in_a_circle():
    known = {module_of(path) for path in FILES}
    edges = {
        module_of(path): {
            name
            for name in imports(ast.parse(path.read_text("utf-8")), module_of(path), path.name == "__init__.py")
            if name in known and name not in (NAME, module_of(path))
        }
        for path in FILES
        if module_of(path) != NAME  # the package itself gathers the public names
    }
    graphlib.TopologicalSorter(edges).prepare()  # which raises


INSIDE = f"{NAME}.dispatch.options"
FACE = next(path.stem for path in FILES if layer(module_of(path)) == 3)
BREAKS = [
    (wrong_directions, f"from .. import {FACE}", INSIDE),
    (wrong_directions, f"def f():\n    from torch_remat.{FACE} import x", INSIDE),
    (wrong_directions, "from .dispatch import region", f"{NAME}.errors"),
    (wrong_directions, "from torch_remat import checkpoint", INSIDE),
    (wrong_directions, "from .. import checkpoint", INSIDE),
    (wrong_directions, "import torch_remat", INSIDE),
    (private_names, "import torch\ntorch._C._x()", INSIDE),
    (private_names, "from torch.utils._python_dispatch import TorchDispatchMode", INSIDE),
    (private_names, "import torch.utils.checkpoint as c\nc._Handle", INSIDE),
    (private_names, "from torch import Tensor\nTensor._make_wrapper_subclass", INSIDE),
    (private_names, "import torch\ngetattr(torch, '_C')", INSIDE),
    (foreign_modules, "import numpy.linalg", INSIDE),
]
KEEPS = [
    (wrong_directions, "from ..errors import RematError", INSIDE),
    (wrong_directions, "from .. import _compat, errors", INSIDE),
    (private_names, "import torch\ntorch.__version__\ntorch.nn.Module", INSIDE),
    (foreign_modules, "import matplotlib", f"{NAME}.reports.pictures"),
]


def test_rules_find_what_breaks_them():
    assert lines_of_functions(ast.parse("def f():\n    'what'\n    x = 1\n    return x")) == [("f", 2)]
    assert [case for case in BREAKS if not case[0](*case[1:])] == []
    assert [case for case in KEEPS if case[0](*case[1:])] == []
