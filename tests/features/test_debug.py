"""`debug=True`: a side-by-side of both phases' ops with the user's source lines, at a cost that does not grow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torch_remat as remat
from tests.helpers import checkpointed, leaf


def error_of(block, **options):
    y = checkpointed(block, region_name="block", **options)(leaf(3))
    with pytest.raises(remat.MismatchError) as caught:
        y.sum().backward()
    return str(caught.value)


def block_that_differs(x):
    h = x.sin()  # the line of the sine
    if remat.is_recomputing():
        h = h.double().tanh()  # the line of replay only
    return h.exp() * h.cos()


def test_error_shows_the_ops_of_both_phases_side_by_side_with_the_users_lines():
    text = error_of(block_that_differs, debug=True)
    assert any(len(re.findall(r"\bsin\b", line)) >= 2 for line in text.splitlines()), text
    assert re.search(r"\btanh\b", text)
    assert "forward" in text.lower()
    assert "replay" in text.lower()
    first = block_that_differs.__code__.co_firstlineno
    assert f"{Path(__file__).name}:{first + 1}" in text
    assert f"{Path(__file__).name}:{first + 3}" in text
    assert all(len(line) < 300 for line in text.splitlines())
    assert "site-packages/torch/" not in text
    assert "tanh" not in error_of(block_that_differs)


def test_error_of_a_long_region_is_bounded_and_shows_the_difference():
    def block(x):
        for _ in range(3000):
            x = x.sin()
        return x.exp().exp() if not remat.is_recomputing() else x.exp().double().tanh()

    text = error_of(block, debug=True)
    assert len(text.splitlines()) < 1000
    assert re.search(r"\btanh\b", text)
