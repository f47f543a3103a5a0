"""What may come out of a region, and what the caller may do with it."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserList, defaultdict, deque, namedtuple

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.helpers import LiveStorages, assert_same, assert_same_program, checkpointed, collector_off, leaf

Pair = namedtuple("Pair", ["one", "two"])


@dataclasses.dataclass
class Result:
    y: torch.Tensor


class MyTuple(tuple):
    __slots__ = ()


class MyDict(dict):
    pass


STRUCTURES = {
    "tensor": lambda a, b: a,
    "tuple": lambda a, b: (a, b),
    "one": lambda a, b: (a,),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, 3: b},
    "deep": lambda a, b: {"x": [(a, {"y": [b]}), a], (1, 2): ()},
    "empty": lambda a, b: [(), [], {}, a],
}


def shape_of(tree):
    """Return a tree's structure with tensors replaced by their type."""
    if isinstance(tree, dict):
        return {key: shape_of(value) for key, value in tree.items()}
    return type(tree)(map(shape_of, tree)) if isinstance(tree, (tuple, list)) else type(tree)


@pytest.mark.parametrize("name", STRUCTURES)
def test_tensors_in_builtin_containers_come_out_as_they_are(name):
    structure = STRUCTURES[name]
    shapes = []

    def program(wrap):
        x = leaf(3)
        out = wrap(lambda x: structure(x.sin().exp(), x.cos().tanh()))(x)
        shapes.append(shape_of(out))
        y = helpers_sum(out)
        y.backward()
        return out, x.grad

    def helpers_sum(tree):
        if isinstance(tree, torch.Tensor):
            return tree.sum()
        values = list(tree.values()) if isinstance(tree, dict) else list(tree)
        return sum((helpers_sum(value) for value in values), torch.zeros(()))

    assert_same_program(program, replays=1)
    assert shapes[0] == shapes[1] == shape_of(structure(torch.ones(1), torch.ones(1)))


@dataclasses.dataclass
class Slotted:
    __slots__ = ("aside", "y")
    y: torch.Tensor
    aside: object


class Registered:
    def __init__(self, y):
        self.hidden = (y,)

    def __repr__(self):
        return "Registered"


torch.utils._pytree.register_pytree_node(
    Registered, lambda it: (list(it.hidden), None), lambda children, _: Registered(*children)
)


class Plain:
    def __init__(self, y, note):
        self.y, self.note, self.me = y, note, self


def looped(y):
    loop = [y]
    loop.append(loop)
    return loop


# What the function returns, and how to find its tensors again.
RETURNED = {
    "nothing": (lambda y: None, lambda out: []),
    "number": (lambda y: 3, lambda out: []),
    "text": (lambda y: "text", lambda out: []),
    "none in tuple": (lambda y: (y, None), lambda out: [out[0]]),
    "number in dict": (lambda y: {"logits": y, "loss": 0.5}, lambda out: [out["logits"]]),
    "deep": (lambda y: {"a": [y, (y, [True, "t", y])]}, lambda out: [out["a"][0], out["a"][1][1][2]]),
    "named tuple": (lambda y: [1, Pair(y, None)], lambda out: [out[1].one]),
    "result of max": (lambda y: y.max(0), lambda out: [out.values]),
    "ordered dict": (lambda y: OrderedDict(y=y, n=1), lambda out: [out["y"]]),
    "default dict": (lambda y: (defaultdict(list, y=y), None), lambda out: [out[0]["y"]]),
    "subclass of tuple": (lambda y: MyTuple([y]), lambda out: [out[0]]),
    "subclass of dict": (lambda y: {"d": MyDict(y=y)}, lambda out: [out["d"]["y"]]),
    "user list": (lambda y: UserList([y]), lambda out: [out[0]]),
    "deque": (lambda y: deque([y, 2]), lambda out: [out[0]]),
    "set": (lambda y: {y}, lambda out: list(out)),
    "dataclass": (lambda y: {"r": Result(y)}, lambda out: [out["r"].y]),
    "dataclass with slots": (lambda y: Slotted(y, None), lambda out: [out.y]),
    "registered pytree": (lambda y: Registered(y), lambda out: list(out.hidden)),
    "object": (lambda y: (Plain(y, "n"), y * 2), lambda out: [out[0].y, out[1]]),
    "generator": (lambda y: (row for row in (y, y * 3)), list),
    "itself inside": (looped, lambda out: [out[0]]),
}


