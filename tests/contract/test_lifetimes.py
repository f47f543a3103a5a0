"""No tensor outlives its last use: all with the garbage collector off, so reference counts alone must do it."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import GraphExecGroup

import torch_remat as remat
from tests.helpers import (
    LiveStorages,
    Mlp,
    alive,
    chain,
    checkpointed,
    collector_off,
    leaf,
    plain,
    shown,
    watch,
)

pytestmark = pytest.mark.usefixtures("_without_collector")


@pytest.fixture
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


def test_after_forward_inner_tensors_are_dead_and_inputs_alive():
    parts = Parts()
    assert len(parts.inner) == 2
    assert alive(parts.inner) == 0
    assert alive(parts.inputs) == 2
    del parts.output
    parts.assert_all_dead()


@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_dropping_the_output_without_backward_frees_saved_tensors_inputs_and_region(options):
    parts = Parts(**options)
    assert parts.function() is not None
    del parts.output
    parts.assert_all_dead()


@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_backward_frees_saved_tensors_and_inputs_while_the_output_is_held(options):
    parts = Parts(**options)
    parts.output.sum().backward()
    assert len(parts.inner) == 4
    assert alive(parts.inner) == 0
    assert alive(parts.inputs) == 0
    del parts.output
    parts.assert_all_dead()


def test_kept_graph_gives_its_values_away_and_frees_everything_when_dropped():
    parts = Parts()
    for _ in range(3):
        parts.output.sum().backward(retain_graph=True)
        assert alive(parts.inner) == 0
        assert alive(parts.inputs) == 2
    del parts.output
    parts.assert_all_dead()


def test_kept_graph_holds_no_values_after_a_graph_exec_group():
    parts = Parts()
    for _ in range(2):
        with GraphExecGroup():
            parts.output.sum().backward(retain_graph=True)
        assert alive(parts.inner) == 0
    del parts.output
    parts.assert_all_dead()


def test_saved_tensor_looked_at_before_backward_is_freed_with_the_output():
    parts = Parts()
    assert parts.output.grad_fn._saved_self.shape == (3,)
    del parts.output
    parts.assert_all_dead()


def test_graph_of_second_order_frees_everything_when_dropped():
    x = leaf(3)
    live = LiveStorages()
    with live:
        y = checkpointed(chain)(x * 1)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        del y, grad, second
    assert live.bytes() == 0


@pytest.mark.parametrize("depth", [2, 4])
def test_dropping_nested_regions_frees_everything(depth):
    references = []

    def block(x, left):
        h = x.sin()
        references.extend(watch(x, h))
        return (checkpointed(block)(h, left - 1) if left else h).exp()

    for backward in (False, True):
        y = checkpointed(block)(leaf(3) * 1, depth)
        if backward:
            y.sum().backward()
        assert len(references) >= 2 * depth
        del y
        assert alive(references) == 0


@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_backward_frees_a_parameter_without_gradient_while_the_output_is_held(options):
    frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
    (weight,) = watch(frozen)
    y = checkpointed(lambda x, w: (x @ w).sin(), **options)(leaf(3), frozen)
    del frozen
    y.sum().backward()
    assert weight.expired()


@pytest.mark.parametrize("options", OPTIONS, ids=shown)
def test_region_that_saves_nothing_keeps_nothing_while_its_output_is_held(options):
    shift = torch.randn(3)
    (given,) = watch(shift)
    x = leaf(3)
    y = checkpointed(lambda x, shift: x + shift, **options)(x, shift)
    del shift
    assert given.expired()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


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


@pytest.mark.parametrize("early_stop", [True, False])
def test_retained_bytes_after_forward_are_inputs_and_outputs_and_nothing_more(early_stop):
    mlp = Mlp(16)
    live = LiveStorages()
    with live:
        x = torch.randn(5, 16, requires_grad=True)
        y = checkpointed(nn.Sequential(mlp, nn.Tanh(), mlp), early_stop=early_stop)(x)
    assert live.bytes() == x.nbytes + y.nbytes == 2 * 5 * 16 * 4


def test_values_die_node_by_node_in_backward_as_in_plain_autograd():
    """Each node's backward counts the big tensors that are alive; the counts fall as they do without a region."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, made, counts):
            y = x * 2
            made.extend(watch(y))
            ctx.save_for_backward(y)
            ctx.made, ctx.counts = made, counts
            return y

        @staticmethod
        def backward(ctx, grad):
            ctx.counts.append(alive(ctx.made))
            ctx.saved_tensors  # noqa: B018  (reading must not pin)
            return grad * 2, None, None

    def run(wrap):
        made, counts = [], []

        def block(x):
            for _ in range(6):
                x = Node.apply(x, made, counts)
            return x.sum()

        wrap(block)(leaf(4)).backward()
        assert alive(made) == 0
        return counts

    assert run(plain) == [6, 5, 4, 3, 2, 1]
    assert run(checkpointed) == [0, 5, 4, 3, 2, 1]  # the first asks for its tensor, by which the replay begins


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


def test_each_region_holds_its_values_only_during_its_own_part_of_backward():
    made, counts = [], []

    def block(x):
        if remat.is_recomputing():
            counts.append(alive(made))
        h = x.sin()
        made.extend(watch(h))
        return h.exp() * h

    x = leaf(3)
    for _ in range(4):
        x = checkpointed(block)(x)
    x.sum().backward()
    assert counts == [0, 0, 0, 0]
    assert alive(made) == 0


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


@pytest.mark.parametrize("options", OPTIONS, ids=shown)
@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_exception_frees_everything(phase, options):
    live = LiveStorages()

    def block(x):
        h = x.sin().exp()
        if remat.is_recomputing() == (phase == "replay"):
            raise ValueError(phase)
        return h.cos()

    with live:
        x = leaf(3) * 1
        y, message = None, ""
        try:
            y = checkpointed(block, **options)(x)
            y.sum().backward()
        except ValueError as error:
            message = str(error)
        assert phase in message
        del x, y
    assert live.bytes() == 0


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


def test_mismatch_frees_everything():
    live = LiveStorages()
    with live:
        y = checkpointed(lambda x: x.sin() if remat.is_recomputing() else x.sin().exp())(leaf(3) * 1)
        try:
            y.sum().backward()
        except remat.MismatchError:
            pass
        else:
            pytest.fail("nothing was raised")
        del y
    assert live.bytes() == 0


def test_thread_that_ran_a_region_leaves_nothing():
    live = LiveStorages()

    def work():
        with live:
            checkpointed(chain)(leaf(3) * 1).sum().backward()
            held = checkpointed(chain)(leaf(3) * 1)
        del held

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(live.seen) > 5
    assert live.bytes() == 0
