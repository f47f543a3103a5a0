"""Promises that only a mutant of `tests.mutants` broke before: nothing else in the suite noticed it."""

from __future__ import annotations

from itertools import count

import pytest
import torch

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, Kernel, Shift, Trace, call
from tests.helpers import Calls, CountOps, alive, assert_same, checkpointed, leaf, no_other_regions, watch
from tests.offloaders import OFFLOAD, Counting
from torch_remat.dispatch.call import survey
from torch_remat.dispatch.region.region import live_regions

TOTAL = torch.zeros(4)


def two(x):
    x = x.exp()  # which saves its result, not its input
    return x.sin(), x.cos()


def test_policy_that_saves_all_draws_keeps_no_random_state():
    y = checkpointed(lambda x: (x * torch.rand_like(x)).sin(), policy=[torch.ops.aten.rand_like])(leaf(4))
    assert "random state" not in str(remat.memory_report(y))
    y.sum().backward()


def test_backward_of_one_output_frees_inputs_and_function_though_another_output_is_left():
    bias, x = torch.ones(4), leaf(4) * 2
    y, z = checkpointed(lambda x, bias=bias: two(x + bias))(x)
    storages = watch(x, bias)
    del x, bias
    assert alive(storages) == 2
    y.sum().backward()
    assert alive(storages) == 0
    assert z.requires_grad


def test_values_of_a_replay_that_fails_do_not_stay():
    scale, fails = 1.0, False

    def block(x):
        x = (x * scale).sin()
        if fails:
            raise ValueError("once")
        return x.exp()

    x = leaf(4)
    y = checkpointed(block)(x).sum()
    scale, fails = 2.0, True
    with pytest.raises(ValueError, match="once"):
        y.backward(retain_graph=True)
    scale, fails = 1.0, False
    y.backward()
    assert_same(torch.autograd.grad(block(x).sum(), x)[0], x.grad)


def test_refusal_that_user_code_swallows_stands_where_replay_cannot_start_over():
    def block(x):
        y = call("auto", Shift, Trace(), "a", SAVE, x)
        try:
            factor = float(y.detach().numpy().max())
        except remat.PlaceholderError:
            factor = 1.0
        return (x * factor).sin() * 2

    with pytest.raises(remat.PlaceholderError):
        checkpointed(block)(leaf(4)).sum().backward()


READERS = {
    "saved by a call": lambda w: lambda x: remat.op(torch.mm, "a")(x, w),
    "saved in a native region": lambda w: lambda x: remat.native_save_region("a", torch.mm, x, w),
    "read and not saved": lambda w: lambda x: (x + w).sin(),
    "cast in a call": lambda w: lambda x: remat.op(torch.autocast("cpu", torch.bfloat16)(lambda x: x @ w), "a")(x),
}


@pytest.mark.parametrize("reader", READERS)
def test_parameter_that_changes_after_forward_is_an_error(reader):
    w = torch.nn.Parameter(torch.ones(4, 4))
    y = checkpointed(READERS[reader](w))(leaf(4, 4))
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(remat.MutationError):
        y.sum().backward()


def test_region_with_a_call_in_a_large_budget_recomputes_nothing(monkeypatch):
    monkeypatch.setattr(survey, "perf_counter_ns", count(0, 10**6).__next__)  # ops are worth to be kept
    function = Calls(lambda x: remat.op(torch.exp, "a")(x.sin()).cos())
    with remat.budget("1 MiB"):
        for _ in range(4):  # the first three are recorded
            checkpointed(function)(leaf(4)).sum().backward()
    assert function.replays == 3


def test_result_that_a_policy_offloads_is_not_recomputed():
    function = Calls(lambda x: x.sin().exp().cos())
    offloader = Counting()
    y = checkpointed(function, policy=lambda ctx, op, *_: remat.CheckpointPolicy.OFFLOAD, offloader=offloader)(leaf(4))
    with CountOps() as ops:
        y.sum().backward()
    assert [info.tensor for info in offloader.sent] == ["exp_0_0"]
    assert not ops.counts["exp"]


def test_write_after_what_an_op_named_recompute_saved_is_an_error_in_a_budget():
    def block(x):
        h = x * 2
        y = remat.op(torch.sin, "a", policy=RECOMPUTE)(h)
        h.add_(1)
        return y

    with remat.budget("1 MiB"):
        y = checkpointed(block)(leaf(4))
    with pytest.raises(remat.MutationError):
        y.sum().backward()


def test_output_that_is_held_after_backward_holds_no_region():
    with no_other_regions():
        y = checkpointed(lambda x: remat.op(torch.sin, "a")(x).exp())(leaf(4))
        assert len(live_regions()) == 1
        y.sum().backward()
        assert not live_regions()


