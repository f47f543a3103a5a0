"""Explanations with OFFLOAD: states, costs that a real change of policy confirms, and nothing that is left behind."""

from __future__ import annotations

import copy
import gc
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from torch.nn import functional as F

import torch_remat as remat
from tests.contract.test_bytes_handles import SIDE, programs
from tests.contract.test_bytes_handles import run as run_program
from tests.features.offload.offloaders import OFFLOAD, Counting
from tests.features.reports.test_memory_report import retained_bytes
from tests.handle_ops import RECOMPUTE, SAVE, Both, Inner, Result, SinCos, Trace, call
from tests.helpers import checkpointed, collector_off, leaf, no_other_regions
from torch_remat.offload.sender import default_offloader


@pytest.fixture(autouse=True)
def _no_other_regions():
    with no_other_regions():
        yield


def op(kernel, name, policy, *inputs):
    return call("auto", kernel, Trace(), name, policy, *inputs)


def block(x):
    h = op(Both, "a", OFFLOAD, x.sin())
    h = op(Inner, "b", RECOMPUTE, h)
    s, _ = op(SinCos, "c", SAVE, h)
    return op(Both, "d", RECOMPUTE, s)


def region(offloader, function=block, **options):
    options = {"region_name": "r", "preserve_rng_state": False, "offload_inputs": True, **options}
    return lambda x: checkpointed(function, offloader=offloader, **options)(x * 2)


def test_explanation_of_offloaded_tensors_as_text():
    offloader = Counting()
    text = str(remat.explain(region(offloader))(leaf(8, 8)))
    assert_expected_inline(
        text,
        """\
r
  keeps 256 B + 512 B offloaded, of which 0 B + 256 B offloaded inputs; without recomputing 2.0 KiB
  forward: 12 ops, 0 FLOP; replay: 7 ops, 0 FLOP
  4 saved tensors without a name: recomputed
  a: offload, replay: skipped, 0 FLOP in forward, 0 FLOP in replay
    x    elided     256 B  replay has it as input 1 of a
    y    offloaded  256 B  the backward of a reads it
    out  offloaded  256 B  the replay of b reads it (same memory as a.y)
    if recompute: +-0 B kept, -256 B offloaded, +-0 FLOP in replay
    if save: +256 B kept, -256 B offloaded, +-0 FLOP in replay
  b: recompute, replay: ran, 0 FLOP in forward, 0 FLOP in replay
    m    recomputed  256 B  the replay of b makes it for its backward
    out  recomputed  256 B  the replay of b recomputes it
    if save: +512 B kept, +-0 FLOP in replay
    if offload: +256 B kept, +256 B offloaded, +-0 FLOP in replay
  c: save, replay: skipped, 0 FLOP in forward, 0 FLOP in replay
    x  elided    256 B  replay has it as input 1 of c
    0  kept      256 B  the replay of d reads it
    1  not kept  256 B  nothing reads it in replay: a placeholder stands for it
    if recompute: -256 B kept, +-0 FLOP in replay
    if offload: -256 B kept, +256 B offloaded, +-0 FLOP in replay
  d: recompute, replay: ran, 0 FLOP in forward, 0 FLOP in replay
    x    recomputed  256 B  the replay of d makes it for its backward
    y    recomputed  256 B  the replay of d makes it for its backward
    out  recomputed  256 B  the replay of d recomputes it
    if save: +256 B kept, +-0 FLOP in replay
    if offload: -256 B kept, +512 B offloaded, +-0 FLOP in replay""",
    )
    offloader.assert_all_released_once()


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_bytes_of_alternatives_are_those_of_a_real_run(ops):
    def kept(ops):
        offloader = Counting()
        y = sum(y.sum() for y in region(offloader, lambda x: run_program(ops, Trace(), x))(x))
        (report,) = remat.memory_report().regions
        assert report.offloaded_bytes == offloader.bytes
        y.backward()
        return report.bytes, report.offloaded_bytes

    x, offloader = leaf(SIDE, SIDE), Counting()
    for op in ops:  # prices are those of whole storages; of a much larger one a part would travel
        op.views = ["t" if view in ("row", "diagonal") else view for view in op.views]
    for place in range(0, len(ops), 2):
        ops[place].policy = OFFLOAD
    (explanation,) = remat.explain(region(offloader, lambda x: run_program(ops, Trace(), x)))(x).regions
    offloader.assert_all_released_once()
    assert offloader.bytes == 0
    now = kept(ops)
    assert (explanation.kept_bytes, explanation.offloaded_bytes) == now
    for place, told in enumerate(explanation.ops):
        for other in told.alternatives:
            changed = copy.deepcopy(ops)
            changed[place].policy = remat.CheckpointPolicy(other.policy)
            in_place, away = kept(changed)
            assert (other.bytes_change, other.offloaded_bytes_change) == (in_place - now[0], away - now[1]), told.name


