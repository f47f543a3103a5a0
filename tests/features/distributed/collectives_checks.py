"""What collectives replay runs, in which order, and where ranks part: cells `check:NAME` of `engines_worker.py`."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

import torch_remat as remat
from tests.features.distributed.engines import check

DEPTH = 3
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
save_collectives = remat.policies.save_collectives


class SequenceBlock(nn.Module):
    """An MLP whose hidden layer is split between the processes, and whose input and output are, along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        whole = functional.all_gather_tensor_autograd(self.norm(x), 0, dist.group.WORLD)
        h = self.down(nn.functional.gelu(self.up(whole)))
        return x + functional.reduce_scatter_tensor_autograd(h, "sum", 0, dist.group.WORLD).sin()


class KeptOnly(nn.Module):
    """A collective of which only results need something that are kept."""

    def forward(self, x: Tensor) -> Tensor:
        total = functional.all_reduce(x.detach().exp(), "sum", dist.group.WORLD)
        return (x * (total @ total.t()).sum().tanh()).sin()


def _step(model: nn.Module, x: Tensor) -> tuple[list[Tensor], remat.testing.Collectives]:
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    with remat.testing.collectives() as calls:
        loss = model(x).square().sum()
        loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())], calls


def _counts(calls: remat.testing.Collectives, phase: str) -> dict[str, int]:
    return dict(Counter(row.op for row in calls if row.phase == phase))


def _compare(model: nn.Module, x: Tensor, ways: dict[str, tuple[Any, dict[str, int]]]) -> None:
    """Compare gradients with those without regions, and what replay runs under each policy with the hand count."""
    expected, plain = _step(model, x)
    for name, (policy, replayed) in ways.items():
        with remat.checkpoint_modules(model, "*", policy=policy):
            actual, calls = _step(model, x)
        assert all(map(torch.equal, expected, actual)), name
        for phase in ("forward", "backward"):
            assert _counts(calls, phase) == _counts(plain, phase), name
        assert _counts(calls, "replay") == replayed, f"{name}: {calls}"
        assert all(row.region for row in calls if row.phase != "backward")
        assert calls.difference() is None, name


@check
def replay_communicates_only_what_is_not_kept_in_one_order() -> None:
    """What is scattered needs no replay with a saved product: only the scatter reads the last one."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(SequenceBlock() for _ in range(DEPTH)))
    torch.manual_seed(dist.get_rank())
    both, gathers = {GATHER: DEPTH, SCATTER: DEPTH}, {GATHER: DEPTH}
    named = save_collectives(all_gathers=True) & ~remat.save_names("*all_gather_into_tensor_*")
    ways = {
        "no policy": (None, both),
        "save_collectives": (save_collectives, gathers),
        "all_gathers": (save_collectives(all_gathers=True), {}),
        "never_replay_effects": (remat.policies.never_replay_effects, {}),
        "all but gathers, by name": (named, gathers),
        "matmuls": (remat.policies.save_matmuls, both),
        "matmuls and collectives": (remat.policies.save_matmuls | save_collectives, gathers),
    }
    _compare(blocks, torch.randn(4, 8), ways)


@check
def replay_runs_no_collective_that_only_kept_results_need() -> None:
    """Unless the policy keeps none of them."""
    mm, tanh, cos = torch.ops.aten.mm.default, torch.ops.aten.tanh.default, torch.ops.aten.cos.default
    ways = {"cos": ([cos], {"all_reduce": 1}), "mm": ([mm], {}), "tanh": ([tanh], {}), "all": (save_collectives, {})}
    _compare(nn.Sequential(KeptOnly()), torch.randn(4, 4), ways)


@check
def what_was_received_is_kept() -> None:
    """Nobody would send it again."""
    rank = dist.get_rank()

    def function(x: Tensor) -> Tensor:
        other = torch.empty(4)
        if rank % 2:
            dist.recv(other, rank - 1)
        else:
            dist.send(other.copy_(x.detach()), rank + 1)
        return (x * other).exp().sin()

    for policy in (save_collectives, remat.policies.never_replay_effects):
        found = []
        for run in (function, remat.checkpoint(policy=policy)(function)):
            x = torch.arange(4.0).mul(rank + 1).requires_grad_()
            run(x).sum().backward()
            found.append(x.grad)
        assert torch.equal(*found)


@check
def a_rank_that_does_something_else_is_told_after_the_block() -> None:
    """Groups of which each rank has its own are no difference; other shapes are."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with remat.testing.collectives() as calls:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(2 + dist.get_rank()), group=alone)
    assert calls.difference() is None
    with remat.testing.collectives() as calls:
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
        functional.all_reduce(torch.ones(4 if dist.get_rank() else (2, 2)), "sum", dist.group.WORLD).sum()
    text = calls.difference() or ""
    assert text.splitlines() == [
        "ranks 0, 1 differ from their call 2 on:",
        "  rank 0: all_reduce float32[2, 2] (forward), call 2 of its list",
        "  rank 1: all_reduce float32[4] (forward), call 2 of its list",
    ], text


@check
def a_rank_that_waits_is_told_while_it_hangs() -> None:
    """While rank 0 waits in a collective to which rank 1 does not come, rank 1 reads where they part."""
    group, directories = dist.new_group(), [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(directories)
    with remat.testing.collectives(directories[0]):
        dist.all_reduce(torch.ones(3), group=group)
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(5), group=group, async_op=True)  # never waited for
            return
        while "differ" not in (text := remat.testing.compare_collectives(Path(directories[0])) or ""):
            time.sleep(0.01)
    assert text.splitlines() == [
        "ranks 0, 1 differ from their call 2 on:",
        "  rank 0: allreduce_ float32[5] (forward), call 2 of its list",
        "  rank 1: no further call",
    ], text
