"""Ops of all kinds in the block of a budget, against plain PyTorch, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_remat as remat

Program = Callable[[], Any]


def _start() -> None:
    torch.manual_seed(3)


def same(program: Program, limit: int = 1_000_000, **options: Any) -> remat.dtr.Runtime:
    """Run a program plainly and in a budget; all results and the random state must be equal bit for bit."""
    _start()
    expected, state = program(), torch.get_rng_state()
    _start()
    with remat.dtr.budget(limit, **options) as runtime:
        got = program()
    assert torch.equal(state, torch.get_rng_state())
    flat, flat_expected = _flat(got), _flat(expected)
    assert len(flat) == len(flat_expected)
    for one, two in zip(flat, flat_expected, strict=True):
        if isinstance(two, torch.Tensor):
            assert not isinstance(one, remat.dtr.EvictableTensor)
            assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
            assert torch.equal(one, two)
        else:
            assert one == two
    assert runtime.peak_bytes <= limit
    return runtime


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _flat(part)]
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [value]


def pressed(program: Program) -> remat.dtr.Runtime:
    """Compare with everything evicted before each op that may be."""
    _start()
    expected, state = program(), torch.get_rng_state()
    _start()
    with remat.dtr.budget(10**9) as runtime, EvictAll(runtime):
        got = program()
    assert torch.equal(state, torch.get_rng_state())
    for one, two in zip(_flat(got), _flat(expected), strict=True):
        if isinstance(two, torch.Tensor):
            assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
            assert torch.equal(one, two)
        else:
            assert one == two
    return runtime


class EvictAll(torch.utils._python_dispatch.TorchDispatchMode):
    """Evicts all that can be evicted before each op."""

    def __init__(self, runtime: remat.dtr.Runtime) -> None:
        super().__init__()
        self._memory = runtime._memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in list(self._memory.storages):
            if storage.place >= 0:
                self._memory.evict(storage)
        return func(*args, **(kwargs or {}))


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def views() -> Any:
    x = torch.randn(6, 8)
    a, b = x.chunk(2, 1)
    c = a.t().reshape(-1)[3:9].unsqueeze(0).expand(4, 6)
    d = torch.stack([c, c * 2]).transpose(0, 1).flatten(1)
    return d, b.diagonal(), x.unfold(0, 2, 1) + 1, x.view(torch.int32) * 1


def write_through_views() -> Any:
    x = torch.randn(4, 6) * 2
    row, column, whole = x[1], x[:, 2], x.view(-1)
    y = x * 3
    row.mul_(2)
    column.add_(row.sum())
    whole[5:9].zero_()
    x.t_()
    z = x + 1
    whole.copy_(torch.arange(24.0))
    return x, row, column, whole, y, z


def writes_in_a_row() -> Any:
    x = torch.randn(5, 5)
    before = x.exp()
    x.add_(1).mul_(2).sigmoid_()
    between = x.exp()
    x.relu_().sub_(before)
    return x, before, between


def resize_and_out() -> Any:
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    out = torch.empty(3, 4)
    torch.add(a, b, out=out)
    part = torch.zeros(6, 4)
    torch.mul(a, b, out=part[2:5])
    grown = torch.empty(0)
    torch.sub(a, b, out=grown)
    values, indices = torch.empty(3), torch.empty(3, dtype=torch.long)
    torch.max(a, 1, out=(values, indices))
    return out, part, grown, values, indices


def random_ops() -> Any:
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(4, 4)
    b = torch.rand(4, 4, generator=generator)
    c = F.dropout(a, 0.5) + torch.bernoulli(b) + torch.randperm(4)
    d = torch.empty(3).normal_() + torch.multinomial(b[0], 3)
    e = torch.rand_like(c).uniform_(1, 2)
    return a, b, c, d, e, generator.get_state()


def control_flow() -> Any:
    x = torch.randn(10)
    total = 0.0
    for value in x:
        if value > 0:
            total += value.item()
        else:
            x = x * 1.5
    positive = x[x > 0]
    return x, total, positive.shape[0], positive.tolist(), torch.nonzero(x > 0), bool((x > 0).any()), int(x.argmax())


def containers() -> Any:
    made = {"a": [torch.ones(2) * at for at in range(3)], "b": (torch.cat([torch.zeros(2), torch.ones(3)]),)}
    top = torch.randn(4, 6).topk(2)
    return made, torch.split(torch.arange(10) * 2, [3, 7]), (top.values, top.indices)


def dtypes() -> Any:
    x = torch.randn(4, 4)
    z = torch.complex(x, x + 1)
    return x.double().half().float(), x.to(torch.int32), x.to("cpu"), z.conj() * 2, z.imag.neg() + 1, z.real.sum()


def gradients() -> Any:
    w, v = _leaf(6, 6), _leaf(6)
    x = torch.randn(3, 6)
    h = torch.tanh(x @ w + v)
    loss = (F.dropout(h, 0.3) * h.relu()).sum() + (w * w).mean()
    loss.backward()
    loss2 = (x @ w).logsumexp(0).sum()
    loss2.backward()
    return loss, w.grad, v.grad


def double_backward() -> Any:
    w, x = _leaf(5, 5), torch.randn(4, 5)
    y = torch.tanh(x @ w)
    (g,) = torch.autograd.grad(y.pow(2).sum(), w, create_graph=True)
    (g.norm() + g.exp().mean()).backward()
    return w.grad, g.detach()


def accumulated_with_graph() -> Any:
    w = _leaf(4)
    (w.exp().sum()).backward(create_graph=True)
    (w.grad.pow(2).sum()).backward()
    return w.grad.detach()


def parameters_written() -> Any:
    w = torch.nn.Parameter(torch.randn(4, 4))
    kept = []
    for _ in range(3):
        h = torch.tanh(torch.ones(2, 4) @ w)
        loss = h.sum()
        loss.backward()
        kept += [h.detach(), loss.detach()]
        with torch.no_grad():
            w.sub_(w.grad, alpha=0.1)
            w.grad.zero_()
    return w.detach(), kept


def optimizers() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return losses, [value.detach() for value in model.state_dict().values()]


def modules_made_inside() -> Any:
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 3), torch.nn.GroupNorm(1, 3), torch.nn.GELU())
    model(torch.randn(2, 2, 8)).sum().backward()
    return [parameter.detach() for parameter in model.parameters()], [p.grad for p in model.parameters()]


def foreach() -> Any:
    xs = [torch.randn(3) for _ in range(3)]
    ys = torch._foreach_add(xs, 1.0)
    torch._foreach_mul_(ys, xs)
    return xs, ys


def autocast() -> Any:
    w = _leaf(8, 8)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = (x @ w).relu()
        out = F.linear(h, w)
    loss = out.float().sum()
    loss.backward()
    return h.detach(), out.detach(), w.grad


def sorting_and_indexing() -> Any:
    x = torch.randn(6, 5)
    x[0, 1:3] = 7
    x[torch.tensor([1, 3])] += 1
    x.index_add_(0, torch.tensor([0, 2]), torch.ones(2, 5))
    values, order = x.sort(1)
    return x, values, order, x.gather(1, order), x.cumsum(0), x.scatter(1, order, values), torch.where(x > 0, x, 0)


PROGRAMS = [
    views, write_through_views, writes_in_a_row, resize_and_out, random_ops, control_flow, containers, dtypes,
    gradients, double_backward, accumulated_with_graph, parameters_written, optimizers, modules_made_inside, foreach,
    autocast, sorting_and_indexing,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_ops_in_a_block_equal_plain_pytorch(program: Program) -> None:
    same(program)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_ops_equal_plain_pytorch_where_everything_is_evicted_before_each_op(program: Program) -> None:
    runtime = pressed(program)
    assert runtime.rematerializations > 0 or program in (foreach,)


@pytest.mark.parametrize("deallocation", ["eager", "ignore", "banish"])
@pytest.mark.parametrize("program", [gradients, write_through_views, random_ops])
def test_each_rule_of_deallocation_gives_the_same_results(program: Program, deallocation: str) -> None:
    same(program, deallocation=deallocation)


def _random_program(seed: int) -> Program:
    """Return a program that draws ops on a pool of tensors: views, writes, random numbers, reductions, gradients."""

    def program() -> Any:
        draw = random.Random(seed)
        weight = _leaf(4, 4)
        pool = [torch.randn(4, 4), torch.randn(4, 4) @ weight]
        for _ in range(25):
            x, y = draw.choice(pool), draw.choice(pool)
            act = draw.randrange(12)
            if act == 0:
                x = x.t()
            elif act == 1:
                x = x[: draw.randint(2, 4)].clone().repeat(2, 1)[:4]
            elif act == 2:
                x = x * 1.01
                x.add_(y.detach().mean())
            elif act == 3:
                x = (x + 0).reshape(2, 8)
                x[draw.randrange(2)].mul_(0.5)
                x = x.view(4, 4)
            elif act == 4:
                x = F.dropout(x, 0.4)
            elif act == 5:
                x = torch.tanh(x @ y)
            elif act == 6:
                x = torch.cat([x[:2], y[2:]])
            elif act == 7:
                x = x.detach().clone()
                x[:, draw.randrange(4)] = torch.rand(4)
            elif act == 8:
                with torch.no_grad():
                    weight.mul_(1.0)
                x = x + 1
            elif act == 9:
                x = x.chunk(2)[1].repeat(2, 1).sigmoid_()
            elif act == 10:
                x = x + float(y.detach().max())
            else:
                x = F.layer_norm(x + torch.randn(4, 1), (4,))
            pool.append(x)
            if len(pool) > 8:
                pool.pop(draw.randrange(8))
        loss = torch.stack([one.sum() for one in pool]).sum() + (weight * pool[-1].detach()).sum()
        try:
            loss.backward()
        except RuntimeError as error:  # a tensor that was saved has been written: so it is in plain PyTorch
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            return [one.detach() for one in pool]
        return [one.detach() for one in pool], loss.detach(), weight.grad

    return program


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_equal_plain_pytorch_in_tiny_budgets(seed: int) -> None:
    program = _random_program(seed)
    pressed(program)
    heuristic = ("dtr_eq", "random", "lru")[seed % 3]
    for limit in (3000, 2000, 1500):
        needed = _needed_bytes(program, limit, heuristic)
        if needed:
            assert needed > limit
            break


def _needed_bytes(program: Program, limit: int, heuristic: str) -> int:
    """Run a program in a budget; return 0 if it fits, else what the error says that it needs."""
    try:
        same(program, limit, heuristic=heuristic)
    except remat.dtr.BudgetError as error:
        return error.needed_bytes
    return 0
