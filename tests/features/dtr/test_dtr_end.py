"""The end of a budget's block: what was made inside becomes plain, and autograd notices no difference."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

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


def tangents(block: Block) -> list[Any]:
    with forward_ad.dual_level():
        with block():
            result = forward_ad.make_dual(torch.ones(3), torch.arange(3.0)).sin()
        return [forward_ad.unpack_dual(result * 2).tangent, result.tolist()]


def lazy_conjugates_and_real_views(block: Block) -> list[Any]:
    with block():
        a = torch.randn(3, dtype=torch.cfloat) * 2
        real = torch.view_as_real(a)
        conjugate = a.conj()
        imaginary = conjugate.imag
        alone = (a * 2).conj()
    _assert_plain(a, real, conjugate, imaginary, alone)
    real.mul_(2)
    return [a, real, conjugate.tolist(), imaginary.tolist(), alone.tolist(), imaginary.is_neg(), alone.is_conj()]


def copies(block: Block) -> list[Any]:
    with block():
        made = torch.arange(9.0).view(3, 3).tanh()
    copied = [copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.nn.Parameter(made)]
    _assert_plain(made, *copied)
    return [made, *copied, made.tolist(), made.numpy().tolist(), f"{made[0, 1]:.9f}"]


PROGRAMS = [
    inputs_that_the_graph_saved, views_with_a_grad_fn, views_without_a_grad_fn, tangents,
    lazy_conjugates_and_real_views, copies,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # in torch's own make_dual
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


def test_a_view_that_the_graph_has_used_is_reported_and_right() -> None:
    runtimes = []

    def program(block: Block) -> list[Any]:
        w = torch.ones(3, 4, requires_grad=True)
        with block() as runtime:
            a = (w * 2).sin()
            t = a.t()
            loss = (t + 1).sum()
        runtimes.append((runtime, a, t))
        inside = torch.autograd.grad(loss, (t, w), retain_graph=True)
        t.mul_(torch.arange(3.0))
        a.sin().sum().backward()
        return [*inside, w.grad, a, t, a.tolist(), f"{a[0, 0]:.3f}"]

    _same_as_without_a_block(program)
    runtime, a, t = runtimes[1]
    assert {id(tensor) for tensor in runtime.left} == {id(a), id(t)}
    assert "2 tensors are not plain" in runtime.report()
    _assert_plain(torch.nn.Parameter(a.detach()))
    del runtimes[:], a, t
    assert not runtime.left


def test_leaves_of_the_block_that_the_graph_holds_get_their_gradients_and_can_be_copied() -> None:
    def program(block: Block) -> list[Any]:
        with block():
            layer = torch.nn.Linear(3, 3)
            x = torch.randn(2, 3, requires_grad=True)
            loss = layer(x).square().sum()
            loss.backward(retain_graph=True)
            first = x.grad
        assert x.grad is first
        _assert_plain(x.grad, layer.weight.grad)
        loss.backward()
        twin = copy.deepcopy(layer)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for copied in (twin, loaded):
            assert type(copied.weight) is torch.nn.Parameter
            assert copied.weight.requires_grad
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        return [layer.weight, layer.weight.grad, x.grad, x.tolist(), twin.weight, twin.weight.grad, loaded.weight]

    _same_as_without_a_block(program)


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
