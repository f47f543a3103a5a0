"""Budgets with the rest of PyTorch: hooks, functions, subclasses, custom ops, copies, other modes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_remat as remat
from tests.features.dtr.test_dtr_ops import EvictAll, pressed, same


def hooks() -> Any:
    w = torch.randn(4, 4, requires_grad=True)
    w.register_hook(lambda g: g * 2)
    h = torch.tanh(torch.randn(2, 4) @ w)
    h.retain_grad()
    h.register_hook(lambda g: g + 1)
    (h * h).sum().backward()
    return w.grad, h.grad


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x**3
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return g * 3 * x * x + 0 * y


def custom_function() -> Any:
    w = torch.randn(4, requires_grad=True)
    _Cube.apply(w * 2).sum().backward()
    return w.grad


def func_transforms() -> Any:
    x = torch.randn(3, 4)
    g = torch.func.grad(lambda x: torch.tanh(x).sum())(x)
    v = torch.func.vmap(lambda row: row.softmax(0) * 2)(x)
    j = torch.func.jvp(torch.sin, (x,), (torch.ones(3, 4),))
    return g, v, list(j)


def inference() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    with torch.inference_mode():
        y = model(torch.ones(2, 4)) + 1
        y.add_(1)
        return y.tolist()


def attention() -> Any:
    q = torch.randn(2, 2, 6, 8, requires_grad=True)
    out = F.scaled_dot_product_attention(q, q * 2, q + 1, dropout_p=0.0, is_causal=True)
    out.sum().backward()
    return out.detach(), q.grad


def recurrent_modules() -> Any:
    lstm = torch.nn.LSTM(4, 6, num_layers=2, dropout=0.3)
    out, (h, c) = lstm(torch.randn(5, 2, 4))
    (out.sum() + h.sum() + c.sum()).backward()
    return out.detach(), h.detach(), [p.grad for p in lstm.parameters()]


def copies() -> Any:
    x = torch.randn(3)
    made = copy.deepcopy(x)
    file = io.BytesIO()
    torch.save(x * 2, file)
    file.seek(0)
    loaded = torch.load(file)
    y = x * 3
    array = y.numpy()
    array[0] = 7.0
    return made, loaded, y + 1, array.tolist(), f"{x[0]:.3f}", str(y), float(x.sum())


def sparse_gradients() -> Any:
    table = torch.nn.Embedding(6, 3, sparse=True)
    (table(torch.tensor([1, 1, 4])) * torch.randn(3, 3)).sum().backward()
    return table.weight.grad.to_dense()


@torch.library.custom_op("dtr_tests::scaled", mutates_args=())
def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor + torch.rand_like(x)


@_scaled.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def custom_ops() -> Any:
    x = torch.randn(4)
    return torch.ops.dtr_tests.scaled(x, 2.0) + torch.ops.dtr_tests.scaled(x, 3.0), torch.rand(1)


PROGRAMS = [
    hooks, custom_function, func_transforms, inference, attention, recurrent_modules, copies, sparse_gradients,
    custom_ops,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_rest_of_pytorch_works_in_a_block(program: Any) -> None:
    same(program)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_rest_of_pytorch_works_where_everything_is_evicted(program: Any) -> None:
    pressed(program)


def test_a_subclass_with_tensors_of_the_block_inside() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    w = torch.randn(4, 4, requires_grad=True)
    with remat.dtr.budget("1 MiB"):
        x = TwoTensor(torch.randn(2, 4), torch.randn(2, 4))
        y = torch.tanh(x @ w)
        assert type(y) is TwoTensor
        assert isinstance(y.a, remat.dtr.EvictableTensor)
        y.sum().backward()
    assert w.grad is not None
    assert not isinstance(y.a, remat.dtr.EvictableTensor)
    assert torch.equal(y.a, torch.tanh(x.a @ w))


def test_the_block_counts_plain_gradients_while_they_live() -> None:
    w = torch.ones(100, requires_grad=True)
    with remat.dtr.budget("1 MiB") as runtime:
        (w * 2).sum().backward()
        assert type(w.grad) is torch.Tensor
        assert runtime.live_bytes == 400
        w.grad = None
        assert runtime.live_bytes == 0


def test_ops_that_must_not_run_twice_are_pinned() -> None:
    from torch.distributed import HashStore, all_reduce, destroy_process_group, init_process_group

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with remat.dtr.budget("1 MiB") as runtime:
            x = torch.ones(8) * 3
            y = x * 1
            all_reduce(x)
            z = x + 1
            memory = runtime._memory
            before = runtime.rematerializations
            for storage in list(memory.storages):
                if storage.place >= 0:
                    memory.evict(storage)
            assert z.tolist() == [4.0] * 8
            assert y.tolist() == [3.0] * 8
            assert runtime.rematerializations > before
    finally:
        destroy_process_group()
    assert x.tolist() == [3.0] * 8


def test_what_autograd_still_holds_leaves_as_a_tensor_with_data_and_its_results_are_plain() -> None:
    w = torch.ones(4, 4, requires_grad=True)
    with remat.dtr.budget("1 MiB"):
        h = torch.tanh(torch.ones(2, 4) @ w)
        loss = (h * h).sum()
    for result in (h + 1, h.view(-1) * 2, h.t() @ h, h.detach()[0] + 1, h[1:] - 1, h.unbind()[0] * 2):
        assert type(result) is torch.Tensor
        assert not isinstance(h, remat.dtr.EvictableTensor)
    expected = torch.tanh(torch.ones(2, 4) @ w)
    assert torch.equal(h.t()[1:].contiguous(), expected.t()[1:])
    assert repr(h.detach()) == repr(expected.detach())
    with remat.dtr.budget("1 MiB"):
        again = (h * 2).detach()
    assert torch.equal(again, expected.detach() * 2)
    loss.backward()
    assert type(w.grad) is torch.Tensor


@pytest.mark.parametrize("larger", [1, 5])
def test_what_read_a_tensor_from_outside_before_a_write_keeps_what_it_read(larger: int) -> None:
    outside = torch.arange(32.0)
    with remat.dtr.budget("1 MiB") as runtime, EvictAll(runtime):
        before = outside.repeat(larger) * 2  # smaller than the tensor: pinned; larger: the tensor is copied
        grown = before + 1
        outside.mul_(10)
        outside.view(4, 8)[1].zero_()
        after = outside * 1
        results = [before * 1, grown * 1, after * 1]
    old = torch.arange(32.0).repeat(larger)
    new = torch.arange(32.0) * 10
    new[8:16] = 0
    for result, expected in zip(results, [old * 2, old * 2 + 1, new], strict=True):
        assert torch.equal(result, expected)
    assert torch.equal(outside, new)


def test_training_steps_with_plain_parameters_in_one_block() -> None:
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        kept: list[torch.Tensor] = []

        def train(model: Any = model, optimizer: Any = optimizer, kept: list[torch.Tensor] = kept) -> None:
            for _ in range(3):
                optimizer.zero_grad()
                hidden = model(torch.randn(8, 8))
                loss = hidden.pow(2).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                kept += [hidden.detach(), loss.detach()]

        if inside:
            with remat.dtr.budget("1 MiB") as runtime, EvictAll(runtime):
                train()
            assert runtime.rematerializations > 0
        else:
            train()
        results.append([*kept, *(value.clone() for value in model.state_dict().values()), torch.get_rng_state()])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
