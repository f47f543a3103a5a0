"""One process of the test of collectives in replay: `collectives_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE`.

Trains blocks whose input is split along the sequence: each gathers it, computes with a part of the weights, and
scatters the sum. Gradients are compared with those without regions, collectives counted by hand, and their order
compared between the ranks. Then one rank does something else, and the list says where.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_remat as remat

DEPTH = 3
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
save_collectives = remat.policies.save_collectives


class Block(nn.Module):
    """An MLP whose hidden layer is split between the processes, and whose input and output are, along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = functional.all_gather_tensor_autograd(self.norm(x), 0, dist.group.WORLD)
        h = self.down(nn.functional.gelu(self.up(whole)))
        return x + functional.reduce_scatter_tensor_autograd(h, "sum", 0, dist.group.WORLD).sin()


class KeptOnly(nn.Module):
    """A collective of which only results need something that are kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x.detach().exp(), "sum", dist.group.WORLD)
        return (x * (total @ total.t()).sum().tanh()).sin()


def step(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], remat.testing.Collectives]:
    """Return loss and gradients of a step, and its collectives."""
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    with remat.testing.collectives() as calls:
        loss = model(x).square().sum()
        loss.backward()
    return [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())], calls


def counts(calls: remat.testing.Collectives, phase: str) -> dict[str, int]:
    """Return how many collectives of each kind ran in a phase."""
    return dict(Counter(row.op for row in calls if row.phase == phase))


def sequence_parallel(rank: int) -> None:
    """Compare gradients, counts, bytes and order under several policies with the hand count."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
    torch.manual_seed(rank)
    x = torch.randn(4, 8)
    expected, plain = step(blocks, x)
    assert counts(plain, "forward") == counts(plain, "backward") == {GATHER: DEPTH, SCATTER: DEPTH}
    assert not counts(plain, "replay")
    # What is scattered needs no replay in any case: nothing that backward saves comes after it but the sine's input.
    ways: dict[str, tuple[Any, dict[str, int]]] = {
        "no policy": (None, {GATHER: DEPTH, SCATTER: DEPTH}),
        "save_collectives": (save_collectives, {GATHER: DEPTH}),
        "all_gathers": (save_collectives(all_gathers=True), {}),
        "never_replay_effects": (remat.policies.never_replay_effects, {}),
        "all but gathers, by name": (
            save_collectives(all_gathers=True) & ~remat.save_names("*all_gather_into_tensor_*"),
            {GATHER: DEPTH},
        ),
        "matmuls": (remat.policies.save_matmuls, {GATHER: DEPTH, SCATTER: DEPTH}),
        # Of the products only the scatter reads the last one, so that nothing of it runs again.
        "matmuls and collectives": (remat.policies.save_matmuls | save_collectives, {GATHER: DEPTH}),
    }
    for name, (policy, replayed) in ways.items():
        with remat.checkpoint_modules(blocks, "*", policy=policy):
            actual, calls = step(blocks, x)
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert torch.equal(one, other), f"{name}: tensor {index} differs"
        assert counts(calls, "forward") == counts(calls, "backward") == counts(plain, "forward"), name
        assert counts(calls, "replay") == replayed, f"{name}: {calls}"
        assert {(row.tensors, row.bytes) for row in calls if row.op == GATHER} == {("float32[4, 8]", 128)}
        assert {(row.tensors, row.bytes) for row in calls if row.op == SCATTER} == {("float32[8, 8]", 256)}
        assert all(row.region for row in calls if row.phase != "backward")
        assert calls.difference() is None, name


def kept_only() -> None:
    """Replay runs no collective that only kept results need."""
    x = torch.randn(4, 4)
    model = nn.Sequential(KeptOnly())
    expected, _ = step(model, x)
    for policy, replayed in (
        ([torch.ops.aten.cos.default], {"all_reduce": 1}),
        ([torch.ops.aten.mm.default], {}),
        ([torch.ops.aten.tanh.default], {}),
        (save_collectives, {}),
    ):
        with remat.checkpoint_modules(model, "*", policy=policy):
            actual, calls = step(model, x)
        assert all(map(torch.equal, expected, actual))
        assert counts(calls, "replay") == replayed, calls
        assert calls.difference() is None


def received(rank: int) -> None:
    """What was received is kept: nobody would send it again."""

    def function(x: torch.Tensor) -> torch.Tensor:
        other = torch.empty(4)
        if rank:
            dist.recv(other, 0)
        else:
            dist.send(other.copy_(x.detach()), 1)
        return (x * other).exp().sin()

    for policy in (save_collectives, remat.policies.never_replay_effects):
        found = []
        for run in (function, remat.checkpoint(policy=policy)(function)):
            x = torch.arange(4.0).mul(rank + 1).requires_grad_()
            run(x).sum().backward()
            found.append(x.grad)
        assert torch.equal(*found)


def tensor_parallel() -> None:
    """Collectives of DTensor: one in forward and one in backward, and in replay only what is not kept."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = nn.Sequential(parallelize_module(block, mesh, plan), nn.Tanh())
    x = torch.randn(4, 8)
    for policy, replayed in ((None, 0), (save_collectives, 0)):
        with remat.checkpoint_modules(model, "0", policy=policy):
            _, calls = step(model, x)
        assert [row.op for row in calls if row.phase == "forward"] == ["all_reduce"], calls
        assert len([row for row in calls if row.phase == "replay"]) == replayed, calls
        assert {row.ranks for row in calls} == {(0, 1)}
        assert calls.difference() is None


def differences(rank: int, directory: Path) -> None:
    """One rank that does something else is told, after the block, and from what was written as it went."""
    for written in (None, directory):
        with remat.testing.collectives(written) as calls:
            dist.all_reduce(torch.ones(3))
            group = dist.new_group([rank])  # of this process alone, so that nothing hangs
            dist.all_reduce(torch.ones(2 + rank), group=group)
            dist.broadcast(torch.ones(1), 0)
        assert calls.difference() is None
        dist.barrier()
    assert remat.testing.compare_collectives(directory) is None
    with remat.testing.collectives() as calls:
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
        functional.all_reduce(torch.ones(4 if rank else (2, 2)), "sum", dist.group.WORLD).sum()
    text = calls.difference() or ""
    assert text.splitlines() == [
        "ranks 0, 1 differ from their call 2 on:",
        "  rank 0: all_reduce float32[2, 2] (forward), call 2 of its list",
        "  rank 1: all_reduce float32[4] (forward), call 2 of its list",
    ], text


def hang(rank: int, directory: Path) -> None:
    """While rank 0 waits in a collective to which rank 1 does not come, rank 1 reads where they part."""
    with remat.testing.collectives(directory):
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3))
        if rank == 0:
            dist.all_reduce(torch.ones(5), async_op=True)  # never waited for
            return
        while "differ" not in (text := remat.testing.compare_collectives(directory) or ""):
            time.sleep(0.01)
    assert text.splitlines() == [
        "ranks 0, 1 differ from their call 3 on:",
        "  rank 0: allreduce_ float32[5] (forward), call 3 of its list",
        "  rank 1: no further call",
    ], text


def main(rank: int, world_size: int, rendezvous: str) -> None:
    """Run all parts."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
    )
    sequence_parallel(rank)
    kept_only()
    received(rank)
    tensor_parallel()
    differences(rank, Path(f"{rendezvous}-calls"))
    dist.barrier()
    hang(rank, Path(f"{rendezvous}-hang"))
    sys.stdout.write("all equal\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the process now and then when Python takes it down, without any region too


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
