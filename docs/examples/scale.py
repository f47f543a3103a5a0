"""Computes what a rank of many keeps, and in which order and with what peak the stages of a pipeline replay.

One process is enough. It pretends to be one rank: the process group ``"fake"`` sends nothing, so that the tensors have
the shapes, and the memory, that they have on that rank, and any values. One stage of the model runs for one
micro-batch; `remat.memory_report` tells what it keeps, `remat.trace` what is alive at most. A pipeline's peak is then
the sum over the micro-batches that are on their way at each action of torch's own schedule.

    python docs/examples/scale.py --out docs/pictures

Not counted: weights, gradients and the state of the optimizer (the table has the weights apart), what ``fully_shard``
gathers, and the buffers that torch's pipelines make once for what each micro-batch receives.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler announces its start and its end on stderr

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from transformer import Sizes, Transformer, cross_entropy, split_sequence, split_tensors

import torch_remat as remat

MIB = 2**20
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
STAGE_BLOCKS, MICROBATCH = 2, 2
Regions = Callable[[Transformer], None]
"""Makes blocks regions, or wraps them."""


def no_regions(model: Transformer) -> None:
    """Keep all activations."""


def all_blocks(model: Transformer) -> None:
    """Make each block a region that keeps nothing but its input."""
    remat.checkpoint_modules(model, "blocks.*")


def all_blocks_with_products(model: Transformer) -> None:
    """The same, but what matrix products return is kept."""
    remat.checkpoint_modules(model, "blocks.*", policy=remat.policies.save_matmuls)


@dataclass(frozen=True)
class Layout:
    """How many ranks split what; their product is the number of ranks."""

    data: int = 1
    tensor: int = 1
    sequence: bool = False  # whether the ranks that split tensors split the sequence between them, too
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.data * self.tensor * self.pipeline


class Action(NamedTuple):
    """What a rank does next: ``F`` forward, ``B`` backward, ``I`` and ``W`` its halves, for inputs and for weights."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Cost:
    """The bytes of one micro-batch in one stage; each peak is what is alive of this micro-batch at most meanwhile.

    Attributes:
        reported: What its regions keep, as `remat.memory_report` says, with their inputs.
        kept: What is alive after forward, but for the stage's input, which lies in a buffer of the pipeline.
        forward: The peak of forward.
        backward: The peak of backward as a whole.
        inputs: The peak of backward's half for inputs.
        between: What is alive from that half to the other one.
        weights: The peak of the half for weights.
        sent: What other ranks are sent: the stage's output, and the gradient of its input.
    """

    reported: int
    kept: int
    forward: int
    backward: int
    inputs: int
    between: int
    weights: int
    sent: int


@contextmanager
def one_rank_of(layout: Layout) -> Iterator[DeviceMesh]:
    """Let this process be the first of the ranks that share a stage; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=layout.data * layout.tensor)
    try:
        yield init_device_mesh("cpu", (layout.data, layout.tensor), mesh_dim_names=("data", "tensor"))
    finally:
        dist.destroy_process_group()


def split(model: Transformer, layout: Layout, mesh: DeviceMesh) -> None:
    """Split a stage's weights between the ranks of a mesh."""
    if layout.tensor > 1:
        (split_sequence if layout.sequence else split_tensors)(model, mesh)


def record(sizes: Sizes, layout: Layout, microbatch: int, regions: Regions = all_blocks) -> tuple[Cost, Cost, Cost]:
    """Return what a first, an inner and a last stage cost on one rank.

    Args:
        sizes: Sizes of a model with three stages; all its blocks are alike, so it stands for one with more.
        layout: How the ranks split it.
        microbatch: Sequences in a micro-batch.
        regions: What keeps less.
    """
    with one_rank_of(layout) as mesh:
        alone = dist.new_group([0])
        stages = []
        for index in range(3):
            part = Transformer(sizes, index, 3)
            split(part, layout, mesh["tensor"])
            regions(part)
            stages.append(PipelineStage(part, index, 3, torch.device("cpu"), group=alone))
        tokens, targets = (torch.zeros(microbatch, sizes.context, dtype=torch.int64) for _ in range(2))
        schedule = ScheduleInterleavedZeroBubble(stages, 1, loss_fn=cross_entropy)
        schedule.step(tokens, target=targets)  # makes the buffers, and the gradients that others are added to
        first, inner, last = (cost_of(stage, tokens, targets) for stage in stages)
        return first, inner, last


