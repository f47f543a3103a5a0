"""No tensor outlives its last use: all with the garbage collector off, so reference counts alone must do it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import GraphExecGroup

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
from tests.helpers import (
    LiveStorages,
    Mlp,
    alive,
    chain,
    checkpointed,
    collector_off,
    leaf,
    name_of,
    pairwise,
    plain,
    shown,
    watch,
)
from tests.ways import BY_HANDLE, WAYS

pytestmark = pytest.mark.usefixtures("_without_collector")


@pytest.fixture(scope="module")
def _without_collector():
    with collector_off():
        yield


class Parts:
    """A region with weak references to all that it may hold: input, inner tensors, function."""

    def __init__(self, **options):
        self.inner = []
        inner = self.inner

        def block(x, *, extra=None):
            h = x.sin()
            hh = h.exp()
            inner.extend(watch(h, hh))
            return (hh * h).cos()

        x, extra = leaf(3) * 1, {"list": [leaf(3) * 1]}
        self.inputs = watch(x, extra["list"][0])
        self.function = weakref.ref(block)
        self.container = weakref.ref(extra["list"][0])
        self.output = checkpointed(block, **options)(x, extra=extra)

    def assert_all_dead(self):
        assert alive(self.inner) == 0
        assert alive(self.inputs) == 0
        assert self.function() is None
        assert self.container() is None


OPTIONS = [
    {},
    {"early_stop": False},
    {"preserve_rng_state": False},
    {"determinism_check": "bitwise"},
    {"determinism_check": lambda t: 0},
    {"debug": True},
    {"region_name": "named"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_inputs_inner_tensors_and_function_die_with_the_output_or_in_backward(options):
    dropped, parts = Parts(**options), Parts(**options)
    for one in (dropped, parts):
        assert len(one.inner) == 2
        assert alive(one.inner) == 0
        assert alive(one.inputs) == 2
        assert one.function() is not None
    del dropped.output
    dropped.assert_all_dead()
    for group in (contextlib.nullcontext, GraphExecGroup, GraphExecGroup):
        with group():
            parts.output.sum().backward(retain_graph=True)
        assert alive(parts.inner) == 0
        assert alive(parts.inputs) == 2
    parts.output.sum().backward()
    assert len(parts.inner) == 10
    assert alive(parts.inner) == 0
    assert alive(parts.inputs) == 0
    del parts.output
    parts.assert_all_dead()


def drop(y, x):
    pass


def backward(y, x):
    torch.autograd.grad(y.sum(), x)


def keep_the_graph(y, x):
    for _ in range(2):
        torch.autograd.grad(y.sum(), x, retain_graph=True)


def second_order(y, x):
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.grad(grad.square().sum(), x)


def raise_in_backward(kind, y, x):
    with pytest.raises(kind):
        backward(y, x)
    leaf(1).sum().backward()  # after an error, torch's queue holds the nodes that are left until the next backward


def mismatch(y, x):
    x.differs = True
    raise_in_backward(remat.MismatchError, y, x)


def error_in_replay(y, x):
    x.fails = True
    raise_in_backward(ValueError, y, x)


def in_a_thread(y, x):
    thread = threading.Thread(target=backward, args=(y, x))
    thread.start()
    thread.join()


ENDS = [drop, backward, keep_the_graph, second_order, mismatch, error_in_replay, in_a_thread]


@pairwise(
    way=WAYS,
    end=ENDS,
    depth=[1, 3],
    options=[{}, {"early_stop": False}, {"debug": True}],
    possible=lambda way, end, **_: way is not BY_HANDLE or end is not second_order,
    ids=lambda value: name_of(value) or str(value),
)
def test_everything_dies_however_a_region_ends(way, end, depth, options):
    x = leaf(3, 3)
    live = LiveStorages()

    def level(x, left):
        h = way.keep("a", lambda h: h.sin().exp(), x)
        g = x.cosh().exp()
        if left:
            h, g = way.region(level, **options)(h, left - 1)
        if hasattr(leaf_of_all, "fails"):
            raise ValueError("in replay")
        if hasattr(leaf_of_all, "differs"):
            h = way.keep("d", lambda h: h[:2].exp(), h)
        h = way.keep("b", lambda h: h.tanh() * h, h)
        return way.keep("c", lambda h: h.cos().exp(), h), g.sinh().tanh()

    leaf_of_all = x
    with live:
        y, g = way.region(level, **options)(x * 1, depth - 1)
        y = y.sum() + g.sum()
        del g
        end(y, x)
        del y
    assert live.bytes() == 0


@pairwise(way=WAYS, where=["call", "between", "end"], depth=[1, 2])
def test_exception_in_forward_frees_everything(way, where, depth):
    live = LiveStorages()

    def fail(_):
        raise ValueError("in forward")

    def level(h, left):
        h = way.keep("a", lambda h: h.sin().exp(), h)
        if left:
            h = way.region(level)(h, left - 1)
        elif where == "call":
            way.keep("fails", fail, h)
        elif where == "between":
            fail(h)
        way.keep("b", lambda h: h.tanh() * h, h)
        fail(h)

    with live, pytest.raises(ValueError, match="in forward"):
        way.region(level)(leaf(3, 3) * 1, depth - 1)
    assert live.bytes() == 0


@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_parameter_without_gradient_dies_in_backward_and_what_nothing_saves_in_forward(options):
    frozen, shift = nn.Parameter(torch.randn(3, 3), requires_grad=False), torch.randn(3)
    weight, given = watch(frozen, shift)
    x = leaf(3)
    y = checkpointed(lambda x, w: (x @ w).sin(), **options)(x, frozen)
    z = checkpointed(lambda x, shift: x + shift, **options)(x, shift)
    del frozen, shift
    assert given.expired()
    assert not weight.expired()
    (y + z).sum().backward()
    assert weight.expired()


@pytest.mark.parametrize("early_stop", [True, False])
def test_retained_bytes_after_forward_are_inputs_and_outputs_and_nothing_more(early_stop):
    mlp = Mlp(16)
    live = LiveStorages()
    with live:
        x = torch.randn(5, 16, requires_grad=True)
        y = checkpointed(nn.Sequential(mlp, nn.Tanh(), mlp), early_stop=early_stop)(x)
    assert live.bytes() == x.nbytes + y.nbytes == 2 * 5 * 16 * 4


def test_saved_tensor_looked_at_before_backward_is_freed_with_the_output():
    parts = Parts()
    assert parts.output.grad_fn._saved_self.shape == (3,)
    del parts.output
    parts.assert_all_dead()


def test_part_of_the_outputs_dropped_frees_what_only_it_needs():
    def block(x):
        return x.sin().exp(), x.cos().tanh()

    x = leaf(3)
    live = LiveStorages()
    with live:
        one, two = checkpointed(block)(x)
        before = live.count()
        del two
        assert live.count() == before - 1
        one.sum().backward()
        assert live.count() <= 2  # the output and the gradient
        del one
    assert live.bytes() == x.grad.untyped_storage().nbytes()


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


@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
@pytest.mark.parametrize("style", STYLES)
def test_values_die_node_by_node_in_backward_as_in_plain_autograd(style, policy):
    """Each node's backward counts the tensors that are alive; the counts fall as they do without a region."""

    def run(wrap, style, tail):
        made, counts = [], []
        kernel = counting(made, counts)

        def block(x):
            for index in range(6):
                x = call(style, kernel, Trace(), f"op{index}", policy, x)
            return call(style, Inner, Trace(), "tail", RECOMPUTE, x).sum() if tail else x.sum()

        wrap(block)(leaf(4)).backward()
        assert alive(made) == 0
        return counts

    for tail in (False, True):
        assert run(plain, style, tail) == [6, 5, 4, 3, 2, 1]
        assert run(checkpointed, style, tail) == [6, 5, 4, 3, 2, 1]


