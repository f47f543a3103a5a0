"""Trains a small GPT four ways and shows that torch_remat saves memory and changes nothing else.

The same model learns from the same batches with the same seed: plain, with ``torch.utils.checkpoint``, with
``torch_remat``, where each block is one checkpointed region, and the same with what its attention returns kept, so that
backward need not run the attention again. The ways take turns, step by step, so that whatever else the machine does
slows all of them alike; on a CPU they use one thread, and the time is that of the process. The demo stops with exit
code 1 as soon as their losses are not equal bit for bit. It ends with a table of time and memory, and a picture of live
bytes over one step.

    python docs/examples/demo.py --help
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matmuls that repeat bit for bit on a GPU

import torch
import torch.utils.checkpoint
from gpt import Attend, GPTConfig, RunBlock, causal_attention
from live_bytes import StepMemory
from picture import draw_live_bytes
from text import Batches, standard_library
from torch import Tensor, nn
from torch.nn import functional as F
from training import DifferenceError, Trainer, TrainingConfig, check_final_state, check_last_loss

import torch_remat as remat

_WARM_UP_STEPS = 3  # left out of the table: allocators fill, kernels are chosen
_MIB = 2**20


def run_plain(name: str, block: nn.Module, x: Tensor) -> Tensor:
    """Keep all activations."""
    return block(x)


def run_torch_checkpoint(name: str, block: nn.Module, x: Tensor) -> Tensor:
    """Recompute the block in backward, with PyTorch's own checkpoint."""
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def run_torch_remat(name: str, block: nn.Module, x: Tensor) -> Tensor:
    """Recompute the block in backward, with torch_remat."""
    return remat.checkpoint(region_name=name)(block)(x)


