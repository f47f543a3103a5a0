"""Writes the figures of a file of results into the documents: ``python -m benchmarks.page`` takes the newest.

``docs/performance.md`` gets tables and charts, this folder's README the ratios beside the targets in ``bars``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .bars import BARS, TimeVerdict, label_of
from .contenders import REENTRANT, REMAT_0_2, SAC, TORCH
from .results import PEAK, RETAINED, TIME, newest, read
from .tables import markdown, times_table, write_between

ROOT = Path(__file__).parent.parent
HEADINGS = {
    TORCH: "Beside `torch.utils.checkpoint`",
    SAC: "Beside SAC",
    REENTRANT: "Beside reentrant `torch.utils.checkpoint`",
    REMAT_0_2: "Beside `torch_remat` 0.2.2",
}
CHARTS = {TORCH: "performance_torch.png", SAC: "performance_sac.png"}
"""The contenders that have a chart, and its file in ``docs/pictures``."""
WAYS = {
    "": "",
    "by function": "policy of functions",
    "op": "remat.op",
    "op closure": "remat.op of a lambda",
    "native": "native_save_region",
    "native closure": "native_save_region of a lambda",
    "policy": "policy: a list of aten ops",
    "policy function": "policy: a function of aten ops",
}
"""What our contenders are called on the page, in its order."""
MODELS = {
    "overhead": "small ops",
    "overhead-module": "small ops in a module",
    "encoder-layer": "encoder layer, 64 wide",
    "transformer": "transformer block, 256 wide",
    "attention": "block, attention kept",
    "matmuls": "block, products kept",
    "blocks": "32 small blocks",
    "handles": "512 Functions with handles",
    "handles-alternating-8": "8 Functions, half kept",
    "handles-alternating-64": "64 Functions, half kept",
    "handles-alternating-512": "512 Functions, half kept",
    "llama": "Llama, 64 wide",
    "llama-256": "Llama, 256 wide",
    "neox": "GPT-NeoX, 64 wide",
    "bert": "BERT, 64 wide",
    "vit": "ViT, 64 wide",
    "mixtral": "Mixtral, 64 wide",
}
"""What our workloads are called on the page, without the group in front of their names."""


def write(data: Mapping[str, Any], root: Path = ROOT) -> None:
    """Write tables and charts of a run into the documents of a checkout."""
    write_between(root / "docs" / "performance.md", [figures(data)])
    write_between(root / "benchmarks" / "README.md", [targets(data)])
    for contender, name in CHARTS.items():
        draw(_rows(data, contender), root / "docs" / "pictures" / name)


def figures(data: Mapping[str, Any]) -> str:
    """Return what the page of performance shows: what was run, a chart for some contenders, a folded table for each."""
    texts = [
        f"Version {data['version']}, measured {data['measured'][:10]} in {data['rounds']} rounds, "
        f"torch {data['torch']}, Python {data['python']}, {data['machine']}.",
        *([data["note"]] if "note" in data else []),
        *([f"Could not run: {'; '.join(data['not run'])}."] if data["not run"] else []),
    ]
    for contender, heading in HEADINGS.items():
        rows = _rows(data, contender)
        if rows and contender in CHARTS:
            texts.append(f"### {heading}")
            texts.append(f"![{heading}: ratios of times](pictures/{CHARTS[contender]})".replace("`", ""))
            texts.append(_folded("Numbers", rows))
        elif rows:
            texts.append(_folded(heading.replace("`", ""), rows))
    return "\n\n".join([*texts, f"### Bytes\n\n{bytes_text(data)}"])


def bytes_text(data: Mapping[str, Any]) -> str:
    """Return the range of the ratios of bytes, in a sentence for each contender."""
    lines = []
    for contender in HEADINGS:
        parts = []
        for unit, meaning in ((RETAINED, "the bytes after forward"), (PEAK, "the bytes at the peak")):
            ratios = [row["ratio"] for row in _rows(data, contender, unit)]
            if ratios:
                parts.append(f"{min(ratios):.3f} to {max(ratios):.3f} of {meaning}")
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


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw ratios of times as points with their quartiles; a hollow point's quartiles enclose 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = _groups(rows)
    lines = [line for way, its in groups.items() for line in ([way] if way else []) + its]
    figure = Figure(figsize=(4.8, 0.8 + 0.21 * len(lines)), layout="constrained")  # its letters are read on a phone
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1.2)
    for place, row in enumerate(lines):
        if not isinstance(row, str):
            _draw_row(axes, place, row)
    axes.set_yticks(range(len(lines)), [line if isinstance(line, str) else _model(line) for line in lines], fontsize=9)
    for line, label in zip(lines, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if isinstance(line, str) else "normal")
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlabel("CPU time of a step, ours / theirs\nbars: quartiles; hollow: these enclose 1", fontsize=9)
    axes.grid(axis="x", color="#cccccc", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


def _draw_row(axes: Any, place: int, row: Mapping[str, Any]) -> None:
    (low, high), ratio = row["spread"], row["ratio"]
    colour = "#1f4e9c" if ratio < 1 else "#d95f02"
    inside = "white" if low <= 1 <= high else colour
    axes.plot([low, high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
    axes.plot(ratio, place, "o", color=colour, markerfacecolor=inside, markersize=6)


def _folded(summary: str, rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [", ".join(filter(None, (_model(row), way))), "{:.3f} ({:.3f}-{:.3f})".format(row["ratio"], *row["spread"])]
        for way, its in _groups(rows).items()
        for row in its
    ]
    table = markdown(["", "ratio (quartiles)"], cells)
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{table}\n\n</details>'


def _rows(data: Mapping[str, Any], contender: str, unit: str = TIME) -> list[dict[str, Any]]:
    return [row for row in data["rows"] if (row["contender"], row["unit"]) == (contender, unit)]


def _groups(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return rows by what our contender is called, in the order of the page."""
    return {
        title: its
        for way, title in WAYS.items()
        if (its := [row for row in rows if str(row["name"]).partition(", ours ")[2] == way])
    }


def _model(row: Mapping[str, Any]) -> str:
    workload = str(row["name"]).partition(", ours ")[0].removesuffix("-policy")
    return MODELS[re.sub(r"^(native|policies|real)-", "", workload)]


if __name__ == "__main__":
    write(read(newest(1)[0]))
