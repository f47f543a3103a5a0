"""The parts of ``benchmarks.gpu``, each for a process of its own: ``python -m benchmarks.gpu_parts NAME --json FILE``.

A part writes its rows anew whenever it has learned more, so that what was measured until it is stopped is there. A
value is None where only a CUDA device has it. Times are those of the wall, with the device waited for on either side.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat
from torch_remat._compat import accelerator_type
from torch_remat._version import __version__ as version

from . import offload
from .measure import quartiles

ROOT = Path(__file__).parents[1]
ON_CUDA = accelerator_type() == "cuda"
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
MIB = 1 << 20
aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Of which a block runs its products and one kernel of attention."""
LEARNING_STEPS = 5
"""Before anything of a way is measured: a budget needs some to learn."""


@dataclass
class Run:
    """What a part is given, and where it writes.

    Attributes:
        file: Where its rows go.
        out: The folder of all results.
        toy: Whether sizes are small.
        end: When to stop, by the clock of ``perf_counter``.
    """

    file: Path
    out: Path
    toy: bool
    end: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Write what is known."""
        partly = self.file.with_suffix(".partly")
        partly.write_text(json.dumps({"rows": self.rows, "notes": self.notes}))
        partly.replace(self.file)

    def has_time(self) -> bool:
        """Whether there is time left."""
        return perf_counter() < self.end

    def say(self, **row: Any) -> None:
        """Add a row."""
        self.rows.append(row)
        self.write()


def machine(run: Run) -> None:
    """Say what runs here, and measure copies from and to pinned memory."""
    run.say(what="torch", value=torch.__version__)
    run.say(what="torch_remat", value=version)
    run.say(what="Python", value=platform.python_version())
    run.say(what="CUDA of the build", value=torch.version.cuda or "none")
    if not ON_CUDA:
        run.say(what="device", value=None)
        return
    about = torch.cuda.get_device_properties(0)
    run.say(what="device", value=about.name)
    run.say(what="compute capability", value=f"{about.major}.{about.minor}")
    run.say(what="memory, MiB", value=about.total_memory // MIB)
    there, back = _seconds_of_copies(256 * MIB)
    run.say(what="to pinned memory, GB/s", value=256 * MIB / there / 1e9)
    run.say(what="from pinned memory, GB/s", value=256 * MIB / back / 1e9)


def _seconds_of_copies(count: int) -> tuple[float, float]:
    """Return the seconds to copy so many bytes to pinned memory, and back."""
    held, pinned = torch.ones(count, dtype=torch.uint8, device=DEVICE), torch.ones(count, dtype=torch.uint8)
    pinned = pinned.pin_memory()
    there = [_seconds(lambda: pinned.copy_(held, non_blocking=True)) for _ in range(5)]
    back = [_seconds(lambda: held.copy_(pinned, non_blocking=True)) for _ in range(5)]
    return min(there), min(back)


def _seconds(step: Callable[[], object]) -> float:
    _synchronize()
    start = perf_counter()
    step()
    _synchronize()
    return perf_counter() - start


def _synchronize() -> None:
    if ON_CUDA:
        torch.cuda.synchronize()


def tests(run: Run) -> None:
    """Run the tests that need a GPU, and count what came out, file by file."""
    files = sorted(str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text())
    if run.toy:
        files = [file for file in files if file.endswith("test_gpu.py")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", *files]
    found: dict[str, dict[str, Any]] = {}
    with (run.out / "pytest.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            if not (match := re.match(r"(\S+?)::(.+?) (PASSED|FAILED|ERROR|SKIPPED)", line)):
                continue
            file, name, outcome = match[1], match[2], match[3].lower()
            row = found.setdefault(file, {"file": file, "passed": 0, "failed": 0, "error": 0, "skipped": 0})
            row[outcome] += 1
            if outcome in ("failed", "error"):
                run.notes.append(f"- **{outcome}**: `{file}::{name}`")
            run.rows = list(found.values())
            run.write()
    code = process.wait()
    if not ON_CUDA:
        run.notes.append("All are skipped: each needs CUDA.")
    run.write()
    if code:
        sys.exit(f"pytest ended with {code}: see pytest.log")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a stack of blocks."""

    width: int
    hidden: int
    head: int
    layers: int
    batch: int
    length: int


SIZES = {
    1024: Sizes(1024, 2816, 64, layers=12, batch=8, length=2048),
    4096: Sizes(4096, 11008, 128, layers=4, batch=4, length=2048),
}
TOY_SIZES = Sizes(32, 64, 8, layers=3, batch=2, length=16)


