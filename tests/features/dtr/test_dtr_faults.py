"""Exceptions at any point of a block: everything still referenced is right afterwards, and nothing is left behind."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_remat as remat


class _FailsAt(TorchDispatchMode):
    """Raises at the n-th op that really runs, first or again: it lies below the block's own mode."""

    def __init__(self, count: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left = count
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if not self.left:
            raise self._error("boom")
        return func(*args, **(kwargs or {}))


def _step(weight: torch.Tensor, kept: list[torch.Tensor]) -> None:
    """A step that keeps each tensor that it makes: random ones, views, written ones, gradients."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = keep(torch.rand(8, 8))
    h = keep(x @ weight)
    h = keep(torch.tanh(h))
    row = keep(h.detach()[2:4])
    u = keep(torch.nn.functional.dropout(h, 0.5))
    w = keep(u.detach() * 2)
    w.add_(1)
    w[1].mul_(3)
    keep(w.view(-1))
    y = keep((u * h).exp())
    keep(row + 1)
    y.sum().backward()
    keep(weight.grad)


def _run(*blocks: contextlib.AbstractContextManager) -> tuple[BaseException | None, list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.full((8, 8), 0.1, requires_grad=True)
    kept: list[torch.Tensor] = []
    try:
        with contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block)
            _step(weight, kept)
    except BaseException as error:
        return error, kept, weight
    return None, kept, weight


def _check(kept: list[torch.Tensor], weight: torch.Tensor) -> None:
    """All that was kept is plain, and what its ops have made of it so far."""
    _, expected, _ = _run()
    written = {5, 6}  # indices of what the step writes after it has kept it
    for at, (one, two) in enumerate(zip(kept, expected, strict=False)):
        assert not isinstance(one, remat.dtr.EvictableTensor)
        assert one.shape == two.shape
        values = one.detach() + 0
        if at not in written or len(kept) >= 8:
            assert torch.equal(values, two.detach()), at
    assert torch.equal(weight.detach(), torch.full((8, 8), 0.1))
    assert weight.grad is None or type(weight.grad) is torch.Tensor
    assert type(torch.ones(2) * 2) is torch.Tensor
    with remat.dtr.budget("1 MiB"):
        assert (torch.ones(2) * 2).tolist() == [2, 2]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("limit", [10**6, 1900])
def test_an_exception_in_any_op_leaves_everything_right(limit: int, error: type[BaseException]) -> None:
    for count in range(1, 400):
        mode = _FailsAt(count, error)
        caught, kept, weight = _run(mode, remat.dtr.budget(limit))
        if mode.left > 0:
            assert caught is None
            assert count > 25
            break
        assert type(caught) is error
        lost = [tensor for tensor in kept if type(tensor).__name__ == "LostTensor"]
        assert not lost
        _check(kept, weight)
    else:
        pytest.fail("the step never ran to its end")


def test_a_budget_too_small_at_any_point_leaves_everything_right() -> None:
    passed = 0
    for limit in range(100, 4000, 100):
        caught, kept, weight = _run(remat.dtr.budget(limit))
        if caught is None:
            passed += 1
        else:
            assert isinstance(caught, remat.dtr.BudgetError)
            assert caught.needed_bytes > limit
            assert f"{caught.needed_bytes:,} B" in str(caught)
        _check(kept, weight)
    assert 0 < passed < 39


def test_the_error_says_what_is_pinned_and_a_budget_that_passes() -> None:
    def run(limit: int) -> None:
        with remat.dtr.budget(limit):
            a, b = torch.ones(100), torch.ones(100)
            torch.cat([a, b])

    with pytest.raises(remat.dtr.BudgetError) as caught:
        run(1000)
    assert caught.value.needed_bytes == 1600
    assert [size for size, _ in caught.value.pinned] == [400, 400]
    assert "aten.ones" in str(caught.value)
    run(caught.value.needed_bytes)


def test_a_tensor_from_outside_that_another_thread_changes_is_an_error_when_it_is_needed_again() -> None:
    x = torch.ones(64)
    with remat.dtr.budget(10_000) as runtime:
        y = x * 2

        thread = threading.Thread(target=x.add_, args=(1,))
        thread.start()
        thread.join()
        memory = runtime._memory
        memory.evict(y._handle.buffer.storage)
        with pytest.raises(remat.MutationError):
            y + 1
        del y
