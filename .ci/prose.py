"""Finds sentences that the style sheet of CONTRIBUTING.md says otherwise, and prints ``file:line: write X, not Y``.

The table there is the one place with the phrases; the text above it explains their form.
Code on pages that is wider than the site shows is found, too; what a program prints (``text``) may be, since it wraps.
Pages are searched without their code, Python files in their comments and strings.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/*.md")
FILES += ("torch_remat/**/*.py", "benchmarks/**/*.py")
HEADING = "## Style sheet\n"
_ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^( *)```(\w*).*?^\1```$", re.MULTILINE | re.DOTALL)
_COLUMNS = 96
_QUOTES = re.compile(r"^#+|^\w*[\"']+|[\"']+$")
_PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def split(contributing: str) -> tuple[str, str]:
    """Return the text without its style sheet, and the style sheet; lines keep their numbers."""
    before, _, rest = contributing.partition(HEADING)
    sheet, heading, after = rest.partition("\n## ")
    return before + "\n" * (sheet.count("\n") + 1) + heading + after, sheet


def pairs(sheet: str) -> list[tuple[str, re.Pattern[str]]]:
    """Return what to write, and a pattern of what not to write, for each phrase in backticks on the right side."""
    rows = _ROW.findall(sheet)
    return [(write, pattern_of(phrase)) for write, instead in rows for phrase in re.findall(r"`([^`]+)`", instead)]


def pattern_of(phrase: str) -> re.Pattern[str]:
    """Return the pattern of a phrase, of which only the first letter may be a capital: "is None" is not "is none"."""
    first, *rest = (f"(?:{word.replace('/', '|')})" for word in phrase.rstrip(".").split())
    first = re.sub(r"(?<=[:|])\w", r"(?i:\g<0>)", first)
    return re.compile(r"\b" + r"\s+".join([first, *rest]) + (r"(?=[.,;:)])" if phrase.endswith(".") else r"\b"))


def blank(match: re.Match[str]) -> str:
    """Return spaces in place of what was found, so that nothing moves."""
    return re.sub(r"[^\n]", " ", match[0])


def of_python(source: str) -> str:
    """Return the comments and strings of a Python file in their places; no pattern matches across other code."""
    lines = source.splitlines(keepends=True)
    starts = list(accumulate(map(len, lines), initial=0))
    kept = list(re.sub(r"\S", "\0", source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _PROSE:
            start = starts[token.start[0] - 1] + token.start[1]
            kept[start : start + len(token.string)] = _QUOTES.sub(blank, token.string)
    return "".join(kept)


def wide(page: str) -> Iterator[tuple[int, int]]:
    """Yield number and width of each line of a page's code that the site cuts off."""
    for block in _BLOCK.finditer(page):
        for number, line in enumerate(block[0].splitlines(), page.count("\n", 0, block.start()) + 1):
            if block[2] != "text" and len(line) - len(block[1]) > _COLUMNS:
                yield number, len(line) - len(block[1])


def check(root: Path) -> Iterator[str]:
    """Yield a line for each sentence to be changed."""
    rules = pairs(split((root / "CONTRIBUTING.md").read_text(encoding="utf-8"))[1])
    for path in sorted({path for pattern in FILES for path in root.glob(pattern)}):
        text = path.read_text(encoding="utf-8")
        if path.name == "CONTRIBUTING.md":
            text, _ = split(text)
        prose = of_python(text) if path.suffix == ".py" else _CODE.sub(blank, text)
        for line, columns in wide(text) if path.suffix == ".md" else ():
            yield f'{path.relative_to(root)}:{line}: write "at most {_COLUMNS} columns", not "{columns}"'
        for write, pattern in rules:
            for match in pattern.finditer(prose):
                line = prose.count("\n", 0, match.start()) + 1
                yield f'{path.relative_to(root)}:{line}: write "{write}", not "{" ".join(match[0].split())}"'


if __name__ == "__main__":
    sys.exit("\n".join(sorted(check(Path(__file__).parent.parent))) or 0)
