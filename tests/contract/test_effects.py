"""Regions that touch what outlives them, by native regions, policies and calls: once, whatever replay runs.

What a skipped call leaves to its region otherwise than by its result is an error in forward, or it is left once. The
Python of a native region runs again in replay, so that there the gradients are right.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.contract.test_native_regions import BODIES, framed
from tests.handle_ops import RECOMPUTE, SAVE
from tests.helpers import (
    assert_equal_gradients,
    assert_same,
    assert_same_program,
    leaf,
    name_of,
    pairwise,
    parameter_gradients,
    plain,
    tensors_in,
)
from tests.native_programs import Experts, Marks, aten, keep, kept, region, replayed_ops

# --- In native regions


@torch.library.custom_op("remat_native_tests::scaled_sine", mutates_args=())
def scaled_sine(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x.sin() * scale, x.cos()


def _scaled_sine_setup(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.scale = inputs[1]


def _scaled_sine_backward(ctx, grad, grad_cos):
    (cosine,) = ctx.saved_tensors
    return grad * cosine * ctx.scale, None


scaled_sine.register_autograd(_scaled_sine_backward, setup_context=_scaled_sine_setup)


@scaled_sine.register_fake
def _(x, scale):
    return torch.empty_like(x), torch.empty_like(x)


@pytest.mark.parametrize("change", ["out", "foreach", "index_put", "set_", "resize_", "scatter_add_", "data", "method"])
def test_outside_tensor_is_changed_once_in_every_way(change):
    buffer = torch.ones(4, 4)

    def body(x):
        h = x.detach().sin()
        with torch.no_grad():
            if change == "out":
                torch.mm(h, h, out=buffer)
            elif change == "foreach":
                torch._foreach_add_([buffer, buffer[0]], 1.0)
            elif change == "index_put":
                buffer[h > 0] += 2
            elif change == "set_":
                buffer.add_(buffer.t().clone())
            elif change == "resize_":
                buffer.resize_(2, 2).fill_(h[0, 0].item())
            elif change == "scatter_add_":
                buffer.scatter_add_(0, (h > 0).long(), h)
            elif change == "data":
                buffer.data.add_(1)
            else:
                buffer.bernoulli_(0.5)
        return x.sin() * 2

    def function(x):
        return F.dropout(keep("a", body, x * 2).exp(), 0.3)

    x, results = leaf(4, 4), []
    for wrap in (plain, region()):
        torch.manual_seed(5)
        buffer.resize_(4, 4).fill_(1)
        y = wrap(function)(x)
        after_forward = buffer.clone()
        results.append([y, *torch.autograd.grad(y.sum(), x), buffer.clone(), torch.rand(2)])
        assert_same(after_forward, buffer)
    assert_same(*results)


class Doubled(torch.autograd.Function):
    """Twice a tensor, which it saves."""

    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * 0 + grad * 2


def view_changed(x, w):
    h = keep("a", F.conv1d, x.reshape(1, 3, 3), w.reshape(3, 3, 1)).reshape(3, 3)
    return h.sin_()


def dead_result_changed(x, w):
    h = keep("a", torch.mm, x, w)
    h.copy_(x)
    return x.exp().sin()


def changed_before_a_saved_op(x, w):
    h = keep("a", torch.mm, x, w)
    h[0].mul_(2)
    return remat.op(Doubled.apply, "double", policy=remat.CheckpointPolicy.SAVE)(h)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("function", [view_changed, dead_result_changed, changed_before_a_saved_op])
def test_returned_tensor_changed_in_place_runs_whole_where_no_graph_shows_a_reader(function, early_stop):
    inputs = leaf(3, 3), leaf(3, 3)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs, allow_unused=True)
    with pytest.warns(remat.RematWarning, match="::a: replay recomputes this call"):
        outputs = region(early_stop=early_stop)(function)(*inputs)
    actual = torch.autograd.grad(outputs.sum(), inputs, allow_unused=True)
    assert [g is None for g in expected] == [g is None for g in actual]
    assert_same([g for g in expected if g is not None], [g for g in actual if g is not None])


# --- A placeholder that is read after all


READERS = {
    "abs": lambda h: h.detach().abs().amax(),
    "item": lambda h: h.detach().max().item(),
    "bool": lambda h: 2.0 if (h > 0).any() else 3.0,
    "where": lambda h: torch.where(h.detach() > 0, 1.0, -1.0),
    "no_grad": lambda h: no_grad_norm(h),
    "to": lambda h: (h > 0).to(torch.float32),
}


@torch.no_grad()
def no_grad_norm(h):
    return h.norm() + 1


@pytest.mark.parametrize("name", READERS)
def test_result_read_without_a_graph_is_right_and_costs_at_most_one_more_run(name):
    """The graph shows no reader: the native region runs once more, with one warning, or its result was kept."""
    calls = []

    def scores(x, w):
        calls.append(1)
        return x @ w

    def function(x, w):
        h = keep("scores", scores, x, w)
        return (x * READERS[name](h)).sin().exp()

    inputs = leaf(3, 3), leaf(3, 3)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs, allow_unused=True)
    y = region(region_name="block")(function)(*inputs)
    del calls[:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = torch.autograd.grad(y.sum(), inputs, allow_unused=True)
    assert_same(expected[0], actual[0])
    assert len(caught) <= 1
    assert len(calls) <= 1 + len(caught)
    for warning in caught:
        assert warning.category is remat.RematWarning
        assert "block::scores" in str(warning.message)


def test_region_that_changed_something_outside_does_not_run_once_more():
    counter = torch.zeros(())

    def body(h):
        counter.add_(1)
        return h @ h

    def function(x):
        h = keep("scores", body, x * 2)
        return (x * h.detach().abs().amax()).sin()

    y = region()(function)(leaf(3, 3))
    with pytest.raises(remat.PlaceholderError, match=r"scores\.out"):
        y.sum().backward()
    assert counter == 1


# --- Custom ops of torch.library


def test_custom_op_inside_is_called_once_and_keeps_what_its_backward_reads():
    marks, x = Marks(), leaf(3)

    def function(x):
        y, cosine = keep("a", scaled_sine, x * 2, 3.0)
        marks("y", y), marks("cosine", cosine)
        return (y * cosine.detach()).exp()

    assert_equal_gradients(function, region()(function), [x])
    assert replayed_ops(function, region(), [x]) == {"mul": 2, "exp": 1}
    marks.storages.clear()
    assert kept(region()(lambda x: function(x) * 2), [x], marks).names == {"cosine", "y"}  # the product reads both


# --- Under a policy


def everything(ctx, op, *args, **kwargs):
    return True


def nothing(ctx, op, *args, **kwargs):
    return False


def random_half(ctx, op, *args, **kwargs):
    """A fixed half of all ops, told by their names."""
    return sum(map(ord, op.name())) % 2 == 0


POLICIES = [everything, nothing, random_half]
policies = pytest.mark.parametrize("policy", POLICIES, ids=name_of)


@policies
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_updates_its_buffers_once(policy, training):
    def program(wrap):
        module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 1, 2)).train(training)
        x = leaf(2, 2, 6, 6)
        y = wrap(lambda x: module(x * 2).sin())(x)
        buffers = [buffer.clone() for buffer in module.buffers()]
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        assert_same(buffers, list(module.buffers()))
        return y, x.grad, parameter_gradients(module), buffers

    assert_same_program(program, policy=policy)


@torch.library.custom_op("remat_policy_tests::record", mutates_args=("log",))
def record(x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    log.add_(x)
    return x.abs()


@policies
def test_custom_op_that_writes_outside_writes_once(policy):
    log, x = torch.zeros(4), leaf(4)

    def function(x):
        return (x * record(x.detach() * 2, log)).exp()

    expected = torch.autograd.grad(function(x).sum(), x)
    written = log.clone()
    log.zero_()
    y = region(policy)(function)(x)
    actual = torch.autograd.grad(y.sum(), x)
    assert_same([expected, written], [actual, log])


@pytest.mark.parametrize("saved", ["mul_", "sin", "exp"])
@pytest.mark.parametrize("call", ["native", "plain"])
@pytest.mark.filterwarnings("ignore:.*replay recomputes this call:torch_remat.RematWarning")
def test_what_was_written_and_then_got_another_shape_in_place(saved, call):
    def block(x):
        written = remat.native_save_region("k", lambda h: h.mul_(2).t_(), x.sin()) if call == "native" else None
        return (x.sin().mul_(2).t_() if written is None else written).exp() * x

    def policy(ctx, op, *args, **kwargs):
        return SAVE if op.overloadpacket is getattr(torch.ops.aten, saved) else RECOMPUTE

    x = leaf(3, 3)
    expected = torch.autograd.grad(block(x).sum(), x)
    assert_same(expected, torch.autograd.grad(remat.checkpoint(policy=policy)(block)(x).sum(), x))


@pytest.mark.parametrize("name", BODIES)
@policies
def test_bodies_of_native_regions_under_a_policy(policy, name):
    """All that native regions must be able to hold, in one, and with the policy alone."""
    body, inputs = BODIES[name], (leaf(4, 4), leaf(4, 4))
    function = framed(body)
    assert_equal_gradients(function, region(policy)(function), inputs)

    def bare(x, w):
        return [y.sin() for y in tensors_in([body(x * 2, w)]) if y.is_floating_point()]

    try:
        assert_equal_gradients(bare, region(policy)(bare), inputs)
    except remat.MutationError:
        assert policy is not nothing  # a saved result was changed: SAC refuses it too


class Averaged(nn.Module):
    """A buffer that follows a mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.rand(4, 4) + 0.5)

    def follow(self, x):
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.detach().abs().mean(0))

    def scale(self, x, reads):
        self.follow(x)
        return x * self.mean.clone() if reads else x * 2


