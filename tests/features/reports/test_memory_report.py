"""Memory reports: bytes equal what the profiler sees retained, names are those of errors, nothing is kept alive."""

from __future__ import annotations

import io
import json
import threading

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from benchmarks.memory import allocations
from tests.contract.test_bytes_handles import programs
from tests.contract.test_bytes_handles import run as run_program
from tests.handle_ops import (
    RECOMPUTE,
    SAVE,
    Affine,
    Both,
    Inner,
    InnerView,
    Noise,
    Result,
    SinCos,
    Trace,
    Transpose,
    call,
)
from tests.helpers import Mlp, alive, checkpointed, collector_off, leaf, no_other_regions, watch
from torch_remat._text import format_bytes
from torch_remat.reports.data import KeptTensor, ParameterReport, RegionReport
from torch_remat.reports.fold import fold


@pytest.fixture(autouse=True)
def _no_other_regions():
    with no_other_regions():
        yield


def retained_bytes(make):
    """Return a root and the bytes, besides its own, that making it has left allocated."""
    make()  # what is made once only is made now
    with allocations() as events:
        root = make()
    return root, sum(events) - root.untyped_storage().nbytes()


def assert_exact(make):
    """Assert that the report of a root says what the profiler sees; return the report."""
    root, measured = retained_bytes(make)
    report = remat.memory_report(root)
    assert report.bytes == measured, f"{measured} bytes retained\n{report}"
    return report


def op(kernel, name, policy, *inputs, style="auto"):
    return call(style, kernel, Trace(), name, policy, *inputs)


def block(x):
    """Ops of both policies, scopes, views, several outputs, shared storage, and random numbers."""
    h = op(Both, "a", SAVE, x)
    with remat.name_scope("sub.0"):
        h = op(Inner, "b", RECOMPUTE, h)
    h = op(InnerView, "c", SAVE, h.t())
    s, c = op(SinCos, "d", SAVE, h)
    h = op(Affine, "e", RECOMPUTE, s.t(), c)
    return op(Noise, "f", SAVE, h, style="handle")


def fresh(*shape):
    return torch.randn(*shape, requires_grad=True)


PARAMETER = nn.Parameter(torch.randn(6, 6))
MODULES = nn.ModuleList(Mlp() for _ in range(3))


def several_regions():
    h = F.gelu(fresh(4, 8) * 3.0)
    for index, module in enumerate(MODULES):
        h = checkpointed(module, region_name=f"layers.{index}")(h)
    return (h * h).sum()


def partial_backward():
    x = fresh(6, 6) * 2
    y, z = checkpointed(lambda x: (op(Result, "b", RECOMPUTE, x).exp(), op(Both, "a", SAVE, x)))(x)
    torch.autograd.grad(y.sum(), x)
    return z.sum()


def with_graph_kept():
    loss = checkpointed(block)(fresh(6, 6) * 2).exp().sum()
    (grad,) = torch.autograd.grad(loss, leaves_below(loss), retain_graph=True)
    return loss + 0 * grad.sum().item()


def leaves_below(root):
    nodes, leaves = [root.grad_fn], []
    while nodes:
        node = nodes.pop()
        if node is not None:
            leaves += [node.variable] if hasattr(node, "variable") else []
            nodes += [following for following, _ in node.next_functions]
    return leaves[:1]


