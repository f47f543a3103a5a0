"""Event logs: what is read, what is refused and at which line, what is written."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

import torch_remat as remat
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


def test_a_log_is_sound_after_an_exception(tmp_path):
    def run():
        with LogWriter(tmp_path / "a.log") as writer:
            writer.call("op", [], [("a", 4, -1)], 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert Log.load(tmp_path / "a.log").base_compute == 1