@pytest.mark.parametrize("call", ["op", "native"])
@pytest.mark.parametrize("also", ["before", "after", "both"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.filterwarnings("ignore:.*replay recomputes this call:torch_remat.RematWarning")
def test_buffer_that_a_call_which_runs_whole_and_the_region_both_write(call, also, reads):
    """It is written once, or what reads it in replay is refused."""

    def train(wrap):
        torch.manual_seed(0)
        module, x = Averaged(), torch.randn(4, 4, requires_grad=True)

        def function(x):
            h = x * 1.0
            if also != "after":
                module.follow(x)
            if not wrap:
                r = module.scale(h, reads)
            elif call == "op":
                r = remat.op(module.scale, "scale")(h, reads)
            else:
                r = remat.native_save_region("scale", module.scale, h, reads)
            if also != "before":
                module.follow(h)
            r[0].mul_(0.5)
            return r.sin() * h

        region = remat.checkpoint(policy=[torch.ops.aten.mm.default])(function) if wrap else function
        region(x).sum().backward()
        return x.grad, module.mean

    expected = train(False)
    if reads:
        with pytest.raises(remat.MutationError, match="mean"):
            train(True)
    else:
        assert_same(train(True), expected)


@pytest.mark.parametrize("given", ["argument", "variable"])
@pytest.mark.parametrize("call", ["op", "native"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore:.*replay:torch_remat.RematWarning")
def test_call_that_runs_after_all_refuses_what_was_changed_after_it(given, call, autocast):
    """NumPy reads a placeholder in a native region: replay starts over, and the region's input is another by then."""

    def train(wrap):
        def scaled(b):
            h = torch.where(b > 0, b, b * 2)
            h * float(h.detach().numpy().mean())  # in a native region this runs in replay
            return h

        def function(a, b):
            args = (b,) if given == "argument" else ()
            part = scaled if args else lambda: scaled(b)
            if not wrap:
                h = part(*args)
            else:
                h = remat.op(part, "c")(*args) if call == "op" else remat.native_save_region("c", part, *args)
            y = a @ h
            if call == "op":
                y = y * float(h.detach().numpy().mean())
            with torch.no_grad():
                b.mul_(0.9)
            return y

        torch.manual_seed(0)
        a, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = (remat.checkpoint(policy=[torch.ops.aten.sigmoid.default])(function) if wrap else function)(a, b)
        y.float().sum().backward()
        return a.grad, b.grad

    if call == "op":  # its result is kept, since recomputed code reads it
        assert_same(train(True), train(False))
    else:
        with pytest.raises(remat.MutationError, match="c is recomputed in replay and reads"):
            train(True)


@pytest.mark.parametrize("how", ["native region", "policy"])
def test_mixture_of_experts_trains_as_plain_autograd_and_routes_once(how):
    def made():
        torch.manual_seed(8)
        model = Experts()
        if how == "native region":
            model.route = functools.partial(keep, "route", model.route)
        return model

    def program(wrap):
        model = made()
        for _ in range(3):
            wrap(model)(torch.randn(2, 5, 8, requires_grad=True)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
        assert int(model.load.sum()) == 3 * 2 * 5 * 2
        return list(model.parameters()), model.load

    router = [aten.topk.default, aten._softmax.default, aten.mm.default, aten.bincount.default]
    policy = router if how == "policy" else None
    assert_same(program(plain), program(region(policy)))
    model = made()
    replayed = replayed_ops(model, region(policy), [leaf(2, 5, 8)], list(model.parameters()))
    assert not {"topk", "bincount", "_softmax", "mm", "add_"} & set(replayed)
    assert replayed["gelu"] >= 1


# --- What a skipped call leaves


CALLS: dict[str, Callable[[Callable], Callable]] = {
    "function": lambda function: remat.op(function, "c"),
    "opaque": lambda function: remat.op(function, "c", opaque=True),
    "decorated": lambda function: remat.op(name="c")(function),
    "native": lambda function: lambda *args: remat.native_save_region("c", function, *args),
}
LEAKS: dict[str, Callable[[Callable, Tensor], Tensor]] = {}
LEFT: dict[str, Callable[[Callable, Tensor], Tensor]] = {}
ODD = {
    "generator": lambda h: (one for one in (h.sin(),)),
    "iterator": lambda h: iter([h.sin()]),
    "object": lambda h: SimpleNamespace(y=h.sin()),
    "object in a list": lambda h: [h.exp(), SimpleNamespace(y=h.sin())],
    "function": lambda h: lambda: h.sin(),
}
OUTSIDE: list[Any] = []
OUTER = nn.Linear(2, 2)


def leak(function: Callable) -> Callable:
    LEAKS[function.__name__.replace("_", " ")] = function
    return function


def left(function: Callable) -> Callable:
    LEFT[function.__name__.replace("_", " ")] = function
    return function


# Refused: the region goes on with a tensor that was not returned, or its own containers hold other tensors.


@leak
def a_variable_gets_a_tensor(call, h):
    kept = None

    def f(h):
        nonlocal kept
        kept = h.exp()
        return h.sin()

    return call(f)(h).sin() * kept.sin()


def leak_by(make, leave, read):
    """Return a block whose call leaves something in a container that the region made, and which reads it."""

    def block(call, h):
        kept = make(h)
        y = call(lambda h: leave(kept, h) or h.sin())(h)
        return y.sin() * read(kept).sin()

    return block


LEAKS |= {
    "a list gets a tensor": leak_by(lambda h: [], lambda kept, h: kept.append(h.exp()), lambda kept: kept[0]),
    "a list loses a tensor": leak_by(
        lambda h: [h.exp(), h.tanh()], lambda kept, h: kept.__delitem__(0), lambda kept: sum(kept)
    ),
    "a dict gets a tensor": leak_by(lambda h: {}, lambda kept, h: kept.update(a=h.exp()), lambda kept: kept["a"]),
    "a set gets a tensor": leak_by(lambda h: set(), lambda kept, h: kept.add(h.exp()), lambda kept: next(iter(kept))),
    "an object gets a tensor": leak_by(
        lambda h: SimpleNamespace(), lambda kept, h: setattr(kept, "a", h.exp()), lambda kept: kept.a
    ),
}


@leak
def a_list_from_outside_gets_a_tensor_that_the_region_reads(call, h):
    y = call(lambda h: OUTSIDE.append(h.exp()) or h.sin())(h)
    return y.sin() * OUTSIDE[-1].sin()


@leak
def what_is_inside_a_view_of_what_was_returned_is_read_by_its_base(call, h):
    kept = []
    y = call(lambda h: kept.append(h.exp()) or kept[0][:1])(h)
    return y.sin() * kept[0].sin()


# Left once, and no error: the region does not go on with it, or it is no tensor.


@left
def a_list_from_outside_gets_a_tensor(call, h):
    return call(lambda h: OUTSIDE.append(h.exp()) or h.sin())(h).sin()


@left
def a_variable_gets_a_number(call, h):
    count = 0

    def f(h):
        nonlocal count
        count += 1
        return h.sin()

    return call(f)(h).sin()


def run_call(block: Callable, call: Callable, wrap: Callable, counts: list[int]) -> tuple[Tensor, list[Any]]:
    """Return the gradient, and the warnings; note how often the call's Python ran."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)

    def counted(function):
        def f(*args):
            counts[0] += 1
            return function(*args)

        return call(f)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(lambda x: block(counted, x.cos()))(x).sum().backward()
    OUTSIDE.clear()
    OUTER.__dict__.pop("cache", None)
    return x.grad, caught


POLICY = {"policy": lambda ctx, op, *args, **kwargs: op is torch.ops.aten.exp.default}
AROUND = {
    "nothing": remat.checkpoint(),
    "policy": remat.checkpoint(**POLICY),
    "region": lambda block: remat.checkpoint()(lambda x: remat.checkpoint()(block)(x.tanh())),
}


@pairwise(name=LEAKS, how=CALLS, around=AROUND)
def test_what_leaks_is_refused_in_forward(name, how, around):
    """Replay would go on with another tensor, or without one."""
    if how != "native":
        with pytest.raises(remat.UsageError) as caught:
            AROUND[around](lambda x: LEAKS[name](CALLS[how], x.cos()))(torch.randn(4, 4, requires_grad=True))
        assert caught.value.op == "c"
        return
    counts = [0]
    expected = run_call(LEAKS[name], plain, lambda f: (lambda x: f(x.tanh())) if around == "region" else f, counts)[0]
    assert torch.equal(expected, run_call(LEAKS[name], CALLS[how], AROUND[around], counts)[0])


@pairwise(name=LEFT, how=CALLS)
def test_what_does_not_reach_the_region_is_left_once(name, how):
    counts = [0]
    expected, _ = run_call(LEFT[name], plain, plain, counts)
    counts[0] = 0
    found, caught = run_call(LEFT[name], CALLS[how], remat.checkpoint(), counts)
    assert torch.equal(expected, found)
    assert not caught
    assert counts[0] <= (2 if how == "native" else 1)


@pairwise(odd=ODD, how=CALLS)
def test_a_result_that_is_no_tree_is_refused_in_forward(odd, how):
    def block(call, h):
        result = call(ODD[odd])(h)
        result = result[1] if isinstance(result, list) else result
        y = result.y if isinstance(result, SimpleNamespace) else result() if callable(result) else next(result)
        return y.sin()

    if how == "native":
        counts = [0]
        assert torch.equal(
            run_call(block, plain, plain, counts)[0], run_call(block, CALLS[how], remat.checkpoint(), counts)[0]
        )
        return
    with pytest.raises(remat.UsageError) as caught:
        remat.checkpoint()(lambda x: block(CALLS[how], x.cos()))(torch.randn(4, 4, requires_grad=True))
    assert caught.value.op == "c"


def written_argument(call, h):
    h = h * 1.0
    return call(lambda h: h.mul_(2).sum())(h) * h.sin()


def written_variable(call, h):
    h = h * 1.0
    return call(lambda: h.mul_(2).sum())() * h.sin()


@pytest.mark.parametrize("how", [how for how in CALLS if how != "opaque"])
@pytest.mark.parametrize("block", [written_argument, written_variable])
def test_a_call_that_writes_what_the_region_made_runs_whole_with_one_warning(block, how):
    counts = [0]
    expected, _ = run_call(block, plain, plain, counts)
    counts[0] = 0
    found, caught = run_call(block, CALLS[how], remat.checkpoint(), counts)
    assert torch.equal(expected, found)
    assert counts[0] == 2
    assert [one.category for one in caught] == [remat.RematWarning]


@pytest.mark.parametrize("how", ["function", "decorated"])
def test_a_call_that_would_run_whole_and_writes_outside_is_refused(how):
    total = torch.zeros(4, 4)

    def f(h):
        total.add_(h.detach())
        return h.sin()

    with pytest.raises(remat.UsageError) as caught:
        remat.checkpoint()(lambda x: CALLS[how](f)(x.cos()).mul_(2).sin())(torch.randn(4, 4, requires_grad=True))
    assert caught.value.op == "c"


def gradient_inside(call, h):
    y = call(lambda h: h.sin() @ h)(h)
    (gradient,) = torch.autograd.grad(y.sin().sum(), h, create_graph=True)
    return gradient * h


@pytest.mark.parametrize("how", CALLS)
def test_a_gradient_through_the_call_inside_the_region_is_refused_in_forward(how):
    """Of a native region, whose Python runs again, it is right."""
    counts = [0]
    expected, _ = run_call(gradient_inside, plain, plain, counts)
    try:
        found, _ = run_call(gradient_inside, CALLS[how], remat.checkpoint(), counts)
    except remat.UsageError as error:
        assert error.op == "c"  # noqa: PT017
    else:
        assert how == "native"
        assert torch.equal(expected, found)


# --- A call writes a tensor that the region made: right, or an error, never another gradient.


class Writes(Function):
    """Changes its second argument, without saying so."""

    @staticmethod
    def forward(ctx, x, v, write):
        ctx.save_for_backward(x)
        write(v)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None, None


class NamedWrites(Writes):
    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x, v, write, op_name, remat_policy):
        return Writes.forward(ctx, x, v, write)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None, None, None, None


class SeedWrites(NamedWrites):
    @staticmethod
    def forward(ctx, x, v, write, op_name, remat_policy):
        handle = remat.get_handle(ctx, op_name, remat_policy)
        if (result := handle.maybe_load_saved()) is not None:
            return result
        x, v = handle.save_or_load_inputs(x, v)
        write(v)
        handle.save_for_backward({"x": x})
        return handle.record_outputs(x * 2)


def doubled(x, v, write):
    write(v)
    return x * 2


WRITERS = {how: lambda x, v, write, call=call: call(doubled)(x, v, write) for how, call in CALLS.items()} | {
    "Function": lambda x, v, write: remat.op(Writes.apply, "c")(x, v, write),
    "seed": lambda x, v, write: SeedWrites.apply(x, v, write, "c", SAVE),
    "seed with names": lambda x, v, write: NamedWrites.apply(x, v, write, "c", SAVE),
}
WRITES = {
    "without a gradient": torch.no_grad()(lambda v: v.mul_(0.5)),
    "past the graph": lambda v: v.detach().mul_(0.5),
    "in part": torch.no_grad()(lambda v: v[0].mul_(0.5)),
}


@pairwise(
    who=WRITERS,
    how=WRITES,
    history=[False, True],
    policy=[None, torch.ops.aten.mul.Tensor, torch.ops.aten.mm.default],
)
@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")
def test_a_call_that_writes_its_argument_is_right_or_refused(who, how, history, policy):
    def gradient(writer, wrap):
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)

        def block(x):
            v = (x if history else x.detach()) * 1.5
            return writer(x.sin(), v, WRITES[how]), v.sin() * x

        sum(y.exp().sum() for y in wrap(block)(x)).backward()
        return x.grad

    expected = gradient(doubled if who in CALLS else Writes.apply, plain)
    chosen = policy and (lambda ctx, op, *args, **kwargs: op is policy)
    try:
        found = gradient(WRITERS[who], remat.checkpoint(policy=chosen))
    except remat.RematError as error:
        assert error.op or error.tensor  # noqa: PT017
    else:
        assert torch.equal(expected, found)


def under_hooks(region, x):
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return region(x.cos())


SURROUNDINGS: dict[str, Callable[[Callable, Tensor], Tensor]] = {
    "nothing": lambda region, x: region(x.cos()),
    "hooks": under_hooks,
    "region": lambda region, x: remat.checkpoint()(lambda x: region(x.cos()))(x),
    "torch's region": lambda region, x: torch_checkpoint(lambda x: region(x.cos()), x, use_reentrant=False),
}


@pairwise(how=[*CALLS, "plain code"], returns=["the input", "another"], around=SURROUNDINGS)
@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")  # it runs whole
def test_a_call_that_writes_the_input_of_its_region(how, returns, around):
    def write(v):
        with torch.no_grad():
            v.mul_(0.9)
        return v if returns == "the input" else v.sin()

    def gradient(call, wrap, surround):
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        surround(wrap(lambda v: torch.nn.functional.gelu(call(write)(v)) * v.sin()), x).sum().backward()
        return x.grad

    expected = gradient(plain, plain, SURROUNDINGS["nothing"])
    try:
        found = gradient(CALLS.get(how, plain), remat.checkpoint(), SURROUNDINGS[around])
    except remat.RematError as error:
        assert error.op or error.tensor  # noqa: PT017
    else:
        assert torch.equal(expected, found)


NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "native region": lambda x: remat.native_save_region("d", torch.sin, x),
    "op": lambda x: remat.op(torch.sin, "d")(x),
    "handle": lambda x: Doubles.apply(x, None, "d", SAVE),
}


class Doubles(Function):
    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x, inner, op_name, remat_policy):
        ctx.save_for_backward(x)
        return x * 2 if inner is None else x * 2 + 0 * NAMED[inner](x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None, None, None


@pytest.mark.parametrize("inner", NAMED)
@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")
def test_a_name_inside_a_handle_that_runs_whole(inner):
    """It belongs to the handle in both phases. Under a policy what is read past autograd starts the replay over."""

    def block(x):
        return (x * float(Doubles.apply(x.cos(), inner, "c", SAVE).detach().numpy().mean())).exp()

    def gradient(wrap):
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        wrap(block)(x).sum().backward()
        return x.grad

    policy = [torch.ops.aten.cos.default]
    assert torch.equal(gradient(plain), gradient(remat.checkpoint(policy=policy)))
