"""Bytes by budget: what forward keeps and the peak of a step as a budget is lowered, ours and torch's own.

torch's is ``activation_memory_budget`` of `torch.compile`, for the model as a whole. Its step's peak may rise as its
budget is lowered (https://github.com/pytorch/pytorch/issues/197838): the model here has 32 small Llama blocks, as the
one of that report.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch

from .budget_models import Model, llama, plain
from .budget_ways import Way, kept_and_peak_bytes, take_times, torch_budget, warm_up, within
from .contenders import NONE
from .measure import same_bits
from .tables import markdown

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)
RISE = 1.02
"""How many times its peak at a larger budget a step may take."""

Curve = list[tuple[float, int, int]]
"""Budgets as shares, from the largest, with the bytes kept after forward and the peak of the step."""


def blocks() -> Model:
    """Return the model: 32 Llama blocks."""
    return llama(64, 32, (2, 128))


def peaks(backend: str | None = None) -> dict[str, Any]:
    """Return our curve, the bytes without checkpointing and, with a backend, torch's curve."""
    model = blocks()
    model.run[0] = plain
    model.step()
    found = {"model": model.name, "none": kept_and_peak_bytes(model, Way(plain)), "ours": our_curve(model)}
    return found | ({"torch": torch_curve(model, backend)} if backend else {})


def our_curve(model: Model) -> Curve:
    """Return the curve of `remat.budget`; gradients are compared at each budget."""
    curve = []
    for share in SHARES:
        way = within(f"{100 * share:.0f}%")
        warm_up(model, {"budget": way})
        curve.append((share, *kept_and_peak_bytes(model, way)))
    return curve


def torch_curve(model: Model, backend: str) -> Curve:
    """Return the curve of torch's own budget."""
    torch._dynamo.config.recompile_limit = 10 * len(SHARES)
    curve = []
    for share in SHARES:
        way = torch_budget(model, share, backend)
        warm_up_compiled(model, way)
        curve.append((share, *kept_and_peak_bytes(model, way)))
    return curve


def warm_up_compiled(model: Model, way: Way) -> bool:
    """Compile; return whether gradients equal eager code's bit for bit: decompositions may draw and round otherwise."""
    model.run[0] = plain
    model.step()
    expected = model.gradients()
    for _ in range(2):
        with way.around():
            model.step()
    return all(map(same_bits, expected, model.gradients()))


def compiled(model: Model, backend: str, rounds: int) -> dict[str, Any]:
    """Return bytes and times of torch's own budgets on a model, in turn with eager code."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 10 * len(SHARES)
    ways, equal, failed = {NONE: Way(plain)}, {NONE: True}, {}
    for share in SHARES:
        way = torch_budget(model, share, backend)
        try:
            equal[f"{share}"] = warm_up_compiled(model, way)
        except Exception as error:
            failed[f"{share}"] = f"{type(error).__name__}: {error}"
            continue
        ways[f"{share}"] = way
    counted = {name: kept_and_peak_bytes(model, way) for name, way in ways.items()}
    samples = take_times(model, ways, rounds)
    rows = {
        name: {
            "ms": median(taken) * 1e3,
            "to eager": median(one / other for one, other in zip(taken, samples[NONE], strict=True)),
            "to 1.0": median(one / other for one, other in zip(taken, samples.get("1.0", taken), strict=True)),
            "kept": counted[name][0],
            "peak": counted[name][1],
            "equal": equal[name],
        }
        for name, taken in samples.items()
    }
    return {"backend": backend, "rows": rows, "failed": failed}


def highest_rise(curve: Curve) -> float:
    """Return how many times the peak at a larger budget a lower one's was, at most."""
    least, rise = curve[0][2], 1.0
    for _, _, peak in curve:
        rise = max(rise, peak / least)
        least = min(least, peak)
    return rise


def peaks_table(found: dict[str, Any]) -> str:
    """Return the curves as a table."""
    who = [name for name in ("ours", "torch") if name in found]
    head = [found["model"], *(f"{name}: {what}, MiB" for name in who for what in ("kept", "peak"))]
    rows = [["none", *(f"{size / 2**20:.2f}" for size in found["none"])] + [""] * 2 * (len(who) - 1)]
    for place, share in enumerate(SHARES):
        sizes = [size for name in who for size in found[name][place][1:]]
        rows.append([f"budget {share:.0%}".replace("%", " %"), *(f"{size / 2**20:.2f}" for size in sizes)])
    return markdown(head, rows)


def peaks_text(found: dict[str, Any]) -> str:
    """Return how far a lower budget raised the peak, as a sentence."""
    rises = {name: highest_rise(found[name]) for name in ("ours", "torch") if name in found}
    said = ", ".join(f"{rise:.3f} ({name})" for name, rise in rises.items())
    state = "pass" if rises["ours"] <= RISE else "FAIL"
    return f"- {state}: a lower budget's peak was at most so many times a larger one's: {said}; the bar is {RISE}."


def compiled_table(model: str, found: dict[str, Any]) -> str:
    """Return the results of `compiled` as a table."""
    head = [f"{model}, {found['backend']}", "ms", "to eager", "to 1.0", "kept, MiB", "peak, MiB", "gradients"]
    rows = []
    for name, row in found["rows"].items():
        times = [f"{row['ms']:.1f}", f"{row['to eager']:.3f}", f"{row['to 1.0']:.3f}" if name != NONE else ""]
        sizes = [f"{row[what] / 2**20:.2f}" for what in ("kept", "peak")]
        rows.append([name, *times, *sizes, "equal" if row["equal"] else "others"])
    failed = [f"{name} could not run: {error}" for name, error in found["failed"].items()]
    return "\n\n".join([markdown(head, rows), *failed])


def plot_peaks(found: dict[str, Any], path: Path) -> None:
    """Draw the peak of a step by the budget."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, look, label in (("ours", "o-", "remat.budget"), ("torch", "s--", "activation_memory_budget, compiled")):
        if name in found:
            axes.plot(
                [share for share, _, _ in found[name]],
                [peak / 2**20 for _, _, peak in found[name]],
                look,
                color="#222222" if name == "ours" else "#9a9a9a",
                label=label,
            )
    axes.set_title(found["model"])
    axes.set_xlabel("budget, as a share")
    axes.set_ylabel("peak of the step, MiB")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
