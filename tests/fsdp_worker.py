"""One process of the test of `fully_shard`: `fsdp_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE`.

Trains a model whose layers are sharded, plain and with layers that are regions; says so if gradients are equal.
"""

from __future__ import annotations

import copy
import datetime
import os
import sys
import warnings

import torch
import torch.distributed as dist
from helpers import Attention, Mlp, no_other_regions
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_remat as remat


class Model(nn.Module):
    """Layers of attention and Mlp, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Mlp()) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model: Model, mesh: DeviceMesh, children: bool) -> None:
    """Shard each layer, and the model around them."""
    for layer in model.layers:
        if children:
            fully_shard(layer[1], mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model: Model, rank: int) -> tuple[list[torch.Tensor], list[str]]:
    """Return the gradients of two steps, and the names of the regions."""
    torch.manual_seed(100 + rank)
    found = []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        y = model(torch.randn(2, 4, 8))
        names = [region.name for region in remat.memory_report(y).regions]
        y.square().mean().backward()
        found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
    return found, names


def compare(mesh: DeviceMesh, rank: int, children: bool) -> None:
    """Compare training without regions with regions made before and after the model is sharded."""
    torch.manual_seed(0)
    plain = Model()
    reference = copy.deepcopy(plain)
    shard(reference, mesh, children)
    expected, _ = train(reference, rank)
    # Of children that are sharded themselves not all ops are the same in replay, which a policy does not allow.
    for options in [{}] if children else [{}, {"policy": remat.policies.save_matmuls}]:
        for before in (True, False):
            model = copy.deepcopy(plain)
            calls: list[int] = []
            if before:
                remat.checkpoint_modules(model, "layers.*", **options)
            shard(model, mesh, children)
            if not before:
                remat.checkpoint_modules(model, "layers.*", **options)
            model.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
            assert list(model.state_dict()) == list(plain.state_dict())
            with no_other_regions():
                actual, names = train(model, rank)
            assert names == ["layers.0", "layers.1", "layers.2"], names
            assert len(calls) == 2, "the hooks of a layer ran in replay"
            for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
                assert torch.equal(one, other), f"{options}, regions first: {before}, tensor {index} differs"


def main(rank: int, world_size: int, rendezvous: str) -> None:
    """Compare with layers that are sharded whole, and with a sharded child in each."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
    )
    mesh = init_device_mesh("cpu", (world_size,))
    for children in (False, True):
        compare(mesh, rank, children)
    dist.barrier()
    sys.stdout.write("all equal\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the process now and then when Python takes it down, without any region too


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
