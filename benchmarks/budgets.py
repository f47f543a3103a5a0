"""Step time by memory budget, beside the static ways to spend memory: ``python -m benchmarks.budgets``.

Three models whose blocks are regions: a GPT of twelve equal blocks over real text, as in the demo, a U-Net of unequal
ones, and an encoder with a decoder on batches whose lengths vary by a factor of eight. Gradients are compared first,
bit for bit. Then each way's peak is counted, by the profiler, and at last the times are taken in turn, in one process,
on one thread, as the CPU time of whole steps; ratios are medians over the rounds.

``--docs`` writes all tables into ``benchmarks/BUDGETS.md``, and the picture of ``docs/budget.md``; ``--quick``
takes a few minutes.

Ways: no checkpointing, full checkpointing (torch's and ours), torch's checkpoint of the first n blocks, selective
activation checkpointing with all matrix products kept, and budgets as shares of the peak of no checkpointing.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat

from .budget_models import Model, Run, gpt, plain, translation, unet
from .measure import undisturbed
from .memory import allocations
from .tables import write_between

ROOT = Path(__file__).parent.parent
MODELS = {"gpt": gpt, "unet": unet, "translation": translation}
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
WARM_UP = 9  # steps; a budget learns in the first of them what it evicts


@dataclass
class Way:
    """A way to run blocks, inside of a context."""

    run: Run
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    budget: Any = None
    seen: dict[float, Any] = field(default_factory=dict)  # the budget's steps while it learns

    def look(self) -> None:
        """Note the steps since the last look; a budget forgets them."""
        if self.budget is not None:
            self.seen.update((step.begun, step) for step in self.budget.steps)


def ours(place: int, block: nn.Module) -> Callable[..., Tensor]:
    """Run it as a region of ours."""
    return remat.checkpoint(region_name=f"blocks.{place}")(block)


def torchs(_: int, block: nn.Module, **options: Any) -> Callable[..., Tensor]:
    """Run it as one of torch's."""
    return lambda *args: torch_checkpoint(block, *args, use_reentrant=False, **options)


def first(count: int, place: int, block: nn.Module) -> Callable[..., Tensor]:
    """Run the first blocks as regions of torch's, the others as they are."""
    return torchs(place, block) if place < count else block


def peak_bytes(model: Model, way: Way) -> int:
    """Return the most bytes that a step has allocated above those from before, gradients existing."""
    model.run[0] = way.run
    model.clear()
    with way.around(), allocations() as events:
        for loss in model.losses:
            loss().backward()
    return max(accumulate(events))


def reserve_bytes(model: Model, none: int, full: int) -> int:
    """Return what a step needs besides what its regions keep, given the peaks of no and of full checkpointing."""
    model.run[0] = ours
    with remat.budget(2**40) as budget:
        model.step()
    kept = max(step.most_bytes for step in budget.steps)
    least = max(step.sum_of("fixed_bytes") + max(row.saved_bytes for row in step.rows) for step in budget.steps)
    return int(1.02 * max(none - kept, full - least, 0))


