"""The pages of the site: the reference has every public name, the page of errors every class.

`make docs` checks the rest: links, anchors, that every page has its place, that docstrings can be parsed.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from importlib import import_module
from pathlib import Path

import torch_remat

DOCS = Path(__file__).parents[2] / "docs"
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
ROOMS = ("budgets", "dtr", "offload", "policies", "reports", "testing")


def test_page_of_all_pages_has_every_page():
    linked = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md", "index.md"} <= linked


def documented() -> list[str]:
    """Return the dotted names of which a page shows the docstring."""
    pages = [DOCS / "errors.md", *sorted((DOCS / "reference").glob("*.md"))]
    return [name for page in pages for name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))]


def resolved(name: str) -> object:
    """Return what a dotted name means."""
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def public_names() -> list[str]:
    """Return the public names of the package and of the modules in it that are public."""
    names = [f"torch_remat.{name}" for name in torch_remat.__all__]
    rooms = [f"torch_remat.{room}.{name}" for room in ROOMS for name in getattr(torch_remat, room).__all__]
    return names + rooms


def test_rooms_are_the_public_packages():
    with_names = {
        path.parent.name
        for path in Path(torch_remat.__file__).parent.glob("*/__init__.py")
        if hasattr(import_module(f"torch_remat.{path.parent.name}"), "__all__")
    }
    assert with_names == set(ROOMS)


def test_reference_has_every_public_name_once_and_no_other():
    names = documented()
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert set(names) <= set(public_names())
    shown = {id(resolved(name)) for name in names}
    objects = {name: resolved(name) for name in public_names()}
    assert [
        name for name, one in objects.items() if not isinstance(one, types.ModuleType) and id(one) not in shown
    ] == []


def classes_of_errors() -> list[type[BaseException]]:
    """Return the classes of errors that users can meet."""
    found, todo = [torch_remat.RematWarning], [torch_remat.RematError]
    import_module("torch_remat.dtr")
    while todo:
        kind = todo.pop()
        if kind.__module__.startswith("torch_remat."):
            found.append(kind)
            todo += kind.__subclasses__()
    return found


def test_page_of_errors_says_of_each_when_it_comes_and_what_to_do():
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    kinds = classes_of_errors()
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == {kind.__name__ for kind in kinds}
    for kind in kinds:
        section = text.partition(f"\n## {kind.__name__}\n")[2].partition("\n## ")[0]
        assert [resolved(name) for name in DIRECTIVE.findall(section)] == [kind]
        if kind is not torch_remat.RematError:
            assert "**When.** " in section
            assert "**What to do.** " in section
            assert f"| [`{kind.__name__}`](#{kind.__name__.lower()}) | " in text