def cost_of(stage: PipelineStage, tokens: Tensor, targets: Tensor) -> Cost:
    """Run one micro-batch through a stage, twice: with backward as a whole, and in halves."""
    found: dict[str, int] = {}
    for halves in (False, True):
        stage.clear_runtime_states()
        renew_buffers(stage)
        with remat.trace() as trace:
            output = stage.forward_one_chunk(0, (tokens,) if stage.is_first else (), {}, save_forward_output=False)
            loss = cross_entropy(output, targets) if stage.is_last else None
            found["reported"] = remat.memory_report().bytes
            sent = [] if stage.is_last else [output]
            del output
            stage.backward_one_chunk(0, loss=loss, full_backward=not halves)
            del loss
            sent += [] if stage.is_first else stage.bwd_cache.pop(0)
            found["sent"] = sum(tensor.untyped_storage().nbytes() for tensor in sent)
            del sent
            if halves:
                stage.backward_weight_one_chunk(0)
        found |= peaks_in(trace, halves, stage.is_first)
    return Cost(**found)


def renew_buffers(stage: PipelineStage) -> None:
    """Give a stage the buffers to receive into: from torch 2.15 on, a micro-batch uses them up."""
    for received in (*stage.args_recv_info[0], *stage.grad_recv_info[0]):
        if hasattr(received, "allocate_buffer") and not received.is_root_arg and received.buffer is None:
            received.allocate_buffer(torch.device("cpu"))


def peaks_in(trace: Any, halves: bool, is_first: bool) -> dict[str, int]:
    """Return the peaks of a trace of one micro-batch. Each half of backward runs autograd's engine."""
    runs = [start for phase, start, _ in trace.phases if phase == "backward"]
    split_at = trace.duration_us if not halves else runs[0] if is_first else runs[1]
    parts: list[list[int]] = [[0], [0], [0]]
    for sample in trace.samples:
        parts[(sample.time_us >= runs[0]) + (sample.time_us >= split_at)].append(sample.total_bytes)
    forward, backward, rest = parts
    if not halves:
        return {"forward": max(forward), "kept": forward[-1], "backward": max(forward[-1], *backward)}
    if is_first:  # torch's first stage does all of backward in the second half
        backward = [forward[-1]]
    return {"inputs": max(forward[-1], *backward), "between": backward[-1], "weights": max(backward[-1], *rest)}


def order_of(schedule: str, ranks: int, microbatches: int) -> dict[int, list[Action]]:
    """Return what each rank of a pipeline does, in order, as torch's schedule has it."""
    stages = ranks * (2 if schedule == "zbv" else 1)
    local = [0, stages - 1] if schedule == "zbv" else [0]
    told = [
        SimpleNamespace(stage_index=index, num_stages=stages, group_size=ranks, group_rank=0, submod=nn.Identity())
        for index in local
    ]
    made = SCHEDULES[schedule](told if schedule in ("zero bubble", "zbv") else told[0], microbatches)
    order = {}
    for rank, actions in made.pipeline_order.items():
        order[rank], count = [], Counter[tuple[str, int]]()
        for action in actions:
            if action is None or (kind := action.computation_type.value) not in ("F", "B", "I", "W"):
                continue
            key = (
                kind,
                action.stage_index,
            )  # counted: the numbers that torch's 1F1B has here are not those that it runs
            order[rank].append(Action(*key, count[key]))
            count[key] += 1
    return order


def peak_of(schedule: str, actions: Sequence[Action], costs: Callable[[int], Cost]) -> int:
    """Return the most bytes that are alive on a rank at any moment of a step.

    Args:
        schedule: Whose rule holds for what was sent to other ranks. Torch's GPipe lets go of it at once, its 1F1B holds
            one tensor sent forward and one sent back, the others hold all until the step ends.
        actions: What the rank does, in order.
        costs: The cost of a stage, by its number.
    """
    alive = most = 0
    held = {"gpipe": 0, "1f1b": 1}.get(schedule, len(actions))
    for action in actions:
        cost = costs(action.stage)
        before, peak, after = {
            "F": (0, cost.forward, cost.kept),
            "B": (cost.kept, cost.backward, 0),
            "I": (cost.kept, cost.inputs, cost.between),
            "W": (cost.between, cost.weights, 0),
        }[action.kind]
        alive -= before
        most = max(most, alive + peak)
        alive += after
        if action.kind in "BW" and held:
            alive += cost.sent
            held -= 1
    return most


