"""The examples in all docstrings of the package run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import torch_remat
from tests.helpers import no_other_regions

MODULES = ["torch_remat", *(found.name for found in pkgutil.walk_packages(torch_remat.__path__, "torch_remat."))]
NEEDS = {"torch_remat.modules.hugging_face": "transformers"}


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples_of_a_module_run(name):
    pytest.importorskip(NEEDS.get(name, "torch"))
    module = importlib.import_module(name)
    with no_other_regions():
        done = doctest.testmod(module)
    assert done.failed == 0
    assert done.attempted == len(re.findall(r"^ *>>> ", inspect.getsource(module), re.MULTILINE))
