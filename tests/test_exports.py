"""The public surface."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib import resources

import pytest

import torch_remat


def test_all_is_sorted_and_holds_every_public_name():
    public = [
        name
        for name, value in vars(torch_remat).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]
    exported = [name for name in torch_remat.__all__ if not name.startswith("__")]
    modules = [name for name in exported if isinstance(getattr(torch_remat, name), types.ModuleType)]
    assert list(torch_remat.__all__) == sorted(torch_remat.__all__)
    assert sorted(set(exported) - set(modules)) == sorted(name for name in public if name != "annotations")


def test_names_of_the_issue_are_exported():
    names = {
        *("checkpoint", "checkpoint_sequential", "is_recomputing"),
        *("RematError", "UsageError", "OutputError", "MismatchError", "MutationError", "ReleasedError"),
    }
    assert names <= set(torch_remat.__all__)


def test_public_functions_and_errors_have_docstrings():
    for name in torch_remat.__all__:
        value = getattr(torch_remat, name)
        if not isinstance(value, str):
            assert value.__doc__, name
            assert value.__doc__.strip()[0].isupper(), name


def test_checkpoint_is_a_function_and_no_module():
    assert isinstance(torch_remat.checkpoint, types.FunctionType)


def test_package_is_typed():
    assert resources.files(torch_remat).joinpath("py.typed").is_file()


def test_the_bench_is_loaded_only_when_it_is_named():
    code = (
        "import sys, torch_remat as remat; assert 'torch_remat.dtr' not in sys.modules; "
        "remat.dtr.simulate; assert 'torch_remat.dtr' in sys.modules; assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'dtrr'"):
        torch_remat.dtrr  # noqa: B018
