"""In-place changes of what backward or replay needs: an error that names the tensor, never a wrong gradient."""

from __future__ import annotations

import functools
import re
from collections import namedtuple

import optree
import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.batches import OptreeBatch, TorchBatch
from tests.handle_ops import RECOMPUTE, SAVE, STYLES, Both, Inner, Kernel, Trace, call
from tests.helpers import chain, checkpointed, leaf, pairwise, plain
from tests.ways import BY_NATIVE_REGION, BY_OP, BY_POLICY, RECOMPUTED

Pair = namedtuple("Pair", ["one", "two"])


def change(tensor):
    """Change a tensor in place, unseen by autograd's graph but not by its version counter."""
    with torch.no_grad():
        tensor.add_(1)


def assert_names(error, *words):
    """Assert that the error tells the region and, as a whole word each, where the tensor stood."""
    assert error.region == "block"
    for word in words:
        assert error.tensor is not None
        assert re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", error.tensor), error.tensor
        assert error.tensor in str(error)


CALLS = {
    "first argument": (lambda f, a, b: f(a, b), 0, ["args", "0"]),
    "second argument": (lambda f, a, b: f(a, b), 1, ["args", "1"]),
    "keyword": (lambda f, a, b: f(a, scale=b), 1, ["scale"]),
    "keyword named as an option": (lambda f, a, b: f(a, debug=b), 1, ["debug"]),
    "list": (lambda f, a, b: f([a, b]), 1, ["args", "0", "1"]),
    "tuple": (lambda f, a, b: f(a, (None, b)), 1, ["args", "1"]),
    "dict": (lambda f, a, b: f({"left": a, "right": b}), 1, ["args", "0", "right"]),
    "dict in keyword": (lambda f, a, b: f(a, options={"deep": [b]}), 1, ["options", "deep", "0"]),
    "namedtuple": (lambda f, a, b: f(Pair(a, b)), 1, ["args", "0"]),
    "optree dataclass": (lambda f, a, b: f(OptreeBatch(a, b)), 1, ["args", "0"]),
    "torch dataclass": (lambda f, a, b: f(TorchBatch(a, b)), 1, ["args", "0"]),
}


OTHER_INPUTS = {
    "leaf": lambda: leaf(3),
    "activation": lambda: leaf(3) * 1,
    "constant": lambda: torch.randn(3),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "part": lambda: torch.randn(4)[1:],
}
MODIFICATIONS = {
    "itself": change,
    "view": lambda x: change(x.detach()[0]),
    "base": lambda x: change(x if x._base is None else x._base),
    "out": torch.no_grad()(lambda x: torch.add(torch.ones(3), 1, out=x)),
    "detached": lambda x: x.detach().fill_(3),
}


@pairwise(place=CALLS, kind=OTHER_INPUTS, how=MODIFICATIONS)
def test_region_input_changed_before_backward_is_an_error_that_names_it(place, kind, how):
    call, index, words = CALLS[place]
    w = leaf(3)
    inputs = [leaf(3) * 1, OTHER_INPUTS[kind]()]
    if index == 0:
        inputs.reverse()

    def block(*args, **kwargs):
        leaves = optree.tree_leaves((args, kwargs))
        tensors = [t for x in leaves for t in ((x.features, x.mask) if isinstance(x, TorchBatch) else (x,))]
        return functools.reduce(lambda total, tensor: (total * tensor).sin(), tensors).exp() * w.sin()

    y = call(checkpointed(block, region_name="block"), *inputs)
    MODIFICATIONS[how](inputs[index])
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert_names(caught.value, *words)
    assert w.grad is None


def test_input_of_an_inner_region_changed_in_the_outer_one_is_an_error_as_in_plain_autograd():
    def program(wrap):
        def block(x):
            h = x * 2
            y = wrap(chain)(h)
            change(h)
            return y + h.sum()

        return wrap(block)

    for wrap in (plain, checkpointed):
        x = leaf(3)
        with pytest.raises(RuntimeError):
            program(wrap)(x).sum().backward()
        assert x.grad is None


def test_input_changed_after_backward_or_of_a_dropped_region_is_no_error():
    x = leaf(3) * 1
    y = checkpointed(chain)(x)
    y.sum().backward()
    change(x)
    dropped = checkpointed(chain)(leaf(3))
    del dropped
    with torch.no_grad():
        z = checkpointed(chain)(x)
    change(x)
    assert not z.requires_grad


