"""One process of the test of `docs/examples/scale.py`: `scale_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE TENSOR RESULT`.

Measures what this rank keeps and its peak, in pipelines whose stages are split over TENSOR ranks each, and writes that
down as JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples"))

import scale
import schedules
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer import Sizes, Transformer

import torch_remat as remat


def kept_by(layout: scale.Layout, mesh: dist.DeviceMesh, options: dict) -> int:
    """Return what the regions of an inner stage keep."""
    part = Transformer(Sizes(blocks=6), 1, 3)
    scale.split(part, layout, mesh)
    remat.checkpoint_modules(part, "blocks.*", **options)
    if layout.data > 1:
        for block in part.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(part, mesh=mesh)
    context = Sizes.context // layout.tensor if layout.sequence else Sizes.context
    x = torch.zeros(scale.MICROBATCH, context, Sizes.width, requires_grad=True)
    y = part(x)
    kept = remat.memory_report().bytes
    y.sum().backward()
    return kept


def main(rank: int, world_size: int, rendezvous: str, tensor: int, result: Path) -> None:
    """Measure everything."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timeout
    )
    found = {}
    flat = init_device_mesh("cpu", (world_size,))
    if tensor == 1:
        for name, options in (("inputs", {}), ("products", {"policy": remat.policies.save_matmuls})):
            found[f"{name}, data"] = kept_by(scale.Layout(data=world_size), flat, options)
            for sequence in (False, True):
                layout = scale.Layout(tensor=world_size, sequence=sequence)
                found[f"{name}, {'sequence' if sequence else 'tensor'}"] = kept_by(layout, flat, options)
    layout = scale.Layout(tensor=tensor, sequence=tensor > 1, pipeline=world_size // tensor)
    mesh = init_device_mesh("cpu", (layout.pipeline, tensor), mesh_dim_names=("pipeline", "tensor"))
    for schedule in scale.SCHEDULES:
        found[schedule] = schedules.measure(schedule, scale.all_blocks, layout, mesh["pipeline"], mesh["tensor"])
    result.with_suffix(f".{rank}").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.write("all equal\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the process now and then when Python takes it down, without any region too


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
