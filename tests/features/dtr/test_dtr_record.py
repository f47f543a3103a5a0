"""Logs of real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_remat as remat
from benchmarks.dtr_models import outcome


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["transformer", "resnet32", "unrolled_gan"])
def test_a_recorded_step_is_a_plain_step_and_its_log_can_be_simulated(name: str, tmp_path: Path) -> None:
    runtimes: list[remat.dtr.Runtime] = []

    def around(run: Any) -> torch.Tensor:
        with remat.dtr.record(tmp_path / "log") as runtime:
            runtimes.append(runtime)
            return run()

    outcome(name, around)  # so that the costs of the log are medians, not those of cold ops
    assert outcome(name, around).equals(outcome(name, lambda run: run()))
    log = remat.dtr.Log.load(tmp_path / "log")
    constants = sum(log.sizes_bytes[log.storage_of[tensor]] for tensor, op in enumerate(log.op_of) if op < 0)
    # What the simulator counts: constants, and copies of what is written in place.
    assert 0.9 * runtimes[0].peak_bytes <= log.peak_bytes <= 1.3 * (runtimes[0].peak_bytes + constants)
    free = remat.dtr.simulate(log, 2 * log.peak_bytes, "dtr_eq")
    assert not free.rematerializations
    tight = remat.dtr.simulate(log, int(0.8 * log.peak_bytes), "dtr_eq")
    assert not tight.ran_out
    assert 1 <= tight.overhead < 1.6


def test_a_log_has_its_start_its_backward_and_writes_by_all_names_of_the_memory(tmp_path: Path) -> None:
    weight = torch.ones(4, requires_grad=True)
    with remat.dtr.record(tmp_path / "log"):
        (weight * 2).exp().sum().backward()
        x = torch.ones(4, 4)
        row = x[1]
        x.add_(1)
        row.mul_(2)
        y = x + 1
    assert y.sum().item() == 12 * 3 + 4 * 5
    assert remat.dtr.Log.load(tmp_path / "log").peak_bytes >= 2 * 64
    lines = _lines(tmp_path / "log")
    assert lines[0] == {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}
    assert {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"} in lines
    ops = [line["NAME"] for line in lines if line["INSTRUCTION"] == "CALL"]
    assert ops[:3] == ["aten.mul.Tensor", "aten.exp", "aten.detach"]
    kinds = [line["INSTRUCTION"] for line in lines]
    assert kinds.count("MUTATE") == 2
    assert "COPY_FROM" in kinds


def test_a_budget_is_recorded_without_what_runs_again(tmp_path: Path) -> None:
    def step() -> None:
        kept = [torch.ones(64)]
        for _ in range(10):
            kept.append(kept[-1] * 2)
        sum(kept).sum()

    with remat.dtr.record(tmp_path / "free"):
        step()
    with remat.dtr.budget(1500) as runtime, remat.dtr.record(tmp_path / "tight"):
        step()
    assert runtime.rematerializations > 0

    def names(path: Path) -> list[tuple[str, str]]:
        return [(line["INSTRUCTION"], line.get("NAME", "")) for line in _lines(path)]

    assert names(tmp_path / "free") == names(tmp_path / "tight")


def test_recording_twice_is_an_error(tmp_path: Path) -> None:
    with (
        remat.dtr.record(tmp_path / "log"),
        pytest.raises(remat.UsageError, match="recorded already"),
        remat.dtr.record(tmp_path / "other"),
    ):
        pass
