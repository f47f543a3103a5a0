"""Every way of keeping, among graphs, nested regions, torch's checkpoint, saved-tensor hooks and threads.

Gradients are those of plain autograd, what is kept is not recomputed, and nothing stays behind.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import (
    LiveStorages,
    assert_same,
    in_threads,
    leaf,
    name_of,
    pairwise,
    plain,
)
from tests.native_programs import (
    full,
    sac,
    uncollected,
)
from tests.ways import BY_HANDLE, KEEPING, WAYS, assert_same_in


@pytest.fixture(autouse=True)
def _warm():
    with LiveStorages():
        leaf(1).detach().sin()


def body(h, w):
    return (h @ w).sin() * h.cos()


def block(way, x, w, name="a"):
    """Whatever reads a kept result is kept as well."""
    given = F.dropout(x * 2, 0.2)
    h = way.keep(name, body, given, w)
    h = way.keep(f"{name}2", lambda h, w: (h.exp() @ w).tanh(), h, w)
    return way.keep(f"{name}3", torch.mul, h, F.dropout(given.cos(), 0.2))


def once(way, x, w):
    return way.region(lambda x: block(way, x, w))(x)


def twice(way, x, w):
    def outer(x):
        h = way.keep("cos", torch.cos, block(way, x, w, "outer"))
        return once(way, h, w) * x.sin()

    return way.region(outer)(x)


def inside_torchs(way, x, w):
    return (full if way.options is not None else plain)(lambda x: once(way, x.sin(), w).exp() * x)(x)


def around_torchs(way, x, w):
    theirs = full if way.options is not None else plain
    return way.region(lambda x: block(way, theirs(lambda h: (h @ w).sin().exp())(x), w))(x)


def inside_sac(way, x, w):
    theirs = sac([torch.ops.aten.mm.default]) if way.options is not None else plain
    return theirs(lambda x: once(way, x @ w, w).cos())(x)


def under_hooks(way, x, w):
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        return once(way, x, w)


def around_hooks(way, x, w):
    def hooked(h):
        with saved_tensors_hooks(lambda tensor: tensor.detach() + 1, lambda tensor: tensor - 1):
            return h.sin()

    return way.region(lambda x: way.keep("b", torch.mm, way.keep("hooked", hooked, x * 2), w))(x)


def levels(pattern):
    """Return regions in each other, a letter a level: `o` for ours, `t` for torch's, `r` for torch's reentrant one."""

    def shape(way, x, w):
        wraps = {"o": way.region, "t": way.torchs, "r": lambda f: partial(torch_checkpoint, f, use_reentrant=True)}

        def level(x, left):
            h = way.keep(f"before {left}", lambda x, w: (x @ w).sin(), x, w)
            for _ in range(1 + (left == "oo")):
                h = wraps[left[0]](level)(h, left[1:]) if left else h
            return way.keep(f"after {left}", lambda h, w: (h @ w).tanh(), h, w)

        return wraps[pattern[0]](level)(x * 1, pattern[1:])

    shape.__name__ = pattern
    return shape


OURS = levels("ooooo")
WITH_TORCHS = [inside_torchs, around_torchs, *map(levels, ["oto", "tot"])]
SHAPES = [once, twice, OURS, inside_sac, under_hooks, around_hooks, *WITH_TORCHS]


def backward_once(y, leaves):
    return torch.autograd.grad(y.sum(), leaves)


def backward_again(y, leaves):
    return [torch.autograd.grad(y.sum(), leaves, retain_graph=keeps) for keeps in (True, True, False)]


def backward_in_parts(y, leaves):
    return [torch.autograd.grad(y[row].sum(), leaves, retain_graph=row < 2) for row in range(3)]


def backward_in_one_group(y, leaves):
    with GraphExecGroup():
        return [torch.autograd.grad(y[row].sum(), leaves, retain_graph=row == 0) for row in (0, 1)]


def backward_of_second_order(y, leaves):
    first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
    return first, torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True)


def backward_in_another_thread(y, leaves):
    results = []
    in_threads(lambda _: results.append(torch.autograd.grad(y.sum(), leaves)), 1)
    return results


BACKWARDS = [
    backward_once,
    backward_again,
    backward_in_parts,
    backward_in_one_group,
    backward_of_second_order,
    backward_in_another_thread,
]


def takes(way, shape, backward):
    """Return whether it is promised: SAC replays once, torch's checkpoint once in a group, `ByHandle` has one order."""
    if shape is inside_sac:
        return backward is backward_once
    if shape in WITH_TORCHS and backward is backward_in_one_group:
        return False
    if way is BY_HANDLE and shape.__name__ in ("oto", "tot"):
        return False  # torch's reads no placeholder
    return way is not BY_HANDLE or backward is not backward_of_second_order


@pairwise(
    way=WAYS,
    shape=SHAPES,
    backward=BACKWARDS,
    early_stop=[True, False],
    possible=lambda early_stop, **row: takes(**row),
    ids=lambda value: name_of(value) or str(value),
)
def test_gradients_and_draws_are_those_of_plain_autograd(way, shape, backward, early_stop):
    results = []
    for options in (None, {**way.options, "early_stop": early_stop}):
        one = dataclasses.replace(way, options=options)
        torch.manual_seed(3)
        x, w = leaf(3, 3), leaf(3, 3)
        y = shape(one, x, w)
        results.append([y.detach(), backward(y, [x, w]), torch.rand(2)])
    assert_same(*results)


@pairwise(way=WAYS, pattern=["or", "ro"], possible=lambda way, pattern: way is not BY_HANDLE or pattern == "ro")
def test_torchs_reentrant_checkpoint_around_regions_and_inside_them(way, pattern):
    def program(way):
        x, w = leaf(3, 3), leaf(3, 3)
        y = levels(pattern)(way, x, w)
        y.sum().backward()
        return y, x.grad, w.grad

    assert_same_in(way, program)


@pytest.mark.parametrize("way", KEEPING, ids=str)
def test_what_is_kept_is_not_recomputed(way):
    def function(x):
        return way.keep("reads it", torch.exp, way.keep("kept", lambda h: h.erf().sin(), x.cos())) + x.sinh()

    seen = Counter()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[func.overloadpacket.__name__, remat.is_recomputing()] += 1
            return func(*args, **(kwargs or {}))

    with Seen():
        way.region(function)(leaf(4)).sum().backward()
    assert seen["cos", True] == 1
    assert seen["sin", True] == seen["exp", True] == 0


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_regions_in_several_threads_at_once(way):
    def work(way):
        generator = torch.Generator().manual_seed(3)
        x, w = (torch.randn(3, 3, generator=generator, requires_grad=True) for _ in range(2))

        def function(x):
            h = way.keep("a", body, x, w)
            return way.keep("c", torch.tanh, way.keep("b", lambda h, w: (h.exp() @ w).cos(), h, w))

        for _ in range(5):
            y = way.region(function)(x)
            results = [y.detach(), *torch.autograd.grad(y.sum(), [x, w])]
        return results

    expected, actual = work(dataclasses.replace(way, options=None)), {}
    in_threads(lambda place: actual.update({place: work(way)}), 4)
    for place in range(4):
        assert_same(expected, actual[place])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_dropped_graph_frees_everything(way):
    x, w = leaf(3, 3), leaf(3, 3)
    with uncollected():
        with LiveStorages() as live:
            y = once(way, x, w)
        assert live.bytes() >= y.nbytes
        del y
        assert live.bytes() == 0
