"""Budgets over ranks, in one process: the choice, and the group; `budget_checks.py` has what several processes do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch_remat as remat
from tests.helpers import Mlp
from torch_remat.budgets.agreed import bucket_of, chosen


def test_greedy_choice_is_within_the_limit_and_prefers_what_is_dear_to_recompute():
    fixed, saved, seconds = [1, 1, 1, 1], [6, 6, 6, 0], [1.0, 2.0, 2.0, 0.0]
    assert chosen(fixed, saved, seconds, 100) == [True] * 4
    assert chosen(fixed, saved, seconds, 16) == [False, True, True, True]
    assert chosen(fixed, saved, seconds, 15) == [False, True, False, True]  # of equals the first
    assert chosen(fixed, saved, seconds, 5) == [False] * 4  # not even one can be filled again
    assert chosen([], [], [], 5) == []


def test_buckets_of_lengths_are_a_fifth_wide():
    assert [bucket_of(size) for size in (0, 1, 1000, 1023, 1024, 1279, 1280)] == [0, 4, 43, 43, 44, 44, 45]


def test_group_that_is_none_is_an_error(tmp_path):
    with pytest.raises(remat.UsageError, match="takes no str"):
        remat.budget("1 MiB", group="tp")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        with pytest.raises(remat.UsageError, match="from rank to rank"):
            remat.budget("1 MiB", group=dist.group.WORLD, offload="fill")
        budget = remat.budget("1 MiB", group=dist.group.WORLD)
        with pytest.raises(remat.UsageError, match="have not agreed"):
            budget.plan()
        for _ in range(4):
            with budget:
                remat.checkpoint(region_name="sin")(torch.sin)(torch.randn(4, requires_grad=True)).sum().backward()
        assert list(budget.plan()) == ["sin"]
        assert budget.plan()["sin"].evicted_tensors == 0
        look_at_measured_bytes(Mlp(), torch.randn(4, 8))
    finally:
        dist.destroy_process_group()


def look_at_measured_bytes(block, x):
    """Compare what replays tell of a region with what it keeps."""
    agreed, alone = remat.budget("100%", group=dist.group.WORLD), remat.budget("100%")
    for budget in (agreed, alone):
        for _ in range(4):
            with budget:
                y = remat.checkpoint(region_name="block")(block)(x)
                loss = remat.checkpoint(region_name="square")(torch.square)(y).sum()
                loss.backward()
    rows = alone.steps[0].rows
    assert [(row.name, row.saved_bytes) for row in rows] == [
        (name, entry.kept_bytes) for name, entry in agreed.plan().items()
    ]
    assert [row.replays for row in agreed.steps[-1].rows] == [0, 0]
    assert agreed.steps[-1].most_bytes == alone.steps[-1].most_bytes
