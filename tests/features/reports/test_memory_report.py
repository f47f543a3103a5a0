"""Memory reports: texts, names, data; they keep nothing alive and change nothing."""

from __future__ import annotations

import io
import json

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

import torch_remat as remat
from tests.features.reports.blocks import block, op
from tests.handle_ops import RECOMPUTE, SAVE, Affine, Both, Result, SinCos
from tests.helpers import alive, checkpointed, collector_off, leaf, watch
from torch_remat._util.text import format_bytes
from torch_remat.reports.data import KeptTensor, RegionReport
from torch_remat.reports.fold import fold


def test_regions_of_other_graphs_are_apart_and_without_roots_all_regions_are_told():
    first, second = (checkpointed(torch.sin, region_name=name)(leaf(3) * 2) for name in ("one", "two"))
    assert [region.name for region in remat.memory_report().regions] == ["one", "two"]
    report = remat.memory_report(second)
    assert ([region.name for region in report.regions], [region.name for region in report.older]) == (["two"], ["one"])
    assert report.bytes == report.regions[0].bytes + sum(node.bytes for node in report.outside)
    alive = f"older graphs that are alive: {format_bytes(report.older[0].bytes)} in 1 region"
    assert str(report).splitlines()[1] == alive
    assert alive in report._repr_html_()
    assert report.to_dict()["older"][0]["bytes"] == report.older[0].bytes
    del first, second
    assert remat.memory_report().regions == ()


class SavesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize(
    "function", [torch.exp, SavesInput.apply, checkpointed(torch.sin)], ids=["an op", "a Function", "a region"]
)
def test_report_that_has_nothing_says_why(function):
    y = function(leaf(3) * 2)
    assert remat.memory_report(y).why_nothing == ""
    y.sum().backward()
    first = str(remat.memory_report(y)).splitlines()[0]  # the leaf is there
    assert first == "kept for backward: 12 B (backward has freed it: call memory_report before)"
    assert "(no region is alive: " in str(remat.memory_report())
    assert "(the tensors have no graph)" in str(remat.memory_report(y.detach()))
    assert str(remat.memory_report(torch.nn.Parameter(torch.ones(3)).sum())).startswith("kept for backward: 0 B\n")


def test_report_keeps_nothing_alive_and_changes_nothing():
    with collector_off():
        x = leaf(4, 4) * 2
        loss = checkpointed(block)(x).sum()
        storages = watch(x)
        reports = [remat.memory_report(loss), remat.memory_report(loss)]
        assert reports[0] == reports[1]
        del x, loss
        assert alive(storages) == 0
        assert remat.memory_report().bytes == 0


def test_report_replays_nothing_and_unpacks_nothing():
    unpacked = []

    def unpack(packed):
        unpacked.append(1)
        return packed

    runs = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), unpack):
        loss = checkpointed(lambda x: (runs.append(1), x.sin())[1])(leaf(3) * 2).exp().sum()
    assert remat.memory_report(loss).bytes > 0
    assert (unpacked, runs) == ([], [1])


def test_graph_may_be_deep():
    x = y = leaf(2)
    for _ in range(5000):
        x = x * y
    assert remat.memory_report(x, x).outside[0].count >= 1


def test_wrong_uses_are_errors():
    with pytest.raises(remat.UsageError, match="takes tensors and modules, not a list"):
        remat.memory_report([torch.ones(1)])
    with pytest.raises(remat.UsageError, match="outside of any region"):
        remat.format_current_memory_report()
    with pytest.raises(remat.UsageError, match=r"print_current_memory_report\(\) was called outside"):
        remat.print_current_memory_report()


