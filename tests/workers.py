"""Runs the processes of a test over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_workers(world_size: int, rendezvous: Path, worker: str, *more: str, timeout_seconds: int = 240) -> None:
    """Run a program of this folder once for each rank, and assert that all end well.

    Each gets its rank, the number of ranks, the file by which they meet, and ``more``; it prints ``all equal``.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), *sys.path]), OMP_NUM_THREADS="1")
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), str(rank), str(world_size), str(rendezvous), *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        texts = [process.communicate(timeout=timeout_seconds)[0] for process in workers]
    finally:
        for process in workers:
            process.kill()
            process.wait()
    for rank, (process, text) in enumerate(zip(workers, texts, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{text}"
        assert "all equal" in text