def model(x):
    """Handles, native regions of both kinds, a policy for ops, and a region in a region."""
    h = remat.checkpoint(region_name="handles", offload_inputs=True)(block)(x * 1)
    h = remat.checkpoint(region_name="native")(natives)(h.tanh())
    policy = remat.offload_names("mm_*") | remat.save_names("exp_0_0")
    h = remat.checkpoint(region_name="policy", policy=policy)(lambda h: ((h @ h).exp().sin() @ h).cos())(h.tanh())
    return remat.checkpoint(region_name="outer")(nested)(h)


def natives(x):
    h = remat.op(lambda h: (h @ h).tanh().exp(), "n", policy=OFFLOAD)(x.sin())
    return remat.op(torch.matmul, "w", policy=OFFLOAD)(h, h).tanh()


def nested(x):
    h = op(Both, "o", OFFLOAD, x.sin())
    return remat.checkpoint(region_name="inner")(lambda h: op(Both, "i", OFFLOAD, h.sin()))(
        op(Inner, "p", RECOMPUTE, h)
    )


def test_explanation_of_a_model_leaves_no_file_and_no_ticket_behind(tmp_path):
    offloader = remat.DiskOffloader(tmp_path, min_bytes=0)
    with remat.offload_to(offloader):
        explanation = remat.explain(model)(leaf(20, 20))
        assert offloader.offloaded_bytes == 0
        offloader.flush()
        assert list(tmp_path.glob("*.raw")) == []
        counting = Counting()
        with collector_off(), remat.offload_to(counting):
            remat.explain(model)(leaf(20, 20))
            counting.assert_all_released_once()
        y = model(leaf(20, 20))
        report = remat.memory_report(y)
    offloader.flush()
    told = {region.name: (region.offloaded_bytes > 0, region.offloaded_bytes) for region in explanation.regions}
    for part in report.regions:
        assert told[part.name] == (part.name != "inner", part.offloaded_bytes)
    assert sum(away for _, away in told.values()) == offloader.offloaded_bytes
    states = {tensor.name: tensor.state for one in explanation.regions for op in one.ops for tensor in op.tensors}
    assert states["handles::a.y"] == states["native::n.saved_3"] == states["native::w.saved_0"] == "offloaded"
    assert states["native::w.out"] == "offloaded"
    by_policy = {tensor.label: tensor.state for tensor in explanation.regions[2].by_policy}
    assert by_policy == {"exp_0_0": "kept", "mm_1_0": "offloaded"}


def test_prices_of_offloading_send_nothing_to_the_offloader_that_all_share():
    before, said = default_offloader().offloaded_bytes, set(default_offloader()._warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (told,) = remat.explain(checkpointed(lambda x: op(Both, "b", SAVE, x.sin())))(leaf(200, 200)).regions
    other = told.ops[0].alternatives[1]
    assert (other.policy, other.bytes_change, other.offloaded_bytes_change) == ("offload", -160_000, 160_000)
    assert (default_offloader().offloaded_bytes, default_offloader()._warned) == (before, said)


def test_tensor_that_did_not_leave_says_why():
    declining = Counting(least_bytes=1 << 20)
    (told,) = remat.explain(region(declining, lambda x: op(Both, "b", OFFLOAD, x.sin())))(leaf(8, 8)).regions
    assert told.ops[0].tensors[1].why == "the backward of b reads it; the offloader did not take it"
    outer = checkpointed(lambda x: region(Counting(), lambda x: op(Both, "b", OFFLOAD, x.sin()))(x).cos())
    inner = remat.explain(outer)(leaf(8, 8)).regions[1]
    assert inner.ops[0].tensors[1].why == "the backward of b reads it; the enclosing checkpoint recomputes it"
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda packed: packed):
        (hooked,) = remat.explain(region(Counting(), lambda x: op(Both, "b", OFFLOAD, x.sin())))(leaf(8, 8)).regions
    assert hooked.ops[0].tensors[1].why == "the backward of b reads it; hooks around the region decide where it is"