def test_current_report_tells_what_the_region_keeps_so_far():
    texts = []

    def function(x, *, mask):
        h = op(Both, "a", SAVE, x)
        with remat.name_scope("block.0"):
            h = op(Affine, "attention", RECOMPUTE, h, mask)
        s, c = op(SinCos, "pair", SAVE, h)
        y = op(Affine, "mix", RECOMPUTE, s, c)
        file = io.StringIO()
        remat.print_current_memory_report(file)
        texts.append(file.getvalue())
        assert file.getvalue() == remat.format_current_memory_report() + "\n"
        return y

    x = torch.arange(12.0).view(3, 4).requires_grad_()
    checkpointed(function, region_name="layers.0", preserve_rng_state=False)(x * 2, mask=x.sin())
    assert_expected_inline(
        texts[0],
        """\
layers.0: 288 B
  args[0]            48 B  float32[3, 4] cpu  input
  kwargs['mask']     48 B  float32[3, 4] cpu  input, also saved tensor 3
  saved tensor 2     48 B  float32[3, 4] cpu  save, the end of forward decides
  saved tensor 5     48 B  float32[3, 4] cpu  save, the end of forward decides
  saved tensor 6     48 B  float32[3, 4] cpu  save, the end of forward decides
  a.x                 0 B  float32[3, 4] cpu  save, counted as args[0]
  a.y                 0 B  float32[3, 4] cpu  save, also out, counted as saved tensor 2
  block.0/attention   0 B                     recompute
  pair.x             48 B  float32[3, 4] cpu  save, the end of forward decides
  pair.0              0 B  float32[3, 4] cpu  save, for replay, counted as saved tensor 5
  pair.1              0 B  float32[3, 4] cpu  save, for replay, counted as saved tensor 6
  mix                 0 B                     recompute
""",
    )


def test_current_report_tells_what_functions_returned_so_far():
    texts = []

    def function(x):
        y = torch.exp(torch.sin(x))
        texts.append(remat.format_current_memory_report())
        return y * 2

    x = torch.arange(12.0).view(3, 4).requires_grad_()
    checkpointed(function, region_name="layers.0", preserve_rng_state=False, policy=[torch.sin])(x * 2)
    assert_expected_inline(
        texts[0],
        """\
layers.0: 144 B
  args[0]         48 B  float32[3, 4] cpu  input
  saved tensor 1  48 B  float32[3, 4] cpu  save, the end of forward decides
  sin_0.saved_0    0 B  float32[3, 4] cpu  save, counted as args[0]
  sin_0.out       48 B  float32[3, 4] cpu  save, for replay""",
    )


def test_whole_report_folds_layers_that_are_alike():
    h = F.gelu(leaf(4, 8) * 3.0)
    for index in range(12):
        h = checkpointed(lambda x: op(Result, "a", SAVE, x), region_name=f"layers.{index}", preserve_rng_state=False)(h)
    h = checkpointed(torch.sin, region_name="head", preserve_rng_state=False)(h)
    assert_expected_inline(
        str(remat.memory_report((h * h).sum())),
        """\
kept for backward: 2.0 KiB

in 13 regions: 1.6 KiB
  layers.0: 256 B
    args[0]  128 B  float32[4, 8] cpu  input
    a.y      128 B  float32[4, 8] cpu  save
  layers.1-11: 128 B each, 1.4 KiB in 11
    shared inputs    0 B  1 tensor           counted elsewhere
    a.y            128 B  float32[4, 8] cpu  save
  head: 0 B
    shared inputs  0 B  1 tensor  counted elsewhere

outside of regions: 392 B
  MulBackward0    136 B  2 nodes: other
  AccumulateGrad  128 B  1 node: variable
  GeluBackward0   128 B  1 node: self""",
    )


def test_names_of_unnamed_saves_are_those_of_errors_and_do_not_change():
    names = []
    x = leaf(3) * 2
    y = checkpointed(lambda x: x.sin().exp().tanh(), region_name="block")(x)
    node = y.grad_fn.next_functions[0][0]  # the replay has filled what it reads
    node.register_prehook(lambda _: names.append([t.name for t in remat.memory_report().all_tensors()]))
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert names == [["block::args[0]", "block::saved tensor 1"]] * 2


