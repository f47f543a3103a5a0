"""Reports, traces and explanations of native regions and of policies for ops: exact bytes, names, reasons."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from benchmarks.memory import allocations
from tests.features.reports.test_memory_report import assert_exact
from tests.handle_ops import RECOMPUTE, SAVE, Both, Trace, call
from tests.helpers import assert_same, checkpointed, leaf, no_other_regions
from tests.test_handle_programs import SIDE, settings_for
from tests.test_native_programs import EVERYTHING, NativeProgram, bodies
from torch_remat.reports.graph import nodes_below

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


def with_view(x):
    """A native region that returns a view of what it makes, read by a plain op."""
    return remat.native_save_region("v", lambda x: (x @ W1).t()[1:], x).sin()


def with_write(x):
    """A native region that changes a tensor that is made inside the region."""
    h = x.sin()
    remat.native_save_region("write", lambda: h.add_(1).mul_(2))
    return h.exp() @ W1


def with_handles_inside(x):
    h = remat.native_save_region("n", lambda: call("auto", Both, Trace(), "inner", SAVE, x.sin()).cos())
    return call("auto", Both, Trace(), "outer", RECOMPUTE, h)


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
    "a returned view": (with_view, None),
    "a write": (with_write, None),
    "handles inside": (with_handles_inside, None),
    "matrix products": (plain_block, [MM]),
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


def test_names_of_what_whole_calls_keep():
    loss = run("whole calls")
    (region,) = remat.memory_report(loss).regions
    rows = {tensor.name: tensor for tensor in region.all_tensors()}
    assert {"block::top.saved_0", "block::top.0", "block::drop.saved_0", "block::drop.out"} <= set(rows)
    assert "1" in rows["block::top.saved_0"].aliases  # the indices are saved, and returned
    (told,) = remat.explain(lambda: run("whole calls"))().regions
    states = {tensor.name: (tensor.state, tensor.why) for op in told.ops for tensor in op.tensors}
    assert states["block::top.saved_0"] == ("kept", "the backward of top reads it")
    assert states["block::top.0"] == ("kept", "an op in replay (exp) reads it")
    assert states["block::top.1"] == ("kept", "an op in replay (gather) reads it")
    assert states["block::drop.out"] == ("kept", "an op in replay (cos) reads it")
    assert [op.replay for op in told.ops] == ["skipped"] * 3


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
        (lambda x: remat.native_save_region("n", torch.mm, x, W1).sum(1), None),
        (lambda x: remat.native_save_region("n", lambda: (x.sin() @ W1).exp()).sum(1), None),
        (lambda x: remat.native_save_region("n", lambda: (x.sin() @ W1).exp()).sum(1), remat.policies.save_matmuls),
        (lambda x: ((x @ W1).sin() @ W2).sum(1), [MM]),
        (lambda x: (x @ W1).topk(2, -1)[0].sum(1), [torch.ops.aten.topk.default]),
        (lambda x: call("auto", Both, Trace(), "b", SAVE, x.sin()).sum(1), remat.policies.save_matmuls),
    ],
    ids=["whole call", "native", "native under a policy", "products", "two results", "handle under a policy"],
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


def test_what_shares_a_storage_that_is_counted_elsewhere_is_one_row():
    def body(x):
        h = remat.native_save_region("n", torch.mm, x, W1)
        return call("auto", Both, Trace(), "a", RECOMPUTE, h) + call("auto", Both, Trace(), "b", RECOMPUTE, h)

    rows = []

    def function(x):
        y = body(x).exp()
        if remat.is_recomputing():
            rows.extend(tensor for op in remat.memory_report().regions[0].ops for tensor in op.tensors)
        return y

    checkpointed(function, early_stop=False)(leaf(4, 8) * 2).sum().backward()
    names = [tensor.name for tensor in rows]
    assert names
    assert len(names) == len(set(names))


def test_trace_has_native_regions_with_their_backward():
    with remat.trace() as trace:
        run("native regions").backward()
    spans = {(span.op, span.phase) for span in trace.spans}
    assert {(op, phase) for op in ("attn", "s/two") for phase in ("forward", "replay", "backward")} <= spans
    attn = next(span for span in trace.spans if span.op == "attn" and span.phase == "forward")
    assert attn.kept_bytes == 3 * 4 * 16 * 4 + 4 * 8 * 4


def test_explanation_of_native_regions():
    (region,) = remat.explain(lambda: run("native regions"))().regions
    attn, two = region.ops
    assert (attn.policy, attn.replay, two.replay) == ("save", "skipped", "skipped")
    assert (attn.forward_flops, attn.replay_flops) == (2 * 2 * 4 * 8 * 16, 0)
    told = {tensor.label: (tensor.state, tensor.why) for tensor in attn.tensors}
    read = {f"saved_{place}": ("kept", "the backward of attn reads it") for place in (1, 2, 3)}  # saved_0: the input
    assert told == read | {"out": ("kept", "an op in replay (exp) reads it")}
    assert [tensor.label for tensor in two.tensors] == ["exp_0_0", "empty_like_0_0", "0", "1"]
    other, away = attn.alternatives
    assert away.policy == "offload"
    assert other.policy == "recompute"
    assert other.flops_change == attn.forward_flops
    recomputed = remat.memory_report(run("native region recomputed")).regions[0].bytes
    assert other.bytes_change == recomputed - region.kept_bytes


def reasons_of(function, *args, **options):
    (region, *_) = remat.explain(checkpointed(function, **options), alternatives=False)(*args).regions
    return {f"{op.name}.{one.label}": one.why for op in region.ops for one in op.tensors} | {
        one.label: one.why for one in region.by_policy
    }


def exponential(x):
    return remat.native_save_region("n", torch.exp, x.sin())


def both(name, x):
    return call("auto", Both, Trace(), name, RECOMPUTE, x)


@pytest.mark.parametrize(
    ("read", "reader"),
    [
        (lambda h: h.cos(), "a backward outside of it reads it"),
        (lambda h: h.view(-1)[:3].t().tan(), "an op in replay (tan) reads it"),
        (lambda h: h.split(2)[1].tan(), "an op in replay (tan) reads it"),
        (lambda h: remat.native_save_region("m", torch.exp, h) * h.tan(), "an op in replay (tan) reads it"),
        (lambda h: both("o", h), "the replay of o reads it"),
        (lambda h: both("o", h).cos() + h.tan(), "the replay of o reads it"),
        (lambda h: both("q", both("o", h)) * both("p", h), "the replay of o reads it"),
        (lambda h: h.tan() + both("o", h), "an op in replay (tan) reads it"),
        (lambda h: checkpointed(torch.tan)(h).cos(), "the replay of an inner region reads it"),
        (lambda h: remat.op(lambda h: h.tan().cos(), "r", policy=RECOMPUTE)(h), "the replay of r reads it"),
        (lambda h: Weighs.apply(h), "a backward outside of it reads it"),
    ],
)
def test_reader_of_what_a_native_region_returns_is_named(read, reader):
    assert reasons_of(lambda x: read(exponential(x)), leaf(4, 4) * 2)["n.out"] == reader


class Weighs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_readers_of_what_a_policy_keeps_are_named():
    def function(x):
        h = (x @ W1).exp() @ W2
        h = call("auto", Both, Trace(), "s", SAVE, h.tan())
        return both("o", h @ W1)

    told = reasons_of(function, leaf(4, 8) * 2, policy=[MM])
    assert told["mm_0_0"] == "an op in replay (exp) reads it"
    assert told["mm_1_0"] == "an op in replay (tan) reads it"
    assert told["s.out"] == "a backward outside of it reads it"
    policy = [torch.ops.aten.sin.default]
    told = reasons_of(lambda x: both("o", call("auto", Both, Trace(), "s", SAVE, x.sin())), leaf(4, 8), policy=policy)
    assert told["s.out"] == "the replay of o reads it"


def test_explanation_of_a_policy_for_ops():
    (region,) = remat.explain(lambda: run("matrix products"))().regions
    assert [(tensor.label, tensor.state) for tensor in region.by_policy] == [("mm_0_0", "kept"), ("mm_1_0", "kept")]
    assert region.replay_flops == 0
    assert region.forward_flops > 0


def draw_forward(bodies):
    """Run drawn regions one after another from one seed; return what a backward would start from."""
    torch.manual_seed(11)
    program = NativeProgram(remat.checkpoint())
    x, w = (torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(2))
    values = [x, w]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of results that are read where no graph shows it
        for index, body in enumerate(bodies):
            values = [*program.region(body, f"r{index}", values[:2]), w]
    return sum((y.sum() for y in values if y.requires_grad), torch.zeros((), requires_grad=True))


@settings_for(40)
@given(st.lists(bodies(EVERYTHING), min_size=1, max_size=2))
def test_total_equals_retained_bytes_for_drawn_programs(drawn):
    assert_exact(lambda: draw_forward(drawn))


@settings_for(15)
@given(st.lists(bodies(EVERYTHING), min_size=1, max_size=2))
def test_watching_drawn_programs_changes_no_gradient_and_fails_nowhere(drawn):
    def gradients():
        root = draw_forward(drawn)
        leaves = [node.variable for node in nodes_below([root]) if hasattr(node, "variable")]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.autograd.grad(root, leaves, allow_unused=True)

    expected = gradients()
    with remat.trace() as trace:
        actual = gradients()
    assert_same(list(expected), list(actual))
    assert str(trace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        explanation = remat.explain(lambda: draw_forward(drawn))()
    assert str(explanation)


class Squares(torch.autograd.Function):
    @staticmethod
    @remat.auto_forward("x", "y")
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * (x * 2 + y)


@pytest.mark.parametrize(
    "run_body", [remat.op, lambda function, name: partial(remat.native_save_region, name, function)]
)
def test_what_a_call_saves_with_and_without_names_is_told_each_once(run_body):
    def body(x):
        return Squares.apply(Squares.apply(x.exp()).tanh()).sin()

    function = checkpointed(lambda x: run_body(body, "call")(x.sin()).cos(), preserve_rng_state=False)
    (told,) = remat.explain(function, alternatives=False)(leaf(4, 4) * 2).regions
    tensors = [tensor for op in told.ops for tensor in op.tensors]
    assert len({tensor.label for tensor in tensors}) == len(tensors)
    assert {"x", "y", "out"} < {tensor.label for tensor in tensors}
    assert sum(one.bytes for one in tensors if not one.shared_with) == told.kept_bytes - told.input_bytes


def test_what_a_policy_keeps_as_an_op_left_it_has_a_reader():
    def function(x):
        return (torch.zeros(4, 8).add_(x.detach()).exp() + x).tanh() * x

    told = reasons_of(function, leaf(4, 8), policy=remat.save_names("add__0_0"))
    assert told["add__0_0"] == "an op in replay (exp) reads it"
