"""One process of the test of `accelerate`: `accelerate_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE`.

Trains a small Llama by `Accelerator.prepare` with FSDP2 and FSDP1, plain and with layers that are regions; says so if
the losses are equal. accelerate shards on accelerators only: what it says of the machine is set anew.
"""

from __future__ import annotations

import datetime
import os
import sys
import warnings

import torch
import torch.distributed as dist

import torch_remat as remat

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "attention_dropout": 0.1,
}
WAYS = {
    "plain": lambda model: None,
    "enabled": remat.enable_gradient_checkpointing,
    "products": lambda model: remat.enable_gradient_checkpointing(model, policy=remat.policies.save_matmuls),
    "modules": lambda model: remat.checkpoint_modules(model, "model.layers.*", keep_last=1),
}


def prepared(model, version: int):
    """Return accelerate's object for this machine, and the model and an optimizer as it prepares them."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        use_orig_params=True if version == 1 else None,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    told = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu"), "fsdp_plugin": plugin}
    for name, value in told.items():
        setattr(accelerator.state, name, value)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))


def train(version: int, way: str, rank: int) -> tuple[list[float], list[str]]:
    """Return the losses of some steps, and the names of the regions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    WAYS[way](model)
    accelerator, model, optimizer = prepared(model, version)
    torch.manual_seed(10 + rank)
    losses, names = [], []
    for _ in range(3):
        tokens = torch.randint(32, (2, 6))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        names = [region.name for region in remat.memory_report(loss).regions]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, names


def main(rank: int, world_size: int, rendezvous: str) -> None:
    """Compare all ways with plain training, with both versions of FSDP."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), ACCELERATE_USE_CPU="true")
    os.environ.update(ACCELERATE_USE_FSDP="true", MASTER_ADDR="localhost", MASTER_PORT="0")
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
    )
    for version in (2, 1):
        expected, _ = train(version, "plain", rank)
        for way in ("enabled", "products", "modules"):
            losses, names = train(version, way, rank)
            assert losses == expected, (version, way, losses, expected)
            assert names == [f"model.layers.{index}" for index in range(2 if way == "modules" else 3)], names
    dist.barrier()
    sys.stdout.write("all equal\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the process now and then when Python takes it down, without any region too


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
