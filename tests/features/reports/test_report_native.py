"""Reports, traces and explanations of native regions and of policies for ops: exact bytes, names, reasons."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from benchmarks.memory import allocations
from tests.features.reports.test_report_bytes import assert_exact
from tests.handle_ops import RECOMPUTE, SAVE, Both, Trace, call
from tests.helpers import checkpointed, leaf, no_other_regions

W1, W2 = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))


@pytest.fixture(autouse=True)
def _no_other_regions():
    with no_other_regions():
        yield


def native_block(x, policy=SAVE):
    """Two native regions, one with two results, between plain ops."""
    h = (x * 2).tanh()
    a = remat.op(lambda h: F.gelu(h @ W1).sin() @ W2, "attn", policy=policy)(h)
    with remat.name_scope("s"):
        c, d = remat.native_save_region("two", lambda b: ((b @ W1).exp(), torch.dropout(b, 0.5, True)), a.exp())
    return (c @ W2) * d.cos()


def plain_block(x):
    return (F.gelu(torch.dropout(x, 0.5, True) @ W1).exp() @ W2).sin() @ W1


def with_write(x):
    """A native region that changes a tensor that is made inside the region."""
    h = x.sin()
    remat.native_save_region("write", lambda: h.add_(1).mul_(2))
    return h.exp() @ W1


def whole_calls(x):
    """Native regions that are one call of a function of torch's own: with residents, choices, random numbers."""
    g = remat.native_save_region("mm", torch.matmul, x.sin(), W1).tanh()
    values, places = remat.native_save_region("top", torch.topk, g, 8)
    h = remat.native_save_region("drop", torch.dropout, values.exp(), 0.5, True)
    return h.cos() * g.gather(-1, places)


MM, EXP = torch.ops.aten.mm.default, torch.ops.aten.exp.default
CASES = {
    "native regions": (native_block, None),
    "native region recomputed": (lambda x: native_block(x, RECOMPUTE), None),
    "whole calls": (whole_calls, None),
    "a write": (with_write, None),
    "products and results": (plain_block, [MM, EXP]),
    "by name": (plain_block, "names"),
    "native regions under a policy": (native_block, [MM]),
}


def run(case):
    function, policy = CASES[case]
    if policy == "names":
        policy = remat.save_names("gelu*", "mm_2_0")
    options = {} if policy is None else {"policy": policy}
    return checkpointed(function, region_name="block", **options)(leaf(4, 8) * 3).sum()


@pytest.mark.parametrize("case", CASES)
def test_total_equals_the_bytes_that_the_profiler_sees_retained(case):
    report = assert_exact(lambda: run(case))
    loss = run(case)
    warned = pytest.warns(remat.RematWarning, match="modified a tensor of the region in place")
    with warned if case == "a write" else nullcontext():
        loss.backward(retain_graph=True)
    (after,) = remat.memory_report(loss).regions
    assert after.bytes == report.regions[0].bytes
    with warned if case == "a write" else nullcontext():
        loss.backward()
    assert remat.memory_report(loss).regions == ()


def test_names_of_what_native_regions_and_policies_keep():
    loss = run("native regions")
    (region,) = remat.memory_report(loss).regions
    assert [op.name for op in region.ops] == ["attn", "s/two"]
    assert {"block::attn.saved_1", "block::attn.out", "block::s/two.exp_0_0", "block::s/two.1"} <= {
        one.name for one in region.all_tensors()
    }
    loss = run("by name")
    (region,) = remat.memory_report(loss).regions
    kept = [one.name for one in region.tensors if one.kind in ("saved", "kept for replay")]
    assert kept == ["block::gelu_0_0"]  # nobody needs mm_2_0, the region's output


def held_in_forward(body, **options):
    """Return what a region keeps besides inputs in the middle of its forward: by the report, and by the profiler."""
    found = []

    def function(x):
        with allocations() as events:
            y = body(x)
            (region,) = remat.memory_report().regions
            small = y.untyped_storage().nbytes()  # held by this function
        kept = [tensor for tensor in region.all_tensors() if tensor.kind not in ("input", "random state")]
        found.append((sum(tensor.bytes for tensor in kept), sum(events) - small, region))
        return y

    checkpointed(function, **options)(leaf(40_000, 8) * 2)  # forward holds the first MiB till its end, unreported
    return found[0]


@pytest.mark.parametrize(
    ("body", "policy"),
    [
        (lambda x: remat.native_save_region("n", lambda: (x.sin() @ W1).exp()).sum(1), remat.policies.save_matmuls),
        (lambda x: (x @ W1).topk(2, -1)[0].sum(1), [torch.ops.aten.topk.default]),
        (lambda x: call("auto", Both, Trace(), "b", SAVE, x.sin()).sum(1), remat.policies.save_matmuls),
    ],
)
def test_report_in_the_middle_of_forward_has_what_waits_for_its_end(body, policy):
    options = {} if policy is None else {"policy": policy}
    reported, held, region = held_in_forward(body, **options)
    assert reported == held, region


def test_report_in_forward_tells_what_a_policy_holds_so_far():
    texts = []

    def function(x):
        h = x @ W1
        texts.append(remat.format_current_memory_report())
        return h.exp()

    checkpointed(function, region_name="r", preserve_rng_state=False, policy=[MM])(leaf(4, 8))
    assert_expected_inline(
        texts[0],
        """\
r: 384 B
  args[0]  128 B  float32[4, 8] cpu   input
  mm_0_0   256 B  float32[4, 16] cpu  save, the end of forward decides""",
    )


def test_rows_tell_the_policy_of_what_a_policy_for_ops_keeps():
    policy = remat.save_names("mm_0_0") | remat.offload_names("mm_1_0")
    function = checkpointed(lambda x: ((x @ W1).exp() @ W2).exp() @ W1, policy=policy)
    with remat.offload_to(remat.CpuOffloader(min_bytes=0)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = function(leaf(4, 8) * 2).sin()
    report = remat.memory_report(y)
    assert {tensor.label: tensor.policy for tensor in report.regions[0].tensors} == {
        "args[0]": "",
        "mm_0_0": "save",
        "mm_1_0": "offload",
    }
    assert report.to_dict()["regions"][0]["tensors"][-1]["policy"] in ("save", "offload")


def test_trace_has_native_regions_with_their_backward():
    with remat.trace() as trace:
        run("native regions").backward()
    spans = {(span.op, span.phase) for span in trace.spans}
    assert {(op, phase) for op in ("attn", "s/two") for phase in ("forward", "replay", "backward")} <= spans
    attn = next(span for span in trace.spans if span.op == "attn" and span.phase == "forward")
    assert attn.kept_bytes == 3 * 4 * 16 * 4 + 4 * 8 * 4
