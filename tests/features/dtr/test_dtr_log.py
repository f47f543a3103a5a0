"""Event logs: what is read, what is refused and at which line, what is written, what real runs record."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

import torch_remat as remat
from benchmarks.dtr_models import outcome
from tests.features.dtr.dtr_logs import LogText
from torch_remat.dtr import Log, LogError, LogWriter, simulate
from torch_remat.dtr.log import Step


def line(instruction, **fields):
    return json.dumps({"INSTRUCTION": instruction, **fields})


CONSTANT = [line("CONSTANT", NAME="w"), line("MEMORY", NAME="w", MEMORY="8")]
CALL = line("CALL", NAME="aten.add", ARGS=["w", "w"], RESULT=["y"], TIME="10")
MEMORY = line("MEMORY", NAME="y", MEMORY="4")
ALIAS = line("ALIAS", NAME="y", ALIAS="-1")
GOOD = [*CONSTANT, CALL, MEMORY, ALIAS]


def changed(index, **fields):
    """`GOOD` with some fields of one line changed; None takes a field out."""
    record = json.loads(GOOD[index]) | fields
    record = {name: value for name, value in record.items() if value is not None}
    return [*GOOD[:index], json.dumps(record), *GOOD[index + 1 :]]


BROKEN = {
    "not JSON": ([*GOOD, "{"], 6),
    "not JSON, deep": (["[" * 100_000], 1),
    "no object": (["[1]"], 1),
    "unknown instruction": ([*GOOD, line("JUMP", NAME="y")], 6),
    "constant at the end": ([CONSTANT[0]], 1),
    "memory of another name": ([CONSTANT[0], line("MEMORY", NAME="v", MEMORY="8")], 2),
    "memory first": ([CONSTANT[1], CONSTANT[0]], 1),
    "no alias of a result": ([*CONSTANT, CALL, MEMORY, line("RELEASE", NAME="y")], 5),
    "args no list": (changed(2, ARGS="w"), 3),
    "arg no name": (changed(2, ARGS=[1]), 3),
    "one name for two results": (changed(2, RESULT=["y", "y"]), 3),
    "unknown arg": (changed(2, ARGS=["w", "v"]), 3),
    "time negative": (changed(2, TIME="-1"), 3),
    "time no number": (changed(2, TIME="soon"), 3),
    "time not finite": (changed(2, TIME="nan"), 3),
    "memory a half": (changed(3, MEMORY="0.5"), 4),
    "alias out of range": (changed(4, ALIAS="2"), 5),
    "mutate out of range": ([*GOOD, line("MUTATE", NAME="add_", ARGS=["y"], MUTATE=["1"], TIME="1")], 6),
    "copy from to unknown": ([*GOOD, line("COPY_FROM", DST="v", SRC="y")], 6),
    "annotation missing": ([*GOOD, line("ANNOTATE")], 6),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_log_is_an_error_with_its_line(kind):
    lines, number = BROKEN[kind]
    with pytest.raises(LogError) as caught:
        Log.parse(lines)
    assert caught.value.line == number
    assert str(caught.value).startswith(f"line {number}: ")
    assert isinstance(caught.value, remat.RematError)
    for other in (copy.copy(caught.value), pickle.loads(pickle.dumps(caught.value))):
        assert (str(other), other.line) == (str(caught.value), number)


def test_all_before_the_last_start_is_dropped():
    start = line("ANNOTATE", ANNOTATION="START")
    log = Log.parse([*GOOD, start, line("JUMP"), start, line("RELEASE", NAME="w"), *GOOD])
    assert (log.base_compute, log.lines) == (10, 7)
    with pytest.raises(LogError) as caught:
        Log.parse([*GOOD, start, CALL, MEMORY, ALIAS])
    assert caught.value.line == 7  # w is unknown after START
    assert Log.parse([*GOOD, line("ANNOTATE", ANNOTATION="BACKWARD")]).base_compute == 10


def test_names_and_views_keep_a_storage_alive():
    text = LogText()
    text.op("a", [], 4)
    text.copy("b", "a")
    text.release("a")
    text.op("c", ["b"], 4)  # a lives on by its other name
    text.copy_from("b", "c")  # now it is gone
    text.op("v", ["b"], 100, alias=0)  # takes no room
    text.release("b", "c")
    text.op("d", ["v"], 3)
    text.release("v", "d")
    log = text.log()
    assert log.peak_bytes == 8
    assert (log.storage_of, log.view) == ([0, 1, 1, 2], [False, False, True, False])


def test_the_writer_writes_what_is_read_again(tmp_path):
    with LogWriter(tmp_path / "a.log") as writer:
        writer.constant("w", 8)
        writer.call("aten.split", ["w"], [("a", 4, -1), ("v", 0, 0)], 12.4)
        writer.annotate("BACKWARD")
        writer.mutate("aten.add_", ["a", "w"], [0], 7)
        writer.copy("b", "a")
        writer.copy_from("b", "v")
        writer.release("a")
    lines = (tmp_path / "a.log").read_text().splitlines()
    assert json.loads(lines[0]) == {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}
    assert json.loads(lines[3])["TIME"] == "12"
    log = Log.load(tmp_path / "a.log")
    assert [step for step, _ in log.steps][:2] == [Step.CONSTANT, Step.RUN]
    assert (log.base_compute, log.sizes_bytes, log.view) == (19, [8, 4, 4], [False, False, True, False])
    assert simulate(log, 100, "dtr").overhead == 1.0


# Logs of real runs


def recorded_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["transformer", "resnet32", "unrolled_gan"])
def test_a_recorded_step_is_a_plain_step_and_its_log_can_be_simulated(name, tmp_path):
    runtimes = []

    def around(run):
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


def test_a_log_has_its_start_its_backward_and_writes_by_all_names_of_the_memory(tmp_path):
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
    lines = recorded_lines(tmp_path / "log")
    assert lines[0] == {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}
    assert {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"} in lines
    ops = [line["NAME"] for line in lines if line["INSTRUCTION"] == "CALL"]
    assert ops[:3] == ["aten.mul.Tensor", "aten.exp", "aten.detach"]
    kinds = [line["INSTRUCTION"] for line in lines]
    assert kinds.count("MUTATE") == 2
    assert "COPY_FROM" in kinds


def test_a_budget_is_recorded_without_what_runs_again(tmp_path):
    def step():
        kept = [torch.ones(64)]
        for _ in range(10):
            kept.append(kept[-1] * 2)
        sum(kept).sum()

    with remat.dtr.record(tmp_path / "free"):
        step()
    with remat.dtr.budget(1500) as runtime, remat.dtr.record(tmp_path / "tight"):
        step()
    assert runtime.rematerializations > 0

    def names(path):
        return [(line["INSTRUCTION"], line.get("NAME", "")) for line in recorded_lines(path)]

    assert names(tmp_path / "free") == names(tmp_path / "tight")


def test_recording_twice_is_an_error(tmp_path):
    with (
        remat.dtr.record(tmp_path / "log"),
        pytest.raises(remat.UsageError, match="recorded already"),
        remat.dtr.record(tmp_path / "other"),
    ):
        pass
