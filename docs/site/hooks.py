"""What MkDocs calls while it builds the site.

Four texts are outside of ``docs/``, where a repository has them; here they become pages. So links to them, and
theirs to pages, are rewritten. Lists in lists, which the texts indent by two columns, get the four that MkDocs needs.
A page's title and description are its heading and its first sentence. A line ``--8<-- "README.md:top"`` stands for the
part of the README between ``<!-- --8<-- [start:top] -->`` and ``<!-- --8<-- [end:top] -->``.
"""

from __future__ import annotations

import html
import logging
import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGES = {
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "contributing/changelog.md",
    "benchmarks/README.md": "contributing/benchmarks.md",
    "benchmarks/BUDGETS.md": "contributing/budgets.md",
    "README.md": "index.md",
    "docs/README.md": "index.md",
}
"""Files of the repository, and where they are on the site; the front page stands for both READMEs."""

_LOG = logging.getLogger("mkdocs.hooks")
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_INNER_ITEM = re.compile(r"^( {2,})(?=[-*] )", re.MULTILINE)
_INCLUDE = re.compile(r"^--8<-- \"README\.md:(\w+)\"$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]*)")
_HEADING = re.compile(r"<h1[^>]*>(.*?)(?:<a class=\"headerlink\".*?)?</h1>", re.DOTALL)
_PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
_SENTENCE = re.compile(r".+?(?:[.!?:](?=\s|$)|$)\s*")
_LONGEST_DESCRIPTION = 160


def on_config(config: Any) -> Any:
    """Let the pages show the version."""
    version = Path(config.config_file_path).parent / "torch_remat" / "_version.py"
    config.extra["release"] = runpy.run_path(str(version))["__version__"]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that come from outside of ``docs/``."""
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links that lead out of ``docs/`` or into it, and the indentation of lists in lists."""
    on_site = page.file.src_uri
    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    markdown = _INCLUDE.sub(lambda match: relinked(section(readme, match[1]), on_site, "README.md"), markdown)
    in_repository = next((source for source, name in PAGES.items() if name == on_site and name != "index.md"), None)
    parts = _CODE.split(markdown)
    for index in range(0, len(parts), 2):
        text = _INNER_ITEM.sub(lambda match: 2 * match.group(1), parts[index])
        parts[index] = relinked(text, on_site, in_repository or f"docs/{on_site}")
    return "".join(parts)


def on_page_content(content: str, page: Any, config: Any, **_: Any) -> str:
    """Give the page the title and the description that browsers and search engines show."""
    heading, description = headline(content)
    if not heading or not description:
        _LOG.warning("%s: no heading, or no sentence below it", page.file.src_uri)
    page.meta["title"] = html.escape(config.site_description if heading == config.site_name else heading)
    page.meta["description"] = html.escape(description)
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["toc"]  # code and its report are side by side there
    return content


def headline(content: str) -> tuple[str, str]:
    """Return of a page in HTML the text of its heading, and as many of its first sentences as a search engine shows."""
    heading = _HEADING.search(content)
    texts = [text_of(paragraph) for paragraph in _PARAGRAPH.findall(content)]
    description, *others = _SENTENCE.findall(next(filter(None, texts), "")) or [""]
    for sentence in others:
        if len(description + sentence) > _LONGEST_DESCRIPTION:
            break
        description += sentence
    return text_of(heading[1]) if heading else "", description.rstrip(" :")


def text_of(content: str) -> str:
    """Return the text of some HTML in one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", content)).split())


def section(readme: str, name: str) -> str:
    """Return the named part of the README."""
    marks = (f"<!-- --8<-- [start:{name}] -->\n", f"<!-- --8<-- [end:{name}] -->\n")
    return readme.partition(marks[0])[2].partition(marks[1])[0]


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
