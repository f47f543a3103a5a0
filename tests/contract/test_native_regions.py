"""Native regions: what runs inside is not recomputed, whatever ops it has; a call of torch's own is skipped whole."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import (
    assert_equal_gradients,
    assert_same,
    leaf,
    pairwise,
    tensors_in,
)
from tests.native_programs import (
    RECOMPUTE,
    ComputeOps,
    keep,
    region,
    replayed_ops,
)

SIDE = 4


def framed(body):
    """Return a function with a recomputed op before the native region and two after each floating output of it."""

    def function(x, w):
        out = keep("body", body, x * 2, w)
        return [y.sin().exp() for y in tensors_in([out]) if y.is_floating_point()]

    return function


def in_place_on_views(h, w):
    a = h @ w
    a[0].mul_(3)
    a.t()[1:, 2].zero_()
    a.view(-1)[::3].sub_(h.detach().reshape(-1)[::3])
    return a.exp()


def random_inside(h, w):
    a = F.dropout(h @ w, 0.4)
    b = a * torch.rand_like(a) + torch.randn(SIDE)
    c = b[torch.randperm(SIDE)]
    noise = torch.empty(SIDE, SIDE).uniform_(-1, 1)
    return c * noise + torch.bernoulli(torch.full((SIDE,), 0.5)), torch.normal(b.detach(), 1.0) * b


def under_autocast(h, w):
    with torch.autocast("cpu", torch.bfloat16):
        a = h @ w
        b = a @ w
        with torch.autocast("cpu", enabled=False):
            c = a.float() @ w
    return b.float() * c


def python_values(h, w):
    a = h @ w
    n = int((a > 0).sum()) % SIDE + 1
    scale = a.detach().abs().max().item()
    rows = [a[i] * (i + scale) for i in range(n)]
    return torch.stack(rows) if bool(a.detach().mean() > 0) else -torch.stack(rows)


def dynamic_shapes(h, w):
    a = h @ w
    rows, columns = (a > 0).nonzero(as_tuple=True)
    unique = torch.unique((a.detach() > 0).long())
    return a[rows, columns].exp(), a.masked_select(a < 0).sin(), a[unique[:1]]


def nested(h, w):
    a = keep("inner", torch.mm, h, w)
    b = remat.op(lambda t: t.sin().cos(), "other", policy=RECOMPUTE)(a)
    return keep("last", lambda: keep("deep", torch.exp, b).tanh())


def comparisons(h, w):
    """Python asks the right operand first if its type is a subclass, as a placeholder's is."""
    mean = (h @ w).detach().mean()
    kept = [h > mean, h >= mean, h < mean, h <= mean, h == mean, h != mean, mean < h]
    return sum(torch.where(mask, h, w) * (index + 1) for index, mask in enumerate(kept)), (h - mean) / mean


def out_of_another_shape(h, w):
    with torch.no_grad():
        a = torch.mul(h, w, out=torch.empty(0).clone())
    return a * h @ w


BODIES = {
    body.__name__: body
    for body in (
        in_place_on_views,
        random_inside,
        under_autocast,
        python_values,
        dynamic_shapes,
        nested,
        comparisons,
        out_of_another_shape,
    )
}


@pairwise(name=BODIES, early_stop=[True, False])
def test_gradients_are_those_of_plain_autograd_and_nothing_inside_is_computed_again(name, early_stop):
    function = framed(BODIES[name])
    inputs = leaf(SIDE, SIDE), leaf(SIDE, SIDE)
    torch.manual_seed(3)
    expected = torch.autograd.grad([y.sum() for y in function(*inputs)], inputs, allow_unused=True)
    torch.manual_seed(3)
    outputs = [y.sum() for y in region(early_stop=early_stop)(function)(*inputs)]
    for keep_graph in (True, True, False):
        actual = torch.autograd.grad(outputs, inputs, allow_unused=True, retain_graph=keep_graph)
        assert [g is None for g in actual] == [g is None for g in expected]
        assert_same([g for g in expected if g is not None], [g for g in actual if g is not None])
    replayed = replayed_ops(function, region(early_stop=early_stop), inputs)
    replayed.pop("_to_copy", None)  # autocast's cast of a leaf comes from outside: it is not kept, but made again
    assert replayed == {"mul": 1, "sin": len(outputs), "exp": len(outputs)}


