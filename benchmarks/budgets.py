"""Step time and bytes by memory budget, beside the static ways to spend memory: ``python -m benchmarks.budgets``.

Eight models whose blocks are regions (`budget_models.py`). Gradients are compared first, bit for bit. Then the bytes
that forward leaves and the peak of a step are counted, by the profiler, and at last the times are taken in turn, in one
process, on one thread, as the CPU time of whole steps; ratios are medians over the rounds.

Ways: no checkpointing, full checkpointing (torch's and ours), torch's checkpoint of the first n blocks for every n,
selective activation checkpointing with all matrix products kept and with every other one, ours with all of them, and
budgets. A budget's extra time is divided by that of the first n blocks at the same kept bytes, which is interpolated
between the n's.

``--only peaks``, ``--only planning`` and ``--only solvers`` are parts of their own; the last has torch's own compiled
budgets with other choices of what is kept. ``--compiled`` measures torch's on all models, which takes most of an
hour. ``--docs`` writes all tables into ``benchmarks/BUDGETS.md``.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

import torch_remat as remat

from .bars import Bar, TimeVerdict
from .budget_models import MODELS, Model, gpt2
from .budget_peaks import compiled, compiled_table, peaks, peaks_table, peaks_text, plot_peaks
from .budget_ways import (
    HALF,
    HUGE,
    LEAST,
    OURS,
    POINTS,
    PRODUCTS,
    SAC,
    TORCH,
    Way,
    kept_and_peak_bytes,
    point_name,
    take_times,
    warm_up,
    ways_of,
    within,
)
from .contenders import NONE, UnavailableError
from .measure import quartiles
from .tables import markdown, times_table, write_between

ROOT = Path(__file__).parent.parent
BARS: dict[str, Sequence[Bar]] = {
    "gpt2-256": [Bar(0.75, 0.62), Bar(0.55, 0.42), Bar(0.45, 0.30), Bar(0.55, 0.40)],
    "gpt2-768": [Bar(0.60, 0.48), Bar(0.40, 0.26), Bar(0.30, 0.20), Bar(0.30, 0.15)],
    "llama-512": [Bar(0.80, 0.65), Bar(0.55, 0.40), Bar(0.35, 0.25), Bar(0.30, 0.10)],
}
"""On a budget's extra time, of that of the first n blocks at the same kept bytes, for each of ``POINTS``."""
NOTHING_EVICTED, LEAST_BUDGET, TO_BOUND = Bar(1.01, 1.00), Bar(1.02, 1.00), Bar(2.0, 1.3)
PRODUCTS_KEPT = {"gpt2-256": Bar(0.165, 0.14)}
"""On the extra time over no checkpointing where products are kept by function."""
MORE = ("peaks", "planning", "solvers")
SOLVED = ("gpt2-256", "llama-256")
"""The models in whose compiled budgets other solvers choose."""
RESAMPLED = 200  # times, for the quartiles
ORANGE, BLUE = "#d95f02", "#1f4e9c"  # torch's ways and ours, as in the other pictures


