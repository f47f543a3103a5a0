"""The benchmarks' own rules: bars name what exists, another checkout runs its own code, wrong gradients are found."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import torch_remat as remat
from benchmarks import compare, contenders, gpu, gpu_parts, page, results
from benchmarks.__main__ import GROUPS
from benchmarks.__main__ import main as run_benchmarks
from benchmarks.bars import BARS
from benchmarks.contenders import NONE, OURS, OURS_FUNCTION, OURS_POLICY, TORCH
from benchmarks.measure import GradientMismatchError, check_gradients
from benchmarks.results import PEAK, RETAINED, TIME
from benchmarks.tables import MARKS
from benchmarks.workloads import Workload
from tests.helpers import leaf

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


def test_other_checkout_takes_part_with_its_own_code(other_checkout):
    contenders.compare_with(other_checkout)
    package = contenders.versions(OURS)["before"]
    assert package is not remat
    assert package.errors.FROM_THE_COPY
    assert not hasattr(remat.errors, "FROM_THE_COPY")
    loaded = [module for name, module in sys.modules.items() if name.startswith("torch_remat_before")]
    assert len(loaded) > 10
    assert all(Path(module.__file__).is_relative_to(other_checkout) for module in loaded)
    x = leaf(3)
    torch.testing.assert_close(torch.autograd.grad(package.checkpoint()(torch.sin)(x).sum(), x)[0], x.cos())
    assert "before" in contenders.full_recompute()


def of_time(ratio, low, high, name="transformer"):
    return {"name": name, "contender": TORCH, "unit": TIME, "ratio": ratio, "spread": [low, high]}


def run_of(*rows, version="1", measured="2026-01-01T00:00Z"):
    about = {"torch": "2.13", "python": "3.11", "machine": "one", "rounds": 4, "not run": []}
    return {"version": version, "measured": measured, **about, "bars": {"passed": 1, "of": 1}, "rows": list(rows)}


def test_rows_whose_spreads_do_not_overlap_moved():
    old = run_of(of_time(1, 0.9, 1.1, "a"), of_time(1, 0.9, 1.1, "b"), of_time(1, 0.9, 1.1, "gone"), version="old")
    new = run_of(of_time(1.2, 1.05, 1.3, "a"), of_time(0.8, 0.7, 0.85, "b"), of_time(1, 1, 1, "new"), version="now")
    table = results.moved_table(old, new)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "| time |" in line]
    assert [(row[0], row[1], row[-1]) for row in cells] == [
        ("", "a", "+20.0 %"),
        ("moved", "b", "-20.0 %"),
        ("", "new", ""),
    ]
    assert table.endswith("1 of 2 rows moved beyond their spread; 1 are new, 1 are in the old run only.")


def test_run_is_written_as_json_and_compared_with_an_earlier_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_benchmarks(["policies-overhead", "--quick", "--rounds", "2", "--json", "before.json"])
    before = results.read(tmp_path / "before.json")
    assert before["rounds"] == 2
    names = {f"policies-overhead, {ours}" for ours in (OURS_POLICY, OURS_FUNCTION)}
    assert {(row["name"], row["unit"]) for row in before["rows"]} == {
        (name, unit) for name in names for unit in (TIME, RETAINED, PEAK)
    }
    compare.main(["policies-overhead", "--quick", "--rounds", "2", "--old", "before.json"])
    assert "of 6 rows moved" in capsys.readouterr().out
    compare.main(["--old", "before.json", "--new", "before.json"])
    assert "0 of 6 rows moved" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        compare.main(["--quick", "--new", "before.json"])


@pytest.mark.parametrize(
    ("document", "text"), [("docs/performance.md", page.figures), ("benchmarks/README.md", page.targets)]
)
def test_figures_in_the_docs_are_those_of_the_newest_results(document, text):
    written = (ROOT / document).read_text().split(MARKS[0])[1].split(MARKS[1])[0]
    assert written.strip() == text(results.read(results.newest(1)[0]))


def test_run_for_a_gpu_ends_in_a_page_where_there_is_none_too(tmp_path):
    assert list(gpu.PARTS) == list(gpu_parts.PARTS)
    chosen = ["llama-1024", "overlap", "reserve"]
    assert gpu.main([str(tmp_path), "--toy", "--parts", *chosen]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: part["state"] for name, part in found.items()} == dict.fromkeys(chosen, "done")
    equal = {row["way"]: row["equal"] for part in ("llama-1024", "overlap") for row in found[part]["rows"]}
    assert len(equal) == 9
    assert all(equal.values()), equal
    written = (tmp_path / "gpu.md").read_text()
    assert all(gpu.PARTS[name].title in written for name in chosen)
    if not gpu_parts.ON_CUDA:
        assert gpu.NEEDS_CUDA in written


def test_part_of_the_run_for_a_gpu_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    broken = tmp_path / "benchmarks"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "gpu_parts.py").write_text(
        "import pathlib, sys, time\n"
        "file = pathlib.Path(sys.argv[sys.argv.index('--json') + 1])\n"
        'file.write_text(\'{"rows": [{"way": "partly"}]}\')\n'
        "time.sleep(60) if sys.argv[1] == 'overlap' else sys.exit(3)\n"
    )
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.0)
    assert gpu.main([str(tmp_path / "out"), "--seconds", "12", "--parts", "llama-1024", "overlap", "reserve"]) == 1
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]
    assert [part["rows"] for part in found.values()] == [[{"way": "partly"}]] * 3
    assert "exit code 3" in found["llama-1024"]["state"]
    assert "stopped after" in found["overlap"]["state"]
    assert "exit code 3" in found["reserve"]["state"]
