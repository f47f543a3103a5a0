"""Measures the peak of a step in each of torch's pipeline schedules: without checkpoints, with torch's, with regions.

torchrun --standalone --nproc-per-node 4 docs/examples/schedules.py --out docs/pictures
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from scale import MIB, MICROBATCH, SCHEDULES, STAGE_BLOCKS, Layout, Regions, all_blocks, no_regions, split

# isort: split
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from transformer import Sizes, Transformer, cross_entropy

import torch_remat as remat


def torch_checkpoint(model: Transformer) -> None:
    """Wrap each block in torch's non-reentrant checkpoint."""
    for name, block in model.blocks.items():
        model.blocks[name] = checkpoint_wrapper(block)


WAYS: dict[str, Regions] = {"none": no_regions, "torch's checkpoint": torch_checkpoint, "torch_remat": all_blocks}


def measure(schedule: str, regions: Regions, layout: Layout, pipeline: DeviceMesh, tensor: DeviceMesh) -> int:
    """Return the peak of this rank in one step, in bytes: what the step allocates, as the allocator reports it."""
    ranks, rank = layout.pipeline, pipeline.get_local_rank()
    count = ranks * (2 if schedule == "zbv" else 1)
    stages = []
    for index in [rank, count - 1 - rank] if schedule == "zbv" else [rank]:
        part = Transformer(Sizes(blocks=STAGE_BLOCKS * count), index, count)
        split(part, layout, tensor)
        regions(part)
        stages.append(PipelineStage(part, index, count, torch.device("cpu"), group=pipeline.get_group()))
    microbatches = 2 * ranks
    several = schedule in ("zero bubble", "zbv")
    runner = SCHEDULES[schedule](stages if several else stages[0], microbatches, loss_fn=cross_entropy)
    batch = torch.zeros(MICROBATCH * microbatches, Sizes.context, dtype=torch.int64)
    tokens = [batch] if stages[0].is_first else []
    targets = {"target": batch, "losses": []} if stages[-1].is_last else {}
    runner.step(*tokens, **targets, return_outputs=False)  # makes the buffers and the gradients
    with remat.trace() as trace:
        runner.step(*tokens, **targets, return_outputs=False)
    return trace.peak.total_bytes


def draw(peaks: dict[str, dict[str, float]], ranks: int, path: Path) -> None:
    """Draw a bar for each way and schedule."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8.0, 4.2), constrained_layout=True)
    looks = zip(peaks.items(), ("#bbbbbb", "#ff9d3b", "#1f4e9c"), (None, "//", None), strict=True)
    for place, ((way, found), color, hatch) in enumerate(looks):
        xs = [x + 0.27 * (place - 1) for x in range(len(found))]
        bars = axes.bar(xs, found.values(), 0.25, label=way, color=color, hatch=hatch, edgecolor="black", linewidth=0.6)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(SCHEDULES)), list(SCHEDULES))
    axes.set(ylabel="peak of the fullest rank (MiB)")
    axes.set_title(
        f"Peak of a training step by pipeline schedule: {ranks} ranks, {2 * ranks} micro-batches", fontsize=11
    )
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measure all ways on all schedules; rank 0 prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layout = Layout(pipeline=dist.get_world_size())
    mesh = init_device_mesh("cpu", (layout.pipeline, 1), mesh_dim_names=("pipeline", "tensor"))
    peaks: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for way, regions in WAYS.items():
        for schedule in SCHEDULES:
            peak = measure(schedule, regions, layout, mesh["pipeline"], mesh["tensor"])
            of_ranks = [None] * layout.pipeline
            dist.all_gather_object(of_ranks, peak)
            peaks[way][schedule] = max(of_ranks) / MIB
            if dist.get_rank() == 0:
                told = ", ".join(f"{peak / MIB:.2f}" for peak in of_ranks)
                print(f"{schedule:12} {way:20} peak of each rank, MiB: {told}", flush=True)
    if dist.get_rank() == 0 and options.out is not None:
        draw(peaks, layout.pipeline, options.out / "schedules.png")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the process now and then when Python takes it down


if __name__ == "__main__":
    main()
