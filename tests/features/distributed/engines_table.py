"""The table of engines by ways: `python -m tests.features.distributed.engines_table [ENGINE ...] [--ways WAY ...]`.

Prints one row a cell. A cell that fails, or hangs for longer than its limit, ends its processes; new ones go on with
the next. All cells with two processes take a quarter of an hour on two cores. Rows of torch's own ways may fail, where
torch does: the command ends with 1 if one of ours failed.
"""

from __future__ import annotations

import argparse
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


def main() -> int:
    """Run the table and print it."""
    from tests.features.distributed import budget_checks, collectives_checks, engines_checks  # noqa: F401
    from tests.features.distributed.engines import CHECKS, ENGINES, THEIRS, WAYS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", default=[*ENGINES, "check"])
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=30, help="the limit of a cell")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    failed = 0
    for engine in given.engines:  # in processes of their own: rows are printed when they end
        ways = CHECKS if engine == "check" else given.ways
        cells = [f"{engine}:{way}" for way in ways]
        for cell, told, texts in run_cells(given.world, cells, given.steps, given.seconds):
            failed += not (told.startswith("equal") or cell.split(":")[1] in THEIRS)
            sys.stdout.write(f"{given.world}  {cell:<36} {told[:240]}\n")
            for text in texts if given.verbose else ():
                sys.stdout.write(text[-3000:])
            sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
