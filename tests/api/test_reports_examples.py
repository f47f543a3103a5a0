"""The examples in the docstrings of reports run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from tests.helpers import no_other_regions
from torch_remat import reports

MODULES = [found.name for found in pkgutil.iter_modules(reports.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_run(name):
    with no_other_regions():
        assert doctest.testmod(importlib.import_module(f"torch_remat.reports.{name}")).failed == 0
