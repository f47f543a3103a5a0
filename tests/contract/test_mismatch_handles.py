"""Replay that does other ops than forward, and kept tensors that were changed: errors that name the op."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import torch_remat as remat
from tests.handle_ops import (
    RECOMPUTE,
    SAVE,
    STYLES,
    Affine,
    Both,
    Inner,
    Kernel,
    Result,
    Trace,
    as_tuple,
    call,
)
from tests.helpers import assert_same, checkpointed, leaf, pairwise, plain


def run_list(style, ops, x):
    """Run ops, given as `(name, policy)`, one after another, then a native op that saves."""
    values = [x.sin()]
    for name, policy in ops:
        values.append(call(style, Both, Trace(), name, policy, values[-1]))
    return values[-1], x.cos().exp()


def mismatch(style, forward, replay, **options):
    """Return the error of a region that runs one list of ops in forward and another in replay."""

    def block(x):
        return run_list(style, replay if remat.is_recomputing() else forward, x)

    x = leaf(3)
    y, z = checkpointed(block, region_name="block", **options)(x)
    with pytest.raises(remat.MismatchError) as caught:
        (y.sum() + z.sum()).backward()
    assert x.grad is None
    assert caught.value.region == "block"
    assert not remat.is_recomputing()
    return caught.value


A, B, C = ("a", SAVE), ("b", SAVE), ("c", SAVE)
AR, BR, CR = ("a", RECOMPUTE), ("b", RECOMPUTE), ("c", RECOMPUTE)

DIFFERENCES = {
    "policy to recompute": ([A, BR], [AR, BR], "a"),
    "policy to save": ([AR, BR], [A, BR], "a"),
    "policy of the second": ([A, B, CR], [A, BR, CR], "b"),
    "names swapped": ([A, B, CR], [B, A, CR], "b"),
    "names of recomputed ops swapped": ([AR, BR, C], [BR, AR, C], "b"),
    "last two names swapped": ([A, B, CR], [A, CR, B], "c"),
    "another name": ([A, B], [A, C], "c"),
    "another name of a recomputed op": ([A, BR, C], [A, ("x", RECOMPUTE), C], "x"),
    "first is missing": ([A, B, CR], [B, CR], "b"),
    "middle is missing": ([A, B, CR], [A, CR], "c"),
    "recomputed one is missing": ([AR, BR, C], [AR, C], "c"),
    "first is new": ([B, CR], [A, B, CR], "a"),
    "middle is new": ([A, CR], [A, B, CR], "b"),
    "recomputed one is new": ([A, C], [A, BR, C], "b"),
}


@pairwise(name=DIFFERENCES, style=STYLES, early_stop=[True, False])
def test_op_that_differs_in_replay_is_an_error_that_names_it(name, style, early_stop):
    forward, replay, op = DIFFERENCES[name]
    error = mismatch(style, forward, replay, early_stop=early_stop)
    assert error.op == op
    assert op in str(error)


@pytest.mark.parametrize(("forward", "replay"), [([A, B], [A]), ([A, BR], [A]), ([A], []), ([AR], [])], ids=str)
def test_last_op_missing_in_replay_is_an_error(forward, replay):
    error = mismatch("handle", forward, replay, early_stop=False)
    assert forward[-1][0] in str(error)


@pytest.mark.parametrize(("forward", "replay"), [([A], [A, B]), ([A], [A, BR]), ([], [A]), ([], [AR])], ids=str)
def test_op_that_is_new_at_the_end_of_replay_is_an_error(forward, replay):
    error = mismatch("handle", forward, replay, early_stop=False)
    assert error.op == replay[-1][0]


def test_recomputed_op_that_is_missing_as_the_last_one_is_an_error_though_replay_stops_early():
    mismatch("handle", [A, BR], [A])


def test_recomputed_op_that_saves_something_else_in_replay_is_an_error():
    for other in (lambda x: x.double(), lambda x: x.repeat(2), lambda x: None):

        class Changing(Function):
            @staticmethod
            def forward(ctx, x, policy, other):
                handle = remat.get_handle(ctx, "it", policy)
                if (ret := handle.maybe_load_saved()) is not None:
                    return ret
                x = handle.save_or_load_inputs(x)
                handle.save_for_backward({"x": other(x) if remat.is_recomputing() else x})
                return handle.record_outputs(x * 2)

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.saved_tensors[0], None, None

        y = checkpointed(lambda x, f=Changing, o=other: f.apply(x.sin(), RECOMPUTE, o), region_name="block")(leaf(3))
        with pytest.raises(remat.RematError) as caught:
            y.sum().backward()
        assert caught.value.region == "block"


def leaking(leaked, *names, arity=1):
    """Return a kernel whose output and saved tensors can be reached from outside."""

    def forward(ctx, *inputs):
        m = sum(inputs).tanh()
        y = m * 2 + inputs[0]
        made = {"x": inputs[0], "m": m, "y": y, "v": m.view(-1)[1:]}
        leaked.update(made)
        return y, {name: made[name] for name in names}

    def backward(ctx, saved, grad):
        return tuple(grad * saved[0].sum() for _ in range(arity))

    return Kernel("leaking", names, forward, backward, arity)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["m", "y", "v"])
def test_resident_that_was_changed_in_place_is_an_error_as_in_plain_autograd_and_is_named(style, name):
    for wrap in (plain, lambda f: checkpointed(f, region_name="block")):
        leaked, x = {}, leaf(3)
        y = wrap(lambda x, leaked=leaked: call(style, leaking(leaked, name), Trace(), "it", SAVE, x.sin()))(x)
        loss = y.sum()
        with torch.no_grad():
            leaked[name].mul_(2)
        with pytest.raises(RuntimeError, match=r"in[- ]?place") as caught:
            loss.backward()
        assert x.grad is None
    error = caught.value
    assert isinstance(error, remat.MutationError)
    assert (error.region, error.op, error.tensor) == ("block", "it", name)
    assert str(error).startswith(f"block::it.{name}: ")


@pytest.mark.parametrize("change", ["base", "view", "inside"])
def test_resident_that_was_changed_by_way_of_an_alias_is_an_error(change):
    leaked, x = {}, leaf(3)

    def block(x):
        y = call("handle", leaking(leaked, "v"), Trace(), "it", SAVE, x.sin())
        if change == "inside":
            with torch.no_grad():
                leaked["m"].add_(1)
        return y

    loss = checkpointed(block, region_name="block")(x).sum()
    if change != "inside":
        (leaked["m"] if change == "base" else leaked["v"][:1]).zero_()
    with pytest.raises(remat.MutationError) as caught:
        loss.backward()
    assert (caught.value.region, caught.value.op, caught.value.tensor) == ("block", "it", "v")


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_slot_that_was_changed_in_place_is_an_error_even_where_plain_autograd_has_none(style, view):
    leaked, x = {}, leaf(3, 3)

    def block(x):
        s = call(style, leaking(leaked, "m"), Trace(), "producer", SAVE, x)
        return call(style, Inner, Trace(), "consumer", RECOMPUTE, s.t() if view else s)

    y = checkpointed(block, region_name="block")(x)
    leaked["y"].detach().mul_(2)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert caught.value.op in ("producer", "consumer")
    assert caught.value.tensor
    assert str(caught.value).startswith(f"block::{caught.value.op}.{caught.value.tensor}: ")
    assert x.grad is None


def test_slot_changed_inside_the_region_after_its_reader_is_an_error():
    leaked, x = {}, leaf(3)

    def block(x):
        s = call("handle", leaking(leaked, "m"), Trace(), "producer", SAVE, x)
        y = call("handle", Inner, Trace(), "consumer", RECOMPUTE, s)
        if not remat.is_recomputing():
            s.detach().add_(1)
        return y

    with pytest.raises(remat.MutationError):
        checkpointed(block, region_name="block")(x).sum().backward()
    assert x.grad is None


def test_output_of_a_saved_op_changed_before_its_reader_is_an_error_or_equal():
    """Forward reads the changed value; replay must not read another one."""

    def block(x):
        s = call("handle", Inner, Trace(), "producer", SAVE, x)
        s.mul_(2)
        return call("handle", Both, Trace(), "consumer", RECOMPUTE, s)

    x = leaf(3)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    try:
        (actual,) = torch.autograd.grad(checkpointed(block)(x).sum(), x)
    except remat.RematError:
        return
    assert_same(expected, actual)


def test_region_output_changed_by_the_caller_is_an_error_if_the_last_op_keeps_it():
    x = leaf(3)
    y = checkpointed(lambda x: call("handle", Result, Trace(), "last", SAVE, x.sin()), region_name="block")(x)
    y.mul_(2)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert (caught.value.region, caught.value.op, caught.value.tensor) == ("block", "last", "y")


def test_region_output_that_replay_makes_again_may_be_changed_by_the_caller():
    x = leaf(3)
    y = checkpointed(lambda x: call("handle", Result, Trace(), "last", RECOMPUTE, x.sin()))(x)
    y.mul_(2)
    expected = torch.autograd.grad((call("plain", Result, Trace(), "last", RECOMPUTE, x.sin()) * 2).sum(), x)
    assert_same(expected, torch.autograd.grad(y.sum(), x))


@pytest.mark.parametrize("kernel", [Inner, Affine], ids=str)
def test_region_output_that_nothing_keeps_may_be_changed_by_the_caller(kernel):
    """The op saves no output, so plain autograd allows it, too."""
    x, w = leaf(3), leaf(3)

    def run(wrap):
        arguments = [w][: kernel.arity - 1]
        y = wrap(lambda x: as_tuple(call("handle", kernel, Trace(), "last", SAVE, x.sin(), *arguments))[0])(x)
        y.mul_(3)
        return torch.autograd.grad(y.sum(), x)

    assert_same(run(plain), run(checkpointed))


def test_input_of_the_region_that_a_saved_op_saved_is_named_when_it_was_changed():
    x = leaf(3) * 1
    y = checkpointed(lambda x: call("handle", Affine, Trace(), "it", SAVE, x, x), region_name="block")(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert caught.value.tensor


def test_change_after_the_first_backward_of_a_kept_graph_is_an_error():
    leaked, x = {}, leaf(3)

    def block(x):
        s = call("handle", leaking(leaked, "m"), Trace(), "producer", SAVE, x)
        return call("handle", Inner, Trace(), "consumer", RECOMPUTE, s)

    y = checkpointed(block)(x)
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    leaked["m"].add_(1)
    with pytest.raises(remat.MutationError):
        y.sum().backward()
    assert_same(first, x.grad)
