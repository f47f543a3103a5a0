"""What the type checker says of right and wrong uses of the public face."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

USES = Path(__file__).parent / "typed_uses.py"


def test_type_checker_passes_right_uses_and_finds_each_wrong_one():
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(USES)]
    done = subprocess.run(command, cwd=USES.parents[2], capture_output=True, text=True, check=False)
    found = {
        (int(line), code)
        for line, code in re.findall(r"typed_uses\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.M)
    }
    lines = enumerate(USES.read_text(encoding="utf-8").splitlines(), start=1)
    expected = {
        (number, code)
        for number, line in lines
        if (marked := re.search(r"# error: (.+)$", line))
        for code in marked[1].split()
    }
    assert found == expected, done.stdout + done.stderr