@pytest.mark.parametrize("name", RETURNED)
def test_whatever_a_plain_function_may_return_a_region_may_return(name):
    function, tensors_in = RETURNED[name]
    shown = []

    def program(wrap):
        x = leaf(2, 3)
        out = wrap(lambda x: function(x.sin().exp()))(x)
        shown.append((type(out), repr(out) if name in ("nothing", "number", "text") else ""))
        found = tensors_in(out)
        total = sum((y.exp().sum() for y in found), x.sum())
        total.backward()
        return found, x.grad

    replays = {"nothing": 0, "number": 0, "text": 0}.get(name, 1)
    assert_same_program(program, replays=replays)
    assert shown[0] == shown[1]


@pytest.mark.parametrize("name", RETURNED)
def test_output_of_any_kind_is_replayed_once_when_backward_needs_a_tensor(name):
    function, tensors_in = RETURNED[name]
    order = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            order.append("backward")
            return grad * 2

    def block(x):
        if remat.is_recomputing():
            order.append("replay")
        return function(Noted.apply(x.sin().exp()))

    found = tensors_in(checkpointed(block)(leaf(2, 3)))
    for y in found[:1]:
        y.sum().backward()
    # The op that reads an index out of `max` saves it, and comes first.
    assert order == ([] if not found else ["replay", "backward"] if name == "result of max" else ["backward", "replay"])


@pytest.mark.parametrize("name", RETURNED)
def test_output_of_any_kind_comes_out_where_no_gradients_are_recorded(name):
    function, tensors_in = RETURNED[name]
    with torch.no_grad():
        out = checkpointed(function)(leaf(2, 3))
    assert type(out) is type(function(torch.ones(2, 3)))
    assert all(isinstance(y, torch.Tensor) for y in tensors_in(out))


@pytest.mark.parametrize("name", [name for name in RETURNED if name not in ("object", "itself inside")])
def test_output_of_any_kind_takes_the_region_with_it_when_it_dies(name):
    function, _ = RETURNED[name]
    x = leaf(2, 3)
    with collector_off(), LiveStorages() as live:
        out = checkpointed(lambda x: function(x.sin().exp()))(x)
        del out
        assert live.count() == 0


def test_output_of_a_transformers_layer_is_what_it_is_without_a_region():
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def program(wrap):
        x = leaf(2, 3)
        out = wrap(lambda x: outputs.BaseModelOutputWithPast(last_hidden_state=x.sin().exp(), past_key_values=None))(x)
        assert type(out) is outputs.BaseModelOutputWithPast
        out.last_hidden_state.sum().backward()
        return out.last_hidden_state, x.grad

    assert_same_program(program, replays=1)


def unsaved_end(x):
    """The last op saves nothing, so plain autograd lets the caller change the output."""
    return x.sin().exp() + x


CALLER_CHANGES = {
    "mul_": lambda y, x: y.mul_(2),
    "add_ input": lambda y, x: y.add_(x),
    "mul_ input": lambda y, x: y.mul_(x),
    "twice": lambda y, x: y.mul_(2).add_(x).sin_(),
    "relu_": lambda y, x: nn.functional.relu_(y),
    "inplace dropout": lambda y, x: nn.functional.dropout(y, 0.5, inplace=True),
    "view": lambda y, x: y.view(-1).mul_(3),
    "row": lambda y, x: y[0].mul_(x[1]),
    "row set": lambda y, x: y.__setitem__(0, x[1].cos()),
    "fill": lambda y, x: y[1].fill_(0),
    "transposed": lambda y, x: y.t().add_(1),
    "masked": lambda y, x: y.masked_fill_(x > 0, 0.0),
    "index": lambda y, x: y.index_add_(0, torch.tensor([1]), x[:1]),
    "detached": lambda y, x: y.detach().mul_(2),
    "no_grad": lambda y, x: torch.no_grad()(lambda: y.mul_(2))(),
}


@pytest.mark.parametrize("name", CALLER_CHANGES)
def test_output_changed_in_place_by_the_caller_is_equal(name):
    def program(wrap):
        x = leaf(2, 3)
        y = wrap(unsaved_end)(x)
        CALLER_CHANGES[name](y, x)
        z = wrap(unsaved_end)(y * 1)
        z.sum().backward()
        return y, z, x.grad

    assert_same_program(program, replays=2)


@pytest.mark.parametrize("view", [lambda h: h.view(-1), lambda h: h.t(), lambda h: h[1], lambda h: h[:, ::2]])
def test_output_that_is_a_view_of_an_inner_tensor_changed_by_the_caller_is_equal(view):
    def program(wrap):
        x = leaf(3, 4)
        y = wrap(lambda x: view(unsaved_end(x)))(x)
        y.mul_(2)
        y.sum().backward()
        return y, x.grad

    assert_same_program(program, replays=1)


