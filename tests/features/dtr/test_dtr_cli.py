"""The bench on the command line, its chart, and the bounds in it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from tests.features.dtr.dtr_logs import chain
from torch_remat.dtr import Log, _chart, chen_chain, optimal_chain, simulate
from torch_remat.dtr.__main__ import main
from torch_remat.errors import UsageError

LOG_FILE = str(Path(__file__).parent / "data" / "dtr_unet.log")


def test_simulate_prints_a_table_and_writes_figures_and_a_chart(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    chart, figures = tmp_path / "chart.png", tmp_path / "out.json"
    options = ["--heuristics", "lru", "dtr_eq", "--deallocation", "ignore", "--search", "sample", "--seed", "4"]
    options += ["--max-overhead", "2.5", "--plot", str(chart), "--json", str(figures)]
    assert main(["simulate", LOG_FILE, "--budgets", "0.9", "0.7", "0.1", *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.replace("no room", "out").splitlines()]
    data, log = json.loads(figures.read_text()), Log.load(LOG_FILE)
    assert rows[2] == ["0.90", "0.70", "0.10"]
    assert [row[0] for row in rows[3:]] == ["lru", "dtr_eq"]
    cells = {cell for row in rows[3:] for cell in row[1:]}
    assert cells > {"out", "stopped"}
    for name, *cells in rows[3:]:
        for cell, share, run in zip(cells, (0.9, 0.7, 0.1), data["runs"][name], strict=True):
            again = simulate(log, share * log.peak_bytes, name, "ignore", search="sample", seed=4, max_overhead=2.5)
            assert run == dataclasses.asdict(again)
            assert cell == ("out" if again.ran_out else "stopped" if again.stopped else f"{again.overhead:.2f}")
    assert (data["peak_bytes"], data["budgets"]) == (log.peak_bytes, [0.9, 0.7, 0.1])
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_class_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_heuristics.py").write_text(
        "from torch_remat.dtr import Heuristic\n"
        "class Biggest(Heuristic):\n"
        "    def score(self, storage, clock):\n"
        "        return -storage.size_bytes\n"
    )
    monkeypatch.chdir(tmp_path)
    name = "my_heuristics:Biggest"
    assert main(["simulate", LOG_FILE, "--budgets", "0.9", "--heuristics", name, "size"]) == 0
    *_, mine, theirs = capsys.readouterr().out.splitlines()
    assert mine.split()[1:] == theirs.split()[1:]
    assert main(["simulate", LOG_FILE, "--heuristics", "my_heuristics:Missing"]) == 2
    assert main(["simulate", LOG_FILE, "--heuristics", "no_such_module:Missing"]) == 2
    sys.modules.pop("my_heuristics")


def test_info(capsys):
    assert main(["info", LOG_FILE]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.split()[0] != "largest")
    log = Log.load(LOG_FILE)
    assert rows["lines"] == str(log.lines)
    assert rows["ops"] == str(len(log.ops))
    assert rows["views"] == str(sum(log.view))
    assert rows["constants"].startswith(f"{log.op_of.count(-1)},")


SCRIPT = """
import sys
import torch

def step():
    torch.ones(4, 8).matmul(torch.ones(8, 8, requires_grad=True)).sin().sum().backward()
    if "fail" in sys.argv:
        raise ValueError("in the script")

if __name__ == "__main__":
    step()
"""


def test_record_runs_a_script_or_a_function_and_writes_its_log(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_training.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    arguments = list(sys.argv)
    for target in ("my_training.py", "my_training:step"):
        assert main(["record", "step.log", target]) == 0
        log = Log.load("step.log")
        assert {"aten.mm", "aten.sin"} <= {op.name.removesuffix(".default") for op in log.ops}
        assert capsys.readouterr().out.splitlines()[1].split() == ["ops", str(len(log.ops))]
    with pytest.raises(ValueError, match="in the script"):
        main(["record", "failed.log", "my_training.py", "fail"])
    assert len(Log.load("failed.log").ops) == len(log.ops)
    assert sys.argv == arguments
    assert main(["record", "step.log", "no_script.py"]) == 2
    assert "no script no_script.py" in capsys.readouterr().err
    sys.modules.pop("my_training")


def test_what_cannot_be_done_is_said_on_stderr(tmp_path, capsys):
    assert main(["simulate", LOG_FILE, "--heuristics", "dtr_qe"]) == 2
    assert "Did you mean 'dtr_eq'" in capsys.readouterr().err
    (tmp_path / "broken.log").write_text('{"INSTRUCTION": "JUMP"}\n')
    assert main(["info", str(tmp_path / "broken.log")]) == 2
    assert capsys.readouterr().err.startswith("error: line 1: ")
    assert main(["info", str(tmp_path / "nowhere.log")]) == 2
    assert "nowhere.log" in capsys.readouterr().err
    for wrong in (["simulate", LOG_FILE, "--budgets", "0"], ["simulate", LOG_FILE, "--budgets", "half"], []):
        with pytest.raises(SystemExit):
            main(wrong)


def test_progress_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["simulate", LOG_FILE, "--budgets", "0.9"]) == 0
    assert "dtr_eq" in capsys.readouterr().out


def test_chart_has_a_line_for_each_heuristic_and_bound():
    pytest.importorskip("matplotlib")
    log, shares = chain(40).log(), [0.9, 0.5, 0.2]
    runs = {name: [simulate(log, share * log.peak_bytes, name) for share in shares] for name in ("dtr", "lru")}
    figure = _chart.plot("A chain", len(log.ops), shares, runs)
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert len(lines) == 4
    for name in ("dtr", "lru"):
        ended = [(100 * share, run.overhead) for share, run in zip(shares, runs[name], strict=True) if not run.stopped]
        assert lines[name] == [pytest.approx(point) for point in ended]
    best = [(100 * share, 1 + optimal_chain(40, int(40 * share)) / 80) for share in shares]
    assert lines["best schedule of a chain"] == [pytest.approx(point) for point in best]
    assert len(lines["Chen's square root on a chain"]) == 2


# Bounds. Found by a search of all schedules: by length, then for budgets from 3 on.
FEWEST = {1: [0], 2: [0], 3: [0, 0], 4: [1, 0, 0], 5: [3, 1, 0, 0], 6: [6, 2, 1, 0, 0]}


def test_optimal_chain_is_what_a_search_of_all_schedules_found():
    for length, found in FEWEST.items():
        assert [optimal_chain(length, budget) for budget in range(3, 3 + len(found))] == found, length
        for budget in range(min(length, 3)):
            with pytest.raises(UsageError, match="does not fit"):
                optimal_chain(length, budget)


def test_chen_chain_holds_the_end_of_each_segment_and_runs_each_again():
    """Of 16 layers in segments of 4: 3 ends, 3 layers of the last segment and a gradient; 3 run again in each."""
    assert chen_chain(16) == (7, 12)
    for length in (2, 3, 5, 17, 64, 100):
        budget, again = chen_chain(length)
        assert optimal_chain(length, budget) <= again < length
