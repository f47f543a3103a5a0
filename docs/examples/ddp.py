"""Trains under DistributedDataParallel; layers are regions that keep attention. Runs over gloo.

torchrun --standalone --nproc-per-node 2 docs/examples/ddp.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_remat as remat

LAYERS, WIDTH, HEADS = 4, 64, 4
BATCH, CONTEXT, STEPS = 4, 32, 3


def build(regions: bool) -> nn.Module:
    """Return the model of this rank; all ranks have the same weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    if regions:
        policy = remat.save_modules("self_attn")
        remat.checkpoint_modules(model, "layers.*", policy=policy)
    return DistributedDataParallel(model)


def train(model: nn.Module) -> tuple[list[float], float]:
    """Return the losses of this rank, and the KiB that it keeps for backward."""
    torch.manual_seed(1 + dist.get_rank())  # each rank has its own batches and dropout
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, CONTEXT, WIDTH)
        loss = (model(x) - x).square().mean()
        kept = remat.memory_report(loss, model).bytes / 1024
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, kept


def main() -> None:
    """Train without and with regions; rank 0 prints what all ranks found."""
    dist.init_process_group("gloo")
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, [train(build(regions)) for regions in (False, True)])
    if dist.get_rank() == 0:
        for rank, ((plain, plain_kept), (ours, our_kept)) in enumerate(found):
            print(f"rank {rank}: losses", *(f"{loss:.4f}" for loss in ours))
            print("equal to those without regions:", ours == plain)
            print(f"kept for backward: {our_kept:,.0f} of {plain_kept:,.0f} KiB")
    dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort a process now and then when Python takes it down