PROGRAMS = {
    "no region": lambda: (fresh(5, 5).sin() @ fresh(5, 5)).exp().sum(),
    "plain region": lambda: checkpointed(lambda x: x.sin().exp())(fresh(5, 5) * 2).sum(),
    "handles": lambda: checkpointed(block)(fresh(6, 6) * 2).sum(),
    "handles on a leaf": lambda: checkpointed(block)(fresh(6, 6)).sum(),
    "without random state": lambda: checkpointed(block, preserve_rng_state=False)(fresh(6, 6) * 2).sum(),
    "views of one storage": lambda: checkpointed(lambda x, y: x * y.t())(*(fresh(4, 4) * 2).expand(2, 4, 4)).sum(),
    "an input twice": lambda: checkpointed(lambda x, y, z: x * y + z["z"])(*[fresh(9)] * 2, z={"z": fresh(9)}).sum(),
    "view that pins its base": lambda: checkpointed(torch.sin)((fresh(50, 4) * 2)[7]).sum(),
    "parameter as input": lambda: checkpointed(torch.mul)(PARAMETER, fresh(6, 6)).sum(),
    "view of a parameter": lambda: checkpointed(torch.mul)(PARAMETER.t(), fresh(6, 6)).sum(),
    "parameter in an op": lambda: checkpointed(lambda x: op(Affine, "a", SAVE, x, PARAMETER))(fresh(6, 6)).sum(),
    "several regions": several_regions,
    "determinism check": lambda: checkpointed(sines, determinism_check=lambda t: [t.abs(), 1])(fresh(9) * 2).sum(),
    "checksums": lambda: checkpointed(sines, determinism_check="bitwise")(fresh(9) * 2).sum(),
    "nested regions": lambda: checkpointed(lambda x: checkpointed(block)(x.sin()).cos())(fresh(6, 6) * 2).sum(),
    "region in torch's": lambda: torch_checkpoint(checkpointed(torch.sin), fresh(9), use_reentrant=False).sum(),
    "torch's checkpoint": lambda: torch_checkpoint(torch.sin, fresh(9) * 2, use_reentrant=False).sum(),
    "torch's in a region": lambda: checkpointed(torchs)(fresh(9)).sum(),
    "packed inputs": lambda: with_packing(lambda: checkpointed(block)(fresh(6, 6) * 2).sum()),
    "packed outside": lambda: with_packing(lambda: fresh(6, 6).sin().exp().sum()),
    "partial backward": partial_backward,
    "retain_graph": with_graph_kept,
    "an attribute of ctx": lambda: Keeps.apply(fresh(6, 6)).sum(),
    "attributes of ctx in a region": lambda: checkpointed(lambda x: Keeps.apply(x).sin())(fresh(6, 6)).sum(),
    "a view of an output": lambda: checkpointed(lambda x: op(Transpose, "t", RECOMPUTE, x).sin())(fresh(4, 4)).sum(),
}  # fmt: skip


def sines(x):
    return x.sin().exp().sin()


def with_packing(make):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("here", [t.clone()]), lambda packed: packed[1][0]):
        return make()


def torchs(x):
    return torch_checkpoint(torch.sin, x, use_reentrant=False)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = x > 0
        ctx.more = [x.exp(), {"sine": x.sin(), "name": "sine"}]
        return x * ctx.mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask


@pytest.mark.parametrize("program", PROGRAMS)
def test_total_equals_the_bytes_that_the_profiler_sees_retained(program):
    assert_exact(PROGRAMS[program])


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_total_equals_retained_bytes_for_drawn_programs(ops):
    def make():
        outputs = checkpointed(lambda x: run_program(ops, Trace(), x))(leaf(3, 3) * 2)
        return sum(y.sum() for y in outputs)

    root, measured = retained_bytes(make)
    assert remat.memory_report(root).bytes == measured


def test_total_in_the_middle_of_backward_counts_what_replay_has_made():
    seen = []

    def look(_grads):
        seen.append(remat.memory_report().bytes)

    x = leaf(8, 8) * 2
    y = checkpointed(lambda x: x.sin().exp().tanh())(x)
    y.grad_fn.next_functions[0][0].register_prehook(look)
    y.sum().backward()
    assert seen == [2 * 8 * 8 * 4]  # the input, which the sine saves too, and the exponential


def test_parameters_are_apart_and_counted_once():
    module = nn.Linear(8, 8)
    loss = sum(checkpointed(module)(F.linear(leaf(2, 8), module.weight)).sum() for _ in range(3))
    report = remat.memory_report(loss)
    assert report.parameters.count == 2
    assert report.parameters.bytes == (64 + 8) * 4
    assert not any(tensor.shape == (8, 8) for tensor in report.all_tensors())


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


def test_report_is_the_same_after_a_backward_that_keeps_the_graph():
    loss = checkpointed(block, region_name="block")(leaf(6, 6) * 2).sum()
    before = remat.memory_report(loss)
    loss.backward(retain_graph=True)
    assert remat.memory_report(loss) == before
    loss.backward()
    assert remat.memory_report(loss).bytes == 6 * 6 * 4  # the leaf
    assert remat.memory_report(loss).regions == ()


def test_report_as_data_has_the_sums_beside_the_parts():
    loss = several_regions()
    report = remat.memory_report(loss)
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert data["bytes"] == sum(part["bytes"] for part in data["regions"] + data["outside"])
    assert data["bytes_by_device"] == {"cpu": data["bytes"]}
    assert [region["name"] for region in data["regions"]] == ["layers.0", "layers.1", "layers.2"]
    assert data["regions"][0]["tensors"][0]["name"] == "layers.0::args[0]"
    assert data["regions"][0]["tensors"][0]["shape"] == [4, 8]


