"""What a region retains after forward is what the rules say, tensor by tensor and byte by byte.

The rules, as a model that knows nothing of the engine:
  1. Replay has: the region's inputs, the outputs of RECOMPUTE ops, and native views of these.
  2. A SAVE op keeps each tensor that it saves, except those that replay has.
  3. A RECOMPUTE op keeps each input that replay does not have.
  4. Nothing else is kept, and nothing is kept twice.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.handle_ops import POLICIES, RECOMPUTE, SAVE, STYLES, Kernel, Trace, call, policy_ids
from tests.helpers import LiveStorages, assert_same, checkpointed, collector_off, leaf, pairwise


@pytest.fixture(scope="module", autouse=True)
def _without_collector():
    """Leave the collector off; before that, run what torch loads when it is first needed, which leaves cycles."""
    with LiveStorages():
        leaf(1).detach().sin()
    with collector_off():
        yield


SIDE = 3
BYTES = SIDE * SIDE * 4
PATTERNS = ["x", "m", "y", "xm", "xy", "my", "xmy"]
"""What an op saves: its inputs, something of its own that is neither input nor output, its output."""


@functools.cache
def pattern_kernel(pattern, arity):
    """Return a kernel that saves by the pattern; its backward reads all that it saved."""
    names = [f"x{index}" for index in range(arity)] if "x" in pattern else []
    names += [letter for letter in "my" if letter in pattern]

    def forward(ctx, *inputs):
        m = sum(inputs).tanh()
        y = m.cos() + inputs[0]
        made = {f"x{index}": x for index, x in enumerate(inputs)} | {"m": m, "y": y}
        return y, {name: made[name] for name in names}

    def backward(ctx, saved, grad):
        total = grad * sum(tensor.sin() for tensor in saved)
        return tuple(total * (index + 1) for index in range(arity))

    return Kernel(pattern, tuple(names), forward, backward, arity)


VIEWS = {
    "none": lambda t: t,
    "t": lambda t: t.t(),
    "row": lambda t: t[1].expand(SIDE, SIDE),
    "flat": lambda t: t.reshape(SIDE, 1, SIDE)[:, 0],
    "diagonal": lambda t: t.diagonal().unsqueeze(1).expand(SIDE, SIDE),
}


class Op:
    """One op of a program: its inputs are names of earlier ops or `"input"`, each read by way of a view."""

    def __init__(self, name, inputs, pattern, policy, style="handle", views=("none", "none")):
        self.name, self.inputs, self.pattern, self.policy = name, inputs, pattern, policy
        self.style, self.views = style, views

    def __repr__(self):
        return f"{self.name}({', '.join(self.inputs)}; {self.pattern}, {policy_ids(self.policy)}, {self.views})"


def expected(ops):
    """Return the names of the tensors that the rules keep."""
    available, kept = {"input"}, set()
    for op in ops:
        inputs = {name for name in op.inputs if name not in available}
        if op.policy is SAVE:
            own = {"m": f"{op.name}.m", "y": f"{op.name}.out"}
            kept |= {own[letter] for letter in op.pattern if letter != "x"}
            inputs = inputs if "x" in op.pattern else set()
        else:
            available.add(op.name)
        kept |= {f"{name}.out" for name in inputs}
    return kept


def run(ops, trace, x):
    """Run the ops; return the outputs that no op reads."""
    values = {"input": x}
    for op in ops:
        inputs = [VIEWS[view](values[name]) for name, view in zip(op.inputs, op.views, strict=False)]
        kernel = pattern_kernel(op.pattern, len(inputs))
        values[op.name] = call(op.style, kernel, trace, op.name, op.policy, *inputs)
    read = {name for op in ops for name in op.inputs}
    return tuple(values[op.name] for op in ops if op.name not in read)


def loss_of(outputs):
    """Return a loss whose graph keeps none of the outputs."""
    return sum(y.sum() * (index + 1) for index, y in enumerate(outputs))


def check(ops):
    """Assert that a region of these ops keeps what the rules say, and gives the gradients of plain autograd."""
    x, trace, live = leaf(SIDE, SIDE), Trace(), LiveStorages()
    with live:
        outputs = checkpointed(lambda x: run(ops, trace, x))(x)
    loss = loss_of(outputs)
    del outputs
    assert trace.alive() == expected(ops), ops
    assert live.bytes() == BYTES * len(expected(ops)), ops
    (actual,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert trace.alive() == expected(ops), ops
    assert live.bytes() == BYTES * len(expected(ops)), ops
    assert_same(actual, torch.autograd.grad(loss, x))
    assert trace.alive() == set(), ops
    assert live.bytes() == 0, ops
    assert_same(torch.autograd.grad(loss_of(run(ops, Trace(), x)), x), actual)
    for op in ops:
        if op.policy is SAVE or "m" in op.pattern:
            assert trace.runs[op.name] == (1 if op.policy is SAVE else 3), ops  # twice in replay: the graph was kept


def chain(policies, pattern, style="handle"):
    names = ["input", *"abcd"]
    return [Op(names[i + 1], [names[i]], pattern, policy, style) for i, policy in enumerate(policies)]


def diamond(policies, pattern, style="handle"):
    inputs = {"a": ["input"], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
    return [Op(name, inputs[name], pattern, policy, style) for name, policy in zip(inputs, policies, strict=True)]


ASSIGNMENTS = list(itertools.product(POLICIES, repeat=4))

HAND_COMPUTED = [
    (chain, "SSSS", "x", "a.out b.out c.out"),
    (chain, "SSSS", "m", "a.m b.m c.m d.m"),
    (chain, "SSSS", "y", "a.out b.out c.out d.out"),
    (chain, "RRRR", "xmy", ""),
    (chain, "SRSR", "x", "a.out c.out"),
    (chain, "RSRS", "x", "b.out"),
    (chain, "SRRR", "m", "a.m a.out"),
    (chain, "SSRR", "m", "a.m b.m b.out"),
    (chain, "SSRS", "xm", "a.m b.m d.m a.out b.out"),
    (chain, "RRRS", "xy", "d.out"),
    (diamond, "SSSS", "x", "a.out b.out c.out"),
    (diamond, "RSSR", "x", "b.out c.out"),
    (diamond, "RSSR", "m", "b.m c.m b.out c.out"),
    (diamond, "SRRS", "x", "a.out"),
    (diamond, "SRSS", "m", "a.m a.out c.m d.m"),
    (diamond, "RSRS", "xm", "b.m b.out d.m"),
    (diamond, "RRRR", "xmy", ""),
]


@pytest.mark.parametrize(("shape", "policies", "pattern", "kept"), HAND_COMPUTED)
def test_the_model_agrees_with_what_was_computed_by_hand(shape, policies, pattern, kept):
    assert expected(shape([SAVE if p == "S" else RECOMPUTE for p in policies], pattern)) == set(kept.split())


@pairwise(shape=[chain, diamond], policies=ASSIGNMENTS, style=STYLES)
def test_region_keeps_the_minimum_for_every_assignment_of_policies(shape, policies, style):
    for pattern in PATTERNS:
        check(shape(policies, pattern, style))


@st.composite
def programs(draw):
    """Draw up to eight ops, each reading one or two earlier values by way of views."""
    ops = []
    for index in range(draw(st.integers(1, 8))):
        known = ["input", *(op.name for op in ops)]
        count = draw(st.integers(1, 2))
        ops.append(
            Op(
                f"op{index}",
                [draw(st.sampled_from(known[::-1])) for _ in range(count)],
                draw(st.sampled_from(PATTERNS)),
                draw(st.sampled_from(POLICIES)),
                draw(st.sampled_from(STYLES)),
                [draw(st.sampled_from(list(VIEWS))) for _ in range(count)],
            )
        )
    return ops


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_region_keeps_the_minimum_for_drawn_programs(ops):
    check(ops)


def test_inner_region_that_takes_the_output_of_a_saved_op_counts_as_a_consumer():
    for policy, kept in ((SAVE, {"a.m", "a.out"}), (RECOMPUTE, set())):
        trace, x = Trace(), leaf(SIDE, SIDE)

        def inner(h, trace=trace):
            return call("handle", pattern_kernel("xm", 1), trace, "inner", SAVE, h)

        def block(x, trace=trace, policy=policy, inner=inner):
            return checkpointed(inner)(call("handle", pattern_kernel("m", 1), trace, "a", policy, x))

        loss = loss_of([checkpointed(block)(x)])
        assert trace.alive() == kept
        loss.backward()
        assert trace.alive() == set()
        assert trace.runs["a"] == (1 if policy is SAVE else 2)
        h = call("plain", pattern_kernel("m", 1), Trace(), "a", policy, x)
        y = call("plain", pattern_kernel("xm", 1), Trace(), "b", policy, h)
        assert_same(x.grad, torch.autograd.grad(loss_of([y]), x)[0])


def test_outer_region_keeps_nothing_of_what_an_inner_one_saves():
    trace, x = Trace(), leaf(SIDE, SIDE)

    def inner(h):
        h = call("handle", pattern_kernel("xmy", 1), trace, "a", SAVE, h)
        return call("handle", pattern_kernel("xmy", 1), trace, "b", RECOMPUTE, h)

    loss = loss_of([checkpointed(lambda x: checkpointed(inner)(x.sin()))(x)])
    assert trace.alive() == set()
    loss.backward()
    assert trace.runs["a"] == 2  # the inner region's residents are recomputed by the outer one
    assert 2 <= trace.runs["b"] <= 3


def test_memory_of_a_chain_of_saved_ops_that_save_nothing_of_their_inputs_does_not_grow():
    for length in (2, 8, 32):
        ops = [Op(f"op{i}", [f"op{i - 1}" if i else "input"], "m", SAVE) for i in range(length)]
        assert expected(ops) == {f"op{i}.m" for i in range(length)}
        check(ops)
