"""Keeps a run's ratios as JSON, one file for each release in ``benchmarks/results``, and compares two of them.

A file has rows. Each is a ratio, ours divided by theirs: of CPU time, with the quartiles over the rounds, or of bytes,
which are exact. It names torch, Python and the kind of machine, but neither hosts nor paths.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from torch_remat._version import __version__

from .bars import judge, judge_times, label_of, ours_measured
from .measure import Result
from .tables import markdown

FOLDER = Path(__file__).parent / "results"
TIME, RETAINED, PEAK = "time", "bytes retained", "bytes at peak"


def record(results: Mapping[str, Result]) -> dict[str, Any]:
    """Return what a release keeps of a run, in types that JSON knows."""
    times, bars = judge_times(results), judge(results)
    counts = [len(one.samples_us) for result in results.values() for one in result.measurements.values()]
    rows = [_row(each.label, each.peer, TIME, *each.ratio) for each in times if each.ratio]
    return {
        "version": __version__,
        "measured": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": _machine(),
        "rounds": min(counts, default=0),
        "bars": {"passed": sum(bar.passed for bar in bars), "of": len(bars)},
        "not run": [f"{each.label} to {each.peer}" for each in times if each.failed],
        "rows": [*rows, *_bytes(results)],
    }


def write(data: Mapping[str, Any], path: Path) -> None:
    """Write what ``record`` returned, each row on a line of its own."""
    rows = ",\n".join(f"    {json.dumps(row)}" for row in data["rows"])
    rest = json.dumps({name: value for name, value in data.items() if name != "rows"}, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{rest[:-2]},\n  "rows": [\n{rows}\n  ]\n}}\n')


def read(path: Path) -> dict[str, Any]:
    """Return what ``write`` wrote."""
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def newest(count: int, folder: Path = FOLDER) -> list[Path]:
    """Return the files of the last runs in a folder, the newest last.

    Raises:
        SystemExit: There are fewer than ``count``.
    """
    files = sorted(folder.glob("*.json"), key=lambda path: str(read(path)["measured"]))
    if len(files) < count:
        raise SystemExit(
            f"benchmarks/{folder.name} has {len(files)} of {count} files; "
            "`python -m benchmarks --quick --json FILE` writes one"
        )
    return files[-count:]


def moved_table(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the rows of a run beside those of an older one; ``moved`` marks those whose spreads do not overlap."""
    before, after = _by_key(old), _by_key(new)
    rows, moved = [], 0
    for key, now in after.items():
        then = before.get(key)
        mark, change = "", ""
        if then:
            change = f"{100 * (now['ratio'] / then['ratio'] - 1):+.1f} %"
            apart = now["spread"][0] > then["spread"][1] or now["spread"][1] < then["spread"][0]
            mark = "moved" if apart else ""
            moved += apart
        rows.append([mark, *key, _shown(then) if then else "", _shown(now), change])
    header = ["", "row", "to", "of", f"old: {old['version']}", f"new: {new['version']}", "change"]
    runs = "\n".join(f"- {name}: {_run(data)}" for name, data in (("old", old), ("new", new)))
    counts = (
        f"{moved} of {len(before.keys() & after.keys())} rows moved beyond their spread; "
        f"{len(after.keys() - before.keys())} are new, {len(before.keys() - after.keys())} are in the old run only."
    )
    return f"{runs}\n\n{markdown(header, rows, left=4)}\n\n{counts}"


def _bytes(results: Mapping[str, Result]) -> Iterator[dict[str, Any]]:
    for name, result in results.items():
        twin = result.workload.twin
        if twin is None:
            continue
        theirs = result.measurements[twin]
        for ours in ours_measured(result):
            mine = result.measurements[ours]
            for unit, ratio in (
                (RETAINED, mine.retained_bytes / theirs.retained_bytes),
                (PEAK, mine.peak_bytes / theirs.peak_bytes),
            ):
                yield _row(label_of(name, ours), twin, unit, ratio, ratio, ratio)


def _row(name: str, contender: str, unit: str, ratio: float, low: float, high: float) -> dict[str, Any]:
    ratio, low, high = round(ratio, 4), round(low, 4), round(high, 4)
    return {"name": name, "contender": contender, "unit": unit, "ratio": ratio, "spread": [low, high]}


def _machine() -> str:
    """Return the kind of processor and the number of its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def _by_key(data: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["name"], row["contender"], row["unit"]): row for row in data["rows"]}


def _shown(row: Mapping[str, Any]) -> str:
    low, high = row["spread"]
    spread = f" ({low:.3f} - {high:.3f})" if row["unit"] == TIME else ""
    return f"{row['ratio']:.3f}{spread}"


def _run(data: Mapping[str, Any]) -> str:
    return (
        f"{data['version']} of {data['measured']}, {data['rounds']} rounds, torch {data['torch']}, "
        f"Python {data['python']}, {data['machine']}"
    )
