"""Ops and the rest of PyTorch in the block of a budget, against plain PyTorch, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject, seed

import torch_remat as remat
from tests.helpers import assert_same
from tests.programs.program import Program as DrawnProgram
from tests.programs.running import State, run
from tests.programs.soak import options
from tests.programs.strategy import programs

Program = Callable[[], Any]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _flat(part)]
    if isinstance(value, dict):
        return _flat(list(value.values()))
    return [value]


def same(program: Program, limit: int = 10**9, pressed: bool = False, **options: Any) -> remat.dtr.Runtime:
    """Run a program plainly and in a budget; all results and the random state must be equal bit for bit.

    Args:
        program: Returns what is compared.
        limit: The budget.
        pressed: Evict everything that can be evicted before each op.
        **options: Options of the budget.
    """
    torch.manual_seed(3)
    expected, state = _flat(program()), torch.get_rng_state()
    torch.manual_seed(3)
    with remat.dtr.budget(limit, **options) as runtime, EvictAll(runtime) if pressed else contextlib.nullcontext():
        got = program()
        assert runtime.peak_bytes <= limit  # which the end of a block may pass: what is still held comes back
    assert torch.equal(state, torch.get_rng_state())
    for one, two in zip(_flat(got), expected, strict=True):
        if isinstance(two, torch.Tensor):
            assert not isinstance(one, remat.dtr.EvictableTensor)
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


def gradients() -> Any:
    w, v = _leaf(6, 6), _leaf(6)
    x = torch.randn(3, 6)
    h = torch.tanh(x @ w + v)
    loss = (F.dropout(h, 0.3) * h.relu()).sum() + (w * w).mean()
    loss.backward()
    loss2 = (x @ w).logsumexp(0).sum()
    loss2.backward()
    return loss.detach(), w.grad, v.grad


def double_backward() -> Any:
    w, x = _leaf(5, 5), torch.randn(4, 5)
    y = torch.tanh(x @ w)
    (g,) = torch.autograd.grad(y.pow(2).sum(), w, create_graph=True)
    (g.norm() + g.exp().mean()).backward()
    return w.grad, g.detach()


def sorting_and_indexing() -> Any:
    x = torch.randn(6, 5)
    x[0, 1:3] = 7
    x[torch.tensor([1, 3])] += 1
    x.index_add_(0, torch.tensor([0, 2]), torch.ones(2, 5))
    values, order = x.sort(1)
    return x, values, order, x.gather(1, order), x.cumsum(0), x.scatter(1, order, values), torch.where(x > 0, x, 0)


def hooks() -> Any:
    w = torch.randn(4, 4, requires_grad=True)
    w.register_hook(lambda g: g * 2)
    h = torch.tanh(torch.randn(2, 4) @ w)
    h.retain_grad()
    h.register_hook(lambda g: g + 1)
    (h * h).sum().backward()
    return w.grad, h.grad


def func_transforms() -> Any:
    x = torch.randn(3, 4)
    g = torch.func.grad(lambda x: torch.tanh(x).sum())(x)
    v = torch.func.vmap(lambda row: row.softmax(0) * 2)(x)
    j = torch.func.jvp(torch.sin, (x,), (torch.ones(3, 4),))
    return g, v, list(j)


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
    views, write_through_views, resize_and_out, random_ops, control_flow, gradients, double_backward,
    sorting_and_indexing, hooks, func_transforms, copies, sparse_gradients, custom_ops,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_ops_equal_plain_pytorch_with_room_without_and_where_everything_is_evicted(program: Program) -> None:
    free = same(program)
    assert same(program, int(0.8 * free.peak_bytes)).evictions > 0
    assert same(program, pressed=True).rematerializations > 0


@pytest.mark.parametrize("deallocation", ["eager", "ignore", "banish"])
@pytest.mark.parametrize("program", [gradients, write_through_views, random_ops])
def test_each_rule_of_deallocation_gives_the_same_results(program: Program, deallocation: str) -> None:
    same(program, deallocation=deallocation)


@seed(0)
@options(60)
@given(programs(odds=("",)).filter(lambda program: program.backward != "thread"))
def test_drawn_programs_equal_plain_pytorch_where_everything_is_evicted(drawn: DrawnProgram) -> None:
    program = lambda: run(State(False, drawn))  # noqa: E731
    try:
        program()
    except RuntimeError:  # plain PyTorch refuses a saved tensor that was written
        reject()
    same(program, pressed=True)


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


def test_a_batch_norm_that_trains_twice_leaves_no_copies_of_its_statistics() -> None:
    norm, x = torch.nn.BatchNorm1d(64), torch.randn(8, 64)
    with remat.dtr.budget("1 MiB") as runtime:
        sum(norm(x).sum() for _ in range(2)).backward()
        once = runtime._memory.plain.values()
        assert {plain.why for plain in once} == {"the gradient of a leaf"}


@pytest.mark.parametrize("in_leaf", [True, False])
def test_what_has_read_a_gradient_before_it_is_written_keeps_what_it_read(in_leaf: bool) -> None:
    results = []
    for block in (contextlib.nullcontext(), remat.dtr.budget("1 MiB")):
        w, seen = torch.ones(64, requires_grad=True), []
        with block as runtime, EvictAll(runtime) if runtime else contextlib.nullcontext():
            scaled = w * 3
            if in_leaf:
                w.register_hook(lambda g, seen=seen: seen.append(g * 2))
            else:
                scaled.grad_fn.register_hook(lambda given, _, seen=seen: seen.append(given[0].detach()))
            scaled.exp().sum().backward()
            doubled = [one * 2 for one in seen]
            w.grad.mul_(0)
            results.append([one + 1 for one in (*doubled, *seen)])
    assert_same(*results)


def test_the_block_counts_plain_gradients_while_they_live() -> None:
    w = torch.ones(100, requires_grad=True)
    with remat.dtr.budget("1 MiB") as runtime:
        (w * 2).sum().backward()
        assert type(w.grad) is torch.Tensor
        assert runtime.live_bytes == 400
        w.grad = None
        assert runtime.live_bytes == 0
        w.register_hook(lambda g: again.append(g.detach()))
        again: list[torch.Tensor] = []
        (w * 2).sum().backward()
        assert runtime.live_bytes == 400  # once, though it is in two tensors
        again.clear()
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


def test_what_read_a_tensor_from_outside_before_a_write_keeps_what_it_read() -> None:
    outside = torch.arange(32.0)
    with remat.dtr.budget("1 MiB") as runtime, EvictAll(runtime):
        before = outside.repeat(5) * 2
        grown = before + 1
        outside.mul_(10)
        outside.view(4, 8)[1].zero_()
        after = outside * 1
        results = [before * 1, grown * 1, after * 1]
    old = torch.arange(32.0).repeat(5)
    new = torch.arange(32.0) * 10
    new[8:16] = 0
    for result, expected in zip(results, [old * 2, old * 2 + 1, new], strict=True):
        assert torch.equal(result, expected)
    assert torch.equal(outside, new)


def test_training_steps_with_parameters_from_outside_in_one_block() -> None:
    results = []
    for budget in (contextlib.nullcontext(), remat.dtr.budget("1 MiB")):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        kept: list[torch.Tensor] = []
        with budget as runtime, EvictAll(runtime) if runtime else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                hidden = model(torch.randn(8, 8))
                loss = hidden.pow(2).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                kept += [hidden.detach(), loss.detach()]
        results.append([*kept, *model.state_dict().values(), torch.get_rng_state()])
    assert_same(*results)
    assert runtime.rematerializations > 0
