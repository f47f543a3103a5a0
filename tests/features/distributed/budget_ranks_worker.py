"""One process of the test of budgets over ranks: `budget_ranks_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE CASE ...`.

Each case trains an engine in a budget with a group, and compares each step's loss and gradients bit for bit with those
of the same engine without checkpointing; or looks for the error that it is to give.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_remat as remat
from torch_remat.budgets import group

WIDTH, DEPTH = 16, 4


class Block(nn.Module):
    """A norm, and two layers with dropout between them; the last rows of the context see what other ranks have."""

    def __init__(self, gathers: bool = False, slow: float = 0.0, experts: int = 1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gathers, self.slow, self.experts = gathers, slow, experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        if self.gathers:
            h = h + funcol.all_gather_tensor_autograd(h, 1, dist.group.WORLD).mean(1, keepdim=True)
        if self.slow:
            time.sleep(self.slow)
        for _ in range(self.experts):  # a rank with more of them saves more
            h = h * h.sigmoid()
        return x + self.down(nn.functional.dropout(self.up(h).relu(), 0.2))


def model_of(**options: object) -> nn.Sequential:
    """Return blocks, the same on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(DEPTH)))


def tensor_parallel(mesh: DeviceMesh, rank: int) -> nn.Module:
    """Split both layers of each block."""
    model = model_of()
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sequence_parallel(mesh: DeviceMesh, rank: int) -> nn.Module:
    """Split layers by width and norms by length: blocks take and give a part of the sequence."""
    model = model_of()
    layers = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for block in model:
        parallelize_module(block, mesh, layers)
    given = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1))
    taken = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Shard(1))
    return parallelize_module(parallelize_module(model, mesh, given), mesh, taken)


def sharded_children(mesh: DeviceMesh, rank: int) -> nn.Module:
    """Shard two layers of each block by themselves, then the block."""
    model = model_of()
    for block in model:
        for part in (block.up, block.down, block):
            fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded_blocks(mesh: DeviceMesh, rank: int) -> nn.Module:
    """Shard each block whole: nothing of that is inside of regions."""
    model = model_of()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def data_parallel(mesh: DeviceMesh, rank: int) -> nn.Module:
    """Average gradients between steps."""
    return nn.parallel.DistributedDataParallel(model_of())


def context_parallel(mesh: DeviceMesh, rank: int) -> nn.Module:
    """Gather the sequence by functional collectives."""
    return model_of(gathers=True)


def slow_rank(mesh: DeviceMesh, rank: int) -> nn.Module:
    """Have one rank take ten times as long."""
    return model_of(gathers=True, slow=0.002 if rank == 0 else 0.02)


def uneven_experts(mesh: DeviceMesh, rank: int) -> nn.Module:
    """Have one rank save more."""
    return model_of(gathers=True, experts=1 + 2 * rank)


ENGINES = {
    engine.__name__: engine
    for engine in (tensor_parallel, sequence_parallel, sharded_children, context_parallel, slow_rank, uneven_experts)
}


def regions(model: nn.Module, **options: object) -> nn.Module:
    """Make each block a region."""
    blocks = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    remat.checkpoint_modules(blocks, "?", **options)
    return model


