"""What a region with handles retains after forward is what the rules say, tensor by tensor and byte by byte.

`tests/programs/kept.py` checks drawn programs. The rules:
  1. Replay has: the region's inputs, the outputs of RECOMPUTE ops, and native views of these.
  2. A SAVE op keeps each tensor that it saves, except those that replay has.
  3. A RECOMPUTE op keeps each input that replay does not have.
  4. Nothing else is kept, and nothing is kept twice.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.handle_ops import RECOMPUTE, SAVE, STYLES, Kernel, Trace, call
from tests.helpers import LiveStorages, assert_same, checkpointed, collector_off, leaf


@pytest.fixture(scope="module", autouse=True)
def _without_collector():
    """Leave the collector off; before that, run what torch loads when it is first needed, which leaves cycles."""
    with LiveStorages():
        leaf(1).detach().sin()
    with collector_off():
        yield


SIDE = 3
BYTES = SIDE * SIDE * 4


@functools.cache
def pattern_kernel(pattern, arity):
    """Return a kernel that saves by the pattern: its inputs (x), its output (y), what is neither (m)."""
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


def run(ops, pattern, trace, x, style="handle"):
    """Run ops, given as `(name, policy, inputs)`; return the outputs that no op reads."""
    values = {"input": x}
    for name, policy, inputs in ops:
        values[name] = call(style, pattern_kernel(pattern, len(inputs)), trace, name, policy, *map(values.get, inputs))
    read = {name for _, _, inputs in ops for name in inputs}
    return tuple(values[name] for name, *_ in ops if name not in read)


def loss_of(outputs):
    """Return a loss whose graph keeps none of the outputs."""
    return sum(y.sum() * (index + 1) for index, y in enumerate(outputs))


def check(ops, pattern, style, kept):
    """Assert that a region of these ops keeps these tensors, and gives the gradients of plain autograd."""
    x, trace, live = leaf(SIDE, SIDE), Trace(), LiveStorages()
    with live:
        outputs = checkpointed(lambda x: run(ops, pattern, trace, x, style))(x)
    loss = loss_of(outputs)
    del outputs
    assert (trace.alive(), live.bytes()) == (kept, BYTES * len(kept)), ops
    (actual,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert (trace.alive(), live.bytes()) == (kept, BYTES * len(kept)), ops
    assert_same(actual, torch.autograd.grad(loss, x))
    assert (trace.alive(), live.bytes()) == (set(), 0), ops
    assert_same(torch.autograd.grad(loss_of(run(ops, pattern, Trace(), x)), x), actual)
    for name, policy, _ in ops:
        if policy is SAVE or "m" in pattern:
            assert trace.runs[name] == (1 if policy is SAVE else 3), ops  # twice in replay: the graph was kept


def chain(policies):
    return [(name, policy, [before]) for name, policy, before in zip("abcd", policies, ["input", *"abc"], strict=True)]


def diamond(policies):
    inputs = [["input"], ["a"], ["a"], ["b", "c"]]
    return list(zip("abcd", policies, inputs, strict=True))


# Policies of four ops, what each of them saves, and what is kept.
KEPT = [
    (chain, "SSSS", "x", "a.out b.out c.out"),
    (chain, "SSSS", "m", "a.m b.m c.m d.m"),
    (chain, "RRRR", "xmy", ""),
    (chain, "SRSR", "x", "a.out c.out"),
    (chain, "SSRS", "xm", "a.m b.m d.m a.out b.out"),
    (chain, "RRRS", "xy", "d.out"),
    (diamond, "RSSR", "m", "b.m c.m b.out c.out"),
    (diamond, "SRSS", "m", "a.m a.out c.m d.m"),
]


@pytest.mark.parametrize("style", STYLES)
def test_region_keeps_what_the_rules_say_and_nothing_else(style):
    for shape, policies, pattern, kept in KEPT:
        ops = shape([SAVE if policy == "S" else RECOMPUTE for policy in policies])
        # Which of its inputs a handle by hand saves is not known: it keeps all that it saves.
        policy_of = {name: policy for name, policy, _ in ops}
        saves_inputs = style == "handle" and "x" in pattern
        of_recomputed = {
            f"{one}.out"
            for _, policy, inputs in (ops if saves_inputs else ())
            for one in inputs
            if policy is SAVE and policy_of.get(one) is RECOMPUTE
        }
        check(ops, pattern, style, set(kept.split()) | of_recomputed)


def test_enclosing_saved_tensor_hooks_take_residents_and_slots_away():
    elsewhere = []

    def pack(tensor):
        elsewhere.append(tensor.clone())
        return len(elsewhere) - 1

    trace, x = Trace(), leaf(SIDE, SIDE)
    ops = chain([SAVE, RECOMPUTE, SAVE, SAVE])
    with saved_tensors_hooks(pack, lambda index: elsewhere[index]):
        outputs = checkpointed(lambda x: run(ops, "xm", trace, x))(x)
    loss = loss_of(outputs)
    del outputs
    assert trace.alive() == set()
    assert len(elsewhere) >= 5
    loss.backward()
    assert_same(x.grad, torch.autograd.grad(loss_of(run(ops, "xm", Trace(), x)), x)[0])
    assert [trace.runs[name] for name in "abcd"] == [1, 2, 1, 1]
