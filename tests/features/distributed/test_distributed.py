"""Engines that train over ranks, with regions, over gloo in processes of their own: see `engines_worker.py`.

By default a few cells in a world of one process and one of two; all engines by all ways are marked `slow`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.features.distributed.cells import run_cells
from tests.helpers import OLDEST
from torch_remat import _compat

ROOT = Path(__file__).parents[3]

# A few cells that differ: the children of a block sharded, wrappers made before and after, collectives inside.
FEW = [
    *("fsdp2_children:titan", "fsdp1:modules", "fsdp1_after:drop_in_policy", "fsdp1_after_without_bias:drop_in"),
    *("sp:collectives", "cp:titan"),
]
MORE = [
    "ddp:handle",
    "fsdp2_after:drop_in_sac",
    "fsdp2_children_bf16:native",
    "fsdp1_flat:offload_names",
    "tp:bitwise",
]
CHECKS_OF_ONE = [
    "hooks_and_names",
    "wrapped_blocks_have_the_names_of_the_model",
    "a_region_around_ddp_trains_as_without",
    "other_modes_see_what_fsdp_does",
    "saved_collectives_do_not_run_again",
    "bitwise_notices_other_values_of_split_tensors",
    "dtr_is_refused",
    "policies_by_price",
    *([] if OLDEST else ["dtr_runs_in_a_stage_of_a_pipeline"]),
]
CHECKS_OF_TWO = [
    "saved_collectives_do_not_run_again",
    "other_modes_see_what_fsdp_does",
    "replay_communicates_only_what_is_not_kept_in_one_order",
    "replay_runs_no_collective_that_only_kept_results_need",
    "what_was_received_is_kept",
    "a_rank_that_does_something_else_is_told_after_the_block",
    "a_rank_that_waits_is_told_while_it_hangs",
    "agree_tp",
    "agree_ddp",
    "policies_by_price",
    "policies_by_function",
    "shapes_that_only_some_ranks_know",
    "without_a_group",
    "rank_that_comes_late",
    "rank_that_runs_one_region_less",
    "rank_that_passes_the_limit",
    "rank_that_raises",
]
PARTS = 9  # of the slow tests, which take a quarter of an hour


def assert_equal(world: int, cells: list[str], steps: int) -> list[str]:
    """Run cells; return what each told."""
    results = []
    for cell, told, texts in run_cells(world, cells, steps, limit_seconds=60):
        assert told.startswith("equal"), "\n".join([f"{cell}: {told}", *texts])
        results.append(told)
    return results


def test_a_world_of_one_has_the_gradients_of_the_engines_without_checkpointing():
    assert_equal(1, [*FEW, *MORE, *(f"check:{name}" for name in CHECKS_OF_ONE)], steps=2)


def test_a_world_of_two_has_the_gradients_of_the_engines_without_checkpointing():
    results = assert_equal(
        2, [*FEW, *(f"check:{name}" for name in CHECKS_OF_TWO), "zero_bubble:none", "zero_bubble:matmuls"], steps=2
    )
    without, ours = (int(told.split("peak=")[1].split()[0]) for told in results[-2:])
    assert ours < without, results[-2:]


def test_what_a_release_of_torch_lacks_of_fsdp_is_passed_over(monkeypatch):
    """The hook into FSDP is no error where a class or a method has another name."""
    runs = []
    group = type("Group", (), {"unshard": lambda self, part: runs.append(part) or "done"})
    work = {"of_groups": ("Group", ("unshard", "reshard")), "without_class": ("Group", ("unshard",))}
    monkeypatch.setattr(_compat, "_FSDP_WORK", work)
    monkeypatch.setitem(sys.modules, "of_groups", SimpleNamespace(Group=group))
    monkeypatch.setitem(sys.modules, "without_class", SimpleNamespace())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    @contextlib.contextmanager
    def context():
        runs.append("in")
        yield
        runs.append("out")

    for _ in range(2):
        _compat.run_fsdp_in(context)
    assert group().unshard("part") == "done"
    assert runs == ["in", "part", "out"]
    assert not work


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_all_that_holds_besides_gradients_holds_over_ranks(world):
    from tests.features.distributed import engines_checks
    from tests.features.distributed.budget_checks import AGREE
    from tests.features.distributed.engines import CHECKS

    names = [name for name, one in CHECKS.items() if getattr(one, "__module__", "") == engines_checks.__name__]
    assert_equal(world, [f"check:{name}" for name in names + [*AGREE] * (world == 2)], steps=2)


@pytest.mark.slow
def test_accelerate_shards_a_model_with_regions_by_both_versions_of_fsdp():
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name)
    assert_equal(2, ["check:accelerate"], steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_ways_have_the_gradients_of_the_engine_and_run_no_more_collectives_than_recomputation(part):
    from tests.features.distributed.engines import ENGINES, OURS

    for engine in [*ENGINES][part::PARTS]:
        cells = [f"{engine}:torch", *(f"{engine}:{way}" for way in OURS)]
        results = assert_equal(2, cells, steps=6)
        counts = [int(told.split("collectives=")[1].split()[0]) for told in results]
        assert max(counts) == counts[0], dict(zip(cells, counts, strict=True))


WAYS_OF_THE_EXAMPLE = ["tp collectives", "sp attention", "pp matmuls", "sp none 12", "pp none 4"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS_OF_THE_EXAMPLE)
def test_the_example_trains_on_two_processes_as_on_one(way):
    parallel, keep, *budget = way.split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "docs" / "examples" / "train_distributed.py"), "--parallel", parallel, "--keep", keep]
    command += [f"--budget={mebibytes}" for mebibytes in budget]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"\nequal {'bit for bit' if parallel == 'pp' else 'within'}" in done.stdout
    assert "rank 1: regions keep" in done.stdout
