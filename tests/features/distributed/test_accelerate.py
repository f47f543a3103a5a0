"""`accelerate` shards a model with regions by both versions of FSDP, in two processes over gloo."""

from __future__ import annotations

import pytest

from tests.features.distributed.test_distributed import run_workers


@pytest.mark.slow
def test_accelerate_shards_a_model_with_regions_by_both_versions_of_fsdp(tmp_path):
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name)
    run_workers(2, tmp_path / "rendezvous", "accelerate_worker.py")
