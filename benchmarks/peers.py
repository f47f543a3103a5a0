"""Other versions of torch_remat, loaded beside the one under test: releases, and another checkout.

The releases on PyPI have the package name of this repository, so each is installed into a folder of its own,
``.peers/torch_remat-<version>``, and loaded under a module name of its own, ``torch_remat_<version>``. Their
modules import each other as ``torch_remat...``, at the top and inside functions. The loader here renames those
imports in the syntax tree before it compiles a module: nothing in ``sys.modules`` is swapped, imports that run
late find the right package too, and what runs is otherwise the code as it was released. Another checkout of this
repository is loaded in the same way, from its own folder.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

PACKAGE = "torch_remat"
FOLDER = Path(__file__).resolve().parent.parent / ".peers"


def load(version: str) -> ModuleType:
    """Return the release ``version`` of torch_remat, installed first if it is not there yet."""
    return _load(f"{PACKAGE}_{version.replace('.', '_')}", install(version))


def load_checkout(folder: Path) -> ModuleType:
    """Return the package in another checkout of this repository, under the name ``torch_remat_before``."""
    if not (folder / PACKAGE / "__init__.py").is_file():
        raise FileNotFoundError(f"{folder} is no checkout: it has no {PACKAGE}/__init__.py")
    return _load(f"{PACKAGE}_before", folder)


def _load(alias: str, folder: Path) -> ModuleType:
    if alias not in sys.modules:
        sys.meta_path.insert(0, _PeerFinder(alias, folder))
    return importlib.import_module(alias)


def install(version: str) -> Path:
    """Return the folder that holds the release, after installing it with pip where it is missing.

    Raises:
        RuntimeError: pip could not install it. The message holds what pip printed.
    """
    target = FOLDER / f"{PACKAGE}-{version}"
    if target.is_dir():
        return target
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    # Installed aside and renamed, so that an interrupted install is not taken for a finished one.
    with tempfile.TemporaryDirectory(dir=FOLDER) as staging:
        fresh = Path(staging) / "installed"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        command = [*pip, "--target", str(fresh), f"{PACKAGE}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"cannot install {PACKAGE}=={version} to compare with:\n{done.stderr.strip()}")
        fresh.rename(target)
    return target


class _PeerFinder(importlib.abc.MetaPathFinder):
    """Finds ``alias`` and its submodules in the folder of one version."""

    def __init__(self, alias: str, folder: Path) -> None:
        self.alias = alias
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root, *rest = fullname.split(".")
        if root != self.alias:
            return None
        place = self.folder.joinpath(PACKAGE, *rest)
        package = place.is_dir()
        file = str(place / "__init__.py" if package else place.with_suffix(".py"))
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=_RenamingLoader(fullname, file),
            submodule_search_locations=[str(place)] if package else None,
        )


class _RenamingLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module from its source, with imports of ``torch_remat`` turned to the alias of its version."""

    def get_code(self, fullname: str) -> CodeType:
        # Not through the bytecode cache: pip fills that with the code before renaming.
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        return compile(_RenameImports(fullname.split(".")[0]).visit(tree), path, "exec", dont_inherit=True)


class _RenameImports(ast.NodeTransformer):
    def __init__(self, alias: str) -> None:
        self.alias = alias

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if node.level == 0 and node.module is not None:
            node.module = self._renamed(node.module)
        return node

    def visit_Import(self, node: ast.Import) -> ast.Import:
        for name in node.names:
            if name.name == PACKAGE and name.asname is None:
                name.asname = PACKAGE  # the module's own code still says torch_remat
            name.name = self._renamed(name.name)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        # import_module("torch_remat.reports"), however it is called: what loads on first use may be named so.
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "import_module":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    argument.value = self._renamed(argument.value)
        return self.generic_visit(node)  # type: ignore[return-value]

    def _renamed(self, module: str) -> str:
        root, dot, rest = module.partition(".")
        return self.alias + dot + rest if root == PACKAGE else module