def test_value_that_came_back_is_not_held_while_the_graph_is_kept():
    offloader = Counting()
    y = checkpointed(lambda x: remat.op(torch.exp, "a", policy=OFFLOAD)(x), offloader=offloader)(leaf(4)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert [what for what, _ in offloader.log].count("onload") == 2


def test_tensor_from_outside_that_was_replaced_where_nobody_looks_is_an_error():
    class Box:
        tensor = leaf(4) * 2

    y = checkpointed(lambda x: (x * Box.tensor).sin())(leaf(4))
    Box.tensor = (Box.tensor.detach() / 2).requires_grad_() * 2  # the same values
    with pytest.raises(remat.MismatchError, match="created outside"):
        y.sum().backward()


def test_call_after_an_inner_region_is_skipped():
    calls = []

    def sine(x):
        calls.append(1)
        return x.sin()

    checkpointed(lambda x: remat.op(sine, "a")(checkpointed(torch.exp)(x)).cos())(leaf(4)).sum().backward()
    assert len(calls) == 1


def test_last_call_that_replay_does_not_make_is_an_error():
    in_forward = iter([True, False])

    def block(x):
        y = x.sin().exp()
        if next(in_forward):
            remat.op(torch.clone, "a")(x.detach())
        return y

    with pytest.raises(remat.MismatchError) as caught:
        checkpointed(block, early_stop=False)(leaf(4)).sum().backward()
    assert caught.value.op == "a"


def test_result_that_a_policy_keeps_as_an_op_in_place_left_it_is_reported():
    def block(x):
        return (torch.zeros(4, 8).add_(x.detach()).exp() + x).tanh() * x

    (region,) = remat.memory_report(checkpointed(block, policy=remat.save_names("add__0_0"))(leaf(4, 8))).regions
    assert [tensor.name.partition("::")[2] for tensor in region.tensors] == ["args[0]", "add__0_0"]


def test_tensor_that_two_ops_save_is_sent_once():
    def block(x):
        return remat.op(torch.sin, "b", policy=OFFLOAD)(remat.op(torch.exp, "a", policy=OFFLOAD)(x))

    offloader = Counting()
    checkpointed(block, offloader=offloader)(leaf(4)).sum().backward()
    assert len(offloader.sent) == 1


def test_native_region_may_write_a_tensor_from_outside_under_a_policy():
    total = torch.zeros(4)

    def block(x):
        remat.native_save_region("a", lambda: total.add_(1))
        return x.sin().exp()

    checkpointed(block, policy=[torch.ops.aten.mm])(leaf(4)).sum().backward()
    assert total.tolist() == [1.0] * 4


def test_result_of_a_call_is_there_for_what_reads_it_without_an_op_under_a_policy():
    """Else replay would start over, with a warning."""

    def block(x):
        scale = remat.op(lambda h: h.sigmoid() * 2, "scale")(x.cos())
        return (x * float(scale.detach().numpy().max())).sin().exp()

    x = leaf(4)
    expected = torch.autograd.grad(block(x).sum(), x)
    assert_same(expected, torch.autograd.grad(checkpointed(block, policy=[torch.ops.aten.mm])(x).sum(), x))


def test_saved_op_that_gets_a_part_of_its_argument_in_replay_is_an_error():
    def block(x):
        h = x * 1
        return (h[:2] if remat.is_recomputing() else h).exp()  # which saves its result

    y = checkpointed(lambda x: block(x).sum() * x.sin(), policy=[torch.ops.aten.exp])(leaf(4))
    with pytest.raises(remat.MismatchError):
        y.sum().backward()


def changed_result_of_a_call_that_wrote_outside(x):
    return remat.op(lambda x: (TOTAL.add_(x.detach()), x.sin())[1], "a")(x).add_(1).sin()


def writes_what_it_was_not_given(x):
    class Box:
        tensor = x.sin()

    return remat.op(lambda x: (Box.tensor.add_(1), x.cos())[1], "a")(x) * Box.tensor


def saved_handle_that_writes(x):
    writing = Kernel("writing", (), lambda ctx, x: (x.add_(1) * 2, {}), lambda ctx, saved, grad: grad * 2)
    return call("auto", writing, Trace(), "a", SAVE, x * 2)


@pytest.mark.parametrize(
    "block", [changed_result_of_a_call_that_wrote_outside, writes_what_it_was_not_given, saved_handle_that_writes]
)
def test_call_that_writes_and_cannot_be_skipped_is_refused_in_forward(block):
    with pytest.raises(remat.UsageError) as caught:
        checkpointed(block)(leaf(4))
    assert caught.value.op == "a"


def test_result_of_a_last_call_is_not_kept_under_a_policy_for_ops():
    x = leaf(64)
    y = checkpointed(lambda x: remat.op(torch.sin, "a")(x.exp()), policy=[torch.ops.aten.exp.default])(x * 2)
    (region,) = remat.memory_report(y).regions
    assert region.bytes == 2 * x.nbytes  # the input, and what the policy selects
