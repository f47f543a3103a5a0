"""`remat.testing.collectives`: the list of a block, and where the ranks of a group differ."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import torch_remat as remat
from tests.helpers import leaf

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names that all releases have


@pytest.fixture
def _process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathered(x):
    return (functional.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD) * 2).exp()


@pytest.mark.usefixtures("_process_group")
def test_functional_collectives_are_listed_with_phase_and_region():
    with remat.testing.collectives() as calls:
        y = remat.checkpoint(region_name="layers.0")(gathered)(leaf(4, 8))
        y.sum().backward()
    assert [(row.op, row.phase, row.region) for row in calls] == [
        ("all_gather_into_tensor", "forward", "layers.0"),
        ("all_gather_into_tensor", "replay", "layers.0"),
        ("reduce_scatter_tensor", "backward", ""),
    ]
    assert {(row.tensors, row.bytes, row.ranks) for row in calls} == {("float32[4, 8]", 128, (0,))}
    assert calls.names == [row.op for row in calls]
    assert calls.to_dicts()[0]["phase"] == "forward"
    assert calls.difference() is None
    assert str(calls) == repr(calls)
    assert str(calls).splitlines() == [
        "call  collective              tensors        bytes  ranks  phase     region",
        "   1  all_gather_into_tensor  float32[4, 8]    128  0      forward   layers.0",
        "   2  all_gather_into_tensor  float32[4, 8]    128  0      replay    layers.0",
        "   3  reduce_scatter_tensor   float32[4, 8]    128  0      backward",
        "3 collectives: 1 in forward, 1 in backward, 1 in replay; 384 B",
    ]


@pytest.mark.usefixtures("_process_group")
def test_collectives_that_write_their_argument_are_listed_with_what_is_given_to_them():
    t = torch.ones(3)
    with remat.testing.collectives() as calls:
        dist.all_reduce(t)
        dist.broadcast(t, 0)
        dist.all_gather([torch.empty(3)], t)
        dist.all_gather_into_tensor(torch.empty(3), t)
        dist.reduce_scatter_tensor(torch.empty(3), t)
        dist.all_to_all_single(torch.empty(3), t)
        dist.barrier()
    *names, last = calls.names
    assert last == "barrier"
    assert names == [
        "allreduce_", "broadcast_", "allgather_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_",
    ]  # fmt: skip
    assert {(row.tensors, row.ranks) for row in calls[:-1]} == {("float32[3]", (0,))}


def test_blocks_without_collectives_and_without_a_group():
    with remat.testing.collectives() as calls:
        remat.checkpoint()(torch.exp)(leaf(3)).sum().backward()
    assert len(calls) == 0
    assert str(calls).endswith("0 collectives; 0 B")


def write(directory, rank, *rows, end="\n"):
    lines = [
        json.dumps({"op": op, "tensors": tensors, "bytes": 4, "ranks": ranks, "phase": "forward", "region": region})
        for op, tensors, ranks, region in rows
    ]
    (directory / f"rank-{rank}.jsonl").write_text("\n".join(lines) + end)


def row(op, ranks=(0, 1), size=4, region=""):
    return op, f"float32[{size}]", ranks, region


REDUCE, GATHER = row("all_reduce", region="a"), row("all_gather_into_tensor")
DIFFER = "ranks 0, 1 differ from their call {} on:\n  rank 0: {}\n  rank 1: {}"
A_GATHER = "all_gather_into_tensor float32[{}] (forward), call {} of its list"
# The lists of ranks, and the text.
LISTS = {
    "by group": (
        [[REDUCE, row("all_reduce", (0, 2)), GATHER], [REDUCE, REDUCE], [row("all_reduce", (0, 2))]],
        DIFFER.format(2, A_GATHER.format(4, 3), "all_reduce float32[4] (forward of a), call 2 of its list"),
    ),
    "a list that ends": ([[REDUCE], [REDUCE, GATHER]], DIFFER.format(2, "no further call", A_GATHER.format(4, 2))),
    "sends": ([[REDUCE, row("send")], [row("recv_"), REDUCE]], None),
    "shapes": (
        [[row("all_gather_into_tensor", size=size)] for size in (1, 2)],
        DIFFER.format(1, A_GATHER.format(1, 1), A_GATHER.format(2, 1)),
    ),
    "shapes that ranks may choose": ([[row("all_to_all_single", size=size)] for size in (1, 2)], None),
    "shapes that ranks may choose, in place": ([[row("alltoall_base_", size=size)] for size in (1, 2)], None),
}


@pytest.mark.parametrize("case", LISTS)
def test_first_difference_of_a_group_is_told(tmp_path, case):
    lists, text = LISTS[case]
    for rank, rows in enumerate(lists):
        write(tmp_path, rank, *rows)
    assert remat.testing.compare_collectives(tmp_path) == text


def test_lists_that_are_missing_or_cut_off(tmp_path):
    with pytest.raises(remat.UsageError, match="no process has written"):
        remat.testing.compare_collectives(tmp_path)
    write(tmp_path, 0, REDUCE)
    write(tmp_path, 1, REDUCE, GATHER, end="")  # of a process that was killed as it wrote
    assert remat.testing.compare_collectives(str(tmp_path)) is None


@pytest.mark.usefixtures("_process_group")
def test_each_call_is_written_before_it_runs(tmp_path):
    with remat.testing.collectives(tmp_path / "calls") as calls:
        for count in range(1, 3):
            dist.all_reduce(torch.ones(2))
            lines = (tmp_path / "calls" / "rank-0.jsonl").read_text().splitlines()
            assert len(lines) == len(calls) == count
    assert remat.testing.compare_collectives(tmp_path / "calls") is None