def train(model: nn.Module, steps: int, around: Callable, lengths: Sequence[int], rank: int) -> list[torch.Tensor]:
    """Return the loss and the gradients of each step, with updates between them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        x = torch.randn(2, lengths[step % len(lengths)], WIDTH)
        with around():
            loss = model(x).square().mean()
            loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found += [loss.detach(), *gradients]
        found = [t.to_local().clone() if isinstance(t, DTensor) else t.clone() for t in found]
        optimizer.step()
        optimizer.zero_grad()
    return found


def agree(name: str, mesh: DeviceMesh, rank: int, lengths: Sequence[int] = (8,), limit: str | int = "50%") -> None:
    """Compare an engine in a budget with itself without checkpointing, and look at the plan."""
    steps = 6 * len(lengths)
    expected = train(ENGINES[name](mesh, rank), steps, nullcontext, lengths, rank)
    budget = remat.budget(limit, group=mesh)
    actual = train(regions(ENGINES[name](mesh, rank)), steps, lambda: budget, lengths, rank)
    assert len(expected) == len(actual)
    for place, (one, other) in enumerate(zip(expected, actual, strict=True)):
        assert torch.equal(one, other), f"{name}: tensor {place} differs"
    plan = budget.plan()
    plans: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(plans, plan.to_json())
    assert len(set(plans)) == 1, plans
    kept = [entry for entry in plan.values() if not entry.evicted_tensors]
    assert 0 < len(kept) < len(plan) == DEPTH, f"{name}: {plan}"
    assert budget.kept_bytes == 0
    assert all(step.most_bytes <= step.limit_bytes for step in list(budget.steps)[-2:])
    # The plan by itself, from its text.
    again = remat.budgets.Plan.from_json(plan.to_json())
    planned = regions(ENGINES[name](mesh, rank), plan=again)
    for one, other in zip(expected, train(planned, steps, nullcontext, lengths, rank), strict=True):
        assert torch.equal(one, other), f"{name}: by its plan"
    again.world = (3, (("default_pg", 3),))
    again._fits = False
    with pytest.raises(remat.UsageError, match="a world of 3 ranks"):
        planned(torch.randn(2, 8, WIDTH))


def alternating(mesh: DeviceMesh, rank: int) -> None:
    """Have lengths alternate: each has its plan."""
    agree("context_parallel", mesh, rank, lengths=(8, 32, 12))


def refuse_one(mesh: DeviceMesh, rank: int) -> None:
    """Look for the refusal of one engine."""
    refuse(mesh, rank, engines=("context_parallel",))


def refuse(mesh: DeviceMesh, rank: int, engines: Sequence[str] = tuple(ENGINES)) -> None:
    """Look for the refusal of what has collectives inside, and of nothing else."""
    x = torch.randn(2, 8, WIDTH)
    for name in engines:
        model = regions(ENGINES[name](mesh, rank))
        with pytest.raises(remat.UsageError, match=r"^0: this region (?s:.*)group=.*plan=plan"), remat.budget("4 KiB"):
            model(x)
        with remat.budget("100%"):  # in which nothing is ever evicted
            model(x).sum().backward()
        if name == "tensor_parallel":  # a policy decides the same on each rank
            model = regions(ENGINES[name](mesh, rank), policy=[torch.ops.aten.mm.default])
            with remat.budget("4 KiB"):
                model(x).sum().backward()
    for engine in (data_parallel, sharded_blocks):
        model = regions(engine(mesh, rank))
        with remat.budget(f"{1 + 100 * rank} KiB"):
            for _ in range(4):
                model(x).sum().backward()
    blocks = sharded_blocks(mesh, rank)
    with remat.budget("4 KiB"):
        for _ in range(4):  # FSDP's hooks are inside, and do not run again
            h = x
            for block in blocks:
                h = remat.checkpoint()(block)(h)
            h.sum().backward()


def raising(mesh: DeviceMesh, rank: int) -> None:
    """Have one rank raise in its last region: the others do not wait for it."""
    model = regions(model_of())  # without collectives, in which no library could help
    budget, x = remat.budget("50%", group=mesh), torch.randn(2, 8, WIDTH)

    def failing(x: torch.Tensor) -> None:
        model[:2](x)
        raise KeyError

    for step in range(6):
        with budget:
            model(x).square().mean().backward()
        if step == 4:  # on all ranks: they go on
            with pytest.raises(KeyError), budget:
                failing(x)
    if rank == 1:
        with pytest.raises(KeyError), budget:
            failing(x)
    else:
        with budget:
            model(x).square().mean().backward()
        with pytest.raises(remat.RematError, match="rank 1 raised KeyError in a block"), budget:
            model(x)
    assert budget.kept_bytes == 0
    y = remat.checkpoint()(torch.sin)(x.requires_grad_())
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.cos())


def waiting(mesh: DeviceMesh, rank: int) -> None:
    """Have one rank come late: the other says what it waits for."""
    patience, group.PATIENCE_SECONDS = group.PATIENCE_SECONDS, 0.1
    budget, x = remat.budget("50%", group=mesh), torch.randn(2, 8, WIDTH, requires_grad=True)
    if rank:
        time.sleep(0.5)
    with nullcontext() if rank else pytest.warns(remat.RematWarning, match="waited for other ranks"), budget:
        remat.checkpoint()(torch.sin)(x).sum().backward()
    group.PATIENCE_SECONDS = patience


def mismatch(mesh: DeviceMesh, rank: int) -> None:
    """Have one rank run one region less."""
    model = regions(model_of())
    budget, x = remat.budget("50%", group=mesh), torch.randn(2, 8, WIDTH)
    with budget:
        (model if rank else model[:-1])(x).square().mean().backward()
    with pytest.raises(remat.UsageError, match="no further region on rank 0, 3 on rank 1"), budget:
        model(x)


def growing(mesh: DeviceMesh, rank: int) -> None:
    """Have one rank pass the limit: all recompute, and agree on a plan that fits."""
    model = regions(model_of(gathers=True))
    budget, x = remat.budget("60 KiB", group=mesh), torch.randn(2, 8, WIDTH)
    kept = []
    for step in range(10):
        if step == 4 and rank == 1:  # while regions have holders
            for block in model:
                block.experts = 6
        with budget:
            model(x).square().mean().backward()
        kept.append([row.evicted_bytes == 0 for row in budget.steps[-1].rows])
    assert kept[:3] == [[False] * DEPTH] * 3, kept
    assert kept[3] == kept[4] != kept[2], kept
    assert kept[5] == [False] * DEPTH, kept
    assert sum(kept[-1]) < sum(kept[3]), kept
    assert budget.steps[-1].most_bytes <= budget.limit


CASES = {
    **{name: lambda mesh, rank, name=name: agree(name, mesh, rank) for name in ENGINES},
    **{case.__name__: case for case in (alternating, refuse, refuse_one, waiting, raising, mismatch, growing)},
}


def main(rank: int, world_size: int, rendezvous: str, *cases: str) -> None:
    """Run cases, one after another."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", message="the budget")
    warnings.filterwarnings("ignore", category=FutureWarning)  # functional collectives have new names in some releases
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
    )
    mesh = init_device_mesh("cpu", (world_size,))
    for case in cases:
        begin = time.perf_counter()
        CASES[case](mesh, rank)
        sys.stdout.write(f"{case}: {time.perf_counter() - begin:.1f} s\n")
        sys.stdout.flush()
    sys.stdout.write("all equal\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the process now and then when Python takes it down, without any region too


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
