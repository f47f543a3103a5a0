"""The end of a budget's block: what was made inside becomes plain, and autograd notices no difference."""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_remat as remat
from tests.helpers import collector_off

Block = Callable[[], Any]
Program = Callable[[Block], list[Any]]


def _in_budget() -> Any:
    return remat.dtr.budget("1 MiB")


def _assert_plain(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert type(tensor) in (torch.Tensor, torch.nn.Parameter)
        assert not tensor._python_dispatch


def _same_as_without_a_block(program: Program) -> None:
    """Run a program, which gets the block as an argument, without one and in one."""
    found = []
    for block in (contextlib.nullcontext, _in_budget):
        torch.manual_seed(0)
        found.append(program(block))
    for at, (one, two) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two, at


def inputs_that_the_graph_saved(block: Block) -> list[Any]:
    w = torch.ones(3, requires_grad=True)
    with block():
        a = (w * 2).sin()
        b = a * w.exp()
        loss = (b * a).sum()
    _assert_plain(a, b, loss)
    inside = torch.autograd.grad(loss, (a, b, w), retain_graph=True)
    both = torch.autograd.grad(loss + (a * b).sum(), (a, b, w), retain_graph=True)
    loss.backward()
    return [*inside, *both, w.grad, a, b]


def views_with_a_grad_fn(block: Block) -> list[Any]:
    w = torch.ones(3, 4, requires_grad=True)
    with block():
        a = (w * 2).sin()
        t, rows = a.t(), a[1:]
    _assert_plain(a, t, rows)
    t.mul_(torch.arange(3.0))
    (a.sin().sum() + rows.exp().sum()).backward()
    return [w.grad, a, t, rows, t._base is a, a._version, rows._version]


def views_without_a_grad_fn(block: Block) -> list[Any]:
    with block():
        a = torch.arange(6.0) + 1
        square = a.view(2, 3)
        row = square[1]
    _assert_plain(a, square, row)
    w = torch.ones(6, requires_grad=True)
    a.mul_(w)
    (row * 2).sum().backward()
    return [w.grad, a, square, row, row._base is a, a._version, row._version]


def copies(block: Block) -> list[Any]:
    with block():
        made = torch.arange(9.0).view(3, 3).tanh()
    copied = [copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.nn.Parameter(made)]
    _assert_plain(made, *copied)
    return [made, *copied, made.tolist(), made.numpy().tolist(), f"{made[0, 1]:.9f}"]


def leaves_without_a_graph(block: Block) -> list[Any]:
    with block():
        layer = torch.nn.Linear(3, 3)
        x = torch.randn(2, 3, requires_grad=True)
        layer(x).square().sum().backward()
        gradient = x.grad
    assert x.grad is gradient
    _assert_plain(x, x.grad, *layer.parameters(), layer.weight.grad)
    results = [x.grad.clone(), layer.weight.grad.clone(), copy.deepcopy(layer).weight]
    layer(x).square().sum().backward()
    return [*results, x.grad, layer.weight.grad]


def used_views_of_a_freed_graph(block: Block) -> list[Any]:
    w = torch.ones(3, 4, requires_grad=True)
    with block():
        a = (w * 2).sin()
        t = a.t()
        loss = t.exp().sum()
        loss.backward()
    _assert_plain(a, t, loss)
    return [w.grad, a, t, loss, t._base is a]


PROGRAMS = [
    inputs_that_the_graph_saved, views_with_a_grad_fn, views_without_a_grad_fn, leaves_without_a_graph,
    used_views_of_a_freed_graph, copies,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_leaves_a_block_is_plain_and_autograd_notices_no_difference(program: Program) -> None:
    _same_as_without_a_block(program)


@pytest.mark.parametrize("detached", [False, True])
def test_writing_what_the_graph_saved_is_an_error_of_backward(detached: bool) -> None:
    w = torch.ones(3, requires_grad=True)
    with _in_budget():
        a = (w * 2).sin()
        alias = a.detach() if detached else a
        loss = (a * w).sum()
    _assert_plain(a, alias, loss)
    alias.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


def _retained() -> list[torch.Tensor]:
    made = torch.ones(3).requires_grad_() * 2
    made.retain_grad()
    return [made, made.exp()]


def _leaf_of_a_graph() -> list[torch.Tensor]:
    made = torch.ones(3, requires_grad=True)
    return [made, (made * 2).sum()]


def _hooked() -> list[torch.Tensor]:
    made = torch.ones(3, requires_grad=True)
    made.register_hook(lambda gradient: gradient)
    return [made]


def _used_view() -> list[torch.Tensor]:
    made = torch.ones(3, 4, requires_grad=True).sin()
    view = made.t()
    return [view, made, view.exp().sum()]


def _real() -> list[torch.Tensor]:
    made = torch.ones(3, dtype=torch.cfloat) * 2
    return [made, torch.view_as_real(made)]


REFUSED = {
    _retained: "retain_grad", _leaf_of_a_graph: "leaf that a graph holds", _hooked: "leaf that a graph holds",
    _used_view: "backward may still come", _real: "another dtype",
}  # fmt: skip


@pytest.mark.parametrize("create", REFUSED, ids=lambda create: create.__name__)
def test_what_cannot_become_plain_is_refused_but_not_its_detached_tensor(create: Callable[[], Any]) -> None:
    with pytest.raises(remat.UsageError, match=f"cannot leave.*{REFUSED[create]}") as caught, _in_budget():
        made = create()
    assert "detach()" in str(caught.value)
    del made
    with _in_budget():
        other = torch.ones(3) * 2
        made = create()[0].detach()
    _assert_plain(other, made)


def test_what_the_graph_holds_lives_as_long_as_the_graph() -> None:
    w = torch.ones(1000, requires_grad=True)
    with collector_off():
        with _in_budget():
            a = (w * 2).sin()
            b = a * w.exp()
            loss = (b * a).sum()
        objects = [weakref.ref(tensor) for tensor in (a, b, loss)]
        memory = [weakref.ref(tensor.untyped_storage()) for tensor in (a, b)]
        node = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr, index]
        saved = weakref.ref(node._saved_other)  # type: ignore[union-attr]
        del a, b, loss
        assert all(reference() is None for reference in objects)
        assert saved() is not None
        del node
        assert saved() is None
        assert all(reference() is None for reference in memory)