def test_input_of_a_region_is_dead_when_backward_reaches_the_region_before_it():
    references = []

    def first(x):
        if remat.is_recomputing():
            counts.append(alive(references))
        return x.sin().exp()

    counts = []
    h = checkpointed(first)(leaf(3))
    references += watch(h)
    y = checkpointed(chain)(h)
    del h
    assert alive(references) == 1
    y.sum().backward()
    assert counts == [0]


def test_unneeded_values_of_replay_die_at_once():
    made = []

    def block(x):
        scratch = torch.ones(1000) + x.detach().sum()
        made.extend(watch(scratch))
        h = (x * scratch.sum()).sin()
        del scratch
        if remat.is_recomputing():
            assert alive(made) == 0
        return h.exp()

    checkpointed(block)(leaf(3)).sum().backward()
    assert len(made) == 2


@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_a_tensor_that_user_code_takes_out_of_replay_holds_no_other_values(options):
    taken, others = [], []

    def block(x):
        h = x.sin()
        taken[:] = [h.exp()]
        hh = h.cos().exp()
        others.extend(watch(hh))
        return hh.cos()

    checkpointed(block, **options)(leaf(3) * 1).sum().backward()
    assert len(others) == 2
    assert alive(others) == 0


def test_exception_frees_an_argument_in_a_container_that_the_function_has_changed():
    def block(tensors):
        tensors[0].exp_()  # so that its history holds the region
        raise ValueError("in forward")

    live = LiveStorages()
    with live:
        tensors = [leaf(3) * 1]
        with pytest.raises(ValueError, match="in forward"):
            checkpointed(block)(tensors)
        del tensors
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


@pytest.mark.parametrize("where", ["placeholder", "mismatch", "twice"])
def test_error_of_ours_frees_everything(where):
    trace = Trace()

    def forward(ctx, x):
        return x * 2, {"x": x}

    failing = Kernel("failing", ("x",), forward, lambda ctx, saved, grad: grad * saved[0])

    def block(x):
        h = call("handle", Both, trace, "a", SAVE, x.sin())
        r = call("handle", Both, trace, "b", RECOMPUTE, h)
        if where == "placeholder":
            h = h.exp() * r
        name = "a" if where == "twice" else "x" if where == "mismatch" and remat.is_recomputing() else "c"
        h = call("handle", failing, trace, name, SAVE, h)
        return call("handle", Both, trace, "d", RECOMPUTE, h * r if where == "placeholder" else h)

    y = None
    with pytest.raises(remat.RematError):  # noqa: PT012
        y = checkpointed(block)(leaf(3) * 1)
        y.sum().backward()
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