def ways_of(model: Model, none: int, quick: bool) -> dict[str, Way]:
    """Return the ways that are measured; ``none`` is the peak of no checkpointing."""
    aten = torch.ops.aten
    matmuls = [aten.mm.default, aten.addmm.default, aten.convolution.default]
    sac = partial(create_selective_checkpoint_contexts, matmuls)
    ways = {"none": Way(plain), "torch": Way(torchs), "ours": Way(ours), "SAC": Way(partial(torchs, context_fn=sac))}
    ways |= {f"first {count}": Way(partial(first, count)) for count in range(1, model.blocks)}
    reserve = reserve_bytes(model, none, peak_bytes(model, ways["ours"]))
    for share in (2.0, 1.0, *SHARES[:: 3 if quick else 1]):
        size = int(share * none)
        budget = remat.budget(size, reserve=min(reserve, size // 2))
        ways[f"budget {share}"] = Way(ours, lambda budget=budget: budget, budget)
    return ways


def measure(model: Model, rounds: int, quick: bool = False) -> dict[str, Any]:
    """Compare gradients, count peaks, take times."""
    none = peak_bytes(model, Way(plain))
    model.step()
    expected = model.gradients()
    ways = ways_of(model, none, quick)
    for name, way in ways.items():
        model.run[0] = way.run
        for _ in range(WARM_UP if way.budget else 1):
            with way.around():
                model.step()
            way.look()
            if not all(map(torch.equal, expected, model.gradients())):
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
            "over": max((int(step.most_bytes - step.limit_bytes) for step in way.seen.values()), default=0),
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
    budget = remat.budget(limit, reserve=reserve_bytes(longest, 2 * limit, peak_bytes(longest, Way(ours))))
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
    """Return nanoseconds per saved tensor over plain autograd, in forward and backward, where nothing is evicted.

    For a pair of hooks that does nothing, and for a budget.
    """
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
    pairs = {name: zip(samples[name], samples["plain"], strict=True) for name in ways if name != "plain"}
    return {name: median(one - other for one, other in pair) for name, pair in pairs.items()}


def table(result: dict[str, Any]) -> str:
    """Return a model's results as a table in Markdown."""
    head = (result["model"], "of no checkpointing", "peak, MiB", "budget, MiB", "beside the best first n at its peak")
    lines = [f"| {' | '.join(head)} |"]
    lines.append("| --- | --: | --: | --: | --- |")
    for name, row in result["rows"].items():
        budget = f"{row['budget'] / 2**20:.1f}" if row["budget"] else ""
        best, ratio = result["beside"].get(name, ("", 0.0))
        beside = f"{ratio:.3f} of {best}" if best else ""
        lines.append(f"| {name} | {row['ratio']:.3f} | {row['peak'] / 2**20:.1f} | {budget} | {beside} |")
    return "\n".join(lines)


def checks(result: dict[str, Any]) -> str:
    """Return what the budgets' peaks, and what they kept, were against their limits, in a sentence each."""
    rows = [row for name, row in result["rows"].items() if name.startswith("budget")]
    fits = [row for row in rows if row["budget"] >= result["rows"]["ours"]["peak"]]
    highest = max((row["peak"] / row["budget"] for row in fits), default=0.0)
    over = max((row["over"] for row in fits), default=0)
    return (
        f"{result['model']}: {len(fits)} of {len(rows)} budgets are at least the peak of full recomputation. In these "
        f"the highest peak was {highest:.3f} of the budget. Regions kept at most {max(over, 0):,} B more than the "
        "limit at any moment. All gradients were equal bit for bit."
    )


def lengths_text(found: dict[str, Any]) -> str:
    """Return what `lengths` has found, as a sentence."""
    static = next(name for name in found["ms"] if name.startswith("first"))
    return (
        "Varying length: the sum of the GPT's steps over batches of 16 to 128 bytes, in half the peak of the longest, "
        f"was {found['ratio']:.3f} of that of {static}, the best static choice that fits the longest; the peak was "
        f"{found['peak'] / found['limit']:.3f} of the budget."
    )


def overhead_text(found: dict[str, float]) -> str:
    """Return what `overhead` has found, as a sentence."""
    return (
        "Overhead: per saved tensor, forward and backward, over plain autograd, where nothing is evicted: "
        f"{found['budget'] / 1e3:.1f} us, of which a pass-through pair of hooks takes {found['hooks'] / 1e3:.1f} us."
    )


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
        marks = {"none": ("x", "no checkpointing"), "torch": ("+", "torch's of all"), "ours": ("*", "ours of all")}
        for name, (mark, label) in (marks | {"SAC": ("D", "SAC of all")}).items():
            row = result["rows"][name]
            axes.plot(row["peak"] / 2**20, row["ratio"], mark, color="#222222", label=label, markersize=8)
        axes.set_title(result["model"])
        axes.set_xlabel("peak of the step, MiB")
        axes.set_ylabel("step time, of no checkpointing")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)


def main(given: Sequence[str] | None = None) -> None:
    """Measure what is asked for, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__)
    parser.add_argument("--rounds", type=int, help="samples of each way (default: 20)")
    parser.add_argument("--only", choices=[*MODELS, "lengths", "overhead"])
    parser.add_argument("--quick", action="store_true", help="a third of the budgets, and three rounds")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw time against peak")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything that was measured to PATH")
    parser.add_argument(
        "--docs", action="store_true", help="write the tables of benchmarks/BUDGETS.md and docs/pictures/budget.png"
    )
    arguments = parser.parse_args(given)
    rounds = arguments.rounds or (3 if arguments.quick else 20)
    warnings.simplefilter("ignore", remat.RematWarning)
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        print(text, end="\n\n", flush=True)

    for name, build in MODELS.items():
        if arguments.only in (None, name):
            results.append(measure(build(), rounds, arguments.quick))
            say(table(results[-1]))
    for result in results:
        say(f"- {checks(result)}")
    if arguments.only in (None, "lengths"):
        found["lengths"] = lengths(rounds)
        say(f"- {lengths_text(found['lengths'])}")
    if arguments.only in (None, "overhead"):
        found["overhead"] = overhead(3 * rounds)
        say(f"- {overhead_text(found['overhead'])}")
    picture = arguments.plot or (arguments.docs and ROOT / "docs" / "pictures" / "budget.png")
    if picture and results:
        plot(results, picture)
    if arguments.docs:
        write_between(ROOT / "benchmarks" / "BUDGETS.md", said)
    if arguments.json:
        arguments.json.write_text(json.dumps({"results": results, **found}, indent=1))


if __name__ == "__main__":
    main()
