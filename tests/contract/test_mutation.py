"""In-place changes of what backward or replay needs: an error that names the tensor, never a wrong gradient."""

from __future__ import annotations

import re
from collections import namedtuple

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.batches import OptreeBatch, TorchBatch
from tests.helpers import assert_same, chain, checkpointed, leaf, pairwise, plain

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


def product(*tensors):
    """Use every tensor so that replay needs it."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = (total * tensor).sin()
    return total.exp()


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


def tensors_anywhere(*args, **kwargs):
    found = []

    def walk(item):
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, dict):
            for value in item.values():
                walk(value)
        elif isinstance(item, (list, tuple)):
            for value in item:
                walk(value)
        elif hasattr(item, "features"):
            walk([item.features, item.mask])

    walk([args, kwargs])
    return product(*found)


@pairwise(place=CALLS, needs_grad=[True, False])
def test_region_input_changed_before_backward_is_an_error_that_names_it(place, needs_grad):
    call, index, words = CALLS[place]
    w = leaf(3)
    inputs = [leaf(3) * 1, torch.randn(3).requires_grad_(needs_grad) * 1]
    if index == 0:
        inputs.reverse()

    def block(*args, **kwargs):
        return tensors_anywhere(*args, **kwargs) * w.sin()

    y = call(checkpointed(block, region_name="block"), *inputs)
    change(inputs[index])
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert_names(caught.value, *words)
    assert w.grad is None


@pytest.mark.parametrize("how", ["view", "base", "out", "copy", "row", "detached"])
def test_input_changed_by_way_of_an_alias_is_an_error(how):
    base = torch.randn(4, 3)
    x = base[1:]
    w = leaf(3)
    y = checkpointed(lambda x: (x * w).sin(), region_name="block")(x)
    if how == "view":
        x[0].mul_(2)
    elif how == "base":
        base.zero_()
    elif how == "out":
        torch.add(torch.ones(3, 3), 1, out=x)
    elif how == "copy":
        x.copy_(torch.ones(3, 3))
    elif how == "row":
        x[1, 2] = 5.0
    else:
        x.detach().fill_(3)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert_names(caught.value, "args", "0")


def test_input_changed_after_the_replay_of_a_kept_graph_is_an_error():
    x = leaf(3) * 1
    y = checkpointed(chain, region_name="block")(x)
    y.sum().backward(retain_graph=True)
    change(x)
    with pytest.raises(remat.RematError):
        y.sum().backward()


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


def test_region_that_changes_its_own_input_is_an_error_or_right():
    def block(x):
        x.mul_(2)
        return x.sin().exp()

    x = leaf(3)
    h = x * 1
    try:
        checkpointed(block, region_name="block")(h).sum().backward()
    except remat.RematError as error:
        assert_names(error, "args", "0")
    else:
        assert_same(x.grad, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])


def exp_then_add(x):
    y = x.exp()
    y.add_(1)
    return y.sin()


def exp_then_add_last(x):
    y = x.exp()
    y.add_(1)
    return y


def factor_changed(x):
    h = x * 2
    y = h * x.cos()
    h.mul_(3)
    return y.exp() * h


def factor_changed_through_a_view(x):
    h = x * 2
    y = h.sin()
    h.view(-1)[0] = 0
    return y.exp()


def changed_after_all_was_saved(x):
    h = x * 2
    y = h.sin()
    h.add_(1)
    return y


def changed_without_gradients(x):
    h = x * 2
    y = h.sin().exp()
    with torch.no_grad():
        h.detach().zero_()
    return y.cos()


def weight_changed(x):
    w = torch.ones(3)
    y = (x * w).sin()
    w.add_(1)
    return (y * w).exp()


def softmax_changed(x):
    y = x.softmax(0)
    y *= 2
    return y.exp()


CHANGES = [
    exp_then_add,
    exp_then_add_last,
    factor_changed,
    factor_changed_through_a_view,
    changed_after_all_was_saved,
    changed_without_gradients,
    weight_changed,
    softmax_changed,
]


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


@pytest.mark.parametrize("block", CHANGES[:3])
def test_tensor_changed_after_it_was_saved_in_an_inner_region_is_an_error(block):
    x = leaf(3)
    with pytest.raises(RuntimeError):
        checkpointed(lambda x: checkpointed(block)(x.cos()).tanh())(x).sum().backward()
    assert x.grad is None


def test_tensor_of_a_closure_changed_between_forward_and_backward_is_an_error_as_in_plain_autograd():
    for wrap in (plain, checkpointed):
        x, scale = leaf(3), torch.randn(3)
        y = wrap(lambda x, scale=scale: (x * scale).sin())(x)
        change(scale)
        with pytest.raises(RuntimeError):
            y.sum().backward()


def test_parameter_that_is_an_input_changed_between_forward_and_backward_is_an_error_that_names_it():
    w = nn.Parameter(torch.randn(3))
    y = checkpointed(lambda x, *, w: (x * w).sin(), region_name="block")(leaf(3), w=w)
    change(w)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    assert_names(caught.value, "w")


def test_parameter_changed_after_a_kept_graphs_first_backward_is_an_error():
    w = nn.Parameter(torch.randn(3, 3))
    y = checkpointed(lambda x: (x @ w).sin() @ w)(leaf(3, 3))
    y.sum().backward(retain_graph=True)
    change(w)
    with pytest.raises(RuntimeError):
        y.sum().backward()


def test_state_is_clean_and_the_next_region_right_after_a_mutation_error():
    x = leaf(3) * 1
    y = checkpointed(chain)(x)
    change(x)
    with pytest.raises(remat.MutationError):
        y.sum().backward()
    assert not remat.is_recomputing()
    x = leaf(3)
    assert_same(torch.autograd.grad(checkpointed(chain)(x).sum(), x), torch.autograd.grad(chain(x).sum(), x))


def test_messages_say_what_to_do():
    x = leaf(3) * 1
    y = checkpointed(chain, region_name="layers.3")(x)
    change(x)
    with pytest.raises(remat.MutationError) as caught:
        y.sum().backward()
    text = str(caught.value)
    assert text.startswith("layers.3")
    assert re.search("in[- ]place", text)
    assert caught.value.remedy
    assert caught.value.remedy in text


@pytest.mark.parametrize("way", ["plain", "policy", "native", "call"])
def test_a_leaf_that_changes_after_its_cast_was_read_is_an_error(way):
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), leaf(4, 4)

    def block(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ weight
        with torch.no_grad():
            weight.mul_(1.5)
        return y

    def named(x):
        call = {"native": lambda: remat.native_save_region("k", block, x), "call": lambda: remat.op(block, "k")(x)}
        return call.get(way, lambda: block(x))()

    options = {"policy": lambda *_, **__: remat.CheckpointPolicy.RECOMPUTE} if way == "policy" else {}
    y = remat.checkpoint(**options)(named)(x)
    with pytest.raises(remat.MutationError):
        y.float().sum().backward()


@pytest.mark.parametrize("wrap", [lambda x: (x,), lambda x: ([x],)], ids=["argument", "in a list"])
def test_input_that_the_region_itself_changes_is_an_error_that_says_so(wrap):
    def block(x):
        x = x[0] if isinstance(x, list) else x
        y = x.sin()
        x.add_(1)
        return y.exp() * x

    x = torch.ones(4)
    w = leaf(4)
    y = checkpointed(lambda x, w: block(x) * w)(*wrap(x), w)
    with pytest.raises(remat.MutationError, match="the region itself modified this input in place"):
        y.sum().backward()


def test_input_that_is_changed_after_the_region_is_an_error_that_says_so():
    x, w = torch.ones(4), leaf(4)
    y = checkpointed(lambda x, w: (x * w).sin())(x, w)
    x.add_(1)
    with pytest.raises(remat.MutationError, match="modified in place after the region was called"):
        y.sum().backward()
