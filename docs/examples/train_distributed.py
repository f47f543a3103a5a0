"""Trains a small GPT whose blocks or tensors are split over processes, with regions, and on one process beside it.

    torchrun --standalone --nproc-per-node 2 docs/examples/train_distributed.py --parallel sp --keep collectives

It runs on any machine: the ranks are processes that talk over gloo. It prints what the regions of each rank keep, the
collectives of a step, and the losses beside those of one process.

The order of lines is the same in each way: split the tensors, make the regions, then make the pipeline's stage. DDP and
FSDP have scripts of their own, ddp.py and fsdp.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from text import Batches, standard_library
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from transformer import Sizes, Transformer, cross_entropy, split_sequence, split_tensors

import torch_remat as remat

SIZES, BATCH, STEPS = Sizes(blocks=4), 8, 4
KEEP = {
    "none": None,
    "matmuls": remat.policies.save_matmuls,
    "attention": remat.policies.save_attention,
    "collectives": remat.policies.save_collectives,
}
Step = Callable[[Tensor, Tensor], Tensor]
"""Runs forward and backward of a batch of tokens and targets; returns its mean loss."""


def tp(model: Transformer, mesh: DeviceMesh, policy: Any) -> Step:
    """Each rank has some heads and a part of each hidden layer; all-reduces inside of the blocks add them up."""
    split_tensors(model, mesh)
    remat.checkpoint_modules(model, "blocks.*", policy=policy)
    return step_in_parts(model, 1)


def sp(model: Transformer, mesh: DeviceMesh, policy: Any) -> Step:
    """The same, and between these each rank has a part of the sequence."""
    split_sequence(model, mesh)
    remat.checkpoint_modules(model, "blocks.*", policy=policy)
    return step_in_parts(model, 1)


def pp(model: Transformer, mesh: DeviceMesh, policy: Any) -> Step:
    """Each rank has some blocks. Micro-batches go through them; backward in halves fills the gaps between them."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    remat.checkpoint_modules(model, "blocks.*", policy=policy)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"), group=mesh.get_group())
    schedule = ScheduleInterleavedZeroBubble([stage], 2 * ranks, loss_fn=cross_entropy)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = [tokens] if stage.is_first else []
        outputs = {"target": targets, "losses": losses} if stage.is_last else {}
        schedule.step(*inputs, **outputs)
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(mean, ranks - 1)
        return mean

    return step


WAYS = {"tp": tp, "sp": sp, "pp": pp}


def budget_of(mebibytes: float | None, parallel: str, mesh: DeviceMesh) -> AbstractContextManager[Any]:
    """Return a budget for the regions of this rank. Ranks whose regions communicate agree on what is evicted."""
    if mebibytes is None:
        return nullcontext()
    limit_bytes = int(mebibytes * 2**20)
    return remat.budget(limit_bytes, group=mesh) if parallel in ("tp", "sp") else remat.budget(limit_bytes)


def step_in_parts(model: nn.Module, parts: int) -> Step:
    """Return the step of a process that has the whole batch, and adds up the gradients of its parts."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for x, y in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            loss = cross_entropy(model(x), y)
            (loss / parts).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step


def train(model: nn.Module, step: Step, budget: AbstractContextManager[Any]) -> list[float]:
    """Return the losses of some steps, on batches that are the same on all ranks; each is a block of the budget."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = Batches(standard_library(), batch=BATCH, context=SIZES.context, seed=0, device=torch.device("cpu"))
    losses = []
    for _ in range(STEPS):
        with budget:
            losses.append(step(*batches.next()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Seen(NamedTuple):
    """What one rank saw in a step."""

    kept_bytes: int
    report: str
    collectives: str


def look(model: Transformer, step: Step, budget: AbstractContextManager[Any]) -> Seen:
    """Take one more step; tell what regions keep when they keep most, and the collectives."""
    reports = []
    last = list(model.blocks.values())[-1]
    hook = last.register_forward_hook(lambda *_: reports.append(remat.memory_report()))
    tokens = torch.zeros(BATCH, SIZES.context, dtype=torch.int64)
    with remat.testing.collectives() as calls, budget:
        step(tokens, tokens)
    hook.remove()
    counts = Counter((call.op, call.phase) for call in calls)
    told = ", ".join(f"{count} {op} in {phase}" for (op, phase), count in counts.items())
    most = max(reports, key=lambda report: report.bytes)
    return Seen(most.bytes, str(most), f"{len(calls)} collectives a step: {told}")


def main() -> int:
    """Train on all ranks, compare with one process, and let rank 0 tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parallel", choices=tuple(WAYS), default="sp", help="what is split")
    parser.add_argument("--keep", choices=tuple(KEEP), default="none", help="what regions keep beside their inputs")
    parser.add_argument("--budget", type=float, help="MiB that regions keep everything in, as far as it goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))

    torch.manual_seed(0)
    alone = Transformer(SIZES)
    model = alone.stage(dist.get_rank(), ranks) if options.parallel == "pp" else alone.stage(0, 1)  # copies the weights
    parts = 2 * ranks if options.parallel == "pp" else 1
    expected = train(alone, step_in_parts(alone, parts), nullcontext())
    step = WAYS[options.parallel](model, mesh, KEEP[options.keep])
    budget = budget_of(options.budget, options.parallel, mesh)
    losses = train(model, step, budget)
    seen: list[Any] = [None] * ranks
    dist.all_gather_object(seen, look(model, step, budget))
    exact = options.parallel == "pp"
    equal = losses == expected if exact else torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-5)
    if dist.get_rank() == 0:
        print(f"{seen[0].report}\n")
        for rank, one in enumerate(seen):
            print(f"rank {rank}: regions keep {one.kept_bytes / 1024:,.0f} KiB; {one.collectives}")
        print(f"losses of {ranks} processes: {' '.join(f'{loss:.7f}' for loss in losses)}")
        print(f"losses of one process: {' '.join(f'{loss:.7f}' for loss in expected)}")
        how = "bit for bit" if exact else "within 1e-5: several ranks add up in another order than one process"
        print(f"{'equal' if equal else 'NOT equal'} {how}")
    dist.barrier()
    return 0 if equal else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # gloo's threads abort the process now and then when Python takes it down
