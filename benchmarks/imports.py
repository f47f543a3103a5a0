"""How long ``import torch_remat`` takes after torch, beside the release on PyPI.

Each sample is a process of its own with Python's collector off. The two take turns, and the order of a pair
changes, so that what else the machine does hits both alike. The time is the processor's. Both packages are copies with
compiled files.
"""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from . import peers, tables
from .measure import quartiles

RELEASE = "0.2.2"
MOST_ROUNDS = 15
_TIMED = """
import gc, sys, time
import torch
gc.disable()
sys.path.insert(0, sys.argv[1])
start = time.process_time()
import torch_remat
print(time.process_time() - start)
"""


def report(rounds: int) -> str:
    """Return the table: milliseconds to import each package, and the ratio of each pair of samples."""
    sources = {"ours": Path(__file__).resolve().parent.parent, f"torch_remat {RELEASE}": peers.install(RELEASE)}
    samples: dict[str, list[float]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as directory:
        for name, source in sources.items():
            copy = Path(directory) / name
            shutil.copytree(source / peers.PACKAGE, copy / peers.PACKAGE)
            compileall.compile_dir(copy, quiet=2)
            _milliseconds(copy)  # reads the files
        for turn in range(min(rounds, MOST_ROUNDS)):
            for name in list(sources)[:: 1 if turn % 2 else -1]:
                samples[name].append(_milliseconds(Path(directory) / name))
    ours, theirs = samples.values()
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    rows = []
    for name, taken in samples.items():
        low, high = quartiles(taken)
        rows.append([name, f"{median(taken):.1f}", f"{low:.1f} - {high:.1f}"])
    low, high = quartiles(ratios)
    ratio = f"ours / {RELEASE}, pair by pair: {median(ratios):.2f} ({low:.2f} - {high:.2f})"
    return f"### import\n\n{tables.markdown(['package', 'ms after torch', 'quartiles'], rows)}\n\n{ratio}"


def _milliseconds(folder: Path) -> float:
    command = [sys.executable, "-c", _TIMED, str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return 1000 * float(done.stdout)
