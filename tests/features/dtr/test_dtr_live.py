"""Training steps in budgets, live: equal to plain PyTorch bit for bit, and inside the budget."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import torch_remat as remat
from benchmarks.dtr_models import MODELS, Outcome, outcome
from tests.helpers import assert_same, collector_off


def _in_budget(name: str, limit: int, **options: Any) -> tuple[Outcome, remat.dtr.Runtime]:
    """Return what a model's step in a budget leaves, and the runtime."""
    block = remat.dtr.budget(limit, **options)

    def around(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        nonlocal runtime
        with block as runtime:
            return run()

    runtime: Any = None
    return outcome(name, around), runtime


def _plain(name: str) -> tuple[Outcome, int]:
    """Return what a plain step leaves, and the peak of what a step makes."""
    plain = outcome(name, lambda run: run())
    free, runtime = _in_budget(name, 2**40)
    assert free.equals(plain)
    assert not runtime.evictions
    return plain, runtime.peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_a_budget_equals_a_plain_step(name: str) -> None:
    plain, peak = _plain(name)
    for share in (0.7,) if name in ("lstm", "treelstm") else (0.9, 0.6, 0.5):  # less takes long: see docs/dtr.md
        found, runtime = _in_budget(name, int(share * peak))
        assert found.equals(plain)
        assert runtime.evictions > 0
        assert runtime.peak_bytes <= share * peak


def test_memory_measured_by_the_profiler_stays_in_the_budget() -> None:
    _, peak = _plain("transformer")
    torch.manual_seed(0)
    step = MODELS["transformer"]()
    limit = peak // 2
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile, remat.dtr.budget(limit) as runtime:
        step.run()
    total = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    largest = 3 * 8 * 16 * 32 * 4
    assert runtime.peak_bytes <= limit
    assert 0.3 * limit < most <= limit + 4 * largest  # what an op takes inside, and the states of generators


@pytest.mark.parametrize("heuristic", ["dtr", "dtr_local", "lru", "size", "msps", "random", "e_star"])
def test_each_heuristic_gives_the_same_results_and_is_reported(heuristic: str) -> None:
    plain, peak = _plain("unet")
    found, runtime = _in_budget("unet", int(0.7 * peak), heuristic=heuristic)
    assert found.equals(plain)
    assert all(part in runtime.report() for part in ("evictions", "run again:", "aten."))


def test_fifty_steps_leave_nothing_behind() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
    with collector_off():
        seen: list[weakref.ref[Any]] = []
        for step in range(50):
            with remat.dtr.budget(40_000) as runtime:
                hidden = model(torch.randn(32, 16))
                hidden.sum().backward()
                seen += [weakref.ref(runtime._block), weakref.ref(hidden)]
            for parameter in model.parameters():
                parameter.grad = None
            del hidden, runtime
            if step == 1:
                before = _tensors()
        assert not any(reference() for reference in seen)
        assert _tensors() == before


def _tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_ten_thousand_ops_come_back_without_recursion() -> None:
    with remat.dtr.budget(3_000) as runtime:
        x = torch.zeros(8)
        first = x + 1
        for _ in range(10_000):
            x = x + 1
        memory = runtime._memory
        for storage in list(memory.storages):
            if storage.place >= 0:
                memory.evict(storage)
        assert x[0].item() == 10_000
        del first
    assert torch.equal(x, torch.full((8,), 10_000.0))


def test_a_tensor_of_a_block_in_another_thread_is_a_clear_error() -> None:
    errors: list[BaseException] = []
    plain: list[torch.Tensor] = []
    with remat.dtr.budget("1 MiB"):
        x = torch.randn(4) + 1

        def work() -> None:
            plain.append(torch.ones(3) * 2)
            for use in (lambda: x + 1, x.tolist, x.numpy):
                with pytest.raises(remat.RematError) as caught:
                    use()
                errors.append(caught.value)
            with remat.dtr.budget("1 MiB"), pytest.raises(remat.RematError) as caught:
                x * 2
            errors.append(caught.value)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(errors) == 4
    assert all("thread" in str(error) for error in errors)
    assert type(plain[0]) is torch.Tensor


def test_a_budget_inside_a_budget_is_an_error_and_leaves_the_outer_one() -> None:
    with remat.dtr.budget("1 MiB"):
        with pytest.raises(remat.UsageError, match="inside"), remat.dtr.budget("1 MiB"):
            pass
        assert isinstance(torch.ones(2) * 2, remat.dtr.EvictableTensor)
    assert type(torch.ones(2) * 2) is torch.Tensor


@pytest.mark.parametrize("limit", [0, -1, "0 B", "-3 MiB", "", "much", True, None, float("nan"), []])
def test_a_budget_that_is_none_is_refused_at_once(limit: Any) -> None:
    with pytest.raises(remat.UsageError, match="budget"):
        remat.dtr.budget(limit)


WRAPS: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "regions": remat.checkpoint(),
    "torch": lambda layer: functools.partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False),
    "compiled": functools.partial(torch.compile, backend="aot_eager"),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_regions_and_compiled_modules_work_inside(wrap: str) -> None:
    x = torch.randn(8, 16)
    results = []
    for limit in (None, 2**40, 9000):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)]
        with contextlib.nullcontext() if limit is None else remat.dtr.budget(limit):
            h = x
            for layer in layers:
                h = (layer if limit is None else WRAPS[wrap](layer))(h)
            h.sum().backward()
        results.append([h.detach(), *(parameter.grad for layer in layers for parameter in layer.parameters())])
    for result in results[1:]:
        assert_same(results[0], result)


def test_costs_by_flops_and_by_a_function_are_deterministic() -> None:
    totals = []
    for _ in range(2):
        with remat.dtr.budget("1 MiB", cost="flops") as runtime:
            torch.ones(4, 5) @ torch.ones(5, 6)
        totals.append(runtime.total_compute)
    assert totals == [20 + 30 + 2 * 4 * 5 * 6] * 2
    with remat.dtr.budget("1 MiB", cost=lambda op, args, kwargs, result: 3.0) as runtime:
        torch.ones(2) + 1
    assert runtime.total_compute == 6


def test_room_is_made_for_a_tensor_of_python_values_too() -> None:
    x = torch.randn(64, requires_grad=True)
    with remat.dtr.budget(600) as runtime:
        y = x.sin().cos()  # 256 bytes each
        weights = torch.tensor([1.0] * 32)
        del weights, y
    assert runtime.evictions == 1
    assert runtime.peak_bytes == 512
