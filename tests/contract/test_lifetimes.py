"""No tensor outlives its last use: all with the garbage collector off, so reference counts alone must do it."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import GraphExecGroup

import torch_remat as remat
from tests.handle_ops import POLICIES, RECOMPUTE, STYLES, Inner, Kernel, Trace, call, policy_ids
from tests.helpers import (
    LiveStorages,
    alive,
    chain,
    checkpointed,
    collector_off,
    leaf,
    name_of,
    pairwise,
    plain,
    python_objects,
    shown,
    watch,
)
from tests.ways import BY_HANDLE, WAYS
from torch_remat.dispatch.region.region import live_regions

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


ENDS = [drop, backward, second_order, mismatch, error_in_replay]


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


def test_parameter_without_gradient_dies_in_backward_and_what_nothing_saves_in_forward():
    frozen, shift = nn.Parameter(torch.randn(3, 3), requires_grad=False), torch.randn(3)
    weight, given = watch(frozen, shift)
    x = leaf(3)
    y = checkpointed(lambda x, w: (x @ w).sin())(x, frozen)
    z = checkpointed(lambda x, shift: x + shift)(x, shift)
    del frozen, shift
    assert given.expired()
    assert not weight.expired()
    (y + z).sum().backward()
    assert weight.expired()


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


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("early_stop", [True, False])
def test_saved_tensor_that_takes_over_the_graph_of_its_reader_leaves_no_cycle(used, early_stop):
    """A node that saved a tensor is reached from it then: replay's graph would own itself."""
    inner = []

    def block(x):
        state = torch.ones(3)
        inner.extend(watch(state))
        out = x * state
        state.add_(out)
        return out.sin() if used else (x * 2).sin()

    y = remat.checkpoint(early_stop=early_stop)(block)(leaf(3))
    with pytest.raises(remat.MutationError) if used else contextlib.nullcontext():
        y.sum().backward()
    del y
    torch.ones((), requires_grad=True).backward()  # else the engine holds on after an error
    assert alive(inner) == 0


def test_mode_that_raises_in_each_op_leaves_nothing_behind():
    class Raising(TorchDispatchMode):
        def __init__(self, after):
            super().__init__()
            self.left = after

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.left -= 1
            if self.left < 0:
                raise KeyError(op)  # also in what the runtime does to let go of the region
            return op(*args, **(kwargs or {}))

    for after in range(5):
        x = torch.ones(3, requires_grad=True)
        before = len(live_regions())
        with Raising(after), contextlib.suppress(KeyError):
            remat.checkpoint()(lambda x: x.exp().sin().exp())(x)
        assert len(live_regions()) == before


@pytest.mark.parametrize("policy", [None, [torch.cos]])
def test_result_of_a_call_dies_with_a_forward_that_raises(policy):
    escaped, made = [], []

    def block(x):
        escaped.append(x.exp())  # whose graph owns the region
        result = remat.op(torch.cos, "kept")(x) if policy is None else torch.cos(x)
        made.extend(watch(result))
        raise KeyError

    with pytest.raises(KeyError):
        remat.checkpoint(policy=policy)(block)(leaf(3) * 2)
    assert escaped
    assert alive(made) == 0


# --- Regions in a loop, up to 2,000, leave no live tensor, no Python object and no memory more


REGIONS = 2_000
LEAF = torch.ones(3, requires_grad=True)


def grad(y, **options):
    return torch.autograd.grad(y.sum(), LEAF, **options)


def nested(call=lambda function, x: function(x)):
    inner = checkpointed(chain)
    return checkpointed(lambda x: inner(call(torch.sin, x)).exp())(LEAF)


def every_option():
    options = {"region_name": "r", "determinism_check": "bitwise", "early_stop": False, "debug": True}
    grad(checkpointed(lambda x: F.dropout(chain(x)).exp(), **options)(LEAF))


def exception(phase):
    def block(x):
        h = x.sin()
        if remat.is_recomputing() == (phase == "replay"):
            raise ValueError
        return h.exp()

    with contextlib.suppress(ValueError):
        grad(checkpointed(block)(LEAF))


STEPS = {
    "forward and backward": lambda: grad(checkpointed(chain)(LEAF)),
    "forward only": lambda: checkpointed(chain)(LEAF),
    "nested": lambda: grad(nested()),
    "a call": lambda: grad(nested(lambda function, x: remat.op(function, "sin")(x))),
    "a native region": lambda: grad(nested(lambda function, x: remat.native_save_region("sin", function, x))),
    "every option": every_option,
    "exception in forward": lambda: exception("forward"),
    "exception in replay": lambda: exception("replay"),
}


def growth(step, times):
    """Return by how much tensors, objects and memory blocks grow over so many steps, once they grow no more.

    Python and torch fill caches of their own in the first some thousand steps, so the smallest growth of a few
    rounds counts; a leak shows in every round.
    """
    for _ in range(20):
        step()
    rounds = []
    for _ in range(8):
        before = python_objects()
        for _ in range(times):
            step()
        rounds.append([late - early for late, early in zip(python_objects(), before, strict=True)])
        if rounds[-1][0] == 0 and rounds[-1][1] < 20 and rounds[-1][2] < times / 4:
            break
    return [min(column) for column in zip(*rounds, strict=True)]


@pytest.mark.parametrize("name", STEPS)
def test_regions_in_a_loop_leave_no_growth(name):
    times = REGIONS if name == "forward and backward" else REGIONS // 5
    with collector_off():
        tensors, objects, blocks = growth(STEPS[name], times)
    assert tensors == 0
    assert objects < 20
    assert blocks < times / 4
