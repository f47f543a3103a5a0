"""Traces: which phases ran, the bytes that the allocator saw, the files and pictures, ranges for profilers."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor

import torch_remat as remat
from benchmarks.memory import allocations
from tests.features.reports.blocks import native_block
from tests.handle_ops import RECOMPUTE, SAVE, Both, Inner, Result, Trace, call
from tests.helpers import alive, assert_same, checkpointed, collector_off, in_threads, leaf, watch
from torch_remat.dispatch import options
from torch_remat.reports import timeline
from torch_remat.reports.timeline import Sample, Span
from torch_remat.reports.trace import Trace as Timeline


def block(x):
    trace = Trace()
    h = call("auto", Both, trace, "a", SAVE, x)
    with remat.name_scope("sub.0"):
        h = call("op", Inner, trace, "b", RECOMPUTE, h)
    return call("auto", Result, trace, "c", SAVE, h)


def phases(trace, op=None):
    return [(span.region, span.phase) for span in trace.spans if span.op == op]


def test_trace_has_each_phase_of_each_region_in_order():
    x = leaf(8, 8) * 2
    with remat.trace() as trace:
        h = checkpointed(block, region_name="one")(x)
        h = checkpointed(torch.sin, region_name="two")(h)
        h.sum().backward()
    assert phases(trace) == [
        ("one", "forward"),
        ("two", "forward"),
        ("two", "replay"),
        ("two", "backward"),
        ("one", "replay"),
        ("one", "backward"),
    ]
    assert [span.call for span in trace.spans if span.op is None] == [0, 1, 1, 1, 0, 0]
    starts = [span.start_us for span in trace.spans]
    assert starts == sorted(starts)
    assert all(span.start_us >= 0 and span.end_us <= trace.duration_us for span in trace.spans)


def test_trace_has_the_ops_of_each_phase_and_what_each_keeps():
    x = leaf(8, 8) * 2
    with remat.trace() as trace:
        y = checkpointed(block, region_name="one")(x)
        report = remat.memory_report(y).regions[-1]
        y.sum().backward()
    forward = {span.op: span for span in trace.spans if span.phase == "forward"}
    assert list(forward) == [None, "a", "sub.0/b", "c"]
    assert forward[None].kept_bytes == report.bytes
    assert {name: forward[name].kept_bytes for name in ("a", "sub.0/b", "c")} == {"a": 256, "sub.0/b": 0, "c": 256}
    assert [span.op for span in trace.spans if span.phase == "replay"] == [None, "a", "sub.0/b"]  # all is filled by c
    assert [span.op for span in trace.spans if span.phase == "backward"] == [None, "c", "sub.0/b", "a"]
    for span in trace.spans:
        region = next(one for one in trace.spans if one.op is None and one.phase == span.phase)
        assert region.start_us <= span.start_us
        assert span.end_us <= region.end_us


def test_bytes_of_a_trace_are_those_that_the_allocator_saw():
    x = leaf(100, 100) * 2
    with remat.trace() as trace:
        y = checkpointed(lambda x: x.sin().exp(), preserve_rng_state=False)(x)
        z = y.detach() + 1
        del z
        y.sum().backward()
        kept = torch.empty(123, dtype=torch.uint8)
    nbytes = 40_000
    forward, replay, backward = trace.spans
    assert (forward.allocated_bytes, forward.freed_bytes) == (2 * nbytes, nbytes)  # sine and exponential; the sine goes
    assert (forward.live_bytes, forward.peak_bytes) == (nbytes, 2 * nbytes)
    assert replay.allocated_bytes == 2 * nbytes
    assert backward.freed_bytes >= 2 * nbytes
    # The leaf's gradient, y, the byte tensor; the seed of backward is freed.
    assert trace.samples[-1].live_bytes == {"cpu": 2 * nbytes + kept.nbytes}
    assert trace.peak.total_bytes == max(sample.total_bytes for sample in trace.samples)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": [torch.ops.aten.mm.default]},
        {"policy": [F.linear]},
        {"policy": remat.save_modules("0")},
    ],
    ids=str,
)
def test_peak_of_a_step_is_what_the_profiler_sees_but_for_a_few_numbers(options):
    module, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(32, 64)

    def step():
        h = x * 2
        for index in range(3):
            h = remat.checkpoint(region_name=str(index), preserve_rng_state=False, **options)(module)(h)
        h.square().sum().backward()
        module.zero_grad()

    step()
    with allocations() as events:
        step()
    with remat.trace() as trace:
        step()
    peak = max(itertools.accumulate(events))
    assert 0 <= peak - trace.peak.total_bytes <= 64
    assert trace.samples[-1].total_bytes == sum(events) == 0


def test_sums_of_the_gradients_of_parameters_do_not_cut_a_backward():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for _ in range(2):  # in the second backward they are added up
        with remat.trace() as trace:
            checkpointed(module, region_name="r")(leaf(4, 8)).sum().backward()
    assert phases(trace) == [("r", "forward"), ("r", "replay"), ("r", "backward")]


class Marked(torch.Tensor):
    """A subclass without a dispatch of its own."""


@pytest.mark.parametrize(("wrap", "count"), [(lambda x: x.as_subclass(Marked), 1), (lambda x: TwoTensor(x, x), 2)])
def test_subclasses_of_tensors_run_in_a_trace_which_counts_what_they_wrap(wrap, count):
    x = wrap(torch.randn(8, 8)).requires_grad_()
    with remat.trace() as trace:
        checkpointed(torch.sin, preserve_rng_state=False)(x * 2).sum().backward()
    assert x.grad is not None
    assert 3 * count * 256 <= trace.peak.total_bytes < 3 * count * 256 + 64


class NamesTooFew(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x):
        ctx.save_for_backward(x, x)
        return x.sin()


def test_wrong_use_of_a_handle_is_the_same_error_in_a_trace():
    with remat.trace(), pytest.raises(remat.UsageError, match="saves 2 tensors and auto_forward names 1"):
        checkpointed(lambda x: remat.op(NamesTooFew.apply, "few")(x))(leaf(2))


def test_backward_alone_is_in_a_trace_that_begins_after_forward():
    x = leaf(8, 8) * 2
    unused = checkpointed(torch.sin, region_name="unused")(x)
    h = checkpointed(block, region_name="one")(x).exp()
    loss = checkpointed(lambda x: checkpointed(torch.sin, region_name="inner")(x).cos(), region_name="two")(h).sum()
    with remat.trace() as trace:
        loss.backward()
        checkpointed(torch.sin, region_name="three")(leaf(2)).sum().backward()
    spans = [(span.region, span.phase, span.call) for span in trace.spans if span.op is None and span.region != "inner"]
    assert spans == [
        ("two", "replay", 1),
        ("two", "backward", 1),
        ("two", "backward", 1),  # after the replay of the inner region
        ("one", "replay", 0),
        ("one", "backward", 0),
        ("three", "forward", 4),
        ("three", "replay", 4),
        ("three", "backward", 4),
    ]
    cells = next(line.split() for line in str(trace).splitlines() if line.startswith("one"))
    assert (cells[2], cells[5], cells[-3]) == ("-", "-", "-")  # forward, kept and live are not known
    del unused


def test_trace_keeps_nothing_alive():
    with remat.trace():
        checkpointed(block)(leaf(2, 2)).sum().backward()  # what torch makes once
    with collector_off():
        with remat.trace() as trace:
            x = leaf(16, 16) * 2
            y = checkpointed(block)(x)
        storages = watch(x, y)
        del x, y
        assert alive(storages) == 0
    assert trace.spans


def test_traces_count_what_their_own_thread_does_also_inside_each_other_and_in_a_profile():
    def record(place):
        with remat.trace() as trace:
            checkpointed(torch.sin, region_name=str(place))(leaf(8, 8) * 2).sum().backward()
        found[place] = trace

    found = {}
    with profile(activities=[ProfilerActivity.CPU], acc_events=True), remat.trace() as outer:
        in_threads(record, 2)
        record(2)
    for place, trace in found.items():
        assert phases(trace) == [(str(place), phase) for phase in ("forward", "replay", "backward")]
        assert trace.peak.live_bytes == outer.peak.live_bytes
    assert phases(outer) == phases(found[2])


def test_trace_that_runs_cannot_be_read():
    with remat.trace() as trace, pytest.raises(remat.UsageError, match="has not ended"):
        trace.to_dict()
    assert str(trace).endswith("ms, nothing allocated")
    assert trace.peak is None
    assert trace.to_dict()["spans"] == []


def test_regions_of_other_threads_do_not_disturb():
    def work(place):
        for _ in range(1 if place == 0 else 20):
            checkpointed(block, region_name=str(place))(leaf(2, 2)).sum().backward()

    with remat.trace() as trace:
        in_threads(work, 3)
        work(0)
    assert {"forward", "replay", "backward"} <= {span.phase for span in trace.spans if span.region == "0"}


def small_trace():
    """A trace made by hand, so that its text does not depend on a clock."""
    trace = Timeline()
    spans = []
    for layer, start in ((0, 0.0), (1, 2000.0)):
        name, kept = f"layers.{layer}", 2**20
        back = 9000.0 - 2 * start
        spans += [
            Span(
                name, None, "forward", layer, start, 2000.0, 1, 4 * kept, 3 * kept, (layer + 1) * kept, 4 * kept, kept
            ),
            Span(name, "attn", "forward", layer, start + 500, 1000.0, 1, kept, 0, 2 * kept, 2 * kept, kept),
            Span(name, None, "replay", layer, back, 1000.0, 1, kept, 0, 5 * kept, 5 * kept, 0),
            Span(name, None, "backward", layer, back + 1000, 3000.0, 1, kept, 3 * kept, kept, 6 * kept, 0),
            Span(name, "attn", "backward", layer, back + 1000, 500.0, 1, kept, 3 * kept, kept, 6 * kept, 0),
        ]
    samples = [Sample(500.0, {"cpu": 2**20}), Sample(6100.0, {"cpu": 6 * 2**20}), Sample(13000.0, {"cpu": 2**19})]
    trace.fill(13000.0, sorted(spans, key=lambda span: span.start_us), samples)
    return trace


def test_trace_as_text():
    assert_expected_inline(
        str(small_trace()),
        """\
