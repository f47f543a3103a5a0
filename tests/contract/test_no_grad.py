"""Ops that autograd does not record, by `no_grad`, inference mode or inputs without gradients: the policy holds."""

from __future__ import annotations

import pytest
import torch

import torch_remat as remat
from tests.handle_ops import POLICIES, RECOMPUTE, SAVE, STYLES, Affine, Both, Inner, Trace, call, policy_ids
from tests.helpers import assert_same, assert_same_program, checkpointed, leaf, pairwise


@pytest.mark.parametrize("style", STYLES)
def test_policy_holds_where_no_input_needs_a_gradient(style):
    traces = []

    def program(wrap):
        trace = Trace()
        traces.append(trace)
        x, t = leaf(3), torch.randn(3)

        def block(x):
            s = call(style, Both, trace, "constant", SAVE, t)
            with torch.no_grad():
                s = call(style, Affine, trace, "under no_grad", SAVE, x, s)
                r = call(style, Both, trace, "again", RECOMPUTE, s)
            assert not s.requires_grad
            s = call(style, Inner, trace, "tail", SAVE, s)
            return call(style, Affine, trace, "reader", RECOMPUTE, call(style, Affine, trace, "sum", SAVE, x, s), r)

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, replays=1)
    assert traces[1].runs == {"constant": 1, "under no_grad": 1, "again": 2, "tail": 1, "sum": 1, "reader": 2}


@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
def test_region_without_gradients_runs_once_and_gives_equal_outputs(policy):
    for context in (torch.no_grad, torch.inference_mode):
        trace, x = Trace(), leaf(3, 3)
        with context():
            y = checkpointed(lambda x, t=trace: call("handle", Both, t, "it", policy, x.sin()))(x)
            expected = call("plain", Both, Trace(), "it", policy, x.sin())
        assert_same(expected, y)
        assert trace.runs == {"it": 1}


@pytest.mark.parametrize("style", STYLES)
def test_saved_op_that_needs_no_gradient_keeps_only_what_a_recomputed_op_reads(style):
    trace, x, t = Trace(), leaf(3), torch.randn(3)

    def block(x):
        one = call(style, Both, trace, "read", SAVE, t)
        two = call(style, Inner, trace, "unread", SAVE, one)
        return call(style, Affine, trace, "reader", RECOMPUTE, x, one), two

    y, two = checkpointed(block)(x)
    loss = y.sum()
    del y, two
    assert trace.alive() == {"read.out"}
    loss.backward()
    assert trace.alive() == set()
    assert trace.runs == {"read": 1, "unread": 1, "reader": 2}


@pairwise(style=STYLES, chain=["R", "OR", "RSSR"], nested=[False, True], early_stop=[True, False])
def test_ops_in_inference_mode_inside_a_region_are_equal_and_saved_ones_run_once(style, chain, nested, early_stop):
    policies = {"R": RECOMPUTE, "S": SAVE, "O": remat.CheckpointPolicy.OFFLOAD}
    traces = []

    def program(wrap):
        trace, metrics = Trace(), []
        traces.append(trace)

        def block(x):
            with torch.inference_mode():
                h = x.detach() * 2
                for place, name in enumerate(chain):
                    h = call(style, Both, trace, f"{place}", policies[name], h)
                if not remat.is_recomputing():
                    metrics.append(h.clone())
                h = h.t()
            s = call(style, Affine, trace, "after", SAVE, x.cos(), x)
            assert h.shape == s.shape
            return call(style, Both, trace, "last", RECOMPUTE, s)

        x = leaf(3, 3)
        y = (wrap(lambda x: wrap(block)(x.sin()).exp()) if nested else wrap(block))(x)
        y.sum().backward()
        return y, x.grad, *[metric.clone() for metric in metrics]

    assert_same_program(program, early_stop=early_stop)
    if not nested:
        assert traces[1].runs == {
            **{f"{place}": 1 + (name == "R") for place, name in enumerate(chain)},
            "after": 1,
            "last": 2,
        }


def test_slot_of_an_inference_tensor_is_exact_though_it_is_changed_in_place_later():
    seen = []

    class Read(torch.autograd.Function):
        @staticmethod
        @remat.auto_forward()
        def forward(ctx, x):
            seen.append(x.clone())
            return x * 1

    def block(x):
        with torch.inference_mode():
            s = call("auto", Inner, Trace(), "s", SAVE, x.detach())
            remat.op(Read.apply, "read", policy=RECOMPUTE)(s)
            if not remat.is_recomputing():
                s.mul_(2)
        return x.sin()

    checkpointed(block)(leaf(3)).sum().backward()
    assert_same(*seen)
