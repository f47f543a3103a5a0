"""The long description, and where a wheel is built; all else is in pyproject.toml.

PyPI shows the README apart from the files beside it. Links to these would lead nowhere, so there they are plain text.
What setuptools writes on the way is in a temporary folder, so that `pip install .` leaves nothing in this one.
"""

import re
import tempfile
from pathlib import Path

from setuptools import setup


def without_relative_links(markdown: str) -> str:
    """Return a text without pictures and links that need the files beside it; code stays as it is."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    for index in range(0, len(parts), 2):
        text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", parts[index], flags=re.MULTILINE)
        parts[index] = re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)
    return "".join(parts)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        setup(
            long_description=without_relative_links(readme),
            long_description_content_type="text/markdown",
            options={"build": {"build_base": place}, "egg_info": {"egg_base": place}},
        )