@dataclass
class Unhashable:
    """An offloader that compares by value, as dataclasses do."""

    content: list = field(default_factory=list)

    def offload(self, tensor, info):
        return tensor.clone()

    def prefetch(self, ticket):
        pass

    def onload(self, ticket):
        return ticket.clone()

    def release(self, ticket):
        pass


def test_offloader_that_cannot_be_hashed():
    (told,) = remat.explain(region(Unhashable()))(leaf(8, 8)).regions
    assert told.offloaded_bytes > 0


def with_policy(x):
    h = remat.op(lambda h: (h @ h).exp(), "n", policy=OFFLOAD)(x.sin())
    return op(Both, "handle", OFFLOAD, F.gelu(h)).cos()


def test_handles_and_native_regions_under_a_policy_for_ops():
    offloader = Counting()
    function = region(offloader, with_policy, policy=remat.save_names("gelu*"))
    (told,) = remat.explain(function)(leaf(8, 8)).regions
    native, handle = told.ops
    assert {tensor.label: (tensor.state, tensor.why) for tensor in native.tensors} == {
        "saved_2": ("offloaded", "the backward of n reads it"),
        "out": ("offloaded", "a backward outside of it reads it"),
    }
    states = {tensor.label: (tensor.state, tensor.why, tensor.shared_with) for tensor in handle.tensors}
    assert states["y"] == ("offloaded", "the backward of handle reads it", None)
    assert states["out"] == ("offloaded", "a backward outside of it reads it", "r::handle.y")
    root, measured = retained_bytes(lambda: function(leaf(8, 8)).sum())
    report = remat.memory_report(root)
    assert (report.bytes, report.offloaded_bytes) == (measured, offloader.bytes)
    assert (told.kept_bytes, told.offloaded_bytes) == (report.regions[0].bytes, offloader.bytes)


def test_memory_that_is_in_place_for_one_op_and_away_for_another():
    def function(x):
        h = remat.op(lambda h: (h @ h).exp(), "away", policy=OFFLOAD)(x.sin())
        h = remat.native_save_region("here", torch.matmul, h, h)
        return h.sin()

    (told,) = remat.explain(region(Counting(), function), alternatives=False)(leaf(8, 8)).regions
    states = {tensor.name: (tensor.state, tensor.shared_with) for one in told.ops for tensor in one.tensors}
    assert states["r::away.saved_2"] == ("offloaded", None)
    assert states["r::here.saved_0"] == ("kept", None)
    assert states["r::here.saved_1"] == ("kept", "r::here.saved_0")


def test_memory_that_was_freed_is_not_taken_for_what_came_in_its_place():
    """The output of `a` dies; the next tensor of the same size, which is kept, has its address."""

    def function(x):
        for place in range(8):
            x = op(Result, f"a{place}", SAVE, op(Inner, f"b{place}", SAVE, x))
        return x

    (told,) = remat.explain(checkpointed(function), alternatives=False)(leaf(64, 64)).regions
    outputs = [tensor for one in told.ops[::2] for tensor in one.tensors if tensor.label == "out"]
    assert {tensor.state for tensor in outputs} == {"not kept"}


def test_error_of_an_offloader_is_that_of_backward():
    offloader = Counting()
    offloader.lose = OSError("unplugged")
    x = leaf(8, 8)
    with pytest.raises(remat.OffloadError, match="unplugged") as caught:
        remat.explain(region(offloader, offload_inputs=False))(x)
    assert str(caught.value).startswith("r::a.out: ")
    del caught
    offloader.lose = None  # its traceback knows the region
    gc.collect()
    offloader.assert_all_released_once()
