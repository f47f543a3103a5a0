"""The memory report that users get: its data, and every form in which it is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_remat.reports.data import KeptForBackward, NodeReport, RegionReport
from torch_remat.reports.html import report_as_html
from torch_remat.reports.pictures import plot_report
from torch_remat.reports.text import format_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class MemoryReport(KeptForBackward):
    """What is kept for backward.

    Attributes:
        regions: The regions that keep something, oldest first.
        outside: What is saved outside of regions, by node type, the largest first.
        parameters: Parameters, apart: those that regions and graph refer to, and those of the modules given.
        buffers: Buffers of the modules given, apart.
        budgets: A line for each budget that regions are in.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, with the sums beside the parts."""

        def with_sums(part: RegionReport | NodeReport) -> dict[str, Any]:
            return {**asdict(part), "bytes": part.bytes, "offloaded_bytes": part.offloaded_bytes}

        return {
            "bytes": self.bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "bytes_by_device": self.bytes_by_device,
            "regions": [with_sums(region) for region in self.regions],
            "outside": [with_sums(node) for node in self.outside],
            "parameters": asdict(self.parameters),
            "buffers": asdict(self.buffers),
            "budgets": list(self.budgets),
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON.

        Args:
            indent: Spaces for each level, or None for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        """Return the report as text, with layers that are alike told once."""
        return format_report(self)

    def _repr_html_(self) -> str:
        return report_as_html(self)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw a bar for each region, or for each group of regions that are alike, and one for what is saved outside.

        Args:
            path: Where to write the picture; the ending tells the format. None writes nothing.

        Returns:
            The matplotlib figure; it is not shown.

        Raises:
            UsageError: matplotlib is not installed.
        """
        return plot_report(self, path)
