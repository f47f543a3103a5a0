"""Kept tensors of calls that were modified in place: errors that name region, op and tensor."""

from __future__ import annotations

import pytest
import torch

import torch_remat as remat
from tests.handle_ops import RECOMPUTE, SAVE, STYLES, Affine, Both, Inner, Kernel, Result, Trace, call
from tests.helpers import assert_same, checkpointed, leaf, plain


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
def test_kept_result_that_was_changed_in_place_is_an_error_even_where_plain_autograd_has_none(style, view):
    for when in ("after the reader", "after forward", "after a backward"):
        leaked, x = {}, leaf(3, 3)

        def block(x, leaked=leaked, when=when):
            s = call(style, leaking(leaked, "m"), Trace(), "producer", SAVE, x)
            y = call(style, Inner, Trace(), "consumer", RECOMPUTE, s.t() if view else s)
            if when == "after the reader" and not remat.is_recomputing():
                s.detach().add_(1)
            return y

        y = checkpointed(block, region_name="block")(x)
        first = None
        if when == "after a backward":
            y.sum().backward(retain_graph=True)
            first = x.grad.clone()
        leaked["y"].detach().mul_(1 if when == "after the reader" else 2)
        with pytest.raises(remat.MutationError) as caught:
            y.sum().backward()
        assert (caught.value.region, caught.value.op) == ("block", "producer"), when
        assert str(caught.value).startswith(f"block::producer.{caught.value.tensor}: "), when
        assert x.grad is None if first is None else torch.equal(x.grad, first), when


def test_output_of_a_saved_op_changed_before_its_reader_is_a_placeholder_error():
    """Replay has no data to change."""

    def block(x):
        s = call("handle", Inner, Trace(), "producer", SAVE, x)
        s.mul_(2)
        return call("handle", Both, Trace(), "consumer", RECOMPUTE, s)

    with pytest.raises(remat.PlaceholderError) as caught:
        checkpointed(block, region_name="block")(leaf(3)).sum().backward()
    assert (caught.value.region, caught.value.op) == ("block", "producer")


def test_region_output_changed_by_the_caller_is_an_error_if_the_last_op_keeps_it():
    x = leaf(3)
    y = checkpointed(lambda x: call("handle", Result, Trace(), "last", SAVE, x.sin()), region_name="block")(x)
    y.mul_(2)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert (caught.value.region, caught.value.op, caught.value.tensor) == ("block", "last", "y")


def test_region_output_that_is_recomputed_or_kept_by_nothing_may_be_changed_by_the_caller():
    x, w = leaf(3), leaf(3)
    for kernel, policy, form in [(Result, RECOMPUTE, "copies"), (Inner, SAVE, "plain"), (Affine, SAVE, "plain")]:

        def run(wrap, form, kernel=kernel, policy=policy):
            inputs = [w][: kernel.arity - 1]
            y = wrap(lambda x: call(form, kernel, Trace(), "last", policy, x.sin(), *inputs))(x)
            y.mul_(3)
            return torch.autograd.grad(y.sum(), x)

        assert_same(run(plain, form), run(checkpointed, "handle"))


def test_input_of_the_region_that_a_saved_op_saved_is_named_when_it_was_changed():
    x = leaf(3) * 1
    y = checkpointed(lambda x: call("handle", Affine, Trace(), "it", SAVE, x, x), region_name="block")(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert caught.value.region == "block"
    assert caught.value.tensor
