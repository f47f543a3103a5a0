"""Outputs of every kind: replay reproduces what autograd needs to know of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.handle_ops import (
    KERNELS,
    POLICIES,
    RECOMPUTE,
    SAVE,
    STYLES,
    Affine,
    Gated,
    Gather,
    Half,
    Identity,
    Inner,
    Sort,
    Trace,
    Transpose,
    as_tuple,
    call,
    policy_ids,
)
from tests.helpers import assert_same_program, checkpointed, leaf, pairwise

TRIPLES = list(itertools.product(POLICIES, repeat=3))


def metadata(tensor):
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad, tensor.is_leaf


@pairwise(kernel=KERNELS, style=STYLES)
def test_replay_shows_of_the_outputs_of_a_skipped_op_what_forward_showed(kernel, style):
    shown = []

    def block(x, w):
        second = [torch.tensor([[1, 0, 1]] * 3)] if kernel is Gather else [w]
        outputs = call(style, kernel, Trace(), "it", SAVE, x.sin(), *second[: kernel.arity - 1])
        shown.append((type(outputs) is tuple, [metadata(y) for y in as_tuple(outputs)]))
        constants = [t.detach() for t in (x, *second)]
        outputs = call(style, kernel, Trace(), "constant", SAVE, *constants[: kernel.arity])
        shown.append((type(outputs) is tuple, [metadata(y)[:5] for y in as_tuple(outputs)]))
        return as_tuple(outputs)[0], x.cos().exp()

    y, z = checkpointed(block)(leaf(3, 3), leaf(3, 3))
    assert not y.requires_grad
    z.sum().backward()
    assert len(shown) == 4
    assert shown[:2] == shown[2:]


@pytest.mark.parametrize("policies", TRIPLES, ids=policy_ids)
def test_integer_and_undifferentiable_outputs_feed_other_ops(policies):
    def program(wrap):
        x = leaf(3, 3)

        def block(x):
            values, index = call("handle", Sort, Trace(), "sort", policies[0], x.sin())
            y, mask = call("auto", Gated, Trace(), "gate", policies[1], values)
            assert (index.requires_grad, mask.requires_grad) == (False, False)
            h = call("auto", Gather, Trace(), "gather", policies[2], y, index)
            return call("handle", Affine, Trace(), "reader", RECOMPUTE, h, mask), index, mask

        y, index, mask = wrap(block)(x)
        y.sum().backward()
        return y, index, mask, x.grad

    assert_same_program(program, replays=1)


@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
@pytest.mark.parametrize("use", [(True, True), (True, False), (False, True)])
def test_gradients_that_are_missing_are_none_where_the_op_asked_for_it(use, policy):
    def program(wrap):
        x = leaf(3)
        outputs = wrap(lambda x: call("auto", Half, Trace(), "it", policy, x.sin()))(x)
        sum(y.sum() for y, used in zip(outputs, use, strict=True) if used).backward()
        return x.grad

    assert_same_program(program)


@pairwise(kernel=[Identity, Transpose], policies=TRIPLES, style=STYLES)
def test_outputs_that_are_inputs_or_views_of_them_are_equal(kernel, policies, style):
    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)

        def block(x, w):
            one = call(style, kernel, Trace(), "of input", policies[0], x)
            h = call(style, Inner, Trace(), "h", policies[1], x.sin())
            two = call(style, kernel, Trace(), "of h", policies[2], h)
            three = call(style, kernel, Trace(), "of two", policies[0], two)
            four = call(style, kernel, Trace(), "of parameter", policies[1], w)
            y = call(style, Affine, Trace(), "x", RECOMPUTE, one, two)
            z = call(style, Affine, Trace(), "y", policies[1], three, four)
            return call(style, Affine, Trace(), "z", RECOMPUTE, y, z), one, three

        y, one, three = wrap(block)(x, w)
        (y.sum() + (one * three).sum()).backward()
        return y, one, three, x.grad, w.grad

    assert_same_program(program, replays=1)


@pairwise(kernel=[Identity, Transpose], policies=TRIPLES, style=STYLES)
def test_native_views_of_outputs_that_are_views_of_inputs_are_equal(kernel, policies, style):
    """Such a view may look just like what the op was given, but replay has data of only one of them."""

    def program(wrap):
        x, w = leaf(3, 3), leaf(3, 3)

        def block(x, w):
            results = []
            for name, given in {
                "input": x,
                "constant": x.detach() * 2,
                "op without gradients": call(style, Inner, Trace(), "c", policies[0], x.detach()),
                "native": x * 2,
                "view": (x + 1).t(),
                "op": call(style, Inner, Trace(), "h", policies[0], x),
            }.items():
                out = call(style, kernel, Trace(), f"alias of {name}", policies[1], given)
                view = out if kernel is Identity else out.t()
                results.append(call(style, Affine, Trace(), f"reader of {name}", RECOMPUTE, view.view_as(view), w))
                results.append(call(style, Affine, Trace(), f"other reader of {name}", policies[2], given, view[:1]))
            return tuple(results)

        results = wrap(block)(x, w)
        sum(y.sum() for y in results).backward()
        return results, x.grad, w.grad

    assert_same_program(program, replays=1)


@pairwise(kernel=[Identity, Transpose], policies=TRIPLES, style=STYLES)
def test_outputs_that_are_inputs_without_gradients_are_equal(kernel, policies, style):
    """Without gradients, autograd gives back the very tensor that the op was given."""

    def program(wrap):
        x, t = leaf(3, 3), torch.randn(3, 3)

        def block(x, t):
            h = call(style, Inner, Trace(), "h", policies[0], t)
            one = call(style, kernel, Trace(), "of h", policies[1], h)
            two = call(style, kernel, Trace(), "of one", policies[2], one)
            three = call(style, kernel, Trace(), "of input", policies[1], t)
            y = call(style, Affine, Trace(), "y", RECOMPUTE, x, one)
            z = call(style, Affine, Trace(), "z", RECOMPUTE, y, two)
            r = call(style, Inner, Trace(), "r", RECOMPUTE, one)
            return call(style, Affine, Trace(), "last", policies[0], z, three), r

        y, r = wrap(block)(x, t)
        y.sum().backward()
        return y, r, x.grad

    assert_same_program(program, replays=1)
