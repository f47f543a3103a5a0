"""The benchmarks' own rules: bars name what exists, another checkout runs its own code, wrong gradients are found."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torch_remat as remat
from benchmarks import budget_models, budgets, contenders, peers
from benchmarks.__main__ import GROUPS
from benchmarks.bars import BARS, only_judged
from benchmarks.contenders import NONE, OURS, REENTRANT, TORCH
from benchmarks.measure import GradientMismatchError, check_gradients
from benchmarks.tables import MARKS, write_between
from benchmarks.workloads import Workload
from tests.helpers import assert_same, leaf

ROOT = Path(__file__).parents[2]


@pytest.fixture
def other_checkout(tmp_path):
    """A copy of the package whose regions say that they are another's."""
    shutil.copytree(ROOT / "torch_remat", tmp_path / "torch_remat", ignore=shutil.ignore_patterns("__pycache__"))
    errors = tmp_path / "torch_remat" / "errors.py"
    errors.write_text(errors.read_text() + "\n\nFROM_THE_COPY = True\n")
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.startswith("torch_remat_before"):
            del sys.modules[name]
    contenders._checkouts.pop(contenders.BEFORE, None)


def simple(**forwards) -> Workload:
    x = leaf(3)
    return Workload(
        name="simple",
        about="",
        leaves={"x": x},
        output_grad=torch.ones(3),
        forwards={NONE: lambda: x.sin(), **{name: lambda run=run: run(x) for name, run in forwards.items()}},
        ideal_retained_bytes=None,
        steps=1,
    )


def test_every_bar_names_a_row():
    rows = {row for group in GROUPS.values() for row in group}
    assert {workload for workload, _, _ in BARS} <= rows


def test_contender_that_computes_something_else_is_found():
    assert check_gradients(simple(same=torch.sin)) == {}
    with pytest.raises(GradientMismatchError, match="other has another gradient of x"):
        check_gradients(simple(other=lambda x: x.sin().detach() + x - x.detach()))


def test_contender_that_cannot_run_is_left_out_and_its_reason_told():
    def broken(x):
        raise remat.UsageError("no")

    failed = check_gradients(simple(same=torch.sin, broken=broken))
    assert list(failed) == ["broken"]
    assert re.match("UsageError: .*no", failed["broken"])


def test_quick_run_leaves_out_what_no_bar_names():
    run = torch.sin
    workload = replace(simple(**dict.fromkeys((OURS, TORCH, REENTRANT, "floor"), run)), name="transformer")
    assert set(only_judged(workload).forwards) == {NONE, OURS, TORCH}


def test_other_checkout_takes_part_with_its_own_code(other_checkout):
    contenders.compare_with(other_checkout)
    package = contenders.versions(OURS)["before"]
    assert package is not remat
    assert package.errors.FROM_THE_COPY
    assert not hasattr(remat.errors, "FROM_THE_COPY")
    loaded = [module for name, module in sys.modules.items() if name.startswith("torch_remat_before")]
    assert len(loaded) > 10
    assert all(Path(module.__file__).is_relative_to(other_checkout) for module in loaded)
    strangers = [
        value.__module__
        for module in loaded
        for value in vars(module).values()
        if getattr(value, "__module__", None) and value.__module__.split(".")[0] == "torch_remat"
    ]
    assert strangers == []
    x = leaf(3)
    torch.testing.assert_close(torch.autograd.grad(package.checkpoint()(torch.sin)(x).sum(), x)[0], x.cos())
    assert "before" in contenders.full_recompute()


def test_folder_without_the_package_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no checkout"):
        peers.load_checkout(tmp_path)


@pytest.mark.parametrize("name", ["performance.md", "budget.md"])
def test_figures_in_the_docs_have_a_place(name, tmp_path):
    document = tmp_path / name
    shutil.copy(ROOT / "docs" / name, document)
    text = document.read_text()
    assert 0 < text.find(MARKS[0]) < text.find(MARKS[1])
    write_between(document, ["| new |"])
    assert document.read_text().split(MARKS[0])[1].split(MARKS[1])[0].strip() == "| new |"


@pytest.mark.parametrize("name", budgets.MODELS)
def test_models_of_budgets_have_equal_gradients_in_regions(name):
    model = budgets.MODELS[name]()
    model.step()
    expected = model.gradients()
    none = budgets.peak_bytes(model, budgets.Way(budget_models.plain))
    with remat.budget(int(0.7 * none)) as budget:
        model.run[0] = budgets.ours
        for _ in range(2):
            model.step()
    assert_same(expected, model.gradients())
    assert budget.kept_bytes == 0
