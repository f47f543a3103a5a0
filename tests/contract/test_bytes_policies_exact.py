"""What a region under an op-level policy keeps and runs again: by hand, and against a model of the rules.

The rules: what autograd saves is needed. A needed result of a saved op is kept; a needed result of a recomputed op is
run again, and all that it reads is needed. Nothing else is kept or run. Views cost nothing.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.helpers import (
    Calls,
    CountOps,
    LiveStorages,
    alive,
    assert_same,
    leaf,
    watch,
)
from tests.native_programs import Marks, aten, kept, region, replayed_ops, sac, uncollected


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Run what torch loads when it is first needed, which leaves cycles."""
    with LiveStorages():
        leaf(1).detach().sin()


MM = [aten.mm.default]


def only_feeds_a_saved_op(m, x, w):
    """The matmul's second factor needs no gradient, so nobody reads the first."""
    return m("e", m("h", m("b", m("a", x * 2) + 1) @ w.detach()).exp())


def saved_op_whose_result_nobody_reads(m, x, w):
    return m("h", x.sin() @ w) * 2


def saved_input_is_recomputed(m, x, w):
    return m("h", m("s", x.sin()) @ w) * 2


def chain(m, x, w):
    a = m("a", x @ w)
    b = m("b", a @ w)
    return m("c", b @ w).sin()


def dead_branch(m, x, w):
    h = m("h", x @ w)
    m("dead", h.exp().cos().sin())
    return h * 2


def dead_branch_without_gradients(m, x, w):
    h = m("h", x @ w)
    _ = h.detach().exp().sum()
    return m("y", h.cos()) * 2


def views(m, x, w):
    h = m("h", x @ w)
    top, rest = h.t().split([1, 3])
    return top.sin().sum() + rest.unsqueeze(0).expand(2, 3, 4).cos().sum() + m("e", h.view(-1)[::2].exp()).sum()


def views_of_recomputed(m, x, w):
    s = m("s", x.sin())
    return m("h", s.t() @ w) + s.t()[0]


def sum_of_two(m, x, w):
    a, b = m("a", x @ w), m("b", w @ x)
    return m("y", m("s", a + b).sin())


def one_of_two(m, x, w):
    a, b = m("a", x @ w), m("b", w @ x)
    return m("y", a.sin()) + b


def several_outputs(m, x, w):
    values, index = m("h", x @ w).sort(-1)
    m("values", values), m("index", index)
    return m("y", values.sin()), w.gather(-1, index)


def parameter_view(m, x, w):
    return m("h", x @ w.t()).sin() + w.t()[1]


def numbers(m, x, w):
    h = m("h", x @ w)
    scale = h.detach().abs().max().item()
    return m("y", m("p", h * scale).sin())


def saved_twice(m, x, w):
    h = m("h", x @ w)
    return m("p", h * h) + m("s", h.sin()) * h.cos()


BY_HAND = [
    (only_feeds_a_saved_op, MM, "h", {"exp": 1}),
    (only_feeds_a_saved_op, [], "", {"mul": 1, "add": 1, "mm": 1, "exp": 1}),
    (only_feeds_a_saved_op, [aten.add.Tensor], "b", {"mm": 1, "exp": 1}),
    (only_feeds_a_saved_op, [aten.exp.default], "e", {}),
    (only_feeds_a_saved_op, [aten.mul.Tensor], "a", {"add": 1, "mm": 1, "exp": 1}),
    (saved_op_whose_result_nobody_reads, MM, "", {"sin": 1}),
    (saved_op_whose_result_nobody_reads, [aten.mul.Tensor], "", {"sin": 1}),
    (saved_input_is_recomputed, [aten.sin.default], "s", {}),
    (saved_input_is_recomputed, [], "", {"sin": 1}),
    (chain, MM, "a b c", {}),
    (chain, [aten.sin.default], "", {"mm": 3}),
    (dead_branch, MM, "", {}),
    (dead_branch, [], "", {}),
    (dead_branch, [aten.exp.default, aten.sin.default], "", {}),
    (dead_branch_without_gradients, MM, "h", {}),
    (dead_branch_without_gradients, [aten.exp.default], "", {"mm": 1}),
    (views, MM, "h", {"exp": 1}),
    (views, [aten.exp.default], "e", {"mm": 1}),
    (views_of_recomputed, [aten.sin.default], "s", {}),
    (views_of_recomputed, MM, "", {"sin": 1}),
    (sum_of_two, MM, "a b", {"add": 1}),
    (sum_of_two, [aten.add.Tensor], "s", {}),
    (sum_of_two, [*MM, aten.add.Tensor], "s", {}),
    (one_of_two, MM, "a", {}),
    (several_outputs, [aten.sort.default], "values index", {}),
    (several_outputs, MM, "h", {"sort": 1}),
    (several_outputs, [*MM, aten.sort.default], "values index", {}),
    (parameter_view, MM, "h", {}),
    (numbers, MM, "h", None),
    (numbers, [aten.mul.Tensor], "p", None),
    (saved_twice, MM, "h", {"sin": 1, "cos": 1}),
    (saved_twice, [*MM, aten.sin.default], "h s", {"cos": 1}),
]


