"""`list_names` and `memory_report` where results are DTensors: rows of what this process has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import torch_remat as remat
from tests.helpers import leaf

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def split():
    block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "2": SequenceParallel(use_local_output=False),
        "3": RowwiseParallel(),
    }
    return parallelize_module(block, init_device_mesh("cpu", (1,)), plan)


def test_rows_of_dtensors_have_the_local_shapes_and_bytes():
    table = remat.list_names(split(), policy=remat.policies.save_matmuls)(leaf(2, 4))
    rows = {row.name: row for row in table}
    product, norm = rows["0.addmm_0_0"], rows["2.native_layer_norm_0_1"]
    assert (product.op, product.shape, product.dtype) == ("aten.addmm.default", (2, 8), "float32")
    assert (product.bytes, product.flops, product.needed, product.kept) == (64, 2 * 2 * 4 * 8, True, True)
    assert (norm.shape, norm.bytes, norm.needed, norm.kept) == ((2, 1), 8, True, False)
    assert rows["0.t_0_0"].bytes == 0  # a view
    assert "kept: 64 bytes" in str(table)


def test_each_name_in_the_table_can_be_saved_and_the_same_is_kept():
    block, x = split(), leaf(2, 4)
    for name in remat.list_names(block)(x).names:
        policy = remat.save_names(name)
        listed = [row.name for row in remat.list_names(block, policy=policy)(x) if row.kept]
        assert listed in ([], [name])
        report = remat.memory_report(remat.checkpoint(policy=policy)(block)(x))
        assert [tensor.label for tensor in report.all_tensors() if tensor.policy == "save"] == listed


def test_results_of_collectives_that_were_not_waited_for_have_rows():
    def function(x):
        return functional.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD) * 2

    table = remat.list_names(function, policy=remat.policies.save_collectives(all_gathers=True))(leaf(4, 4))
    assert {row.op: row.shape for row in table}["aten.mul.Tensor"] == (4, 4)


def test_report_says_that_shards_are_local():
    report = remat.memory_report(remat.checkpoint(policy=remat.save_names("0.addmm_*"))(split())(leaf(2, 4)))
    (row,) = (tensor for tensor in report.all_tensors() if tensor.label.startswith("0.addmm"))
    assert row.shard
    assert (row.shape, row.bytes) == ((2, 8), 64)
    assert "float32[2, 8] cpu  save, local shard" in str(report)
    assert str(report).count("local shard") == 1
    plain = remat.memory_report(remat.checkpoint(policy=[torch.ops.aten.exp.default])(torch.exp)(leaf(3)))
    assert "local shard" not in str(plain)
