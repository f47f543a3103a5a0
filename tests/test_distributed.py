"""`DistributedDataParallel` over gloo around a checkpointed module, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 120


def run_workers(world_size: int, rendezvous: Path) -> None:
    """Run one worker for each rank and assert that all end well."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), *sys.path]), OMP_NUM_THREADS="1")
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "ddp_worker.py"), str(rank), str(world_size), str(rendezvous)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        texts = [worker.communicate(timeout=TIMEOUT_SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for rank, (worker, text) in enumerate(zip(workers, texts, strict=True)):
        assert worker.returncode == 0, f"rank {rank}:\n{text}"
        assert "all equal" in text


def test_one_process_has_gradients_equal_to_plain_training(tmp_path):
    run_workers(1, tmp_path / "rendezvous")


def test_two_processes_have_gradients_equal_to_plain_training(tmp_path):
    run_workers(2, tmp_path / "rendezvous")