def test_report_as_html_is_one_table_that_escapes_names_and_as_data_has_sums():
    report = remat.memory_report(checkpointed(block, region_name="<b>")(leaf(6, 6)).exp().sum())
    html = report._repr_html_()
    assert html.startswith("<table>")
    assert html.endswith("</table>")
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "kept for backward" in html
    assert "for replay" in html
    assert html.count("<tr>") == html.count("</tr>")
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert (
        data["bytes"]
        == data["bytes_by_device"]["cpu"]
        == sum(part["bytes"] for part in data["regions"] + data["outside"])
    )
    assert (data["regions"][0]["tensors"][0]["label"], data["regions"][0]["tensors"][0]["shape"]) == ("args[0]", [6, 6])


def test_regions_are_folded_only_where_all_is_alike():
    def names(regions):
        return [label for label, _ in fold(regions)]

    def made(name, *labels):
        rows = tuple(KeptTensor(f"{name}::{label}", label, "input", 4, (1,), "float32", "cpu") for label in labels)
        return RegionReport(name, rows, ())

    assert names([made("a.0", "x"), made("a.1", "x"), made("a.2", "y"), made("a.3", "y")]) == ["a.0-1", "a.2-3"]
    assert names([made("a.0", "x"), made("a.2", "x")]) == ["a.{0,2}"]
    assert names([made(f"a.{at}", "x") for at in (1, 3, 5)]) == ["a.{1,3,5}"]
    assert names([made(f"a.{at}", "x") for at in (1, 2, 5)]) == ["a.1-2", "a.5"]
    assert names([made(f"a.{at}", "x") for at in (2, 1)]) == ["a.2", "a.1"]
    assert names([made(f"a.{at}", "xy"[at % 2]) for at in range(8)]) == ["a.{0,2,...,6}", "a.{1,3,...,7}"]
    assert names([made("a.9.b", "x"), made("a.10.b", "x")]) == ["a.9-10.b"]
    assert names([made("a.0.0", "x"), made("a.1.1", "x")]) == ["a.0.0", "a.1.1"]
    layers = [made(f"l.{at}.{part}", part) for at in range(3) for part in ("attention", "mlp")]
    assert names([*layers, made("head", "x")]) == ["l.0-2.attention", "l.0-2.mlp", "head"]
    assert names([made("first", "x"), *layers[:-1]]) == ["first", "l.0-1.attention", "l.0-1.mlp", "l.2.attention"]
    assert names([made("Block", "x")] * 3) == ["Block x3"]
    assert names([made("a0", "x"), made("b1", "x")]) == ["a0", "b1"]


def test_region_that_raised_in_forward_is_not_in_the_report_of_another_graph():
    def raising(x):
        x.sin().exp()
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user") as caught:
        remat.checkpoint(region_name="raised")(raising)(torch.ones(3, requires_grad=True))
    loss = remat.checkpoint(region_name="whole")(lambda x: x.sin().exp())(torch.ones(3, requires_grad=True)).sum()
    assert caught.traceback  # which holds the region that raised
    assert [region.name for region in remat.memory_report(loss).regions] == ["whole"]


@pytest.fixture
def process_group():
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


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.usefixtures("process_group")
def test_rows_of_dtensors_have_the_local_shapes_and_bytes():
    table = remat.list_names(split(), policy=remat.policies.save_matmuls)(leaf(2, 4))
    rows = {row.name: row for row in table}
    product, norm = rows["0.addmm_0_0"], rows["2.native_layer_norm_0_1"]
    assert (product.op, product.shape, product.dtype) == ("aten.addmm.default", (2, 8), "float32")
    assert (product.bytes, product.flops, product.needed, product.kept) == (64, 2 * 2 * 4 * 8, True, True)
    assert (norm.shape, norm.bytes, norm.needed, norm.kept) == ((2, 1), 8, True, False)
    assert rows["0.t_0_0"].bytes == 0  # a view
    assert "kept: 64 bytes" in str(table)
    report = remat.memory_report(remat.checkpoint(policy=remat.save_names("0.addmm_*"))(split())(leaf(2, 4)))
    (row,) = (tensor for tensor in report.all_tensors() if tensor.policy == "save")
    assert row.shard
    assert (row.label, row.shape, row.bytes) == ("0.addmm_0_0", (2, 8), 64)
    assert "float32[2, 8] cpu  save, local shard" in str(report)
    assert str(report).count("local shard") == 1
