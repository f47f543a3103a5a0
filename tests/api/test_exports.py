"""The public surface."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import types
from importlib import resources
from pathlib import Path

import torch_remat


def test_all_is_sorted_and_holds_every_public_name():
    assert list(torch_remat.__all__) == sorted(torch_remat.__all__)
    public = {
        name
        for name in dir(torch_remat)
        if not name.startswith("_") and not isinstance(getattr(torch_remat, name), types.ModuleType)
    }
    modules = {name for name in torch_remat.__all__ if isinstance(getattr(torch_remat, name), types.ModuleType)}
    assert modules == {"dtr", "policies", "testing"}
    assert public == set(torch_remat.__all__) - modules
    assert len(torch_remat.__all__) <= 43


def test_classes_of_results_are_found_in_their_rooms():
    for room in (torch_remat.budgets, torch_remat.offload, torch_remat.reports):
        for name in room.__all__:
            assert getattr(room, name).__module__.startswith(room.__name__), name
            assert name in ("Offloader",) or name not in torch_remat.__all__, name


LATER = (
    *("_drop_in", "modules"),
    *("dtr", "testing", "reports", "offload.cpu", "offload.disk"),
    *("policies.ready", "policies.by_op", "policies.names"),
)


def test_import_leaves_out_what_a_training_step_may_do_without():
    program = """
import sys
import torch_remat
loaded = [name for name in sys.modules if name.startswith("torch_remat.")]
assert not set(torch_remat.__all__) - set(dir(torch_remat))
assert loaded == [name for name in sys.modules if name.startswith("torch_remat.")]  # dir() loads nothing
assert not {"matplotlib", "networkx", "optree"} & set(sys.modules)
print(*loaded)
for name in torch_remat.__all__:
    getattr(torch_remat, name)
torch_remat.policies.save_matmuls
print(*(name for name in sys.modules if name.startswith("torch_remat.")))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True, env=os.environ
    )
    at_first, in_the_end = (set(line.split()) for line in done.stdout.splitlines())
    for module in LATER:
        name = f"torch_remat.{module}"
        assert not {found for found in at_first if found == name or found.startswith(name + ".")}, module
        assert {found for found in in_the_end if found == name or found.startswith(name + ".")}, module


def test_what_loads_later_is_known_to_type_checkers_and_is_what_it_should_be():
    source = Path(torch_remat.__file__).read_text(encoding="utf-8")
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    told = {alias.name: node.module for node in block.body for alias in node.names}
    loaded = {name: module for module, names in torch_remat._LOADED_ON_USE.items() for name in names}
    for name, module in loaded.items():
        assert told.pop(name) == ("torch_remat" if module == name else f"torch_remat.{module}")
        assert getattr(torch_remat, name).__name__ in (name, f"torch_remat.{name}")
    assert not told


def test_checkpoint_is_a_function_and_the_package_is_typed():
    assert isinstance(torch_remat.checkpoint, types.FunctionType)
    assert resources.files(torch_remat).joinpath("py.typed").is_file()
