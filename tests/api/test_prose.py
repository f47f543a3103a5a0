"""`.ci/prose.py` finds sentences that the style sheet of CONTRIBUTING.md says otherwise."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".ci" / "prose.py"
PROSE = runpy.run_path(str(PROGRAM))
SHEET = PROSE["split"]((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))[1]
FENCE, LONG = "`" * 3, "a" * 97
CODE_IN_A_LIST = f"- b:\n\n  {FENCE}python\n  {LONG[1:]}\n  {LONG}\n  {FENCE}\n"


RECOMPUTED = ['1: write "recomputed", not "made again"']
NO_SUCH = ['1: write "is not one, does not exist", not "is none"']
CASES = {
    "start of a sentence": ("docs/a.md", "Left out is the block.", ['1: write "skipped, omitted", not "Left out"']),
    "over lines": ("docs/a.md", "#\n\nIt is made\nagain.", ['3: write "recomputed", not "made again"']),
    "before a full stop": ("docs/a.md", "Right all the same.", ['1: write "still", not "all the same"']),
    "one of several words": ("docs/a.md", "Regions around.", ['1: write "the enclosing region", not "Regions around"']),
    "another case": ("docs/a.md", "Of these there is none. It is None.", NO_SUCH),
    "code": ("docs/a.md", f"`made again`, all the same shapes.\n\n{FENCE}text\nmade again\n{FENCE}\n", []),
    "wide code": ("docs/a.md", f"| {LONG} |\n\n{CODE_IN_A_LIST}", ['7: write "at most 96 columns", not "97"']),
    "wide output": ("docs/a.md", f"{FENCE}text\n{LONG}\n{FENCE}\n{LONG}\n", []),
    "docstring": ("torch_remat/a.py", '"""It is made again."""', RECOMPUTED),
    "comment": ("torch_remat/a.py", "# it is made\n# again", RECOMPUTED),
    "message": ("torch_remat/a.py", 'x = f("is " "made " "again")', RECOMPUTED),
    "source": ("torch_remat/a.py", 'made, again = "made", "again"', []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_the_style_sheet_says_otherwise_is_found_at_its_line(tmp_path, case):
    name, text, expected = CASES[case]
    (tmp_path / "CONTRIBUTING.md").write_text("# C\n\n" + PROSE["HEADING"] + SHEET)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert list(PROSE["check"](tmp_path)) == [f"{name}:{found}" for found in expected]


def test_style_sheet_has_thirty_pairs():
    assert SHEET.count("\n| ") == 2 + 30  # and the head
    assert len(PROSE["pairs"](SHEET)) >= 20


def test_program_runs_and_says_by_its_exit_code_whether_something_was_found():
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False)
    assert done.returncode == (1 if done.stderr else 0)
    assert all(": write " in line for line in done.stderr.splitlines())
