"""Writes the figures of a file of results into the documents: ``python -m benchmarks.page`` takes the newest.

``docs/performance.md`` gets tables and charts, this folder's README the ratios beside the targets in ``bars``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .bars import BARS, TimeVerdict, label_of
from .contenders import REENTRANT, REMAT_0_1, REMAT_0_2, SAC, TORCH
from .results import PEAK, RETAINED, TIME, newest, read
from .tables import markdown, times_table, write_between

ROOT = Path(__file__).parent.parent
HEADINGS = {
    TORCH: "Beside `torch.utils.checkpoint`",
    SAC: "Beside SAC",
    REENTRANT: "Beside reentrant `torch.utils.checkpoint`",
    REMAT_0_2: "Beside `torch_remat` 0.2.2",
    REMAT_0_1: "Beside `torch_remat` 0.1.0",
}
CHARTS = {TORCH: "performance_torch.png", SAC: "performance_sac.png"}
"""The contenders that have a chart, and its file in ``docs/pictures``."""


def write(data: Mapping[str, Any], root: Path = ROOT) -> None:
    """Write tables and charts of a run into the documents of a checkout."""
    write_between(root / "docs" / "performance.md", [figures(data)])
    write_between(root / "benchmarks" / "README.md", [targets(data)])
    for contender, name in CHARTS.items():
        draw(_rows(data, contender), HEADINGS[contender].replace("`", ""), root / "docs" / "pictures" / name)


def figures(data: Mapping[str, Any]) -> str:
    """Return what the page of performance shows: what was run, and a chart and a table for each contender."""
    texts = [
        f"Version {data['version']}, measured {data['measured'][:10]} in {data['rounds']} rounds, "
        f"torch {data['torch']}, Python {data['python']}, {data['machine']}.",
        *([data["note"]] if "note" in data else []),
        *([f"Could not run: {'; '.join(data['not run'])}."] if data["not run"] else []),
    ]
    for contender, heading in HEADINGS.items():
        rows = _rows(data, contender)
        if not rows:
            continue
        texts.append(f"### {heading}")
        if contender in CHARTS:
            texts.append(f"![{heading}: ratios of times](pictures/{CHARTS[contender]})".replace("`", ""))
        cells = [[_short(row), "{:.3f} ({:.3f}-{:.3f})".format(row["ratio"], *row["spread"])] for row in rows]
        texts.append(markdown(["row", "ratio (quartiles)"], cells))
    return "\n\n".join([*texts, f"### Bytes\n\n{bytes_text(data)}"])


def bytes_text(data: Mapping[str, Any]) -> str:
    """Return the range of the ratios of bytes, in a sentence for each contender."""
    lines = []
    for contender in HEADINGS:
        parts = []
        for unit in (RETAINED, PEAK):
            ratios = [row["ratio"] for row in _rows(data, contender, unit)]
            if ratios:
                parts.append(f"{unit} {min(ratios):.3f} to {max(ratios):.3f} of theirs")
        lines += [f"- {HEADINGS[contender]}: {', '.join(parts)}."] if parts else []
    bars = data["bars"]
    lines.append(f"- Checks of bytes, replayed ops and growth: {bars['passed']} of {bars['of']} pass.")
    return "\n".join(lines)


def targets(data: Mapping[str, Any]) -> str:
    """Return the ratios of times beside their targets."""
    rows = {(row["name"], row["contender"]): row for row in data["rows"] if row["unit"] == TIME}
    keys = {(label_of(workload, ours), peer): bar for (workload, ours, peer), bar in BARS.items()}
    return times_table([
        TimeVerdict(*key, bar, (rows[key]["ratio"], *rows[key]["spread"])) for key, bar in keys.items() if key in rows
    ])  # fmt: skip


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw ratios of times as points with their quartiles; a hollow point's quartiles enclose 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.3 + 0.25 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1.2)
    for place, row in enumerate(rows):
        (low, high), ratio = row["spread"], row["ratio"]
        colour = "#1f4e9c" if ratio < 1 else "#d95f02"
        axes.plot([low, high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot(
            ratio, place, "o", color=colour, markerfacecolor="white" if low <= 1 <= high else colour, markersize=6
        )
    axes.set_yticks(range(len(rows)), [_short(row) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("CPU time of a step, ours / theirs; bars: quartiles; hollow: they enclose 1", fontsize=9)
    axes.set_title(title, fontweight="bold")
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _rows(data: Mapping[str, Any], contender: str, unit: str = TIME) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if (row["contender"], row["unit"]) == (contender, unit)]


def _short(row: Mapping[str, Any]) -> str:
    return str(row["name"]).replace(", ours", ",")


if __name__ == "__main__":
    write(read(newest(1)[0]))
