"""What the pictures share: matplotlib, loaded when it is needed, and a look that survives black-and-white print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch_remat.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Fill and hatch of a bar's parts: told apart without colour.
INK, GREY, LIGHT = "#222222", "#9a9a9a", "#e6e6e6"


def new_figure(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes; it is in no window and no global list, so nothing has to close it.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib, which is not installed", remedy='Install it: pip install "torch_remat[plot]".'
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontweight="bold")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def save(figure: Figure, path: str | Path | None) -> Figure:
    """Write a figure, if there is a path, and return it."""
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def unit_of(count: float) -> tuple[float, str]:
    """Return the binary unit in which a number of bytes reads best: its bytes and its name."""
    for bytes_in_unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= bytes_in_unit:
            return float(bytes_in_unit), name
    return 1.0, "B"
