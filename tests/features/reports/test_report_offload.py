"""Reports, traces and explanations of what is offloaded: bytes in place and bytes away, each once, under its name."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import torch_remat as remat
from tests.features.offload.blocks import Writes, run, run_and_flush
from tests.features.reports.blocks import op, retained_bytes
from tests.handle_ops import RECOMPUTE, Affine, Both
from tests.helpers import LiveStorages, checkpointed, leaf
from tests.offloaders import OFFLOAD, Counting


class Allocating(Counting):
    """What it brings back is memory that the profiler sees."""

    def onload(self, ticket):
        return super().onload(ticket).clone()


def region(offloader, function, **options):
    options = {"region_name": "r", "preserve_rng_state": False, "offload_inputs": True, **options}
    return checkpointed(function, offloader=offloader, **options)


def twice(x):
    """The same memory in several places: saved twice, as views, and slotted."""
    h = op(Both, "a", OFFLOAD, x.sin())
    g = op(Both, "b", OFFLOAD, h.t())
    g = op(Affine, "c", RECOMPUTE, h[2:6], g.t()[1:5])
    return g * op(Affine, "d", RECOMPUTE, h.view(-1)[:32].view(4, 8), g)


def natives(x):
    """Native regions of both kinds, with several results, next to handles."""
    h = op(Both, "a", OFFLOAD, x.sin())
    h = remat.op(lambda h: (h @ h).exp(), "n", policy=OFFLOAD)(h)
    values, places = remat.op(torch.topk, "top", policy=OFFLOAD)(h, 4)
    g = remat.native_save_region("s", torch.matmul, h, h)
    w = remat.op(torch.matmul, "w", policy=OFFLOAD)(g, h)
    return w.gather(-1, places).sin() * values


def by_policy(offloader):
    policy = remat.save_names("sin_0_0") | remat.offload_names("mm_*", "exp_0_0")
    return region(offloader, lambda x: ((x @ x).exp().sin() @ x).cos(), policy=policy)(leaf(8, 8) * 2).sum()


PROGRAMS = {
    "three regions": lambda offloader: run(offloader, leaf(8, 8)).sum(),
    "one memory in many places": lambda offloader: region(offloader, twice)(leaf(8, 8) * 2).sum(),
    "native regions": lambda offloader: region(offloader, natives)(leaf(8, 8) * 2).sum(),
    "policies for ops": by_policy,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_bytes_in_place_are_those_retained_and_bytes_away_those_of_the_offloader(program):
    offloader = Allocating()
    root, measured = retained_bytes(lambda: PROGRAMS[program](offloader))
    report = remat.memory_report(root)
    assert (report.bytes, report.offloaded_bytes) == (measured, offloader.bytes), str(report)
    assert report.bytes_by_device.get("Allocating", 0) == offloader.bytes
    root.backward()
    offloader.assert_all_released_once()
    assert remat.memory_report(root).offloaded_bytes == 0


def test_offloader_in_memory_saves_nothing_and_says_so():
    offloader = remat.CpuOffloader(min_bytes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root, measured = retained_bytes(lambda: region(offloader, twice)(leaf(8, 8) * 2).sum())
    report = remat.memory_report(root)
    assert report.offloaded_bytes == offloader.offloaded_bytes > 0
    assert report.bytes + offloader.host_bytes >= measured
    with pytest.warns(remat.RematWarning, match="saves nothing"):
        region(remat.CpuOffloader(min_bytes=0), twice)(leaf(8, 8) * 2)


def test_value_that_came_back_is_resident_as_well():
    offloader, reports = Allocating(), []
    x = leaf(8, 8) * 2
    y = region(offloader, lambda x: op(Both, "b", OFFLOAD, op(Both, "a", OFFLOAD, x.sin())))(x)
    before = remat.memory_report()
    y.grad_fn.next_functions[0][0].register_prehook(lambda _: reports.append(remat.memory_report()))
    y.sum().backward(retain_graph=True)
    assert remat.memory_report() == before  # each read has given its value away
    y.sum().backward()
    kept, freed = reports
    assert kept.offloaded_bytes == before.offloaded_bytes
    assert not any(tensor.kind == "brought back" for tensor in kept.all_tensors())
    rows = [(row.bytes, row.device, row.kind) for row in freed.all_tensors() if row.name == "r::a.y"]
    assert rows == [(256, "Allocating", "saved"), (256, "cpu", "brought back")]
    assert (freed.bytes, freed.offloaded_bytes) == (3 * 256, 256)


def in_place(report):
    """Return the bytes of what regions keep in place, without random state."""
    return sum(
        tensor.bytes
        for region in report.regions
        for tensor in region.all_tensors()
        if not tensor.offloaded and tensor.kind != "random state"
    )


def test_what_is_not_written_yet_is_in_place_as_well(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    writes.go.clear()
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0), leaf(20, 20)
    with LiveStorages() as live:
        y = run(offloader, x)
        on_its_way = remat.memory_report()
        before = live.bytes()
    writes.go.set()
    offloader.flush()
    written = remat.memory_report()
    assert on_its_way.offloaded_bytes == written.offloaded_bytes == 12 * 1600
    assert (in_place(on_its_way), before) == (12 * 1600, 13 * 1600)  # and the result
    assert (in_place(written), live.bytes()) == (0, 1600)
    assert "not gone yet" in str(on_its_way)
    assert "not gone yet" not in str(written)
    assert "offloaded, but here too" in legend(on_its_way)
    y.sum().backward()


def test_what_cannot_be_written_counts_as_in_place(tmp_path, monkeypatch):
    writes, offloader = Writes(monkeypatch), remat.DiskOffloader(tmp_path, min_bytes=0)
    writes.fails = lambda number: True
    tell = offloader.offload

    def offload(tensor, info):
        ticket = tell(tensor, info)
        offloader.flush()
        return ticket

    monkeypatch.setattr(offloader, "offload", offload)
    with pytest.warns(remat.RematWarning, match="stays in memory"):
        y = region(offloader, twice)(leaf(8, 8) * 1)
    report = remat.memory_report(y)
    assert (report.regions[0].bytes, report.offloaded_bytes) == (3 * 256, 0)  # the input, and two results
    assert report.bytes_by_device.keys() == {"cpu"}


def legend(report):
    """Return the labels of a picture's legend."""
    (shown,) = report.plot().legends
    return [text.get_text() for text in shown.get_texts()]