def test_two_outputs_that_share_memory_one_changed_by_the_caller_are_equal():
    def program(wrap):
        def block(x):
            h = unsaved_end(x)
            return h, h[0]

        x = leaf(3, 4)
        whole, row = wrap(block)(x)
        row.mul_(x[1])
        whole.add_(1)
        (whole.sum() + row.exp().sum()).backward()
        return whole, row, x.grad

    assert_same_program(program, replays=1)


def test_output_that_its_producer_saved_and_the_caller_changes_is_never_silently_wrong():
    x = leaf(3)
    y = checkpointed(lambda x: x.sin().exp())(x)
    y.mul_(2)
    try:
        (actual,) = torch.autograd.grad(y.sum(), x)
    except RuntimeError:
        return
    (expected,) = torch.autograd.grad((x.sin().exp() * 2).sum(), x)
    assert_same(expected, actual)


def test_several_backwards_over_an_output_changed_in_place_are_equal():
    def program(wrap):
        x = leaf(2, 3)
        y = wrap(unsaved_end)(x)
        y[0].mul_(x[1])
        y.relu_()
        results = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(2)]
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.square().sum().backward()
        return y, results, first, x.grad

    assert_same_program(program)


OUTPUTS = {
    "input": lambda x, w: x,
    "input and more": lambda x, w: (x, x.sin().exp()),
    "input twice": lambda x, w: [x, x, x.sin() * w],
    "view of input": lambda x, w: (x.view(-1), x.t(), (x * w).sin()),
    "slice of input": lambda x, w: {"row": x[0], "rest": x[1:].exp()},
    "detached input": lambda x, w: (x.detach(), x.sin()),
    "parameter": lambda x, w: (w, (x * w).sin()),
    "view of parameter": lambda x, w: (w.view(-1), (x * w).sin()),
    "same twice": lambda x, w: [h := (x * w).sin().exp(), h],
    "views of one": lambda x, w: list((x * w).sin().exp().unbind()),
    "chunks": lambda x, w: (x * w).sin().exp().chunk(2, dim=1),
    "no gradient": lambda x, w: (x.sin().exp(), (x > 0), x.argmax(-1), torch.ones(2)),
    "constant": lambda x, w: (torch.arange(3), (x * w).exp()),
    "expanded": lambda x, w: (x.sum() * w.sum()).sin().expand(2, 2),
    "complex": lambda x, w: torch.complex(x.sin(), w.cos()).exp(),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_inputs_or_views_are_equal(name):
    def program(wrap):
        base, w = leaf(2, 4), nn.Parameter(torch.randn(2, 4))
        x = base * 1
        out = wrap(OUTPUTS[name])(x, w)
        flat = [out] if isinstance(out, torch.Tensor) else list(out.values()) if isinstance(out, dict) else list(out)
        total = sum(y.abs().sin().sum() for y in flat if y.requires_grad)
        total.backward()
        return flat, base.grad, w.grad if w.grad is not None else torch.zeros(())

    assert_same_program(program)


def test_input_that_is_returned_is_the_same_object():
    x, w = leaf(3) * 1, nn.Parameter(torch.randn(3))
    same, parameter, y = checkpointed(lambda x: (x, w, (x * w).sin()))(x)
    assert same is x
    assert parameter is w
    assert y.grad_fn is not None


def test_output_has_no_node_more_than_without_a_region():
    x = leaf(3, 4)

    def names(y):
        found, todo = [], [y.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None:
                found.append(node.name())
                todo.extend(next_node for next_node, _ in node.next_functions)
        return found

    assert names(checkpointed(unsaved_end)(x)) == names(unsaved_end(x))
    y = checkpointed(lambda x: x.sin().exp().t())(x)
    assert y._base is not None
    assert not checkpointed(unsaved_end)(x)._is_view()


def test_output_that_is_a_leaf_made_inside_is_left_alone():
    made = []

    def block(x):
        fresh = torch.ones(3, requires_grad=True)
        made.append(fresh)
        return fresh, (x * fresh).sin()

    x = leaf(3)
    fresh, y = checkpointed(block)(x)
    assert fresh is made[0]
    try:
        y.sum().backward()
    except remat.RematError:
        return  # replay makes another leaf: an error is as good as the right gradient
    assert_same([x.grad, fresh.grad], torch.autograd.grad((x * made[0]).sin().sum(), [x, made[0]]))
