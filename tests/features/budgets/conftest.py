"""Settings of the tests of budgets: nothing is known of any region, and each op takes the same time."""

from __future__ import annotations

from itertools import count

import pytest

from torch_remat.budgets.budget import forget_steps
from torch_remat.dispatch.call import survey
from torch_remat.ladders import kinds, ladder

OP_NS = 100_000
"""What each op takes: so much that each is worth to be kept, and what is kept depends on no clock."""


@pytest.fixture(autouse=True)
def _each_op_takes_the_same(monkeypatch):
    monkeypatch.setattr(survey, "perf_counter_ns", count(0, OP_NS).__next__)
    monkeypatch.setattr(ladder, "_ACT_NS", 30_000)
    monkeypatch.setattr(ladder, "_REGION_NS", 0)
    for forget in (kinds.forget_kinds, forget_steps):
        forget()
    yield
    for forget in (kinds.forget_kinds, forget_steps):
        forget()
