"""Every Python block in the README and in `docs/` runs, unless `<!-- not run -->` stands right above it.

What it prints is what the page says it prints, where `<!-- output -->` and a block of text follow.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo

from tests.helpers import no_other_regions

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^```python[^\n`]*\n(.*?)^```[^\S\n]*$(?:\n+<!-- output -->\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
NOT_RUN = "<!-- not run -->"
NAMES_OF_0_2_2 = """
RecomputeStateHook SavedTensorInfo SavedTensorKind checkpoint clear_memory_snapshot_cache collect_trace
current_saved_tensor_info discover_autograd_roots format_current_memory_report format_oom_saved_tensors_report
format_saved_tensors_report is_placeholder is_recomputing memory_snapshot_annotate name_scope oom_observer
print_current_memory_report print_saved_tensors_report recompute_needs_tensor region save_for_backward
saved_tensors_hooks trace_scope
"""


PINNED = torch.__version__.startswith("2.13.")  # other releases save other tensors, and so print other bytes


def blocks(text: str) -> list[tuple[int, str, str | None]]:
    """Return line number and code of each Python block that is to be run, and what it must print."""
    return [
        (text.count("\n", 0, match.start(1)) + 1, match.group(1), match.group(2))
        for match in FENCE.finditer(text)
        if not text[: match.start()].rstrip().endswith(NOT_RUN)
        if not match.group(1).startswith("--8<--")  # a file, which has a test of its own
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # where the compiler is used
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_of_a_text_run_in_their_order(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)  # the compiler imports the module of what it compiles
    torch._dynamo.reset()  # it compiles one code for so many functions, and other tests may have used them up
    with no_other_regions():
        for line, code, printed in blocks(path.read_text(encoding="utf-8")):
            torch.manual_seed(0)
            padded = "\n" * (line - 1) + code
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(padded, str(path), "exec"), vars(module))
            if printed is not None and PINNED:
                assert output.getvalue() == printed, f"{path.name}:{line} prints something else"


def test_every_public_name_of_torch_remat_0_2_2_has_a_row_in_the_table_for_it():
    text = (ROOT / "docs" / "reference" / "names_0_2_2.md").read_text(encoding="utf-8")
    table = text.partition("\n| 0.2.x | here | what changes |\n")[2].partition("\n\n")[0]
    theirs = [row.split(" | ")[0] for row in table.splitlines()]
    for name in NAMES_OF_0_2_2.split():
        assert any(re.search(rf"\b{name}\b", cell) for cell in theirs), name


def test_blocks_are_found_with_their_output_and_marked_ones_left_out():
    fence = "`" * 3
    text = f"a\n{fence}python\nx = 1\n{fence}\n{NOT_RUN}\n{fence}python\ny = 2\n{fence}\n{fence}sh\nls\n{fence}\n"
    assert blocks(text) == [(3, "x = 1\n", None)]
    code, shown = f"{fence}python\nprint(1)\n{fence}\n", f"{fence}text\n1\n{fence}\n"
    assert blocks(f"{code}\n<!-- output -->\n{shown}{code}\n{shown}") == [
        (2, "print(1)\n", "1\n"),
        (10, "print(1)\n", None),
    ]
    assert blocks((ROOT / "README.md").read_text(encoding="utf-8"))
