"""What regions with native regions or under a policy keep, and which ops they run again, counted by hand.

Of a native region are kept tensors born inside that backward reads, and returned tensors that replay or a later native
region's backward reads; nothing from outside that replay will have, never a parameter, nothing twice. Under a policy
what autograd saves is needed: a needed result of a saved op is kept; a needed result of a recomputed op is run again,
and all that it reads is needed. Nothing else is kept or run. Views cost nothing.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.helpers import alive, assert_same, leaf, watch
from tests.native_programs import (
    RECOMPUTE,
    Marks,
    aten,
    keep,
    kept,
    region,
    replayed_ops,
    sac,
    uncollected,
)


def test_placeholder_that_outlives_replay_keeps_nothing_of_the_region_alive():
    """As in a list of hidden states, to which replay appends once more."""
    states, made = [], []

    def block(x):
        y = x.cos()
        made.append(watch(y))
        states.append((y @ y).detach())
        return y.sin()

    with uncollected():
        y = region(MM)(block)(leaf(3, 3))
        y.sum().backward()
        del y
        assert [type(state).__name__ for state in states] == ["Tensor", "Placeholder"]
        assert [alive(reference) for reference in made] == [0, 0]
        with pytest.raises(remat.PlaceholderError, match=r":mm_0_0"):
            states[1].sum().item()


MM = [aten.mm.default]


def returned_twice(m, x, w):
    one, two, three = keep("a", lambda: ((h := m("h", x @ w)), h, h.view(-1)))
    return (one.sin() + two.cos()).view(-1) * three


def read_in_a_skipped_one(m, x, w):
    h = m("h", keep("a", torch.mm, x, w))
    return m("c", keep("b", lambda: h * 2)) + m("d", x * 2).sin()


def one_of_two_outputs(m, x, w):
    u, v = keep("a", lambda: (m("u", x @ w), m("v", x * 3)))
    return m("y", v.sin()) + u


def integers(m, x, w):
    values, index = keep("a", lambda: tuple(m(*pair) for pair in zip(("values", "index"), x.sort(-1), strict=True)))
    return w.gather(-1, index) + values


def recomputed_region_reads(m, x, w):
    h = m("h", keep("a", torch.mm, x, w))
    return remat.op(lambda t: m("s", m("d", t * 2).sin()).exp(), "b", policy=RECOMPUTE)(h)


def native_chain(m, x, w):
    a = m("a", keep("1", torch.mm, x, w))
    b = m("b", keep("2", torch.mm, a, w))
    c = m("c", keep("3", torch.mm, b.sin(), w))
    return m("d", keep("4", lambda: c * 2))


NATIVE = {  # program, and the names of what it keeps; it takes what marks a tensor by a name, and two tensors
    "read by nobody": (lambda m, x, w: m("h", keep("a", torch.mm, x, w)) * 2, ""),
    "born inside": (lambda m, x, w: keep("a", lambda: m("c", m("b", m("a", x @ w).sin()).exp())) * 2, "a c"),
    "read through a sum": (lambda m, x, w: m("y", m("s", m("h", keep("a", torch.mm, x, w)) + x).sin()), "h"),
    "read after the last fill": (lambda m, x, w: (g := m("g", x.sin())) + m("h", keep("a", torch.mm, g, w)), ""),
    "saved inside, born outside": (lambda m, x, w: keep("a", lambda g: m("s", g.sin()) * 2, m("g", x.exp())), ""),
    "read by the next one": (lambda m, x, w: keep("b", lambda h: h.sin() * 2, m("h", keep("a", torch.mm, x, w))), "h"),
    "read in a skipped one alone": (read_in_a_skipped_one, "c h"),
    "view of its result": (lambda m, x, w: m("y", m("h", keep("a", torch.mm, x, w)).t()[1:].sin()), "h"),
    "returned twice": (returned_twice, "h"),
    "parameter inside": (lambda m, x, w: keep("a", lambda: m("s", w.sin()) + w.t()[1:].cos().sum(0)) * 2, ""),
    "one of two outputs": (one_of_two_outputs, "v"),
    "integers": (integers, "index"),
    "changed in place": (lambda m, x, w: keep("a", lambda: m("h", x @ w).add_(1).mul_(2).sin()) * 2, "h"),
    "read by a recomputed one": (recomputed_region_reads, "h"),
    "chain": (native_chain, "a b"),
}


def only_feeds_a_saved_op(m, x, w):
    """The matmul's second factor needs no gradient, so nobody reads the first."""
    return m("e", m("h", m("b", m("a", x * 2) + 1) @ w.detach()).exp())


