"""The list of mutants does not rot, and what runs them notices one."""

from __future__ import annotations

import json
from collections import Counter

from tests import mutants
from tests.mutants import MUTANTS, PROMISES

WATCHER = """
import torch, torch_remat as remat

def test_dropout():
    x = torch.ones(99, requires_grad=True)
    y = remat.checkpoint()(lambda x: torch.nn.functional.dropout(x.sin()).sin())(x)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
"""


def test_every_mutant_applies_once_and_compiles():
    for mutant in MUTANTS:
        compile(mutant.patched(), mutant.file, "exec")


def test_mutants_have_names_of_their_own_and_each_promise_has_several():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    counts = Counter(mutant.promise for mutant in MUTANTS)
    assert counts.keys() == PROMISES.keys()
    assert min(counts.values()) >= 3
    assert json.loads(mutants.HINTS.read_text()).keys() <= {mutant.name for mutant in MUTANTS}


def test_runner_notices_what_breaks_a_test_and_nothing_else(tmp_path, capfd):
    (tmp_path / "test_watcher.py").write_text(WATCHER)
    arguments = ["--tests", str(tmp_path / "test_watcher.py"), "--jobs", "1", "--only"]
    assert mutants.main([*arguments, "random state not replayed", "ticket not released"]) == 1
    told = capfd.readouterr().out.splitlines()
    assert "noticed by" in told[0]
    assert "NOT noticed" in told[1]


def test_patch_that_no_longer_applies_is_a_problem(monkeypatch, capfd):
    gone = MUTANTS[0]._replace(old="what stands nowhere")
    monkeypatch.setattr(mutants, "MUTANTS", (gone,))
    assert mutants.main(["--only", gone.name]) == 1
    assert "occurs 0 times" in capfd.readouterr().out