def exp_then_add(x):
    y = x.exp()
    y.add_(1)
    return y.sin()


def factor_changed_through_a_view(x):
    h = x * 2
    y = h.sin()
    h.view(-1)[0] = 0
    return y.exp()


def changed_without_gradients(x):
    h = x * 2
    y = h.sin().exp()
    with torch.no_grad():
        h.detach().zero_()
    return y.cos()


CHANGES = [exp_then_add, factor_changed_through_a_view, changed_without_gradients]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("block", CHANGES)
def test_tensor_changed_after_it_was_saved_inside_is_an_error_as_in_plain_autograd(block, early_stop):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(block)(leaf(3)).sum().backward()
    x = leaf(3)
    with pytest.raises(remat.MutationError) as caught:
        checkpointed(block, early_stop=early_stop, region_name="block")(x).sum().backward()
    assert caught.value.region == "block"
    assert x.grad is None


def test_parameter_changed_after_a_kept_graphs_first_backward_is_an_error():
    w = nn.Parameter(torch.randn(3, 3))
    y = checkpointed(lambda x: (x @ w).sin() @ w)(leaf(3, 3))
    y.sum().backward(retain_graph=True)
    change(w)
    with pytest.raises(RuntimeError):
        y.sum().backward()


@pytest.mark.parametrize("way", [RECOMPUTED, BY_OP, BY_NATIVE_REGION, BY_POLICY], ids=str)
def test_a_leaf_that_changes_after_its_cast_was_read_is_an_error(way):
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), leaf(4, 4)

    def block(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ weight
        with torch.no_grad():
            weight.mul_(1.5)
        return y

    y = way.region(lambda x: way.keep("k", block, x))(x)
    with pytest.raises(remat.MutationError):
        y.float().sum().backward()


@pytest.mark.parametrize("way", [RECOMPUTED, BY_NATIVE_REGION, BY_OP], ids=str)
@pytest.mark.parametrize("wrap", [lambda x: (x,), lambda x: ([x],)], ids=["argument", "in a list"])
def test_input_that_the_region_itself_changes_is_an_error_that_says_so(wrap, way):
    def block(x):
        x = x[0] if isinstance(x, list) else x
        y = x.sin()
        way.keep("write", lambda x: x.add_(1), x)
        return y.exp() * x

    x = torch.ones(4)
    w = leaf(4)
    y = checkpointed(lambda x, w: block(x) * w)(*wrap(x), w)
    with pytest.raises(remat.MutationError, match="the region itself modified this input in place"):
        y.sum().backward()


# --- What saved calls keep


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


@pairwise(style=STYLES, name=["m", "y", "v"])
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


@pairwise(style=STYLES, view=[False, True], when=["after the reader", "after forward", "after a backward"])
def test_kept_result_that_was_changed_in_place_is_an_error_even_where_plain_autograd_has_none(style, view, when):
    leaked, x = {}, leaf(3, 3)

    def block(x):
        s = call(style, leaking(leaked, "m"), Trace(), "producer", SAVE, x)
        y = call(style, Inner, Trace(), "consumer", RECOMPUTE, s.t() if view else s)
        if when == "after the reader" and not remat.is_recomputing():
            s.detach().add_(1)
        return y

    y = checkpointed(block, region_name="block")(x)
    if when == "after a backward":
        y.sum().backward(retain_graph=True)
    if when != "after the reader":
        leaked["y"].detach().mul_(2)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert (caught.value.region, caught.value.op) == ("block", "producer")
    assert str(caught.value).startswith(f"block::producer.{caught.value.tensor}: ")


def test_output_of_a_saved_op_changed_before_its_reader_is_a_placeholder_error():
    """Replay has no data to change."""

    def block(x):
        s = call("handle", Inner, Trace(), "producer", SAVE, x)
        s.mul_(2)
        return call("handle", Both, Trace(), "consumer", RECOMPUTE, s)

    with pytest.raises(remat.PlaceholderError) as caught:
        checkpointed(block, region_name="block")(leaf(3)).sum().backward()
    assert (caught.value.region, caught.value.op) == ("block", "producer")
