"""Step time by memory budget, beside the static ways to spend memory: ``python -m benchmarks.budgets``.

Two models whose blocks are regions: a GPT of twelve equal blocks over real text, as in the demo, and a U-Net of unequal
ones. Gradients are compared first, bit for bit. Then each way's peak is counted, by the profiler, and at last the times
are taken in turn, in one process, on one thread, as the CPU time of whole steps; ratios are medians over the rounds.

Ways: no checkpointing, full checkpointing (torch's and ours), torch's checkpoint of the first n blocks, selective
activation checkpointing with all matrix products kept, and budgets as shares of the peak of no checkpointing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat

from .measure import undisturbed
from .memory import allocations

Run = Callable[[int, nn.Module], Callable[..., Tensor]]

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
WARM_UP = 9  # steps; a budget measures the first of them


@dataclass
class Model:
    """A model whose blocks are run by ``run``, which may be changed."""

    name: str
    blocks: int
    module: nn.Module
    loss: Callable[[], Tensor]
    run: list[Run]

    def step(self) -> None:
        """Run forward and backward, with gradients from before."""
        for parameter in self.module.parameters():
            parameter.grad.zero_()  # type: ignore[union-attr]
        self.loss().backward()

    def gradients(self) -> list[Tensor]:
        """Return copies of the gradients."""
        return [parameter.grad.clone() for parameter in self.module.parameters()]  # type: ignore[union-attr]


@dataclass
class Way:
    """A way to run blocks, inside of a context."""

    run: Run
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    budget: Any = None


def plain(_: int, block: nn.Module) -> Callable[..., Tensor]:
    """Run a block as it is."""
    return block


def ours(place: int, block: nn.Module) -> Callable[..., Tensor]:
    """Run it as a region of ours."""
    return remat.checkpoint(region_name=f"blocks.{place}")(block)


def torchs(_: int, block: nn.Module, **options: Any) -> Callable[..., Tensor]:
    """Run it as one of torch's."""
    return lambda *args: torch_checkpoint(block, *args, use_reentrant=False, **options)


def first(count: int, place: int, block: nn.Module) -> Callable[..., Tensor]:
    """Run the first blocks as regions of torch's, the others as they are."""
    return torchs(place, block) if place < count else block


def gpt(length: int = 64) -> Model:
    """Return the GPT of the demo, with twelve blocks, on one batch of real text."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "examples"))
    from gpt import GPT, GPTConfig
    from text import Batches, standard_library

    run: list[Run] = [plain]
    config = GPTConfig(layers=12, heads=4, width=96, context=max(length, 64), dropout=0.05)
    module = GPT(config, lambda name, block, x: run[0](int(name.rpartition(".")[2]), block)(x))
    batches = Batches(standard_library(), batch=8, context=length, seed=0, device=torch.device("cpu"))
    tokens, targets = batches.next()

    def loss() -> Tensor:
        torch.manual_seed(1)
        return module(tokens, targets)

    return _ready(Model("gpt", 12, module, loss, run))


class Convs(nn.Module):
    """Two convolutions, each with a norm."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(taken, given, 3, padding=1), nn.GroupNorm(4, given), nn.SiLU(),
            nn.Conv2d(given, given, 3, padding=1), nn.GroupNorm(4, given), nn.SiLU(),
        )  # fmt: skip

    def forward(self, *given: Tensor) -> Tensor:
        """Run on what is given, joined by channels."""
        return self.body(torch.cat(given, 1) if len(given) > 1 else given[0])


