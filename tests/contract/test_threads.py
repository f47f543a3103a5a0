"""Regions in several threads at once, and one region reached from several threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import torch_remat as remat
from tests.helpers import assert_same, chain, checkpointed, leaf, pairwise

TIMEOUT_SECONDS = 30


def run_in_threads(*functions):
    """Run each function in a thread of its own, all started together; return results, raise what they raise."""
    results: list = [None] * len(functions)
    errors = []
    start = threading.Barrier(len(functions))

    def run(index, function):
        try:
            start.wait(TIMEOUT_SECONDS)
            results[index] = function()
        except BaseException as error:  # the test thread raises it again
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(index, function), daemon=True) for index, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return results


class Overlap:
    """Runs a function slowly and remembers how many calls of it ran at one time."""

    def __init__(self, function):
        self.function, self.lock = function, threading.Lock()
        self.running = self.most = self.total = 0

    def __call__(self, *args):
        with self.lock:
            self.running += 1
            self.total += 1
            self.most = max(self.most, self.running)
        time.sleep(0.05)
        try:
            return self.function(*args)
        finally:
            with self.lock:
                self.running -= 1


def test_two_threads_that_reach_one_region_replay_it_once():
    def two_branches(x):
        return x.sin().exp(), x.cos().tanh()

    for _ in range(5):
        function = Overlap(two_branches)
        x = leaf(6)
        one, two = checkpointed(function)(x)
        leaves = run_in_threads(
            lambda one=one, x=x: torch.autograd.grad(one.sum(), x)[0],
            lambda two=two, x=x: torch.autograd.grad(two.sum(), x)[0],
        )
        assert function.most == 1
        assert function.total == 2
        assert_same(leaves[0], torch.autograd.grad(x.sin().exp().sum(), x)[0])
        assert_same(leaves[1], torch.autograd.grad(x.cos().tanh().sum(), x)[0])


def test_two_threads_that_reach_nested_regions_in_different_order_do_not_deadlock():
    shared = leaf(6)

    def make():
        inner = checkpointed(Overlap(chain))
        return checkpointed(Overlap(lambda x: inner(x.sin()).exp()))(shared)

    one, two = make(), make()

    def backward(first, second):
        return lambda: [torch.autograd.grad(y.sum(), shared, retain_graph=True)[0] for y in (first, second)]

    forward, reverse = run_in_threads(backward(one, two), backward(two, one))
    expected = torch.autograd.grad(chain(shared.sin()).exp().sum(), shared)[0]
    assert_same([expected] * 4, [*forward, *reverse])


def test_autocast_and_random_state_of_one_thread_do_not_reach_a_region_of_another():
    w = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 4)

    def work(dtype):
        def run():
            types = []

            def block(x):
                h = (x @ w).sin() @ w
                types.append(h.dtype)
                return h.exp()

            for _ in range(20):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                    y = checkpointed(block, early_stop=False)(x)
                torch.autograd.grad(y.float().sum(), w)
            return types

        return run

    half, full = run_in_threads(work(torch.bfloat16), work(torch.float32))
    assert half == [torch.bfloat16] * 40
    assert full == [torch.float32] * 40


OUTSIDE = {
    "result": lambda s, factor: s * factor,
    "view of a result": lambda s, factor: (s * factor).t(),
    "leaf": lambda s, factor: (s.detach() * factor).requires_grad_(),
    "view of a leaf": lambda s, factor: (s.detach() * factor).requires_grad_().t(),
}


@pairwise(kind=OUTSIDE, numbers=[0, 200], threaded=[False, True])
def test_variable_from_outside_that_is_another_tensor_in_replay_is_an_error_in_any_thread(kind, numbers, threaded):
    s, x = leaf(4, 4), leaf(4, 4)
    for _ in range(numbers):  # nodes are numbered by thread: the main thread is ahead of the other one, or not
        s * 2
    t = before = OUTSIDE[kind](s, 1.0)
    y = checkpointed(lambda v: (v.sin() * t).cos(), region_name="r")(x)
    t = OUTSIDE[kind](s, 7.0)

    def backward():
        for _ in range(200 - numbers):
            s * 2
        with pytest.raises(remat.MismatchError) as caught:
            y.sum().backward()
        return caught.value.region

    assert (run_in_threads(backward) if threaded else [backward()]) == ["r"]
    assert before is not t


def test_code_compiles_after_regions_whose_forwards_overlapped():
    """Torch notes for all threads at once whether a mode is active, and up to 2.12 it compiles nothing then."""
    first_runs, second_runs, first_is_over = (threading.Event() for _ in range(3))

    def run(begins, waits_for):
        def function(x):
            y = x @ x
            begins.set()
            assert waits_for.wait(TIMEOUT_SECONDS)
            return y.sin()

        return remat.checkpoint(policy=[torch.ops.aten.mm.default])(function)(leaf(4, 4))

    def first():
        run(first_runs, second_runs)
        first_is_over.set()

    def second():
        assert first_runs.wait(TIMEOUT_SECONDS)
        run(second_runs, first_is_over)

    run_in_threads(first, second)
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    backend = CompileCounter()
    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.rand(3))
    assert backend.frame_count == 1
