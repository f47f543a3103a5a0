"""`DistributedDataParallel`, `fully_shard` and `DTensor` over gloo with regions, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 120


def run_workers(world_size: int, rendezvous: Path, worker: str = "ddp_worker.py", *arguments: str) -> None:
    """Run one worker for each rank, with more arguments, and assert that all end well."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), *sys.path]), OMP_NUM_THREADS="1")
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), str(rank), str(world_size), str(rendezvous), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        texts = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in workers]
    finally:
        for process in workers:
            process.kill()
            process.wait()
    for rank, (process, text) in enumerate(zip(workers, texts, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{text}"
        assert "all equal" in text


def test_one_process_has_gradients_equal_to_plain_training(tmp_path):
    run_workers(1, tmp_path / "rendezvous")


def test_two_processes_have_gradients_equal_to_plain_training(tmp_path):
    run_workers(2, tmp_path / "rendezvous")


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_layers_chosen_by_a_pattern_and_sharded_have_gradients_equal_to_plain_training(tmp_path, world_size):
    run_workers(world_size, tmp_path / "rendezvous", "fsdp_worker.py")


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_blocks_of_split_tensors_have_gradients_equal_to_plain_training_under_all_policies(tmp_path, world_size):
    run_workers(world_size, tmp_path / "rendezvous", "dtensor_worker.py")