def peaks_of(schedule: str, ranks: int, microbatches: int, costs: tuple[Cost, Cost, Cost]) -> list[int]:
    """Return the peak of each rank of a pipeline; the costs are those of a first, an inner and a last stage."""
    last = ranks * (2 if schedule == "zbv" else 1) - 1
    order = order_of(schedule, ranks, microbatches)
    return [
        peak_of(schedule, order[rank], lambda stage: costs[(stage > 0) + (stage == last)]) for rank in sorted(order)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the orders of a small pipeline and a table of layouts up to 1,024 ranks; draw the chart."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the chart")
    parser.add_argument("--width", type=int, default=Sizes.width, help="numbers that stand for a byte")
    parser.add_argument("--context", type=int, default=Sizes.context, help="bytes in a sequence")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = Sizes(blocks=3 * STAGE_BLOCKS, width=options.width, context=options.context)
    print("In which order the two ranks of a pipeline run four micro-batches (stage, action, micro-batch):\n")
    for schedule in SCHEDULES:
        for rank, actions in sorted(order_of(schedule, 2, 4).items()):
            print(f"{schedule if not rank else '':12} rank {rank}: {' '.join(map(str, actions))}")
    print_layouts(sizes)
    if options.out is not None:
        draw(sizes, options.out / "scale.png")
    return 0


def print_layouts(sizes: Sizes) -> None:
    """Print what ranks keep, and their peaks, in layouts from 8 to 1,024 ranks."""
    print(
        f"\nBlocks are regions that keep their input; {STAGE_BLOCKS} blocks a stage, width {sizes.width}; "
        f"micro-batches of {MICROBATCH} x {sizes.context} bytes, twice as many as ranks in a pipeline:\n"
    )
    print(
        f"{'ranks':>6} {'data':>5} {'tensor':>7} {'sequence':>9} {'pipeline':>9} {'kept KiB':>9}   peak MiB: ", end=""
    )
    print("".join(f"{name:>14}" for name in SCHEDULES))
    for layout in (
        Layout(tensor=2, pipeline=4),
        Layout(tensor=2, sequence=True, pipeline=4),
        Layout(data=4, tensor=4, sequence=True, pipeline=4),
        Layout(data=8, tensor=8, sequence=True, pipeline=4),
        Layout(data=16, tensor=8, sequence=True, pipeline=8),
        Layout(data=8, tensor=8, sequence=True, pipeline=16),
    ):
        costs = record(sizes, layout, MICROBATCH)
        ways = f"{layout.data:5} {layout.tensor:7} {'yes' if layout.sequence else 'no':>9} {layout.pipeline:9}"
        print(f"{layout.ranks:6} {ways} {costs[1].reported / 1024:9.0f}", end=" " * 13)
        for name in SCHEDULES:
            peaks = peaks_of(name, layout.pipeline, 2 * layout.pipeline, costs)
            print(f"{f'{min(peaks) / MIB:.1f} to {max(peaks) / MIB:.1f}':>14}", end="")
        print(flush=True)


def draw(sizes: Sizes, path: Path) -> None:
    """Draw what a rank keeps of one micro-batch, and the highest peak of a pipeline, over the number of ranks."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.0, 5.2), constrained_layout=True)
    counts = (1, 2, 4, 8)
    marks = iter("os^v")
    for sequence in (False, True):
        for name, regions in (("inputs", all_blocks), ("inputs and products", all_blocks_with_products)):
            costs = [record(sizes, Layout(tensor=n, sequence=sequence), MICROBATCH, regions)[1] for n in counts]
            label = f"{name} kept, {'sequence split, too' if sequence else 'tensors split'}"
            line = "--" if sequence else "-"
            left.plot(counts, [cost.reported / MIB for cost in costs], line, marker=next(marks), label=label)
    left.set(xscale="log", yscale="log", xticks=counts, xticklabels=counts, ylabel="kept by an inner stage (MiB)")
    left.set(xlabel="ranks that split tensors", title="Of one micro-batch")
    counts = (2, 4, 8, 16)
    for regions, line in ((no_regions, ":"), (all_blocks, "-")):
        costs = record(sizes, Layout(), MICROBATCH, regions)
        for place, name in enumerate(SCHEDULES):
            peaks = [max(peaks_of(name, n, 2 * n, costs)) / MIB for n in counts]
            label = f"{name}, {'regions' if regions is all_blocks else 'none'}"
            right.plot(counts, peaks, line, color=f"C{place}", marker="os^v"[place], label=label)
    right.set(xscale="log", yscale="log", xticks=counts, xticklabels=counts, ylabel="peak of the fullest rank (MiB)")
    right.set(xlabel="ranks in a pipeline, twice as many micro-batches", title="Pipelines")
    for axes in (left, right):
        axes.minorticks_off()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", fontsize=8, title="left")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", fontsize=8, title="right", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
