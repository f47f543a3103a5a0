"""Runs cells, each an engine and a way or a check, in processes of their own: see `engines_worker.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent


def run_cells(
    world: int, cells: Sequence[str], steps: int = 6, limit_seconds: int = 30
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield for each cell its name, what the first rank told of it, and what each rank printed if it failed."""
    left = list(cells)
    while left:
        texts = _run_processes(world, left, steps, limit_seconds)
        told = [
            dict(line.split(" ", 1) for line in text.splitlines() if line.split(" ", 1)[0] in left) for text in texts
        ]
        for cell in list(left):
            left.remove(cell)
            results = [one.get(cell, "FAILED: it hung, or another rank ended") for one in told]
            worst = next((one for one in results if not one.startswith("equal")), None)
            yield cell, worst or results[0], texts if worst else []
            if worst is not None:
                break


def _run_processes(world: int, cells: Sequence[str], steps: int, limit_seconds: int) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        root = HERE.parents[2]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(root), *sys.path]), OMP_NUM_THREADS="1")
        command = [sys.executable, str(HERE / "engines_worker.py")]
        rendezvous = str(Path(directory) / "rendezvous")
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world), rendezvous, str(limit_seconds), str(steps), *cells],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            return [process.communicate()[0] for process in processes]  # each ends itself when a cell hangs
        finally:
            for process in processes:
                process.kill()
                process.wait()