def attend_and_keep(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Mix values, and keep what comes out: the region around does not run this again."""
    return remat.native_save_region("attention", F.scaled_dot_product_attention, query, key, value, is_causal=True)


WAYS: dict[str, tuple[RunBlock, Attend]] = {
    "plain": (run_plain, causal_attention),
    "torch.utils.checkpoint": (run_torch_checkpoint, causal_attention),
    "torch_remat": (run_torch_remat, causal_attention),
    "torch_remat, attention kept": (run_torch_remat, attend_and_keep),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    start = time.perf_counter()
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)  # an op that cannot repeat bit for bit raises
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that takes time
    torch.set_num_threads(1)  # threads that wait for each other would count as work

    model = GPTConfig(options.layers, options.heads, options.width, options.context, options.dropout)
    training = TrainingConfig(options.steps, options.learning_rate, options.seed, torch.device(options.device))
    text = standard_library()
    batches = Batches(text, batch=options.batch, context=options.context, seed=options.seed, device=training.device)
    trainers = {name: Trainer(model, training, *way) for name, way in WAYS.items()}
    print_introduction(trainers["plain"], text, options)
    try:
        train(trainers, batches, options.steps - 1, options.every)
        memories = record(trainers, batches.next())
    except DifferenceError as difference:
        print(f"\nFAILED: {difference}", file=sys.stderr)
        return 1
    print_results(trainers, memories, options.every)
    where = {"cpu": "CPU", "cuda": "GPU"}[options.device]
    subtitle = f"GPT with {model.layers} blocks on the {where}"
    picture = options.out / "live_bytes.png"
    step_ms = {name: _step_milliseconds(trainer) for name, trainer in trainers.items()}
    draw_live_bytes(memories, step_ms, picture, subtitle)
    print(f"\nLive bytes over one step: {picture}")
    if options.trace:
        look(trainers["torch_remat"], batches.next(), options.out)
    print(f"Done in {time.perf_counter() - start:.0f} s.")
    return 0


def look(trainer: Trainer, batch: tuple[Tensor, Tensor], out: Path) -> None:
    """Take one more step; save what is kept after its forward and what happens when, as text, picture and data."""
    report, trace = trainer.train_traced(batch)
    (out / "memory_report.txt").write_text(f"{report}\n")
    (out / "memory_report.json").write_text(report.to_json())
    report.plot(out / "memory_report.png")
    (out / "trace.txt").write_text(f"{trace}\n")
    trace.plot(out / "trace.png")
    print(f"\n{report}\n\n{trace}\n\nSaved with pictures: {out}/trace.*, {out}/memory_report.*")


def train(trainers: dict[str, Trainer], batches: Batches, steps: int, every: int) -> None:
    """Take ``steps`` steps, the ways in turn, and print how it goes.

    Raises:
        DifferenceError: The losses part.
    """
    names = list(trainers)
    print("   step    loss    ms per step: " + " | ".join(names))
    for step in range(1, steps + 1):
        batch = batches.next()
        first = step % len(names)
        for name in names[first:] + names[:first]:  # each way is now the first, now the last
            trainers[name].train(batch)
        check_last_loss(trainers)
        if step == 1 or step % every == 0:
            loss = statistics.fmean(trainers[names[0]].losses[-every:])
            times = (f"{_milliseconds(trainers[name].step_seconds[-every:]):{len(name)}.0f}" for name in names)
            print(f"{step:7d}{loss:8.3f}{'':17}{' | '.join(times)}", flush=True)


def record(trainers: dict[str, Trainer], batch: tuple[Tensor, Tensor]) -> dict[str, StepMemory]:
    """Take the last step under the recorder.

    Raises:
        DifferenceError: The losses, the final parameters or the random states part.
    """
    memories = {name: trainer.train_recorded(batch) for name, trainer in trainers.items()}
    check_last_loss(trainers)
    check_final_state(trainers)
    return memories


def print_introduction(trainer: Trainer, text: Tensor, options: argparse.Namespace) -> None:
    """Print what is about to run."""
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    where = "one CPU thread" if options.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"A GPT of {options.layers} blocks, {parameters / 1e6:.1f} M parameters, learns {len(text) / 1e6:.0f} MB of "
        f"Python source (the standard library), byte by byte.\n"
        f"Four ways take turns, same seed, same data: {options.steps} steps of {options.batch} x {options.context} "
        f"bytes on {where}.\n",
        flush=True,
    )


def print_results(trainers: dict[str, Trainer], memories: dict[str, StepMemory], every: int) -> None:
    """Print that the ways are equal, and time and memory of each with the ratio to the first."""
    losses = next(iter(trainers.values())).losses
    print(
        f"\nThe loss fell from {losses[0]:.2f} to {statistics.fmean(losses[-every:]):.2f}. In all four ways the "
        f"{len(losses)} losses, the final parameters\nand the states of the random generators are equal bit for bit.\n"
    )
    rows = {
        name: (
            _step_milliseconds(trainer),
            memories[name].kept_bytes / _MIB,
            memories[name].peak_bytes / _MIB,
        )
        for name, trainer in trainers.items()
    }
    reference = next(iter(rows.values()))
    print(f"{'':28}{'median step':>20}{'kept after forward':>24}{'peak':>24}")
    for name, row in rows.items():
        cells = (
            f"{f'{value:.1f} {unit}':>{width}} {value / base:6.2f}x"
            for value, base, width, unit in zip(row, reference, (12, 16, 16), ("ms", "MiB", "MiB"), strict=True)
        )
        print(f"{name:28}{''.join(cells)}")


def _step_milliseconds(trainer: Trainer) -> float:
    return _milliseconds(trainer.step_seconds[_WARM_UP_STEPS:])


def _milliseconds(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT plain, with torch.utils.checkpoint and in two ways with torch_remat; compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = GPTConfig()
    add = parser.add_argument
    add("--steps", type=int, default=25, help="training steps of each way; live bytes are recorded over the last one")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--out", type=Path, default=Path("demo-output"), help="folder for the picture")
    add("--trace", action="store_true", help="trace one more step with torch_remat, and report what it keeps")
    add("--seed", type=int, default=0, help="of the weights, the batches and dropout")
    add("--every", type=int, default=5, help="steps from one line of progress to the next")
    add("--learning-rate", type=float, default=4e-3, help="the highest that is reached")
    add("--layers", type=int, default=model.layers, help="blocks of the GPT")
    add("--heads", type=int, default=model.heads, help="attention heads of a block")
    add("--width", type=int, default=model.width, help="numbers that stand for a byte")
    add("--context", type=int, default=256, help="bytes in a sequence")
    add("--batch", type=int, default=4, help="sequences in a batch")
    add("--dropout", type=float, default=model.dropout, help="share of numbers that are dropped")
    options = parser.parse_args(arguments)
    if options.steps < _WARM_UP_STEPS + 2:
        parser.error(f"--steps must be at least {_WARM_UP_STEPS + 2}: {_WARM_UP_STEPS} to warm up, 1 timed, 1 recorded")
    if min(options.every, options.layers, options.heads, options.context, options.batch) < 1:
        parser.error("--every, --layers, --heads, --context and --batch must be at least 1")
    if options.width < 1 or options.width % options.heads:
        parser.error(f"--width must be a multiple of --heads, not {options.width} and {options.heads}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU on this machine")
    return options


if __name__ == "__main__":
    sys.exit(main())