class LlamaBlock(nn.Module):
    """Attention with rotary positions and a gated MLP, each with its norm, as in Llama; no biases."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.head = sizes.head
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.width) for _ in range(2))
        self.query, self.key, self.value, self.out = (linear(sizes.width, sizes.width) for _ in range(4))
        self.gate, self.up = (linear(sizes.width, sizes.hidden) for _ in range(2))
        self.down = linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the block's output, of the shape of its input ``(batch, length, width)``."""
        normed = self.norms[0](x)
        query, key, value = (
            part(normed).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = (part * cosine + _turned(part) * sine for part in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


@dataclass
class Way:
    """One way to keep what backward needs.

    Attributes:
        wrap: Makes a block what is called in its place.
        around: Entered around each step.
        seconds: Samples of a step.
        row: What is known besides times.
    """

    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    seconds: list[float] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)


class Stack:
    """Blocks in bfloat16, and a step of them in each way."""

    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers)).to(DEVICE, torch.bfloat16)
        shape = sizes.batch, sizes.length, sizes.width
        self.x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        angles = torch.outer(torch.arange(sizes.length), 1e4 ** -torch.linspace(0, 1, sizes.head // 2))
        angles = torch.cat((angles, angles), -1).to(DEVICE)
        self.positions = angles.cos().bfloat16(), angles.sin().bfloat16()

    def step(self, way: Way) -> int | None:
        """Run forward and backward; return the bytes that forward has left allocated, on a CUDA device."""
        self.clear()
        with way.around():
            before = torch.cuda.memory_allocated() if ON_CUDA else 0
            h = self.x
            for block in self.blocks:
                h = way.wrap(block)(h, *self.positions)
            kept = torch.cuda.memory_allocated() - before if ON_CUDA else None
            h.float().square().mean().backward()
        return kept

    def clear(self) -> None:
        """Forget the gradients."""
        self.x.grad = None
        self.blocks.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Return those that are compared: of the input and of the first block."""
        return [self.x.grad, *(parameter.grad for parameter in self.blocks[0].parameters())]  # type: ignore[list-item]


def ways() -> dict[str, Way]:
    """Return the ways to run a block, plain first."""
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    offloader = remat.CpuOffloader(prefetch_bytes=1 << 30, max_pending_bytes=1 << 30)
    halved = remat.budget("50%")
    return {
        "plain": Way(lambda block: block),
        "torch's checkpoint": Way(lambda block: partial(torch_checkpoint, block, use_reentrant=False)),
        "region": Way(remat.checkpoint()),
        "SAC": Way(lambda block: partial(torch_checkpoint, block, use_reentrant=False, context_fn=contexts)),
        "policy, the same ops": Way(remat.checkpoint(policy=KEPT)),
        "budget of 50 %": Way(remat.checkpoint(), lambda: halved),
        "region, inputs offloaded": Way(remat.checkpoint(offloader=offloader, offload_inputs=True)),
    }


def llama(run: Run, width: int) -> None:
    """Measure a step of Llama blocks in each way, in rounds whose order changes."""
    sizes = TOY_SIZES if run.toy else SIZES[width]
    stack, contenders = Stack(sizes), ways()
    run.notes.append(
        f"{sizes.layers} blocks, width {sizes.width}, hidden {sizes.hidden}, {sizes.batch} x {sizes.length} tokens. "
        "*Equal*: gradients of the input and of the first block, bit for bit; attention may add in any order."
    )
    expected: list[Tensor] = []
    for name, way in [*contenders.items()]:
        way.row = {"way": name}
        run.rows.append(way.row)
        try:
            way.row.update(_counted(stack, way))
        except torch.OutOfMemoryError:
            way.row["ms"] = "out of memory"
            stack.clear()
            del contenders[name]
            continue
        gradients = stack.gradients()
        expected = expected or [gradient.clone() for gradient in gradients]
        way.row["equal"] = all(map(torch.equal, expected, gradients))
        run.write()
    _take_times(run, contenders, stack.step)


def _counted(stack: Stack, way: Way) -> dict[str, Any]:
    """Return the row's bytes, after some steps from which budgets learn."""
    for _ in range(LEARNING_STEPS):
        stack.step(way)
    stack.clear()
    row = {"ms": 0.0, "of plain": 0.0, "quartiles": ""}
    if not ON_CUDA:
        stack.step(way)
        return {**row, "peak MiB": None, "kept MiB": None}
    _synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = stack.step(way) or 0
    peak = torch.cuda.max_memory_allocated() - before
    return {**row, "peak MiB": peak / MIB, "kept MiB": kept / MIB}


def _take_times(run: Run, contenders: dict[str, Way], step: Callable[[Way], object]) -> None:
    """Take samples while there is time, and write medians after each round; ratios are those within rounds."""
    names, rounds = list(contenders), 0
    while names and (rounds < 2 or (run.has_time() and not (run.toy and rounds >= 3))):
        start = rounds % len(names)
        for name in names[start:] + names[:start]:
            contenders[name].seconds.append(_seconds(partial(step, contenders[name])))
        rounds += 1
        first = contenders[names[0]].seconds
        for way in contenders.values():
            ratios = [own / other for own, other in zip(way.seconds, first, strict=True)]
            low, high = quartiles(ratios)
            way.row.update({"ms": median(way.seconds) * 1000, "of plain": median(ratios)})
            way.row["quartiles"] = f"{low:.3f} - {high:.3f}"
        run.write()
    run.notes.append(f"{rounds} rounds.")
    run.write()


def overlap(run: Run) -> None:
    """Measure how much of the copies of offloading a step hides."""
    width, rows, layers = (32, 16, 3) if run.toy else (4096, 16384, 8)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_CUDA else torch.float32
    blocks = nn.ModuleList(offload.Block(width) for _ in range(layers)).to(DEVICE, dtype)
    x = torch.randn(rows, width, device=DEVICE, dtype=dtype, requires_grad=True)
    offloader = remat.CpuOffloader(prefetch_bytes=2 << 30, max_pending_bytes=2 << 30, min_bytes=0)
    contenders = {"kept": Way(remat.checkpoint()), "offloaded": Way(remat.checkpoint(offloader=offloader))}
    policies = {"kept": offload.SAVE, "offloaded": offload.OFFLOAD}
    moved = [0]

    def step(way: Way) -> None:
        policy = policies[way.row["way"]]
        blocks.zero_grad(set_to_none=True)
        x.grad, h = None, x.clone()
        for block in blocks:
            h = way.wrap(block)(h, policy)
        moved[0] = max(moved[0], offloader.offloaded_bytes)
        h.float().sum().backward()

    expected: Tensor | None = None
    for name, way in contenders.items():
        way.row = {"way": name, "ms": 0.0, "of plain": 0.0, "quartiles": ""}
        run.rows.append(way.row)
        for _ in range(3):
            step(way)
        if ON_CUDA:
            torch.cuda.reset_peak_memory_stats()
            step(way)
        way.row["peak MiB"] = torch.cuda.max_memory_allocated() / MIB if ON_CUDA else None
        expected = x.grad if expected is None else expected
        assert expected is not None
        assert x.grad is not None
        way.row["equal"] = torch.equal(expected, x.grad)
        run.write()
    run.notes.append(f"{layers} blocks of width {width} on {rows} rows; {moved[0]:,} bytes offloaded in a step.")
    _take_times(run, contenders, step)
    if ON_CUDA:
        copies = sum(_seconds_of_copies(256 * MIB)) * moved[0] / (256 * MIB)
        longer = median(contenders["offloaded"].seconds) - median(contenders["kept"].seconds)
        run.notes.append(f"Copies alone: {copies * 1000:.1f} ms. Hidden: {1 - max(longer, 0) / copies:.0%}.")
    else:
        run.notes.append("Hidden: needs CUDA.")
    run.write()


def reserve(run: Run) -> None:
    """Measure what the allocator holds above what is allocated, under budgets in bytes and without."""
    stack = Stack(TOY_SIZES if run.toy else SIZES[1024])
    everything = remat.budget("100%")
    _say_reserve(run, stack, "plain", Way(lambda block: block), None)
    _say_reserve(run, stack, "region", Way(remat.checkpoint()), None)
    _say_reserve(run, stack, "budget of 100 %", Way(remat.checkpoint(), lambda: everything), everything)
    most = everything.steps[-1].most_bytes
    for share in (0.9, 0.7, 0.5, 0.3):
        if run.has_time():
            budget = remat.budget(max(int(most * share), 1))
            way = Way(remat.checkpoint(), lambda budget=budget: budget)  # type: ignore[misc]
            _say_reserve(run, stack, f"budget of {budget.budget_bytes / MIB:,.1f} MiB", way, budget)


def _say_reserve(run: Run, stack: Stack, name: str, way: Way, budget: Any) -> None:
    """Run some steps from an empty cache, and add a row."""
    stack.clear()
    if ON_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ON_CUDA else 0
    for _ in range(LEARNING_STEPS + 2):
        stack.step(way)
    _synchronize()
    row: dict[str, Any] = {"way": name, "allocated MiB": None, "reserved MiB": None, "above MiB": None, "retries": None}
    if ON_CUDA:
        stats = torch.cuda.memory_stats()
        allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        row.update({"allocated MiB": (allocated - before) / MIB, "reserved MiB": (reserved - before) / MIB})
        row.update({"above MiB": (reserved - allocated) / MIB, "retries": stats["num_alloc_retries"]})
    row["kept at most MiB"] = budget.steps[-1].most_bytes / MIB if budget is not None else ""
    row["left for the rest MiB"] = budget.reserve_bytes / MIB if budget is not None else ""
    run.say(**row)


PARTS: dict[str, Callable[[Run], None]] = {
    "machine": machine,
    "tests": tests,
    "llama-1024": partial(llama, width=1024),
    "llama-4096": partial(llama, width=4096),
    "overlap": overlap,
    "reserve": reserve,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_parts", description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args(arguments)
    run = Run(options.json, options.out, options.toy or not ON_CUDA, perf_counter() + options.seconds)
    PARTS[options.name](run)


if __name__ == "__main__":
    main()
