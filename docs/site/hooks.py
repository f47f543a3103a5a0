"""What MkDocs calls while it builds the site.

Three texts stand where a repository has them, outside of ``docs/``; here they become pages. So links to them, and
theirs to pages, are rewritten.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGES = {
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "contributing/changelog.md",
    "benchmarks/README.md": "contributing/benchmarks.md",
    "README.md": "index.md",
    "docs/README.md": "index.md",
}
"""Files of the repository, and where they are on the site; the front page stands for both READMEs."""

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]*)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that come from outside of ``docs/``."""
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links that lead out of ``docs/`` or into it."""
    on_site = page.file.src_uri
    in_repository = next((source for source, name in PAGES.items() if name == on_site and name != "index.md"), None)
    return relinked(markdown, on_site, in_repository or f"docs/{on_site}")


def relinked(markdown: str, on_site: str, in_repository: str) -> str:
    """Return the text with links that are right on the site.

    Args:
        markdown: The text, with links as they are right in the repository.
        on_site: Where it is on the site.
        in_repository: Where it is in the repository.
    """

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), match.group(1)))
        page = PAGES.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(page, posixpath.dirname(on_site) or ".") if match.group(1) else match.group(1)

    return _LINK.sub(replaced, markdown)
