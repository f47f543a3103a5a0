"""What a release says of itself agrees: version, changelog, tag, the range of torch, the text that PyPI shows."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_remat._requires import OLDEST_TORCH, require_torch
from torch_remat._version import __version__

ROOT = Path(__file__).parents[2]
RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.dev\d+)?")


def text_of(name: str) -> str:
    """Return a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_version_comes_after_all_that_the_registry_has_under_this_name():
    match = RELEASE.fullmatch(__version__)
    assert match is not None
    assert tuple(map(int, match.groups())) > (0, 2, 2)


def test_changelog_begins_with_this_version():
    newest = re.findall(r"^## (.*)$", text_of("CHANGELOG.md"), re.MULTILINE)[0]
    if ".dev" in __version__:
        assert newest == "Unreleased"
    else:
        assert re.fullmatch(re.escape(__version__) + r" - \d{4}-\d\d-\d\d", newest)


def test_tag_of_what_is_checked_out_is_its_version():
    git = ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"]
    try:
        tags = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git here, or no repository")
    assert [tag for tag in tags if tag.startswith("v")] in ([], [f"v{__version__}"])


def test_citation_has_version_and_day_of_the_last_release():
    stated = dict(re.findall(r"^(version|date-released): (\S+)$", text_of("CITATION.cff"), re.MULTILINE))
    released = re.findall(r"^## (\S+) - (\S+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert [(stated["version"], stated["date-released"])] == released[:1]


def test_version_is_not_stated_where_setuptools_reads_it():
    stated = re.compile(r"^ *version *[:=] *[\"']?\d", re.MULTILINE)
    assert not [name for name in ("pyproject.toml", "setup.py") if stated.search(text_of(name))]
    assert stated.search('version = "0.3.0"')


def test_range_of_torch_is_the_same_for_pip_and_for_the_import():
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f'"torch>={oldest}"' in text_of("pyproject.toml")


@pytest.mark.parametrize("version", ["2.10.0", "2.10", "2.10.0a0+git1234", "2.13.0+cpu", "3.0.1", "parrot", "parrot.1"])
def test_torch_that_is_new_enough_or_unknown_passes(version):
    require_torch(version)


@pytest.mark.parametrize("version", ["2.9.1", "2.9.1+cu128", "1.13.0", "2.2"])
def test_torch_that_is_too_old_is_an_error_that_says_what_to_install(version):
    with pytest.raises(ImportError, match=r"needs torch 2\.10 or newer.*\n.*pip install 'torch>=2\.10'") as caught:
        require_torch(version)
    assert f"this is torch {version} ({torch.__file__})" in str(caught.value)


def test_import_says_that_torch_is_too_old_before_it_needs_anything_of_it(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.9.1"\n')
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import torch_remat"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: torch_remat needs torch 2.10 or newer, and this is torch 2.9.1" in done.stderr


def test_long_description_has_no_link_that_leads_nowhere_on_the_registry():
    spec = importlib.util.spec_from_file_location("long_description", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    code = "```python\nx[0](y)  # [a](b)\n```"
    given = f"# T\n\n![p](docs/p.png)\n\nSee [`a` b](docs/a.md#c), [w](https://e.org) and [l](#t).\n\n{code}\n"
    expected = f"# T\n\nSee `a` b, [w](https://e.org) and [l](#t).\n\n{code}\n"
    assert module.without_relative_links(given) == expected
    shown = re.sub(r"^```.*?^```$", "", module.without_relative_links(text_of("README.md")), flags=re.M | re.S)
    assert not [link for link in re.findall(r"\]\(([^)]*)\)", shown) if not link.startswith(("https://", "#"))]