class UNet(nn.Module):
    """Four levels down and up, with skip connections: blocks of a factor of eight in size."""

    def __init__(self, run: list[Run], width: int = 12) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.run = run
        self.down = nn.ModuleList(Convs(3 if not level else widths[level - 1], widths[level]) for level in range(4))
        self.up = nn.ModuleList(Convs(widths[level] + widths[level + 1], widths[level]) for level in (2, 1, 0))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image."""
        skips = []
        for place, block in enumerate(self.down):
            x = self.run[0](place, block)(x if not place else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for place, block in enumerate(self.up, start=4):
            x = self.run[0](place, block)(skips.pop(), F.interpolate(x, scale_factor=2.0))
        return self.head(x)


def unet() -> Model:
    """Return a U-Net on a batch of noise."""
    run: list[Run] = [plain]
    torch.manual_seed(0)
    module, images = UNet(run), torch.randn(2, 3, 96, 96)
    return _ready(Model("unet", 7, module, lambda: module(images).square().mean(), run))


def _ready(model: Model) -> Model:
    for parameter in model.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def peak_bytes(model: Model, way: Way) -> int:
    """Return the most bytes that a step has allocated above those from before, gradients existing."""
    model.run[0] = way.run
    for parameter in model.module.parameters():
        parameter.grad.zero_()  # type: ignore[union-attr]
    with way.around(), allocations() as events:
        model.loss().backward()
    return max(accumulate(events))


def ways_of(model: Model, none: int) -> dict[str, Way]:
    """Return the ways that are measured; ``none`` is the peak of no checkpointing."""
    aten = torch.ops.aten
    matmuls = [aten.mm.default, aten.addmm.default, aten.convolution.default]
    sac = partial(create_selective_checkpoint_contexts, matmuls)
    ways = {"none": Way(plain), "torch": Way(torchs), "ours": Way(ours), "SAC": Way(partial(torchs, context_fn=sac))}
    ways |= {f"first {count}": Way(partial(first, count)) for count in range(1, model.blocks)}
    for share in (2.0, 1.0, *SHARES):
        budget = remat.budget(int(share * none))
        ways[f"budget {share}"] = Way(ours, lambda budget=budget: budget, budget)
    return ways


def measure(model: Model, rounds: int) -> dict[str, Any]:
    """Compare gradients, count peaks, take times."""
    none = peak_bytes(model, Way(plain))
    model.step()
    expected = model.gradients()
    ways = ways_of(model, none)
    for name, way in ways.items():
        model.run[0] = way.run
        for step in range(WARM_UP if way.budget else 1):
            with way.around():
                model.step()
            if step > 1 and way.budget and way.budget.steps[-1].peak_bytes > way.budget.budget_bytes:
                print(f"  {name}: step {step + 1} had a peak of {way.budget.steps[-1].peak_bytes}")
            same = all(map(torch.equal, expected, model.gradients()))
            if not same:
                raise AssertionError(f"{model.name}: {name} has other gradients")
    peaks = {name: peak_bytes(model, way) for name, way in ways.items()}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    with undisturbed():
        for turn in range(rounds):
            names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
            for name in names[:: -1 if turn % 2 else 1]:
                way = ways[name]
                model.run[0] = way.run
                with way.around():
                    begin = process_time()
                    model.step()
                    samples[name].append(process_time() - begin)
            gc.collect()
    rows = {
        name: {
            "ms": median(taken) * 1e3,
            "ratio": median(one / other for one, other in zip(taken, samples["none"], strict=True)),
            "peak": peaks[name],
            "budget": way.budget and way.budget.budget_bytes,
            "forward": way.budget and way.budget.steps[-1].forward_bytes,
            "limit": way.budget and int(way.budget.limit),
        }
        for (name, taken), way in zip(samples.items(), ways.values(), strict=True)
    }
    return {"model": model.name, "none": none, "rows": rows, "beside": dict(_beside_best(rows, samples))}


def _beside_best(rows: dict[str, Any], samples: dict[str, list[float]]) -> Iterator[tuple[str, Any]]:
    """Yield, for each budget, the fewest first blocks whose peak is no higher, and the time as a share of theirs."""
    for name, row in rows.items():
        if not name.startswith("budget"):
            continue
        fits = [other for other in rows if other.startswith("first") and rows[other]["peak"] <= row["peak"]]
        if row["peak"] >= rows["none"]["peak"]:
            fits = ["none"]
        best = min(fits or ["torch"], key=lambda other: rows[other]["ratio"])
        yield name, (best, median(a / b for a, b in zip(samples[name], samples[best], strict=True)))


def lengths(rounds: int) -> dict[str, Any]:
    """Sum step times over batches of lengths that differ by a factor of eight, at the peak of half the longest."""
    models = {length: gpt(length) for length in (16, 32, 48, 64, 96, 128)}
    longest = models[128]
    limit = int(0.5 * peak_bytes(longest, Way(plain)))
    fits = [n for n in range(1, 13) if peak_bytes(longest, Way(partial(first, n))) <= limit]
    budget = remat.budget(limit)
    ways = {f"first {fits[0]}": Way(partial(first, fits[0])), "budget": Way(ours, lambda: budget), "none": Way(plain)}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for model in [longest] * WARM_UP + list(models.values()):
        model.run[0] = ours
        with budget:
            model.step()
    peak = peak_bytes(longest, ways["budget"])
    with undisturbed():
        for _ in range(rounds):
            for name, way in ways.items():
                taken = 0.0
                for model in models.values():
                    model.run[0] = way.run
                    with way.around():
                        begin = process_time()
                        model.step()
                        taken += process_time() - begin
                samples[name].append(taken)
    static = samples[f"first {fits[0]}"]
    ratio = median(a / b for a, b in zip(samples["budget"], static, strict=True))
    sums = {name: median(taken) * 1e3 for name, taken in samples.items()}
    return {"limit": limit, "peak": peak, "ms": sums, "ratio": ratio}


def overhead(rounds: int, count: int = 200) -> dict[str, float]:
    """Return nanoseconds per saved tensor over plain autograd, in forward and backward, where nothing is given up."""
    x, grad, budget = torch.randn(4, requires_grad=True), torch.ones(4), remat.budget("1 GiB")

    def chain(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x.sin()
        return x

    def hooked() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return chain(x)

    def budgeted() -> Tensor:
        with budget:
            return remat.checkpoint()(chain)(x)

    ways = {"plain": lambda: chain(x), "hooks": hooked, "budget": budgeted}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    with undisturbed():
        for turn in range(-WARM_UP, rounds):
            for name, forward in ways.items():
                begin = process_time()
                forward().backward(grad)
                if turn >= 0:
                    samples[name].append((process_time() - begin) / count * 1e9)
    pairs = {name: zip(samples[name], samples["plain"], strict=True) for name in ("hooks", "budget")}
    return {name: median(one - other for one, other in pair) for name, pair in pairs.items()}


def table(result: dict[str, Any]) -> str:
    """Return a model's results as a table in Markdown."""
    head = (
        result["model"],
        "of no checkpointing",
        "peak, MiB",
        "budget, MiB",
        "beside the best static way at its peak",
    )
    lines = [f"| {' | '.join(head)} |"]
    lines.append("| --- | --: | --: | --: | --- |")
    for name, row in result["rows"].items():
        budget = f"{row['budget'] / 2**20:.1f}" if row["budget"] else ""
        best, ratio = result["beside"].get(name, ("", 0.0))
        beside = f"{ratio:.3f} of {best}" if best else ""
        lines.append(f"| {name} | {row['ratio']:.3f} | {row['peak'] / 2**20:.1f} | {budget} | {beside} |")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw time against peak."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(results), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        looks = (("budget", "o-", "#222222"), ("first", "s--", "#9a9a9a"))
        for start, look, colour in looks:
            rows = sorted((row["peak"], row["ratio"]) for name, row in result["rows"].items() if name.startswith(start))
            label = "torch checkpoint of the first n blocks" if start == "first" else "a budget"
            axes.plot([x / 2**20 for x, _ in rows], [y for _, y in rows], look, color=colour, label=label)
        for name in ("none", "torch", "ours", "SAC"):
            row = result["rows"][name]
            axes.annotate(name, (row["peak"] / 2**20, row["ratio"]), xytext=(4, 4), textcoords="offset points")
            axes.plot(row["peak"] / 2**20, row["ratio"], "x", color="#222222")
        axes.set_title(result["model"])
        axes.set_xlabel("peak of the step, MiB")
        axes.set_ylabel("step time, of no checkpointing")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure what is asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=["gpt", "unet", "lengths", "overhead"])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", remat.RematWarning)
    torch.set_num_threads(1)
    results, found = [], {}
    for build in (gpt, unet):
        if arguments.only in (None, build.__name__):
            results.append(measure(build(), arguments.rounds))
            print(table(results[-1]), end="\n\n", flush=True)
    if arguments.only in (None, "lengths"):
        found["lengths"] = lengths(arguments.rounds)
        print("lengths", found["lengths"], flush=True)
    if arguments.only in (None, "overhead"):
        found["overhead"] = overhead(3 * arguments.rounds)
        print("nanoseconds a saved tensor over plain autograd", found["overhead"])
    if arguments.plot and results:
        plot(results, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps({"results": results, **found}, indent=1))


if __name__ == "__main__":
    main()