def ids(value):
    if callable(value):
        return value.__name__
    return "+".join(op._schema.name.removeprefix("aten::") for op in value) or "none" if isinstance(value, list) else ""


@pytest.mark.parametrize(("function", "ops", "names", "runs"), BY_HAND, ids=ids)
def test_region_keeps_and_runs_what_was_counted_by_hand(function, ops, names, runs):
    x, w, marks = leaf(4, 4), nn.Parameter(torch.randn(4, 4)), Marks()

    def policy(ctx, op, *args, **kwargs):
        return op in ops

    def loss(m, x):
        out = function(m, x, w)
        return sum(y.sum() for y in (out if isinstance(out, tuple) else (out,)))

    plain_gradients = torch.autograd.grad(loss(Marks(), x), [x, w], allow_unused=True)
    with uncollected():
        after = kept(lambda x: region(policy)(lambda x: function(marks, x, w))(x), [x], marks)
        assert after.names == set(names.split())
        assert after.bytes == marks.bytes(names.split())
        for retain in (True, False):
            gradients = after.backward([x, w], retain_graph=retain)
            assert [g is None for g in gradients] == [g is None for g in plain_gradients]
            assert_same([g for g in plain_gradients if g is not None], [g for g in gradients if g is not None])
        assert marks.alive() == set()
        assert after.live.bytes() == 0
    ours = replayed_ops(lambda x: function(Marks(), x, w), region(policy), [x], [w])
    assert runs is None or ours == runs
    peer = replayed_ops(lambda x: function(Marks(), x, w), sac(policy), [x], [w])
    assert not Counter(ours) - Counter(peer)


def test_region_that_needs_nothing_again_is_not_replayed():
    function = Calls(lambda x: x.exp().tanh())
    x = leaf(4)
    region([aten.exp.default, aten.tanh.default])(function)(x).sum().backward()
    assert (function.total, function.replays) == (1, 0)


def test_view_of_a_kept_tensor_is_the_same_memory_in_replay():
    """What replay reads is a view of what was kept, with its strides and offset, and not a copy."""
    x, w = leaf(4, 4), leaf(4, 4)

    def function(x, w):
        h = (x @ w).t()[1:]
        return h.sin().contiguous() * h.cos()

    with uncollected():
        after = kept(region(MM)(function), [x, w])
        assert after.bytes == 4 * 4 * 4
    assert_same(
        torch.autograd.grad(function(x, w).sum(), [x, w]), torch.autograd.grad(region(MM)(function)(x, w).sum(), [x, w])
    )


def test_saved_view_ops_keep_nothing_of_their_own():
    """SAC with a policy that saves a view op keeps the whole base alive; here a view is made again."""

    def function(x):
        big = torch.cat([x, x, x])
        return big.narrow(0, 0, 4).sin() * 2

    x = leaf(4, 4)

    def views_only(ctx, op, *args, **kwargs):
        return op.is_view

    assert kept(region(views_only)(function), [x]).bytes == 0
    assert replayed_ops(function, region(views_only), [x]) == {"cat": 1}


def test_region_output_that_is_a_saved_result_is_held_by_the_caller_alone():
    x, w = leaf(4, 4), leaf(4, 4)
    with uncollected():
        y = region(MM)(lambda x: x.sin() @ w)(x)
        reference, graph = watch(y), y.grad_fn
        del y
        assert alive(reference) == 0
        del graph


# Programs drawn at random

OPS = {
    "double": (1, lambda t: t * 2, "", "mul"),
    "shift": (1, lambda t: t + 1, "", "add"),
    "t": (1, lambda t: t.t(), "", None),
    "row": (1, lambda t: t[1].expand(3, 3), "", None),
    "add": (2, torch.add, "", "add"),
    "sin": (1, torch.sin, "i", "sin"),
    "exp": (1, torch.exp, "o", "exp"),
    "sigmoid": (1, torch.sigmoid, "o", "sigmoid"),
    "mul": (2, torch.mul, "i", "mul"),
    "mm": (2, torch.mm, "i", "mm"),
}
"""How many tensors an op takes, what it does, whether it saves its inputs or its output, its name if it computes."""


