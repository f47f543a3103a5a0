"""Settings of every test: one seed, one thread, a clean state afterwards, `gpu` tests only where there is a GPU."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

import torch_remat as remat
from torch_remat._compat import accelerator_type
from torch_remat.dispatch.check import samples
from torch_remat.policies.nothing import forget_first_forwards


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if accelerator_type() == "cuda":
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _no_leftovers():
    """Collect what earlier files left in cycles: an exception's frames hold regions, which reports would list.

    What is left is frozen: the many collections of the tests, and their walks over all objects, then take no time.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Run kernels on one thread, so that threads in tests are the tests' own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _samples_of_each_region():
    """Compare small values of each region, not of the first ones of a process and a part of the later ones."""
    before, samples._FIRST = samples._FIRST, sys.maxsize
    yield
    samples._FIRST = before


@pytest.fixture(scope="session", autouse=True)
def _warm():
    """Run what torch loads when a dispatch mode first needs it: it leaves cycles, which tests would see."""
    from tests.helpers import LiveStorages, leaf

    with LiveStorages():
        leaf(1).detach().sin()


@pytest.fixture(autouse=True)
def _clean_state():
    """Seed before each test; afterwards no test may have left hooks, modes, autocast or grad mode behind."""
    from tests.helpers import assert_clean_state

    torch.manual_seed(0)
    forget_first_forwards()
    yield
    assert_clean_state()
    assert not remat.is_recomputing()
