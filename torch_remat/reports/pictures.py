"""Pictures, for which matplotlib is loaded; they survive black-and-white print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch_remat.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, GREY, LIGHT = "#222222", "#9a9a9a", "#e6e6e6"


def new_figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure; it is in no window and no global list, so nothing has to close it.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "plots need matplotlib, which is not installed", remedy="Install it: pip install matplotlib."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontweight="bold")
    return figure


def finished(figure: Figure, path: str | Path | None) -> Figure:
    """Take away the lines above and beside the axes, write the figure, if there is a path, and return it."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
