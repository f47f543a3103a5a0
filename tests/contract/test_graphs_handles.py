"""Handle ops in graphs of every shape: kept, second order, parts of it, nested."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.handle_ops import (
    KERNELS,
    POLICIES,
    RECOMPUTE,
    SAME_KIND,
    SAVE,
    STYLES,
    Affine,
    Both,
    Gather,
    Identity,
    Inner,
    Power,
    Result,
    SinCos,
    Trace,
    Transpose,
    as_tuple,
    call,
    policy_ids,
)
from tests.helpers import assert_same, assert_same_program, checkpointed, leaf, pairwise, plain

PAIRS = list(itertools.product(POLICIES, repeat=2))
TRIPLES = list(itertools.product(POLICIES, repeat=3))


def three(style, policies, trace, x, w):
    """Three ops in a row; all of their gradients are true ones."""
    h = call(style, Affine, trace, "a", policies[0], x, w)
    h = call(style, Power, trace, "b", policies[1], h)
    return call(style, Affine, trace, "c", policies[2], h, x)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policies", TRIPLES, ids=policy_ids)
def test_kept_graphs_are_equal_and_run_each_body_as_often_as_they_must(policies, style):
    traces = []

    def program(wrap):
        trace, x, w = Trace(), leaf(3), leaf(3)
        traces.append(trace)
        y = wrap(lambda x: three(style, policies, trace, x.sin(), w))(x)
        results = []
        for keep in (True, True, False):
            y.square().sum().backward(retain_graph=keep)
            results += [x.grad.clone(), w.grad.clone()]
        return results

    assert_same_program(program)
    for name, policy in zip("abc", policies, strict=True):
        assert traces[1].runs[name] == (1 if policy is SAVE else 4)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policies", TRIPLES, ids=policy_ids)
def test_second_order_gradients_are_equal_and_true(policies, style):
    def program(wrap):
        trace = Trace()
        x, w = (torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        y = wrap(lambda x: three(style, policies, trace, x, w))(x)
        first = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        scalar = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(scalar, [x, w], create_graph=True)
        third = torch.autograd.grad(sum(g.sum() for g in second), x)
        return y, first, second, third

    assert_same_program(program)
    x, w = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    function = checkpointed(lambda x, w: three(style, policies, Trace(), x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k is not Gather], ids=str)
def test_second_order_through_each_saved_kernel_is_equal(kernel):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)

        def block(x, w):
            outputs = call("handle", kernel, Trace(), "it", SAVE, x, *[w][: kernel.arity - 1])
            return as_tuple(outputs)[0], call("handle", Both, Trace(), "r", RECOMPUTE, as_tuple(outputs)[0])

        y, z = wrap(block)(x, w)
        (gx,) = torch.autograd.grad((y * z).sum(), x, create_graph=True)
        return y, z, gx, torch.autograd.grad(gx.square().sum(), [x, w], allow_unused=True)[0]

    assert_same_program(program)


@pairwise(wanted=["x", "w", "v", "inner"], policies=TRIPLES)
def test_gradients_of_some_inputs_only_are_equal(wanted, policies):
    def program(wrap):
        x, w, v = leaf(3), leaf(3), leaf(3)
        inner = {}

        def block(x, w):
            h = call("handle", Affine, Trace(), "a", policies[0], x, w)
            inner.setdefault("h", h)
            h = call("handle", Affine, Trace(), "b", policies[1], h, v)
            return call("handle", Inner, Trace(), "c", policies[2], h)

        y = wrap(block)(x.sin(), w)
        target = {"x": x, "w": w, "v": v, "inner": inner["h"]}[wanted]
        return torch.autograd.grad(y.sum(), target, retain_graph=True), torch.autograd.grad(y.sum(), [target, v])

    assert_same_program(program)


@pairwise(order=["first", "second", "both", "one by one", "reversed", "first dropped"], policies=PAIRS)
def test_several_region_outputs_in_any_order_are_equal(order, policies):
    def program(wrap):
        x, w = leaf(3), leaf(3)

        def block(x, w):
            s, c = call("handle", SinCos, Trace(), "parts", policies[0], x)
            one = call("handle", Both, Trace(), "one", policies[1], s)
            return one, c, call("handle", Affine, Trace(), "two", RECOMPUTE, c, w)

        outputs = list(wrap(block)(x, w))
        if order == "first dropped":
            del outputs[0]
        picks = {"first": [0], "second": [2], "one by one": [0, 1, 2], "reversed": [2, 1, 0], "first dropped": [1, 0]}
        results = []
        if order == "both":
            torch.autograd.backward(outputs, [torch.ones(3)] * 3)
        for pick in picks.get(order, []):
            gradients = torch.autograd.grad(outputs[pick].sum(), [x, w], retain_graph=True, allow_unused=True)
            results += [g for g in gradients if g is not None]
        return results, x.grad if order == "both" else x

    assert_same_program(program)


def nested_program(policies, style, depth):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)

        def level(x, left):
            h = call(style, Inner, Trace(), "before", policies[0], x)
            if left:
                h = wrap(level)(h, left - 1)
            h = call(style, Affine, Trace(), "between", policies[1], h, w)
            if left:
                h = wrap(level)(h.t(), left - 1)
            return call(style, Both, Trace(), "after", policies[2], h)

        y = wrap(level)(x.sin(), depth)
        results = [torch.autograd.grad(y.sum(), [x, w], retain_graph=True) for _ in range(2)]
        y.sum().backward()
        return y, results, x.grad, w.grad

    return program


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policies", TRIPLES, ids=policy_ids)
def test_nested_regions_with_saved_ops_at_every_level_are_equal(policies, style):
    assert_same_program(nested_program(policies, style, 1))
    assert_same_program(nested_program(policies, style, 2), early_stop=False)


@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
def test_inner_region_before_the_first_op_and_after_the_last_is_equal(policy):
    def program(wrap):
        def outer(x):
            h = wrap(lambda h: call("handle", Both, Trace(), "inner", policy, h.sin()))(x)
            h = call("handle", Both, Trace(), "it", policy, h)
            return wrap(lambda h: h.cos())(wrap(lambda h: call("auto", Both, Trace(), "inner", policy, h))(h))

        x = leaf(3, 3)
        y = wrap(outer)(x)
        results = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(2)]
        y.sum().backward()
        return y, results, x.grad

    assert_same_program(program)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("closure", [True, False])
def test_inner_region_keeps_as_much_where_its_input_is_a_view_in_one_phase_only(closure, early_stop):
    def program(wrap):
        x = leaf(3, 3)

        def outer(x):
            view = remat.native_save_region("view", lambda: x.sin().t())

            def inner(h):
                same = call("auto", Identity, Trace(), "same", SAVE, h)
                return call("auto", Both, Trace(), "reader", RECOMPUTE, h), same

            h, same = wrap(lambda unused: inner(view))(x) if closure else wrap(inner)(view)
            return call("auto", Both, Trace(), "last", RECOMPUTE, same), h.exp()

        y, z = wrap(outer)(x)
        (y + z).sum().backward()
        return y, z, x.grad

    assert_same_program(program, early_stop=early_stop)


@pytest.mark.parametrize("style", STYLES)
def test_saved_op_that_is_given_a_tensor_and_a_skipped_view_of_it_is_equal(style):
    def program(wrap):
        x = leaf(3, 3)

        def block(x):
            h = x.sin()
            return call(style, Affine, Trace(), "both", SAVE, call(style, Transpose, Trace(), "view", SAVE, h), h)

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


@pytest.mark.parametrize("alias", ["of the view", "of the base", "of an alias", "of a skipped result"])
def test_op_that_runs_again_on_a_detached_alias_of_a_skipped_view_is_equal(alias):
    def program(wrap):
        x = leaf(3, 3)

        def block(x):
            h = x.sin()
            if alias == "of a skipped result":
                h = call("auto", Inner, Trace(), "skipped", SAVE, h)
            given = h.detach() if alias in ("of an alias", "of a skipped result") else h
            view = call("auto", Transpose, Trace(), "view", SAVE, given)
            read = {"of the view": view.detach(), "of the base": h.detach()}.get(alias, given)
            return call("auto", Both, Trace(), "again", RECOMPUTE, read), call("auto", Inner, Trace(), "in", SAVE, h)

        y, z = wrap(block)(x)
        z.sum().backward()
        return y, z, x.grad

    assert_same_program(program, early_stop=False)


@pytest.mark.parametrize("policies", PAIRS, ids=policy_ids)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", ["torch in ours", "ours in torch"])
def test_ops_in_regions_nested_with_torch_checkpoint_are_equal(inside, reentrant, policies):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)

        def theirs(function):
            return lambda *args: torch_checkpoint(function, *args, use_reentrant=reentrant)

        def inner(h):
            h = call("auto", Inner, Trace(), "c", policies[1], h.sin())
            return call("auto", Affine, Trace(), "d", RECOMPUTE, h, w)

        def outer(x):
            h = call("handle", Both, Trace(), "a", policies[0], x.sin())
            h = call("handle", Affine, Trace(), "b", RECOMPUTE, h, w)
            return (theirs if inside == "torch in ours" else wrap)(inner)(h).exp()

        y = (wrap if inside == "torch in ours" else theirs)(outer)(x)
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_program(program)


def test_backward_in_another_thread_is_equal():
    def program(wrap):
        x = leaf(3)

        def block(x):
            with remat.name_scope("block"):
                return three("auto", (SAVE, RECOMPUTE, SAVE), Trace(), x.sin(), x)

        y = wrap(block)(x)
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
        return x.grad

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("kernel", SAME_KIND, ids=str)
def test_long_chains_of_one_kernel_with_alternating_policies_are_equal(kernel):
    def program(wrap):
        x = leaf(3, 3)

        def block(x):
            for index in range(20):
                x = call(STYLES[index % 2], kernel, Trace(), f"op{index}", POLICIES[index % 2], x)
            return x

        y = wrap(block)(x)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program)


def test_native_op_that_saves_nothing_after_saved_ops_needs_no_replay():
    x, trace = leaf(3), Trace()
    y = checkpointed(lambda x: call("handle", Result, trace, "it", SAVE, x * 1).sum() + 1)(x)
    expected = torch.autograd.grad(call("plain", Result, Trace(), "it", SAVE, x).sum(), x)
    assert_same(expected, torch.autograd.grad(y, x))
    assert trace.runs == {"it": 1}


def test_exception_between_ops_leaves_a_clean_state():
    fail = [True]

    def block(x):
        h = call("handle", Both, Trace(), "a", SAVE, x.sin())
        if fail and remat.is_recomputing() == (fail[0] == "replay"):
            raise ValueError("between")
        return call("handle", Both, Trace(), "b", RECOMPUTE, h)

    x = leaf(3)
    expected = torch.autograd.grad(plain(lambda x: block_without(x))(x).sum(), x)
    for when in (True, "replay"):
        fail[:] = [when]
        with pytest.raises(ValueError, match="between"):
            checkpointed(block)(x).sum().backward()
        fail.clear()
        assert_same(expected, torch.autograd.grad(checkpointed(block)(x).sum(), x))


def block_without(x):
    h = call("plain", Both, Trace(), "a", SAVE, x.sin())
    return call("plain", Both, Trace(), "b", RECOMPUTE, h)