13.0 ms, peak 6.0 MiB at 6.1 ms in the backward of layers.1::attn, 512.0 KiB alive at the end

            calls  forward ms  replay ms  backward ms     kept    freed     live     peak
layers.0-1      2       2.000      1.000        3.000  1.0 MiB  3.0 MiB  2.0 MiB  6.0 MiB
  attn          2       1.000          -        0.500  1.0 MiB  3.0 MiB  2.0 MiB  6.0 MiB
means of the calls; freed: in backward; live: at most after forward; peak: at most at any moment""",
    )


def test_trace_as_data_and_as_chrome_trace(tmp_path):
    trace = small_trace()
    assert json.loads(trace.to_json())["spans"][0]["region"] == "layers.0"
    trace.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(trace.spans)
    assert {"name", "ts", "dur", "pid", "tid", "cat"} <= complete[0].keys()
    assert [event["name"] for event in complete[:2]] == ["layers.0 [forward]", "layers.0::attn [forward]"]
    counters = [event for event in events if event["ph"] == "C"]
    assert [event["args"]["cpu"] for event in counters] == [2**20, 6 * 2**20, 2**19]


def test_plots_are_written_and_names_are_drawn_as_they_are(tmp_path):
    pytest.importorskip("matplotlib")
    name = r"a$\frac$_{x^"
    timeline = Timeline()
    spans = [(name, 0, 8000), ("short", 8100, 1)]
    spans = [Span(region, None, "forward", 0, start, length, 1, 0, 0, 0, 0, 0) for region, start, length in spans]
    timeline.fill(10_000, spans, [Sample(4000, {"cpu": 100})])
    trace = timeline.plot(tmp_path / "trace.png")
    assert name in trace.axes[0].get_title(loc="left")
    assert name in trace.axes[-1].texts[0].get_text()
    assert small_trace().plot().axes[-1].texts[0].get_text() == "layers.0"
    with remat.trace() as empty:
        pass
    empty.plot(tmp_path / "empty.svg")
    report = remat.memory_report(checkpointed(block, region_name=name)(leaf(64, 64))).plot(tmp_path / "report.pdf")
    assert name in [text.get_text() for text in report.axes[0].get_yticklabels()]
    assert remat.memory_report().plot() is not None
    assert all((tmp_path / file).stat().st_size > 1000 for file in ("trace.png", "empty.svg", "report.pdf"))


def test_trace_shows_itself_in_a_notebook():
    trace = small_trace()
    html = trace._repr_html_()
    assert html.startswith("<table><tbody>")
    for line in str(trace).splitlines():
        for cell in line.split("  "):
            assert f"{cell.strip()}</t" in html
    assert html.count("<tr>") == html.count("</tr>") == len(str(trace).splitlines()) - 1
    assert repr(trace) == f"<remat trace: {str(trace).splitlines()[0]}>"


def test_plot_without_matplotlib_is_a_clear_error(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(remat.UsageError, match="not installed") as caught:
        small_trace().plot()
    assert "pip install matplotlib" in str(caught.value)


def ranges(events):
    return [event.name for event in events if event.name.startswith("remat::")]


def test_profile_has_ranges_of_regions_and_ops():
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        checkpointed(block, region_name="layers.0")(leaf(4, 4)).sum().backward()
    assert ranges(profiler.events()) == [
        "remat::layers.0 [forward]",
        "remat::layers.0::a [forward]",
        "remat::layers.0::sub.0/b [forward]",
        "remat::layers.0::c [forward]",
        "remat::layers.0 [replay]",
        "remat::layers.0::a [replay]",
        "remat::layers.0::sub.0/b [replay]",
    ]


def test_what_runs_outside_of_regions_is_told_as_forward_backward_or_the_optimizers_step():
    w = leaf(64, 64)
    optimizer = torch.optim.SGD([w], momentum=0.9)
    with remat.trace() as forward:
        big = torch.ones(256, 256)
        del big
        w.sin().sum().backward()
    with remat.trace() as backward:
        (w.sin().exp() * 2).sum().backward()
        optimizer.step()
    with remat.trace() as step:
        optimizer.zero_grad()
        w.grad = torch.ones_like(w)
        optimizer.step()
    assert " in forward, " in str(forward)
    assert [phase for phase, _, _ in backward.phases] == ["backward", "the optimizer's step"]
    begin, end = backward.phases[0][1:]
    assert backward.at((begin + end) / 2) == "backward"
    assert backward.at(begin - 1) == backward.at(end + 1) == "forward"
    (_, begin, end) = step.phases[0]
    assert step.at((begin + end) / 2) == "the optimizer's step"
    assert "no region" not in str(forward) + str(backward) + str(step)
    assert json.loads(backward.to_json())["phases"][0][0] == "backward"


def test_exception_leaves_nothing_behind_and_the_trace_readable():
    def fail():
        checkpointed(torch.sin)(leaf(2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), remat.trace() as trace:
        fail()
    assert options.observers == []
    assert not options.is_watched()
    assert [span.phase for span in trace.spans] == ["forward"]  # what happened until then
    assert "sin" in str(trace)


def test_trace_has_native_regions_with_their_backward_and_changes_no_gradient():
    def gradient():
        torch.manual_seed(3)
        x = leaf(4, 8)
        checkpointed(native_block)(x * 3).sum().backward()
        return x.grad

    expected = gradient()
    with remat.trace() as trace:
        assert_same(gradient(), expected)
    spans = {(span.op, span.phase) for span in trace.spans}
    assert {(op, phase) for op in ("attn", "s/two") for phase in ("forward", "replay", "backward")} <= spans
    attn = next(span for span in trace.spans if span.op == "attn" and span.phase == "forward")
    assert attn.kept_bytes == 3 * 4 * 16 * 4 + 4 * 8 * 4


class Allocator:
    """What CUDA's allocator says of itself, while ops on the CPU stand for those of a device."""

    def __init__(self, monkeypatch):
        self.current = self.peak = 1000
        monkeypatch.setattr(timeline, "accelerator_type", lambda: "cuda")
        for name, value in {
            "device_count": lambda: 2,
            "current_device": lambda: 1,
            "memory_reserved": lambda device: 0,
            "reset_peak_memory_stats": self.reset,
            "memory_stats_as_nested_dict": lambda device: {"allocated_bytes": {"all": vars(self)}},
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def change(self, *steps):
        for step in steps:
            self.current += step
            self.peak = max(self.peak, self.current)

    def reset(self, device):
        assert device == 1  # the other has no memory
        self.peak = self.current


def test_bytes_on_the_device_are_those_of_its_allocator_from_the_beginning_and_inside_of_kernels(monkeypatch):
    allocator = Allocator(monkeypatch)

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            allocator.change(+500, -200)  # seen after the op below
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            allocator.change(-800)
            return grad.cos()

    x = leaf(2)
    with remat.trace() as trace:
        checkpointed(Kernel.apply, region_name="r")(x).sum().backward()
    levels = [sample.live_bytes.get("cuda:1") for sample in trace.samples]
    assert [level for level, _ in itertools.groupby(levels)] == [1000, 1500, 1300, 500]
    forward, backward = (next(span for span in trace.spans if span.phase == phase) for phase in ("forward", "backward"))
    assert (forward.allocated_bytes, forward.freed_bytes) == (500 + 8, 200)  # and the result on the CPU
    assert (forward.peak_bytes, forward.live_bytes, backward.freed_bytes) == (1508, 1308, 800)


@pytest.mark.gpu
def test_trace_on_the_device_has_its_allocations_and_the_phases_of_its_backward_thread():
    x = leaf(64, 128, device="cuda") * 2
    with remat.trace() as trace:
        checkpointed(block, region_name="r")(x).sum().backward()
    assert {"forward", "replay", "backward"} <= {phase for _, phase in phases(trace)}
    assert trace.peak.live_bytes["cuda:0"] > x.nbytes