def chain(m, x, w):
    a = m("a", x @ w)
    b = m("b", a @ w)
    return m("c", b @ w).sin()


def views(m, x, w):
    h = m("h", x @ w)
    top, rest = h.t().split([1, 3])
    return top.sin().sum() + rest.unsqueeze(0).expand(2, 3, 4).cos().sum() + m("e", h.view(-1)[::2].exp()).sum()


def sum_of_two(m, x, w):
    a, b = m("a", x @ w), m("b", w @ x)
    return m("y", m("s", a + b).sin())


def several_outputs(m, x, w):
    values, index = m("h", x @ w).sort(-1)
    m("values", values), m("index", index)
    return m("y", values.sin()), w.gather(-1, index)


def numbers(m, x, w):
    h = m("h", x @ w)
    scale = h.detach().abs().max().item()
    return m("y", m("p", h * scale).sin())


def call_saves_what_was_modified(m, x, w):
    h = m("h", x @ w).exp_()
    return m("y", remat.op(lambda h: h.sin(), "call")(h)).cos()


ROWS = [
    *(pytest.param(program, None, names, None, id=name) for name, (program, names) in NATIVE.items()),
    (only_feeds_a_saved_op, MM, "h", {"exp": 1}),
    (only_feeds_a_saved_op, [], "", {"mul": 1, "add": 1, "mm": 1, "exp": 1}),
    (only_feeds_a_saved_op, [aten.add.Tensor], "b", {"mm": 1, "exp": 1}),
    (only_feeds_a_saved_op, [aten.exp.default], "e", {}),
    (chain, MM, "a b c", {}),
    (chain, [aten.sin.default], "", {"mm": 3}),
    (views, MM, "h", {"exp": 1}),
    (views, [aten.exp.default], "e", {"mm": 1}),
    (sum_of_two, MM, "a b", {"add": 1}),
    (sum_of_two, [*MM, aten.add.Tensor], "s", {}),
    (several_outputs, MM, "h", {"sort": 1}),
    (several_outputs, [*MM, aten.sort.default], "values index", {}),
    (numbers, MM, "h", None),
    (numbers, [aten.mul.Tensor], "p", None),
    (call_saves_what_was_modified, [], "y", None),
]
"""Function, the ops that the policy saves (None: no policy), what is kept, and the ops that run again if counted."""


def ids(value):
    if callable(value):
        return value.__name__
    return "+".join(op._schema.name.removeprefix("aten::") for op in value) or "none" if isinstance(value, list) else ""


@pytest.mark.parametrize(("function", "ops", "names", "runs"), ROWS, ids=ids)
def test_region_keeps_and_runs_what_was_counted_by_hand(function, ops, names, runs):
    x, w, marks = leaf(4, 4), nn.Parameter(torch.randn(4, 4)), Marks()
    names = set(names.split())
    policy = None if ops is None else lambda ctx, op, *args, **kwargs: op in ops

    def loss(m, x):
        out = function(m, x, w)
        return sum(y.sum() for y in (out if isinstance(out, tuple) else (out,)))

    plain_gradients = torch.autograd.grad(loss(Marks(), x), [x, w], allow_unused=True)
    with uncollected():
        after = kept(lambda x: region(policy)(lambda x: function(marks, x, w))(x), [x], marks)
        assert after.names == names
        assert after.bytes == marks.bytes(names)
        for retain in (True, True, False):
            gradients = after.backward([x, w], retain_graph=retain)
            assert [g is None for g in gradients] == [g is None for g in plain_gradients]
            assert_same([g for g in plain_gradients if g is not None], [g for g in gradients if g is not None])
            assert marks.alive() == (names if retain else set())
        assert after.live.bytes() == 0
    if ops is not None:
        ours = replayed_ops(lambda x: function(Marks(), x, w), region(policy), [x], [w])
        assert runs is None or ours == runs
        peer = replayed_ops(lambda x: function(Marks(), x, w), sac(policy), [x], [w])
        assert not Counter(ours) - Counter(peer)


def test_number_assigned_in_a_native_region_keeps_nothing():
    """The memory of the tensor that torch makes of it may be that of a result that is gone."""

    def write(v):
        for row in range(4):
            v[row] = 0.25

    def function(x):
        unused = [(x @ x).sum().sin() for _ in range(4)]
        del unused
        v = x.cos()
        keep("write", write, v)
        return v

    x = leaf(4, 4)
    kept = {remat.memory_report(region([aten.mm.default, aten.sum.default])(function)(x)).bytes for _ in range(40)}
    assert kept == {x.nbytes}