@st.composite
def programs(draw):
    """Draw steps: `(saved, op, indices of what it reads)`; value 0 is the input."""
    steps = []
    for index in range(draw(st.integers(1, 10))):
        name = draw(st.sampled_from(list(OPS)))
        reads = tuple(draw(st.integers(max(0, index - 4), index)) for _ in range(OPS[name][0]))
        steps.append((draw(st.booleans()), name, reads))
    return steps


def run(steps, marks, x):
    """Run the steps; return the values that no step reads."""
    values = [x]
    for number, (_, name, reads) in enumerate(steps, 1):
        values.append(marks(f"v{number}", OPS[name][1](*(values[read] for read in reads))))
    read = {read for _, _, reads in steps for read in reads}
    return [value for number, value in enumerate(values) if number and number not in read]


def by_position(steps):
    """Return a policy that saves the computing ops that are marked so, by their order in forward."""
    wanted = [saved for saved, name, _ in steps if OPS[name][3]]
    position = iter(range(len(wanted)))

    def policy(ctx, op, *args, **kwargs):
        return False if ctx.is_recompute or op.is_view else wanted[next(position)]

    return policy


def model(steps):
    """Return the numbers of the values that are kept, and the ops that run again."""
    kept, again = set(), set()

    def need(number):
        if number == 0:
            return
        saved, name, reads = steps[number - 1]
        if OPS[name][3] is None:
            need(reads[0])
        elif saved:
            kept.add(number)
        elif number not in again:
            again.add(number)
            for read in reads:
                need(read)

    for number, (_, name, reads) in enumerate(steps, 1):
        for value in reads if OPS[name][2] == "i" else [number] * (OPS[name][2] == "o"):
            need(value)
    return kept, Counter(OPS[steps[number - 1][1]][3] for number in again)


def roots(steps, kept):
    """Return the names of the kept values and of all views of them: they share memory."""
    shared = set(kept)
    for number, (_, name, reads) in enumerate(steps, 1):
        if OPS[name][3] is None and reads[0] in shared:
            shared.add(number)
    return {f"v{number}" for number in shared}


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_drawn_program_keeps_and_runs_what_the_model_says(steps):
    x, marks = leaf(3, 3), Marks()
    stays, again = model(steps)
    with uncollected():
        after = kept(region(by_position(steps))(lambda x: run(steps, marks, x)), [x], marks)
        names = {name for name in after.names if marks.storages[name].cdata != x.untyped_storage()._cdata}
        assert names == roots(steps, stays), steps
        assert after.bytes == len(stays) * x.nbytes, steps
        (actual,) = after.backward([x])
        assert_same(torch.autograd.grad(sum(y.sum() for y in run(steps, Marks(), x)), [x])[0], actual)
        assert after.live.bytes() == 0, steps
    wrap = lambda f: lambda x: region(by_position(steps))(f)(x)  # noqa: E731
    replayed = replayed_ops(lambda x: run(steps, Marks(), x), wrap, [x])
    assert replayed == dict(again), steps
    peer = replayed_ops(lambda x: run(steps, Marks(), x), lambda f: lambda x: sac(by_position(steps))(f)(x), [x])
    assert not Counter(replayed) - Counter(peer), steps


# What a mode outside sees of replay


def all_backward_ops(checkpointed, *inputs):
    """Return how often each op ran in backward, as a mode outside counts, detach excluded."""
    y = checkpointed(*inputs)
    with CountOps() as ops:
        torch.autograd.grad(y.sum(), inputs)
    del ops.counts["detach"]
    return ops.counts


@pytest.mark.parametrize("last", ["a norm", "a product with a constant"])
def test_replay_ends_at_the_last_tensor_also_if_that_is_a_float_without_gradient(last):
    """Such a tensor may be a buffer that its op is about to fill; here it is none, as the calls tell."""

    def function(x, w):
        if last == "a norm":
            h = F.layer_norm(x.sin(), (4,))
        else:
            with torch.no_grad():
                constant = (x @ w).sin()
            h = x.sin() * constant
        return h.t().contiguous().t() + h.view(2, -1)[:, :4].sum()

    policy = [aten.add.Tensor]
    x, w = leaf(4, 4), torch.randn(4, 4)
    ours = all_backward_ops(lambda x: region(policy)(function)(x, w), x)
    peers = all_backward_ops(lambda x: sac(policy)(function)(x, w), x)
    assert not ours - peers
    assert_same(
        torch.autograd.grad(function(x, w).sum(), x), torch.autograd.grad(region(policy)(function)(x, w).sum(), x)
    )
