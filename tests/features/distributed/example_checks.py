"""What processes measure of `docs/examples/scale.py`, and what `accelerate` trains: cells `check:NAME`."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_remat as remat
from tests.features.distributed.engines import check
from tests.integrations.models import FAMILIES, VOCABULARY

EXAMPLES = str(Path(__file__).parents[3] / "docs" / "examples")


@check
def scale() -> str:
    """Measure the peak of each rank in pipelines of two stages, which four ranks split in two each."""
    sys.path.insert(0, EXAMPLES)
    import scale as example
    import schedules

    warnings.filterwarnings("ignore")
    world = dist.get_world_size()
    tensor = world // 2
    layout = example.Layout(tensor=tensor, sequence=tensor > 1, pipeline=world // tensor)
    mesh = init_device_mesh("cpu", (layout.pipeline, tensor), mesh_dim_names=("pipeline", "tensor"))
    found = {
        schedule: schedules.measure(schedule, example.all_blocks, layout, mesh["pipeline"], mesh["tensor"])
        for schedule in example.SCHEDULES
    }
    every: list[Any] = [None] * world
    dist.all_gather_object(every, found)
    return json.dumps(every)


def _losses(version: int, enable: Callable[[torch.nn.Module], Any]) -> tuple[list[float], list[str]]:
    """Return the losses of some steps of a small Llama prepared by `accelerate`, and the names of the regions."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**FAMILIES["Llama"].sizes)).train()
    enable(model)
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        use_orig_params=True if version == 1 else None,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    told = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu"), "fsdp_plugin": plugin}
    for name, value in told.items():  # it shards on accelerators only: what it says of the machine is set anew
        setattr(accelerator.state, name, value)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    torch.manual_seed(10 + dist.get_rank())
    losses, names = [], []
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (2, 6))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        names = [region.name for region in remat.memory_report(loss).regions]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, names


@check
def accelerate() -> None:
    """Both versions of FSDP train a model with regions as without."""
    warnings.filterwarnings("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), ACCELERATE_USE_CPU="true")
    os.environ.update(ACCELERATE_USE_FSDP="true", MASTER_ADDR="localhost", MASTER_PORT="0")
    for version in (2, 1):
        expected, _ = _losses(version, lambda model: None)
        for layers, enable in (
            (2, functools.partial(remat.enable_gradient_checkpointing, policy=remat.policies.save_matmuls)),
            (1, functools.partial(remat.checkpoint_modules, patterns="model.layers.*", keep_last=1)),
        ):
            losses, names = _losses(version, enable)
            assert losses == expected, (version, losses, expected)
            assert names == [f"model.layers.{index}" for index in range(layers)], names