def test_reports_of_graphs_that_are_deep_or_wide():
    x = y = leaf(2)
    for _ in range(5000):
        x = x * y
    assert remat.memory_report(x, x).outside[0].count >= 1
    assert remat.memory_report(torch.ones(2)).bytes == 0


def test_root_that_is_no_tensor_is_an_error():
    with pytest.raises(remat.UsageError, match="takes tensors and modules, not a list"):
        remat.memory_report([torch.ones(1)])


def test_current_report_outside_of_regions_is_an_error():
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
layers.0: 240 B
  args[0]            48 B  float32[3, 4] cpu  input
  kwargs['mask']     48 B  float32[3, 4] cpu  input
  a.x                 0 B  float32[3, 4] cpu  save, counted as layers.0::args[0]
  a.y                48 B  float32[3, 4] cpu  save, also out
  block.0/attention   0 B                     recompute
  pair.0             48 B  float32[3, 4] cpu  save, for replay
  pair.1             48 B  float32[3, 4] cpu  save, for replay
  mix                 0 B                     recompute
""",
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
    args[0]    0 B  float32[4, 8] cpu  input, counted as layers.0::a.y
    a.y      128 B  float32[4, 8] cpu  save
  head: 0 B
    args[0]  0 B  float32[4, 8] cpu  input, counted as layers.11::a.y

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


def test_report_while_other_threads_run_regions():
    stop = threading.Event()
    errors = []

    def work():
        try:
            while not stop.is_set():
                checkpointed(lambda x: op(Result, "a", SAVE, x).view(-1), preserve_rng_state=False)(
                    leaf(4)
                ).sum().backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            str(remat.memory_report())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_offloaded_bytes_are_apart():
    def pack(tensor):
        return torch.device("meta"), tensor.clone()  # as if it came from another device

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
        loss = checkpointed(lambda x: op(Result, "a", SAVE, x), preserve_rng_state=False)(leaf(4, 4) * 2).exp().sum()
    report = remat.memory_report(loss)
    assert report.offloaded_bytes == 2 * 64  # the region's input, the exponential; the op's result is where it was made
    assert report.bytes == remat.memory_report().bytes + 64 + 8  # the leaf and the factor are outside
    assert "offloaded" in str(report)


def test_picture_has_room_for_long_names_and_sums():
    pytest.importorskip("matplotlib")

    def row(label, count, offloaded=False):
        return KeptTensor(label, label, "saved", count, (1,), "float32", "cpu", offloaded=offloaded)

    regions = [
        RegionReport(f"a.rather.long.name.of.a.region.{kind}", (row("x", 2**20), row("y", 2**29, True)), ())
        for kind in ("first", "second")
    ]
    figure = remat.reports.MemoryReport(tuple(regions), (), ParameterReport(0, 0)).plot()
    figure.canvas.draw()
    width, _ = figure.canvas.get_width_height()
    texts = [text for text in figure.axes[0].texts if text.get_text()]
    assert len(texts) == 2
    for text in (*texts, *figure.axes[0].get_yticklabels()):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width


def test_report_as_html_is_one_table_and_escapes_names():
    report = remat.memory_report(checkpointed(block, region_name="<b>")(leaf(6, 6)).exp().sum())
    html = report._repr_html_()
    assert html.startswith("<table>")
    assert html.endswith("</table>")
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "kept for backward" in html
    assert "for replay" in html
    assert html.count("<tr>") == html.count("</tr>")


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


@pytest.mark.gpu
def test_bytes_on_the_device_are_those_that_its_allocator_has_given():
    def make():
        x = torch.randn(64, 128, device="cuda", requires_grad=True)  # multiples of 512 bytes
        return checkpointed(lambda x: op(Result, "a", SAVE, x.sin()).view(-1), preserve_rng_state=False)(x).sum()

    make()
    before = torch.cuda.memory_allocated()
    loss = make()
    report = remat.memory_report(loss)
    assert report.bytes_by_device == {"cuda:0": torch.cuda.memory_allocated() - before - 512}  # the loss


def test_region_that_raised_in_forward_is_not_in_the_report_of_another_graph():
    def raising(x):
        x.sin().exp()
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user") as caught:
        remat.checkpoint(region_name="raised")(raising)(torch.ones(3, requires_grad=True))
    loss = remat.checkpoint(region_name="whole")(lambda x: x.sin().exp())(torch.ones(3, requires_grad=True)).sum()
    assert caught.traceback  # which holds the region that raised
    assert [region.name for region in remat.memory_report(loss).regions] == ["whole"]