def test_picture_and_table_tell_offloaded_bytes_apart(tmp_path):
    report = remat.memory_report(run(Counting(), leaf(16, 16)).sum())
    figure = report.plot(tmp_path / "kept.png")
    assert "offloaded" in figure.get_suptitle()
    offloaded = [bar for bars in figure.axes[0].containers if bars.get_label() == "offloaded" for bar in bars]
    assert {bar.get_hatch() for bar in offloaded} == {"----"}
    assert sum(bar.get_width() for bar in offloaded) == report.offloaded_bytes / 1024
    assert "12.0 KiB offloaded" in report._repr_html_()
    data = json.loads(report.to_json())
    assert 12 << 10 == data["offloaded_bytes"] == report.offloaded_bytes == data["bytes_by_device"]["Counting"]


def test_live_bytes_of_a_trace_fall_when_a_thread_of_the_offloader_frees_a_tensor(tmp_path):
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    x = torch.randn(100, 100, requires_grad=True)
    run(offloader, x).sum().backward()
    with remat.trace() as trace:
        y = run_and_flush(offloader, x).sum()
        y.backward()
        del y
    assert trace.samples[-1].total_bytes == 0
    assert all(sum(one.live_bytes.values()) >= 0 for one in trace.samples)
    forward = {span.op: span for span in trace.spans if span.phase == "forward" and span.call == 2}
    assert (forward["b"].kept_bytes, forward["b"].offloaded_bytes) == (0, 2 * 40000)
    assert forward[None].offloaded_bytes == 4 * 40000
    assert "offloaded" in str(trace)


def test_trace_counts_what_an_offloader_brings_back(tmp_path):
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    region = remat.checkpoint(offload_inputs=True, offloader=offloader, preserve_rng_state=False)(torch.sin)
    loss = region(torch.randn(100, 100, requires_grad=True) * 2).sum()
    offloader.flush()
    with remat.trace() as trace:
        loss.backward()
    replay, _ = trace.spans
    assert (replay.phase, replay.live_bytes) == ("replay", 40004)  # and the gradient of the loss
