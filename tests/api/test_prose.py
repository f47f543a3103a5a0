"""`.ci/prose.py` finds sentences that the style sheet of CONTRIBUTING.md says otherwise."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".ci" / "prose.py"
SHEET = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def loaded():
    """Return the program as a module."""
    spec = importlib.util.spec_from_file_location("prose", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prose = loaded()


def found(folder: Path, name: str, text: str) -> list[str]:
    """Return what is found in a repository that has the style sheet and one more file."""
    (folder / "CONTRIBUTING.md").write_text("# C\n\n" + prose.HEADING + prose.split(SHEET)[1])
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return list(prose.check(folder))


def test_style_sheet_has_thirty_pairs():
    rows = [line for line in prose.split(SHEET)[1].splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 30  # and the head
    assert len(prose.pairs(prose.split(SHEET)[1])) >= 20


@pytest.mark.parametrize(
    ("sentence", "write", "instead"),
    [
        ("Left out is the block.", "skipped, omitted", "Left out"),
        ("It is made\nagain in backward.", "recomputed", "made again"),
        ("The result was changed in place.", "modified in place, in-place modification", "changed in place"),
        ("A region around it.", "the enclosing region", "region around"),
        ("Of these there is none.", "is not one, does not exist", "is none"),
        ("It is right all the same.", "still", "all the same"),
    ],
)
def test_sentence_of_a_page_is_found_at_its_line(tmp_path, sentence, write, instead):
    assert found(tmp_path, "docs/a.md", f"# A\n\n{sentence}\n") == [f'docs/a.md:3: write "{write}", not "{instead}"']


def test_code_of_a_page_and_good_sentences_are_not_found(tmp_path):
    fence = "`" * 3
    page = f"# A\n\nIt is None, `made again`, with all the same shapes.\n\n{fence}text\nmade again\n{fence}\n"
    assert found(tmp_path, "docs/a.md", page) == []


def test_code_of_a_page_that_is_wider_than_the_site_is_found_and_what_it_prints_is_not(tmp_path):
    fence, long = "`" * 3, "a" * 97
    code = f"- b:\n\n  {fence}python\n  {long[1:]}\n  {long}\n  {fence}\n"
    page = f"# A\n\n| {long} |\n\n{fence}text\n{long}\n{fence}\n{long}\n{code}"
    assert found(tmp_path, "docs/a.md", page) == ['docs/a.md:13: write "at most 96 columns", not "97"']


def test_docstrings_comments_and_messages_are_found_and_code_is_not(tmp_path):
    source = (
        '"""It is made again."""\n# it is made\n# again\nx = f("is " "made " "again")\nmade, again = "made", "again"\n'
    )
    lines = [line.split(":")[1] for line in found(tmp_path, "torch_remat/a.py", source)]
    assert lines == ["1", "2", "4"]


def test_program_runs_and_says_by_its_exit_code_whether_something_was_found():
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False)
    assert done.returncode == (1 if done.stderr else 0)
    assert all(": write " in line for line in done.stderr.splitlines())
