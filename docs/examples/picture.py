"""Draws live bytes over one training step, one line for each way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # draw into the file: no screen is needed

from live_bytes import PHASES, StepMemory
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_MIB = 2**20
# A phase is as wide for every way, so that the lines stand one above the other; within it they go on with each event.
_WIDTHS = {"forward": 1.0, "backward": 2.0, "optimizer": 0.4}


# Readable without colour. The thick line lies under the dashed one, so that both show where they agree.
_STYLES = (
    {"color": "#777777", "linewidth": 1.5, "zorder": 2},
    {"color": "#d95f02", "linewidth": 1.4, "zorder": 5, "linestyle": (0, (4, 2))},
    {"color": "#1f4e9c", "linewidth": 2.8, "zorder": 4},
    {"color": "#2a9d5c", "linewidth": 1.5, "zorder": 3},
)


def draw_live_bytes(
    memories: Mapping[str, StepMemory], step_ms: Mapping[str, float] | None, path: Path, subtitle: str
) -> None:
    """Write the picture to ``path``.

    Args:
        memories: One recorded step for each of up to four ways, by name; an arrow leads from the peak of the first to
            the lowest.
        step_ms: The milliseconds that a step takes, by name; None leaves times out.
        path: A ``.png`` file, or any other format that matplotlib knows by its ending.
        subtitle: What was trained, in a few words.
    """
    figure, axes = plt.subplots(figsize=(5.2, 4.6), constrained_layout=True)  # its letters are read on a phone
    plain, *others = memories.values()
    for (name, memory), style in zip(memories.items(), _STYLES, strict=False):
        sizes = f"kept {memory.kept_bytes / _MIB:.1f}, peak {memory.peak_bytes / _MIB:.1f} MiB"
        label = f"{name}: {sizes}" + (f", {step_ms[name]:.0f} ms" if step_ms else "")
        axes.plot(*_curve(memory), drawstyle="steps-post", label=label, **style)
    axes.fill_between(*_curve(plain), step="post", color="#eeeeee", zorder=0)
    axes.axhline(
        plain.standing_bytes / _MIB, color="black", linestyle=":", linewidth=1.2, label="weights, optimizer state"
    )

    top = 1.1 * max(memory.peak_bytes for memory in memories.values()) / _MIB
    axes.set(xlim=(0, sum(_WIDTHS.values())), ylim=(0, top), ylabel="live memory (MiB)")
    _mark_phases(axes)
    if others:
        _mark_saving(axes, plain, min(others, key=lambda memory: memory.peak_bytes))
    figure.suptitle("Live bytes over one training step", fontweight="bold")
    axes.set_title(subtitle, fontsize=10)
    figure.legend(loc="outside lower left", fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _curve(memory: StepMemory) -> tuple[list[float], list[float]]:
    """Return the points of one line: place within the step, and live MiB."""
    starts = _phase_starts()
    xs = [starts[sample.phase] + sample.progress * _WIDTHS[sample.phase] for sample in memory.samples]
    return xs, [sample.live_bytes / _MIB for sample in memory.samples]


def _phase_starts() -> dict[str, float]:
    """Return where each phase begins on the x axis."""
    starts, position = {}, 0.0
    for name in PHASES:
        starts[name] = position
        position += _WIDTHS[name]
    return starts


def _mark_phases(axes: Axes) -> None:
    """Name each phase under the axis and draw a line between two of them."""
    starts = _phase_starts()
    for start in list(starts.values())[1:]:
        axes.axvline(start, color="black", linewidth=0.8, zorder=1)
    axes.set_xticks([start + _WIDTHS[name] / 2 for name, start in starts.items()], list(starts), fontweight="bold")
    axes.tick_params(axis="x", length=0)


def _mark_saving(axes: Axes, plain: StepMemory, best: StepMemory) -> None:
    """Draw an arrow from the peak without to the peak with checkpoints, beside the lines."""
    at = _phase_starts()["backward"] + 0.12 * _WIDTHS["backward"]
    high, low = plain.peak_bytes / _MIB, best.peak_bytes / _MIB
    axes.plot([_phase_starts()["backward"], at + 0.05], [high, high], color="black", linewidth=0.8)
    axes.plot([at - 0.05, at + 0.05], [low, low], color="black", linewidth=0.8)
    axes.annotate("", xy=(at, low), xytext=(at, high), arrowprops={"arrowstyle": "-|>", "color": "black"}, zorder=5)
    saving = f"{100 * (1 - low / high):.0f} % lower"
    axes.annotate(
        saving,
        (at, 0.65 * low + 0.35 * high),
        xytext=(6, 0),
        textcoords="offset points",
        fontweight="bold",
        va="center",
    )
