"""One process of the test of `DistributedDataParallel`: `ddp_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE`.

Trains a model for some steps, plain and checkpointed; says so and exits with 0 if gradients are equal.
"""

from __future__ import annotations

import datetime
import os
import sys
import warnings

import torch
import torch.distributed as dist
from helpers import Calls, Stack, checkpointed, plain
from torch.nn.parallel import DistributedDataParallel

SETTINGS = [
    {},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


def train(wrap, rank: int, settings: dict, *, outside: bool) -> list[torch.Tensor]:
    """Return losses, last gradients and parameters after three steps, the second of which accumulates."""
    torch.manual_seed(0)
    stack = Stack(plain if outside else wrap, depth=2)
    model = DistributedDataParallel(stack, **settings)
    run = wrap(model) if outside else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(3):
        if step == 1 and "static_graph" not in settings:
            with model.no_sync():
                run(torch.randn(2, 4, 8)).square().mean().backward()
        loss = run(torch.randn(2, 4, 8)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *gradients, *(parameter.detach().clone() for parameter in model.parameters())]


def main(rank: int, world_size: int, rendezvous: str) -> None:
    """Compare both ways of training under each setting of DDP."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    for settings in SETTINGS:
        for outside in (False, True):
            if outside and settings:
                continue
            counters = []

            def wrap(function, counters=counters):
                counters.append(Calls(function))
                return checkpointed(counters[-1])

            expected = train(plain, rank, settings, outside=outside)
            actual = train(wrap, rank, settings, outside=outside)
            for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
                assert torch.equal(one, other), f"{settings}, region outside: {outside}, tensor {index} differs"
            assert sum(counter.replays for counter in counters) >= 3, "nothing was replayed"
    dist.barrier()
    sys.stdout.write("all equal\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the process now and then when Python takes it down, without any region too


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