def measure(name: str, model: Model, rounds: int) -> dict[str, Any]:
    """Compare gradients, count bytes, take times; bytes once more after the times, for a budget may have moved."""
    ways = ways_of(model)
    first_steps = warm_up(model, ways)
    counted = {name: [kept_and_peak_bytes(model, way)] for name, way in ways.items()}
    samples = take_times(model, ways, rounds)
    for way in (way for way in ways if ways[way].learns):
        counted[way].append(kept_and_peak_bytes(model, ways[way]))
    kept = {way: sum(kept for kept, _ in bytes_) // len(bytes_) for way, bytes_ in counted.items()}
    least, most = kept[OURS], kept[NONE]
    beside = _quartiled(lambda taken: beside_first(kept, extras(taken)), samples)
    bounds = {name: seconds for name in map(point_name, POINTS) if (seconds := recomputed_seconds(model, ways[name]))}
    to_bounds = _quartiled(lambda taken: beside_bounds(bounds, taken), samples)
    ratios = _quartiled(lambda taken: {way: extra + 1 for way, extra in extras(taken).items()}, samples)
    rows = {
        way: {
            "ms": median(taken) * 1e3,
            "ratio": ratios[way],
            "kept": kept[way],
            "share": (kept[way] - least) / (most - least),
            "peak": max(peak for _, peak in counted[way]),
            "beside": beside.get(way),
            "to bound": to_bounds.get(way),
            "first ms": [seconds * 1e3 for seconds in first_steps[way]] if ways[way].learns else None,
        }
        for way, taken in samples.items()
    }
    to_full = _quartiled(lambda taken: {LEAST: _ratio(taken[LEAST], taken[OURS])}, samples)
    return {"name": name, "model": model.name, "rounds": rounds, "rows": rows, "least to full": to_full[LEAST]}


def extras(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return each way's extra time over no checkpointing, as a share of it: the median of the rounds."""
    return {name: _ratio(taken, samples[NONE]) - 1 for name, taken in samples.items()}


def recomputed_seconds(model: Model, way: Way) -> float:
    """Return what a budget's ladders say that kernels take in the replays of one step."""
    steps = way.budget.to_dict()["steps"][-len(model.losses) :]
    return sum(seconds for step in steps for region in step["regions"] for _, seconds in region["runs_again"])


def beside_bounds(bounds: Mapping[str, float], samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the extra time of budgets, of the seconds that their ladders say are recomputed."""
    found = extras(samples)
    return {name: found[name] * median(samples[NONE]) / seconds for name, seconds in bounds.items()}


def beside_first(kept: Mapping[str, int], extra: Mapping[str, float]) -> dict[str, float]:
    """Return for each other way its extra time, divided by that of the first n blocks at the same kept bytes."""
    static = [name for name in kept if name in (NONE, TORCH) or name.startswith("first ")]
    curve = sorted(((kept[name], extra[name]) for name in static), reverse=True)
    found = {}
    for name in kept.keys() - {NONE, OURS, LEAST, HUGE, *static}:
        theirs = interpolated(curve, kept[name])
        if theirs > 0:
            found[name] = extra[name] / theirs
    return found


def interpolated(curve: Sequence[tuple[int, float]], kept: int) -> float:
    """Return the extra time at so many kept bytes, given points from the most bytes to the fewest.

    Fewer bytes take no less time: points that say otherwise, by noise, count as their mean.
    """
    pools: list[tuple[float, int]] = []
    for _, value in curve:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, size), (other, more) = pools.pop(), pools.pop()
            pools.append(((one * size + other * more) / (size + more), size + more))
    values = [value for value, size in pools for _ in range(size)]
    points = list(zip((size for size, _ in curve), values, strict=True))
    if kept >= points[0][0]:
        return points[0][1]
    for (more, least), (fewer, most) in pairwise(points):
        if kept >= fewer:
            return least + (most - least) * (more - kept) / (more - fewer)
    return points[-1][1]


def planning() -> dict[str, dict[str, float]]:
    """Return what the first three steps in a budget take above full checkpointing: recording, ladders and all else."""
    found = {}
    for layers in (1, 48):
        model = gpt2(64, layers, (2, 64))
        full, way = within("0%"), within("40%")
        warm_up(model, {LEAST: full})
        taken = warm_up(model, {LEAST: full, "budget": way})
        least = median(taken[LEAST])
        found[f"{layers} layers"] = {"seconds": sum(max(one - least, 0.0) for one in taken["budget"][:3])}
    return found


def verdicts(result: dict[str, Any]) -> list[TimeVerdict]:
    """Return what was measured beside what must be."""
    name, rows = result["name"], result["rows"]

    def extra(row: dict[str, Any]) -> tuple[float, float, float]:
        ratio, low, high = row["ratio"]
        return ratio - 1, low - 1, high - 1

    found = []
    for point, bar in zip(POINTS, BARS.get(name, [Bar()] * len(POINTS)), strict=True):
        row = rows[point_name(point)]
        said = f"{name}, {point_name(point)}, extra time"
        found.append(TimeVerdict(said, f"first n at {row['share']:.2f}", bar, row["beside"]))
        if row["to bound"] is not None:
            found.append(TimeVerdict(said, "recomputed seconds", TO_BOUND, row["to bound"]))
    found.append(TimeVerdict(f"{name}, nothing evicted", NONE, NOTHING_EVICTED, rows[HUGE]["ratio"]))
    found.append(TimeVerdict(f"{name}, least budget", OURS, LEAST_BUDGET, result["least to full"]))
    bar = PRODUCTS_KEPT.get(name, Bar())
    found.append(TimeVerdict(f"{name}, products, extra time", NONE, bar, extra(rows[PRODUCTS])))
    found.append(TimeVerdict(f"{name}, SAC, extra time", NONE, Bar(), extra(rows[SAC])))
    if HALF in rows:
        row = rows[HALF]
        found.append(TimeVerdict(f"{name}, {HALF}, extra time", f"first n at {row['share']:.2f}", Bar(), row["beside"]))
    return found


def table(result: dict[str, Any]) -> str:
    """Return a model's results as a table in Markdown."""
    head = [result["model"], "ms", "to none", "kept, MiB", "share", "peak, MiB", "extra, of first n", "quartiles"]
    rows = []
    for name, row in result["rows"].items():
        cells = [f"{row['ms']:.1f}", f"{row['ratio'][0]:.3f}", f"{row['kept'] / 2**20:.1f}", f"{row['share']:.2f}"]
        cells.append(f"{row['peak'] / 2**20:.1f}")
        beside, low, high = row["beside"] or (None, 0.0, 0.0)
        rows.append([name, *cells, *(["", ""] if beside is None else [f"{beside:.3f}", f"{low:.3f} - {high:.3f}"])])
    return markdown(head, rows)


def planning_text(found: dict[str, dict[str, float]]) -> str:
    """Return what `planning` has found, as a sentence."""
    said = ", ".join(f"{1e3 * row['seconds']:.0f} ms with {name}" for name, row in found.items())
    return f"- The first three steps in a budget took above full checkpointing, in all: {said} (GPT-2, 64 wide)."


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the extra time of steps against kept bytes, one panel above the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.4 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, result in zip(figure.subplots(len(results), 1, squeeze=False).flat, results, strict=True):
        plot_model(axes, result)
    figure.savefig(path, dpi=150)


def plot_model(axes: Any, result: dict[str, Any]) -> None:
    """Draw one model: torch's ways in orange, ours in blue, no checkpointing as the point where both begin."""
    rows = result["rows"]
    spots = {name: (row["kept"] / 2**20, 100 * (row["ratio"][0] - 1)) for name, row in rows.items()}
    curves = (
        ("torch.utils.checkpoint, the first n blocks", ORANGE, "s--", "first ", TORCH),
        ("torch_remat, a budget", BLUE, "o-", "budget ", OURS),
    )
    for label, colour, look, start, full in curves:
        between = [name for name in rows if name.startswith(start) and name not in (HUGE, LEAST)]
        points = sorted(spots[name] for name in (NONE, *between, full))
        axes.plot(*zip(*points, strict=True), look, color=colour, label=label, linewidth=2, markersize=7)
    axes.plot(*spots[SAC], "D", color=ORANGE, markersize=9, label="torch's selective checkpointing of products")
    axes.plot(*spots[NONE], "o", color="#222222", markersize=9, label="no checkpointing", zorder=5)
    axes.set_title(f"{result['model']}: one training step", fontsize=13)
    axes.set_xlabel("MiB kept for backward", fontsize=13)
    axes.set_ylabel("a step takes longer by, %", fontsize=13)
    axes.set_ylim(bottom=-1)
    axes.tick_params(labelsize=12)
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", fontsize=12)


def main(given: Sequence[str] | None = None) -> None:
    """Measure what is asked for, and print it."""
    arguments = _parser().parse_args(given)
    rounds = arguments.rounds or (3 if arguments.quick else 20)
    warnings.simplefilter("ignore", remat.RematWarning)
    torch.set_num_threads(1)
    names = arguments.only or [*MODELS, *MORE]
    results: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        print(text, end="\n\n", flush=True)
        if arguments.json:  # after each part, so that a run that ends early is not lost
            arguments.json.write_text(json.dumps({"results": results, **found}, indent=1))

    if arguments.compiled:
        _compiled(names, rounds, arguments, found, say)
        return
    for name in (name for name in MODELS if name in names):
        try:
            results.append(measure(name, MODELS[name](), rounds))
        except UnavailableError as error:
            say(f"{name} is skipped: {error}")
            continue
        say(table(results[-1]))
    if results:
        say(times_table([verdict for result in results for verdict in verdicts(result)]))
    if "peaks" in names:
        found["peaks"] = peaks()
        say(f"{peaks_table(found['peaks'])}\n\n{peaks_text(found['peaks'])}")
    if "planning" in names:
        found["planning"] = planning()
        say(planning_text(found["planning"]))
    if "solvers" in names:
        from .budget_solvers import solvers, solvers_table  # which torch 2.10 has no interface for

        found["solvers"] = {name: solvers(MODELS[name](), rounds) for name in SOLVED}
        say("\n\n".join(map(solvers_table, found["solvers"].values())))
    if arguments.plot and results:
        plot(results, arguments.plot)
    if arguments.docs:
        write_between(ROOT / "benchmarks" / "BUDGETS.md", said)


def _compiled(
    names: Sequence[str], rounds: int, arguments: argparse.Namespace, found: dict[str, Any], say: Callable[[str], None]
) -> None:
    """Measure torch's own budgets: the peaks beside ours, and the models."""
    if "peaks" in names:
        found["peaks"] = peaks(arguments.backend)
        say(f"{peaks_table(found['peaks'])}\n\n{peaks_text(found['peaks'])}")
        if arguments.plot:
            plot_peaks(found["peaks"], arguments.plot)
    found["compiled"] = {}
    for name in (name for name in MODELS if name in names):
        model = MODELS[name]()
        found["compiled"][name] = compiled(model, arguments.backend, rounds)
        say(compiled_table(model.name, found["compiled"][name]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=__doc__)
    parser.add_argument("--rounds", type=int, help="samples of each way (default: 20)")
    parser.add_argument("--only", nargs="+", choices=[*MODELS, *MORE])
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--compiled", action="store_true", help="torch's own budgets, with all that --only names")
    parser.add_argument("--backend", default="aot_eager_decomp_partition", help="of torch.compile, for --compiled")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw time against kept bytes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write everything that was measured to PATH")
    parser.add_argument("--docs", action="store_true", help="write the tables of benchmarks/BUDGETS.md")
    return parser


def _ratio(taken: Sequence[float], theirs: Sequence[float]) -> float:
    return median(one / other for one, other in zip(taken, theirs, strict=True))


def _quartiled(
    compute: Callable[[Mapping[str, Sequence[float]]], Mapping[str, float]], samples: Mapping[str, Sequence[float]]
) -> dict[str, tuple[float, float, float]]:
    """Return each computed value, with its quartiles over runs of as many rounds drawn from the measured ones."""
    draw, rounds = Random(0), len(samples[NONE])
    drawn: dict[str, list[float]] = {}
    for _ in range(RESAMPLED):
        turns = draw.choices(range(rounds), k=rounds)
        for name, value in compute({name: [taken[turn] for turn in turns] for name, taken in samples.items()}).items():
            drawn.setdefault(name, []).append(value)
    return {name: (value, *quartiles(drawn.get(name, [value]))) for name, value in compute(samples).items()}


if __name__ == "__main__":
    main()
