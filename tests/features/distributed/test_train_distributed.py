"""`docs/examples/train_distributed.py` runs by torchrun, and trains as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WAYS = [
    "ddp none",
    "fsdp matmuls",
    "tp collectives",
    "sp collectives",
    "sp attention",
    "pp matmuls",
    "sp none 12",
    "fsdp none 4",
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_example_trains_on_two_processes_as_on_one(way):
    parallel, keep, *budget = way.split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "docs" / "examples" / "train_distributed.py"), "--parallel", parallel, "--keep", keep]
    command += [f"--budget={mebibytes}" for mebibytes in budget]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    exact = parallel in ("ddp", "fsdp", "pp")
    assert f"\nequal {'bit for bit' if exact else 'within'}" in done.stdout
    assert "rank 1: regions keep" in done.stdout
