"""What a skipped call leaves to its region otherwise than by its result: an error in forward, or it is left once.

The Python of a native region runs again in replay, so that there the gradients are right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import pairwise

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


# --- Refused: the region goes on with a tensor that was not returned, or its own containers hold other tensors.


@leak
def a_variable_gets_a_tensor(call, h):
    kept = None

    def f(h):
        nonlocal kept
        kept = h.exp()
        return h.sin()

    return call(f)(h).sin() * kept.sin()


@leak
def a_variable_gets_another_tensor(call, h):
    kept = h * 2

    def f(h):
        nonlocal kept
        kept = kept.exp()
        return h.sin()

    return call(f)(h).sin() * kept.sin()


@leak
def a_variable_gets_a_tensor_without_history(call, h):
    kept = None

    def f(h):
        nonlocal kept
        kept = h.detach().exp()
        return h.sin()

    return call(f)(h).sin() * kept.sin()


@leak
def a_list_gets_a_tensor(call, h):
    kept = []
    y = call(lambda h: kept.append(h.exp()) or h.sin())(h)
    return y.sin() * kept[0].sin()


@leak
def a_list_gets_a_tensor_without_history(call, h):
    kept = []
    y = call(lambda h: kept.append(h.detach().exp()) or h.sin())(h)
    return y.sin() * kept[0].sin()


@leak
def a_list_loses_a_tensor(call, h):
    kept = [h.exp(), h.tanh()]
    y = call(lambda h: kept.pop() * h)(h)
    return y.sin() * sum(kept).sin()


@leak
def an_argument_that_is_a_list_gets_a_tensor(call, h):
    kept = []
    y = call(lambda h, kept: kept.append(h.exp()) or h.sin())(h, kept)
    return y.sin() * kept[0].sin()


@leak
def a_dict_gets_a_tensor(call, h):
    kept = {}
    y = call(lambda h: kept.update(a=h.exp()) or h.sin())(h)
    return y.sin() * kept["a"].sin()


@leak
def a_dict_gets_a_list_with_a_tensor(call, h):
    kept = {"a": []}
    y = call(lambda h: kept["a"].append(h.exp()) or h.sin())(h)
    return y.sin() * kept["a"][0].sin()


@leak
def a_set_gets_a_tensor(call, h):
    kept = set()
    y = call(lambda h: kept.add(h.exp()) or h.sin())(h)
    return y.sin() * next(iter(kept)).sin()


@leak
def an_object_gets_a_tensor(call, h):
    kept = SimpleNamespace()
    y = call(lambda h: setattr(kept, "a", h.exp()) or h.sin())(h)
    return y.sin() * kept.a.sin()


@leak
def a_list_from_outside_gets_a_tensor_that_the_region_reads(call, h):
    y = call(lambda h: OUTSIDE.append(h.exp()) or h.sin())(h)
    return y.sin() * OUTSIDE[-1].sin()


@leak
def a_module_gets_a_tensor_that_the_region_reads(call, h):
    y = call(lambda h: setattr(OUTER, "cache", h.exp()) or h.sin())(h)
    return y.sin() * OUTER.cache.sin()


@leak
def what_is_inside_a_view_of_what_was_returned_is_read_by_its_base(call, h):
    kept = []
    y = call(lambda h: kept.append(h.exp()) or kept[0][:1])(h)
    return y.sin() * kept[0].sin()


# --- Left once, and no error: the region does not go on with it, or it is no tensor.


@left
def a_list_from_outside_gets_a_tensor(call, h):
    return call(lambda h: OUTSIDE.append(h.exp()) or h.sin())(h).sin()


@left
def a_list_from_outside_gets_a_tensor_without_history(call, h):
    return call(lambda h: OUTSIDE.append(h.detach().exp()) or h.sin())(h).sin()


@left
def a_module_gets_a_tensor_without_history(call, h):
    return call(lambda h: setattr(OUTER, "cache", h.detach().exp()) or h.sin())(h).sin()


@left
def a_list_gets_a_number(call, h):
    kept = []
    return call(lambda h: kept.append(3.0) or h.sin())(h).sin()


@left
def a_dict_gets_a_string(call, h):
    kept = {}
    return call(lambda h: kept.update(a="b") or h.sin())(h).sin()


@left
def a_variable_gets_a_number(call, h):
    count = 0

    def f(h):
        nonlocal count
        count += 1
        return h.sin()

    return call(f)(h).sin()


@left
def an_own_list_is_filled(call, h):
    def f(h):
        kept = []
        kept.append(h.exp())
        return kept[0].sin()

    return call(f)(h).sin()


def run(block: Callable, call: Callable, wrap: Callable, counts: list[int]) -> tuple[Tensor, list[Any]]:
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


def plain(function: Callable) -> Callable:
    return function


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
    expected = run(LEAKS[name], plain, lambda f: (lambda x: f(x.tanh())) if around == "region" else f, counts)[0]
    assert torch.equal(expected, run(LEAKS[name], CALLS[how], AROUND[around], counts)[0])


@pairwise(name=LEFT, how=CALLS)
def test_what_does_not_reach_the_region_is_left_once(name, how):
    counts = [0]
    expected, _ = run(LEFT[name], plain, plain, counts)
    counts[0] = 0
    found, caught = run(LEFT[name], CALLS[how], remat.checkpoint(), counts)
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
        assert torch.equal(run(block, plain, plain, counts)[0], run(block, CALLS[how], remat.checkpoint(), counts)[0])
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
    expected, _ = run(block, plain, plain, counts)
    counts[0] = 0
    found, caught = run(block, CALLS[how], remat.checkpoint(), counts)
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
    expected, _ = run(gradient_inside, plain, plain, counts)
    try:
        found, _ = run(gradient_inside, CALLS[how], remat.checkpoint(), counts)
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


SAVE = remat.CheckpointPolicy.SAVE
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


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.filterwarnings("ignore::torch_remat.RematWarning")  # it runs whole
def test_input_of_a_region_in_a_call_that_changes_it_afterwards(how, depth):
    def gradient(call, wrap):
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)

        def inner(v):
            y = wrap(torch.tanh)(v)
            with torch.no_grad():
                v.mul_(0.9)
            return y

        region = wrap(lambda x: call(inner)(x * 1.0).sin() * x)
        (wrap(lambda x: region(x.sin())) if depth else lambda x: region(x.sin()))(x).sum().backward()
        return x.grad

    expected = gradient(plain, plain)
    try:
        found = gradient(CALLS[how], remat.checkpoint())
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
