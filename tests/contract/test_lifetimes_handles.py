"""No resident, slot or placeholder outlives its last use; the garbage collector is off, so reference counts do it."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch.autograd import Function

import torch_remat as remat
from tests.handle_ops import (
    KERNELS,
    POLICIES,
    RECOMPUTE,
    SAVE,
    STYLES,
    Affine,
    Both,
    Gather,
    Inner,
    Kernel,
    Trace,
    as_tuple,
    call,
    policy_ids,
)
from tests.helpers import LiveStorages, alive, checkpointed, collector_off, leaf, pairwise, plain, watch

pytestmark = pytest.mark.usefixtures("_without_collector")
TRIPLES = list(itertools.product(POLICIES, repeat=3))


@pytest.fixture(scope="module")
def _without_collector():
    with LiveStorages():
        leaf(1).detach().sin()  # what torch loads when it first needs it leaves cycles
    with collector_off():
        yield


class Parts:
    """A region of three ops, with weak references to all that it may hold."""

    def __init__(self, style, policies, **options):
        self.trace = trace = Trace()

        def block(x):
            h = call(style, Inner, trace, "a", policies[0], x.sin())
            h = call(style, Both, trace, "b", policies[1], h)
            return call(style, Affine, trace, "c", policies[2], h, h.t())

        x = leaf(3, 3) * 1
        self.input = watch(x)
        self.function = weakref.ref(block)
        self.output = checkpointed(block, **options)(x)

    def assert_all_dead(self):
        assert self.trace.alive() == set()
        assert alive(self.input) == 0
        assert self.function() is None


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policies", TRIPLES, ids=policy_ids)
def test_dropping_the_output_without_backward_frees_everything(policies, style):
    for options in ({}, {"early_stop": False}, {"debug": True}, {"preserve_rng_state": False}):
        parts = Parts(style, policies, **options)
        assert parts.function() is not None
        del parts.output
        parts.assert_all_dead()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policies", TRIPLES, ids=policy_ids)
def test_backward_frees_residents_and_slots_while_the_output_is_held(policies, style):
    for options in ({}, {"early_stop": False}, {"debug": True}):
        parts = Parts(style, policies, **options)
        parts.output.sum().backward()
        assert parts.trace.alive() == {"c.out"}
        assert alive(parts.input) == 0
        del parts.output
        parts.assert_all_dead()


@pytest.mark.parametrize("policies", TRIPLES, ids=policy_ids)
def test_kept_graph_holds_after_each_backward_what_it_held_before(policies):
    parts = Parts("handle", policies)
    before = parts.trace.alive()
    for _ in range(3):
        parts.output.sum().backward(retain_graph=True)
        assert parts.trace.alive() == before
        assert alive(parts.input) == 1
    parts.output.sum().backward()
    assert parts.trace.alive() == {"c.out"}
    del parts.output
    parts.assert_all_dead()


@pytest.mark.parametrize("policies", TRIPLES, ids=policy_ids)
def test_graph_of_second_order_frees_everything_when_dropped(policies):
    live, x = LiveStorages(), leaf(3, 3)
    trace = Trace()

    def block(x):
        h = call("handle", Affine, trace, "a", policies[0], x.sin(), x)
        h = call("handle", Both, trace, "b", policies[1], h)
        return call("handle", Affine, trace, "c", policies[2], h, h.t())

    y = checkpointed(block)(x * 1)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with live:
        (second,) = torch.autograd.grad(grad.square().sum(), x)
    del y, grad, second
    assert trace.alive() == set()
    assert live.bytes() == 0


@pairwise(kernel=KERNELS, style=STYLES)
def test_no_form_of_any_kernel_makes_a_cycle(kernel, style):
    for policy, backward in itertools.product(POLICIES, [False, True]):
        trace = Trace()

        def block(x, w, trace=trace, policy=policy):
            second = [torch.tensor([[1, 0, 1]] * 3)] if kernel is Gather else [w]
            outputs = as_tuple(call(style, kernel, trace, "it", policy, x.sin(), *second[: kernel.arity - 1]))
            return call(style, Affine, trace, "reader", RECOMPUTE, outputs[0], x), outputs[0]

        function = weakref.ref(block)
        y, z = checkpointed(block)(leaf(3, 3) * 1, leaf(3, 3) * 1)
        if backward:
            (y.sum() + z.sum()).backward()
            assert trace.alive() <= {"it.out", "it.0", "reader.out"}
        del y, z, block
        assert trace.alive() == set()
        assert function() is None


def counting(made, counts):
    """Return a kernel that saves its own output and, in backward, counts how many of all outputs are alive."""

    def forward(ctx, x):
        y = x * 2
        made.extend(watch(y))
        return y, {"y": y}

    def backward(ctx, saved, grad):
        counts.append(alive(made))
        return grad * 2

    return Kernel("counting", ("y",), forward, backward)


@pytest.mark.parametrize("style", STYLES)
def test_residents_die_node_by_node_in_backward_as_in_plain_autograd(style):
    def run(wrap, tail):
        made, counts = [], []
        kernel = counting(made, counts)

        def block(x):
            for index in range(6):
                x = call(style, kernel, Trace(), f"op{index}", SAVE, x)
            return call(style, Inner, Trace(), "tail", RECOMPUTE, x).sum() if tail else x.sum()

        wrap(block)(leaf(4)).backward()
        assert alive(made) == 0
        return counts

    for tail in (False, True):
        assert run(plain, tail) == [6, 5, 4, 3, 2, 1]
        assert run(checkpointed, tail) == [6, 5, 4, 3, 2, 1]


def test_slots_are_dead_after_the_replay_except_where_backward_needs_them():
    seen = []

    class Look(Function):
        @staticmethod
        def forward(ctx, x, trace):
            ctx.trace = trace
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.trace.alive())
            return grad, None

    trace = Trace()

    def block(x):
        s = call("handle", Inner, trace, "s", SAVE, x)
        r = call("handle", Inner, trace, "r", RECOMPUTE, s)
        t = call("handle", Inner, trace, "t", SAVE, r)
        return Look.apply(call("handle", Inner, trace, "u", RECOMPUTE, t), trace)

    loss = checkpointed(block)(leaf(3)).sum()
    assert trace.alive() == {"s.m", "s.out", "t.m", "t.out"}
    loss.backward()
    assert seen == [{"s.m", "t.m"}]


def test_part_of_the_outputs_dropped_frees_the_residents_that_only_it_needs():
    trace = Trace()

    def block(x):
        one = call("handle", Inner, trace, "one", SAVE, x.sin())
        two = call("handle", Inner, trace, "two", SAVE, x.cos())
        return one, two

    one, two = checkpointed(block)(leaf(3))
    assert trace.alive() == {"one.m", "one.out", "two.m", "two.out"}
    del two
    assert trace.alive() == {"one.m", "one.out"}
    loss = one.sum()
    del one
    assert trace.alive() == {"one.m"}
    loss.backward()
    assert trace.alive() == set()


@pytest.mark.parametrize("backward", [False, True])
def test_dropping_nested_regions_frees_everything(backward):
    trace = Trace()

    def level(x, left):
        h = call("handle", Both, trace, f"s{left}", SAVE, x.sin())
        h = checkpointed(level)(h, left - 1) if left else h
        return call("handle", Both, trace, f"r{left}", RECOMPUTE, h)

    y = checkpointed(level)(leaf(3) * 1, 3)
    if backward:
        y.sum().backward()
    del y
    assert trace.alive() == set()


@pytest.mark.parametrize("where", ["body", "between", "replay", "placeholder", "mismatch", "twice"])
def test_exception_frees_everything(where):
    trace = Trace()

    def forward(ctx, x):
        if where == "body":
            raise ValueError
        return x * 2, {"x": x}

    failing = Kernel("failing", ("x",), forward, lambda ctx, saved, grad: grad * saved[0])

    def block(x):
        h = call("handle", Both, trace, "a", SAVE, x.sin())
        r = call("handle", Both, trace, "b", RECOMPUTE, h)
        if where == "between" or (where == "replay" and remat.is_recomputing()):
            raise ValueError
        if where == "placeholder":
            h = h.exp() * r
        name = "a" if where == "twice" else "x" if where == "mismatch" and remat.is_recomputing() else "c"
        h = call("handle", failing, trace, name, SAVE, h)
        return call("handle", Both, trace, "d", RECOMPUTE, h * r if where == "placeholder" else h)

    y = None
    raised = False
    try:
        y = checkpointed(block)(leaf(3) * 1)
        y.sum().backward()
    except (ValueError, remat.RematError):
        raised = True
    assert raised
    del y
    assert trace.alive() == set()


def test_inner_regions_slot_for_the_output_of_a_saved_op_dies_with_the_outer_replay():
    trace = Trace()

    def block(x):
        h = call("handle", Inner, trace, "a", SAVE, x)
        return checkpointed(lambda h: call("handle", Both, trace, "b", RECOMPUTE, h.sin()))(h)

    y = checkpointed(block)(leaf(3))
    assert trace.alive() == {"a.m", "a.out", "b.out"}
    y.sum().backward()
    assert trace.alive() == {"b.out"}
