"""What may come out of a region, and what the caller may do with it."""

from __future__ import annotations

import dataclasses
from collections import deque, namedtuple

import pytest
import torch
from torch import nn

from tests.handle_ops import KERNELS, SAVE, STYLES, Gather, Trace, as_tuple, call
from tests.helpers import LiveStorages, assert_same, assert_same_program, checkpointed, collector_off, leaf, pairwise

Pair = namedtuple("Pair", ["one", "two"])


@dataclasses.dataclass
class Result:
    y: torch.Tensor


class MyTuple(tuple):
    __slots__ = ()


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
    "deep": (lambda y: {"a": [y, (y, [True, "t", y])]}, lambda out: [out["a"][0], out["a"][1][1][2]]),
    "named tuple": (lambda y: [1, Pair(y, None)], lambda out: [out[1].one]),
    "subclass of tuple": (lambda y: MyTuple([y]), lambda out: [out[0]]),
    "deque": (lambda y: deque([y, 2]), lambda out: [out[0]]),
    "set": (lambda y: {y}, lambda out: list(out)),
    "dataclass": (lambda y: {"r": Result(y)}, lambda out: [out["r"].y]),
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
        shown.append((type(out), repr(out) if name in ("nothing", "number") else ""))
        found = tensors_in(out)
        total = sum((y.exp().sum() for y in found), x.sum())
        total.backward()
        return found, x.grad

    assert_same_program(program, replays=0 if name in ("nothing", "number") else 1)
    assert shown[0] == shown[1]
    x = leaf(2, 3)
    with collector_off(), LiveStorages() as live:
        out = checkpointed(lambda x: function(x.sin().exp()))(x)
        assert type(out) is shown[0][0]
        del out
        assert live.count() == 0 or name in ("object", "itself inside")  # they hold themselves


def test_output_that_its_producer_saved_may_be_changed_by_the_caller():
    """Plain autograd refuses that; replay makes another tensor in its place."""
    x = leaf(3)
    y = checkpointed(lambda x: x.sin().exp())(x)
    y.mul_(2)
    assert_same(torch.autograd.grad((x.sin().exp() * 2).sum(), x), torch.autograd.grad(y.sum(), x))


OUTPUTS = {
    "input and more": lambda x, w: (x, x.sin().exp()),
    "view of input": lambda x, w: (x.view(-1), x.t(), (x * w).sin()),
    "detached input": lambda x, w: (x.detach(), x.sin()),
    "parameter": lambda x, w: (w, w.view(-1), (x * w).sin()),
    "same twice": lambda x, w: [h := (x * w).sin().exp(), h],
    "views of one": lambda x, w: list((x * w).sin().exp().unbind()),
    "no gradient": lambda x, w: (x.sin().exp(), (x > 0), x.argmax(-1), torch.ones(2)),
    "complex": lambda x, w: (torch.complex(x.sin(), w.cos()).exp(),),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_inputs_or_views_are_equal(name):
    def program(wrap):
        base, w = leaf(2, 4), nn.Parameter(torch.randn(2, 4))
        x = base * 1
        out = wrap(OUTPUTS[name])(x, w)
        assert name not in ("input and more", "parameter") or out[0] is (w if name == "parameter" else x)
        total = sum(y.abs().sin().sum() for y in out if y.requires_grad)
        total.backward()
        return out, base.grad, w.grad if w.grad is not None else torch.zeros(())

    assert_same_program(program)


def test_output_that_is_a_leaf_made_inside_is_the_leaf_and_gradients_are_right():
    made = []

    def block(x):
        fresh = torch.ones(3, requires_grad=True)
        made.append(fresh)
        return fresh, (x * fresh).sin()

    x = leaf(3)
    fresh, y = checkpointed(block)(x)
    assert fresh is made[0]
    y.sum().backward()
    assert_same([x.grad, fresh.grad], torch.autograd.grad((x * fresh).sin().sum(), [x, fresh]))


def metadata(tensor):
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad, tensor.is_leaf


@pairwise(kernel=KERNELS, style=STYLES)
def test_replay_shows_of_the_outputs_of_a_skipped_op_what_forward_showed(kernel, style):
    shown = []

    def block(x, w):
        second = [torch.tensor([[1, 0, 1]] * 3)] if kernel is Gather else [w]
        outputs = call(style, kernel, Trace(), "it", SAVE, x.sin(), *second[: kernel.arity - 1])
        shown.append((type(outputs) is tuple, [metadata(y) for y in as_tuple(outputs)]))
        constants = [t.detach() for t in (x, *second)]
        outputs = call(style, kernel, Trace(), "constant", SAVE, *constants[: kernel.arity])
        shown.append((type(outputs) is tuple, [metadata(y)[:5] for y in as_tuple(outputs)]))
        return as_tuple(outputs)[0], x.cos().exp()

    y, z = checkpointed(block)(leaf(3, 3), leaf(3, 3))
    assert not y.requires_grad
    z.sum().backward()
    assert len(shown) == 4
    assert shown[:2] == shown[2:]
