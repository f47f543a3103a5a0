"""One process of the test of `DTensor`: `dtensor_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE`.

Trains a block whose weights are split between processes, plain, under torch's checkpoint and as a region, without a
policy and with several; says so if gradients are equal and no product runs again that a policy saves. Also with the
values compared bit for bit, which notices a replay that differs.
"""

from __future__ import annotations

import copy
import datetime
import functools
import os
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint as of_torch
from helpers import CountOps
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_remat as remat

PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]


class Block(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(self.up(x).relu(), 0.2))


def tensor_parallel(block: Block, mesh: DeviceMesh) -> tuple[Block, torch.Tensor]:
    """Split both weights; the block's input is a tensor that all processes have."""
    return parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}), torch.randn(4, 8)


def data_parallel(block: Block, mesh: DeviceMesh) -> tuple[Block, torch.Tensor]:
    """Split the input by rows, and the weights too."""
    for layer in (block.up, block.down):
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return block, distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])


def step(block: Block, x: torch.Tensor, run: Callable | None) -> tuple[list[torch.Tensor], int]:
    """Return what a step gives, as tensors of this process, and the number of matrix products in backward."""
    torch.manual_seed(1)
    block.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = block(x) if run is None else run(block, x)
    with CountOps() as ops:
        y.square().sum().backward()
    found = [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())]
    counted = ops.counts["mm"] + ops.counts["addmm"]
    return [t.to_local().clone() if isinstance(t, DTensor) else t.clone() for t in found], counted


def compare(block: Block, x: torch.Tensor) -> None:
    """Compare all ways with plain training."""
    contexts = functools.partial(of_torch.create_selective_checkpoint_contexts, PRODUCTS)
    theirs = functools.partial(of_torch.checkpoint, use_reentrant=False)
    ways = {
        "torch": theirs,
        "torch, selective": functools.partial(theirs, context_fn=contexts),
        "plain": remat.drop_in(),
        "bitwise": lambda block, x: remat.checkpoint(determinism_check="bitwise")(block)(x),
        "contexts": functools.partial(remat.drop_in(), context_fn=contexts),
        **{name: remat.drop_in(policy=getattr(remat.policies, name)) for name in remat.policies.__all__},
    }
    expected, products = step(block, x, None)
    counts = {}
    for name, way in ways.items():
        actual, counts[name] = step(block, x, way)
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert torch.equal(one, other), f"{name}: tensor {index} differs"
    assert products == counts["contexts"] == counts["save_matmuls"], (products, counts)
    assert counts["plain"] <= counts["torch"], counts
    regional = copy.deepcopy(block)
    remat.checkpoint_modules(regional, "*", policy=remat.policies.save_matmuls)
    for one, other in zip(expected, step(regional, x, None)[0], strict=True):
        assert torch.equal(one, other), "modules by pattern"


def notice_other_values(x: torch.Tensor) -> None:
    """Let replay compute with another factor, which a check of metadata cannot notice."""
    factor = [1.0]
    y = remat.checkpoint(determinism_check="bitwise")(lambda x: (x * factor[0]).sin().exp())(x.requires_grad_())
    factor[0] = 2.0
    with pytest.raises(remat.MismatchError, match="other values"):
        y.sum().backward()


def main(rank: int, world_size: int, rendezvous: str) -> None:
    """Compare with weights split along a block, and with weights and input split by rows."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
    )
    mesh = init_device_mesh("cpu", (world_size,))
    for split in (tensor_parallel, data_parallel):
        torch.manual_seed(0)
        compare(*split(Block(), mesh))
    notice_other_values(distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]))
    dist.barrier()
    sys.stdout.write("all equal\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the process now and then when Python takes it down, without any region too


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
