"""`kept_by`: one row for each tensor, with what it is, where it is, and why; reports read nothing else."""

from __future__ import annotations

import numpy
import pytest
import torch

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, Affine, Inner, Noise, Trace, call
from tests.helpers import leaf, no_other_regions
from torch_remat._kept import Kept, What, decisions_of, kept_by
from torch_remat.dispatch.region.region import Region, live_regions


@pytest.fixture(autouse=True)
def _no_other_regions():
    with no_other_regions():
        yield


def op(kernel, name, policy, *inputs):
    return call("auto", kernel, Trace(), name, policy, *inputs)


def only_region() -> Region:
    (region,) = live_regions()
    return region


def rows(what: What | None = None) -> list[Kept]:
    return [row for row in kept_by(only_region()) if what in (None, row.what)]


def test_rows_of_ops_with_handles_say_what_is_kept_and_who_reads_it():
    def block(x):
        y = op(Inner, "first", SAVE, x)
        return op(Affine, "second", RECOMPUTE, y, x).sin()

    x = leaf(4, 4)
    y = remat.checkpoint(region_name="block")(block)(x)
    (given,) = rows("input")
    assert (given.op, given.tensor, given.why) == ("", "args[0]", "replay")
    assert given.value.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert given.decision is None
    (resident,) = rows("saved")
    assert (resident.op, resident.decision, resident.why, resident.by) == ("first", SAVE, "backward", "first")
    (slot,) = rows("slot")
    assert (slot.op, slot.tensor, slot.why, slot.by) == ("first", "out", "replay", "")
    assert slot.value.shape == (4, 4)
    assert {(row.op, row.value) for row in rows("empty")} == {("", None)}
    assert decisions_of(only_region()) == {"first": SAVE, "second": RECOMPUTE}
    del y


def test_rows_of_saved_tensors_that_replay_fills_change_with_it():
    seen = []

    def block(x):
        y = x.exp()
        y.register_hook(lambda _: seen.extend(rows("refilled")))
        return y.sin().sum()

    y = remat.checkpoint()(block)(leaf(4, 4))
    empty = rows("empty")
    assert empty
    assert {(row.why, row.value) for row in empty} == {("again", None)}
    y.backward()
    assert seen
    assert {(row.why, row.value.shape) for row in seen} == {("backward", (4, 4))}


def test_policy_for_aten_ops_holds_results_undecided_and_keeps_those_that_are_read():
    held = []

    def block(x, w):
        y = x @ w
        held.extend((row.tensor, row.decision) for row in rows("undecided"))
        return (y * 2).exp()

    y = remat.checkpoint(policy=[torch.ops.aten.mm.default])(block)(leaf(4, 4), leaf(4, 4))
    assert ("mm_0_0", SAVE) in held
    assert not rows("undecided")
    (result,) = rows("result")
    assert (result.op, result.tensor, result.decision) == ("", "mm_0_0", SAVE)
    assert result.why == "replay"
    del y


def test_random_states_and_compared_values_have_rows():
    block = remat.checkpoint(determinism_check="bitwise")(
        lambda x: op(Noise, "noise", SAVE, torch.rand_like(x) * x).sin()
    )
    y = block(leaf(4, 4))
    assert {row.op for row in rows("random state")} == {"", "noise"}
    assert {row.why for row in rows("determinism check")} == {"replay"}
    del y


def test_reading_rows_unpacks_nothing():
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy(force=True), unpacked.append):
        y = remat.checkpoint()(lambda x: op(Inner, "saved", SAVE, x).sin())(leaf(4, 4))
    assert {type(row.value) for row in rows()} == {numpy.ndarray, type(None)}
    assert unpacked == []
    del y
