"""Finds sentences that the style sheet of CONTRIBUTING.md says otherwise, and prints ``file:line: write X, not Y``.

The table there is the one place with the patterns: what is in backticks in its second column is a regular expression.
Pages are searched without their code, Python files in their comments and strings.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/*.md")
FILES += ("torch_remat/**/*.py", "benchmarks/**/*.py")
HEADING = "## Style sheet\n"
_ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_QUOTES = re.compile(r"^#+|^\w*[\"']+|[\"']+$")
_PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def split(contributing: str) -> tuple[str, str]:
    """Return the text without its style sheet, and the style sheet; lines keep their numbers."""
    before, _, rest = contributing.partition(HEADING)
    sheet, heading, after = rest.partition("\n## ")
    return before + "\n" * (sheet.count("\n") + 1) + heading + after, sheet


def pairs(sheet: str) -> list[tuple[str, re.Pattern[str]]]:
    """Return what to write, and the pattern of what not to write, for each pattern of the style sheet."""
    found = []
    for write, instead in _ROW.findall(sheet):
        for pattern in re.findall(r"`([^`]+)`", instead):
            spaced = pattern.replace(r"\|", "|").replace(" ", r"\s+")
            found.append((write, re.compile(rf"\b(?:{spaced})(?!\w)", re.IGNORECASE)))
    return found


def blank(match: re.Match[str]) -> str:
    """Return spaces in place of what was found, so that nothing moves."""
    return re.sub(r"[^\n]", " ", match[0])


def of_python(source: str) -> str:
    """Return the comments and strings of a Python file in their places; no pattern matches across other code."""
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:row])) for row in range(len(lines))]
    kept = list(re.sub(r"\S", "\0", source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _PROSE:
            start = starts[token.start[0] - 1] + token.start[1]
            kept[start : start + len(token.string)] = _QUOTES.sub(blank, token.string)
    return "".join(kept)


def check(root: Path) -> Iterator[str]:
    """Yield a line for each sentence to be changed."""
    rules = pairs(split((root / "CONTRIBUTING.md").read_text(encoding="utf-8"))[1])
    for path in sorted({path for pattern in FILES for path in root.glob(pattern)}):
        text = path.read_text(encoding="utf-8")
        if path.name == "CONTRIBUTING.md":
            text, _ = split(text)
        prose = of_python(text) if path.suffix == ".py" else _CODE.sub(blank, text)
        for write, pattern in rules:
            for match in pattern.finditer(prose):
                line = prose.count("\n", 0, match.start()) + 1
                yield f'{path.relative_to(root)}:{line}: write "{write}", not "{" ".join(match[0].split())}"'


if __name__ == "__main__":
    sys.exit("\n".join(sorted(check(Path(__file__).parent.parent))))