# --- The forms of the call


def test_outside_of_a_region_it_is_a_plain_call():
    given = leaf(3)
    tree = {"a": (object(), None), "b": given}
    assert keep("a", lambda: tree) is tree
    assert remat.native_save_region("a", lambda: tree) is tree
    assert remat.op(lambda: tree, "a", policy=RECOMPUTE)() is tree
    y = keep("a", torch.sin, given)
    assert y.grad_fn.name() == "SinBackward0"
    assert y.grad_fn._saved_self is given
    for _ in range(2):  # names matter only within a region
        assert_same(torch.sin(given), keep("a", torch.sin, given))


@pytest.mark.parametrize("call", [keep, lambda name, f, /, *a, **k: remat.native_save_region(name, f, *a, **k)])
def test_arguments_and_keywords_reach_the_function(call):
    def function(x):
        one = call("closure", lambda: x.sin())
        two = call("args", torch.addmm, x, one, x, beta=2, alpha=0.5)
        given = {"policy": {"t": two}, "name": 3, "args": [x]}
        return call("kwargs", lambda policy, name, args: policy["t"] * name + args[0], **given).exp()

    assert_equal_gradients(function, region()(function), [leaf(3, 3)])
    assert replayed_ops(function, region(), [leaf(3, 3)]) == {"exp": 1}


# --- What surrounds it


def test_an_outer_mode_sees_each_op_inside_once_in_forward():
    function = framed(python_values)
    inputs = leaf(SIDE, SIDE), leaf(SIDE, SIDE)
    with ComputeOps() as expected:
        function(*inputs)
    with ComputeOps() as actual:
        region()(function)(*inputs)
    assert actual.counts == expected.counts


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("addmm", lambda x, w: keep("n", F.linear, x, w, w[0])),
        ("bernoulli_", lambda x, w: keep("n", torch.dropout, x @ w, 0.5, True)),
        ("rrelu_with_noise", lambda x, w: keep("n", torch.rrelu, x @ w, 0.1, 0.9, True)),
    ],
)
def test_call_of_torchs_own_does_not_run_in_replay(op, call):
    x, w = leaf(4, 4), leaf(4, 4)
    replayed = replayed_ops(lambda x: call(x.sin(), w).sin().exp(), region(), [x], [w])
    assert replayed["sin"] >= 1
    assert op not in replayed


def test_another_function_or_shape_in_replay_is_an_error():
    x, w = leaf(4, 4), leaf(4, 4)

    def function(x):
        return keep("n", torch.mul if remat.is_recomputing() else torch.matmul, x.sin(), w).sin()

    def shape(x):
        return keep("n", torch.matmul, x.sin().t() if remat.is_recomputing() else x.sin(), w).sin()

    for changed in (function, shape):
        y = region(region_name="r")(changed)(x)
        with pytest.raises(remat.MismatchError, match="r::n: replay made this call with"):
            y.sum().backward()


def test_region_in_a_native_region_is_a_plain_call():
    runs = []

    def inner(x):
        runs.append(1)
        return (x * 2).sin().exp()

    def function(x):
        return keep("native", lambda: region(region_name="inner")(inner)(x * 3)).exp()

    x = leaf(3)
    expected = torch.autograd.grad((x * 3 * 2).sin().exp().exp().sum(), x)
    assert_same(expected, torch.autograd.grad(region()(function)(x).sum(), x))
    assert len(runs) == 2  # in forward, and its Python again in replay; not a third time for a replay of its own
