"""Prefetch: what backward will reach next, in its order, within the bound."""

from __future__ import annotations

import pytest
import torch

from tests.features.offload.offloaders import OFFLOAD, Counting
from tests.handle_ops import RECOMPUTE, Affine, Inner, Trace, call
from tests.helpers import assert_same, checkpointed, leaf

BYTES = 36


def block(x):
    for name in "abc":
        x = call("handle", Inner, Trace(), name, OFFLOAD, x)
    return call("handle", Affine, Trace(), "d", RECOMPUTE, x, x)


def model(offloader, x, depth, **options):
    h = x * 1
    for index in range(depth):
        h = checkpointed(block, offloader=offloader, region_name=f"r{index}", **options)(h)
    return h


def outstanding(log):
    """Return how many tensors were asked for and not read, after each event."""
    asked, counts = set(), []
    for done, ticket in log:
        if done == "prefetch":
            asked.add(ticket)
        elif done in ("onload", "release"):
            asked.discard(ticket)
        counts.append(len(asked))
    return counts


def test_order_of_prefetch_is_the_order_in_which_backward_reads():
    offloader = Counting(prefetch_bytes=1000 * BYTES)
    y = model(offloader, leaf(3, 3), 3, offload_inputs=True)
    y.sum().backward()
    asked = [offloader.names[ticket] for done, ticket in offloader.log if done == "prefetch"]
    read = [offloader.names[ticket] for done, ticket in offloader.log if done == "onload"]
    assert read[0] == "r2::args[0]"
    assert asked == read[1:]
    assert read[:5] == ["r2::args[0]", "r2::c.out", "r2::c.m", "r2::b.m", "r2::a.m"]
    assert read[5] == "r1::args[0]"
    assert outstanding(offloader.log)[-1] == 0


@pytest.mark.parametrize("bound", [1, 2, 3, 5])
def test_bytes_that_are_asked_for_and_not_read_stay_within_the_bound(bound):
    offloader = Counting(prefetch_bytes=bound * BYTES)
    y = model(offloader, leaf(3, 3), 4, offload_inputs=True)
    y.sum().backward()
    assert max(outstanding(offloader.log)) == bound
    assert offloader.count("prefetch") == offloader.count("onload") - 1
    offloader.assert_all_released_once()


def test_one_tensor_is_asked_for_even_if_it_is_larger_than_the_bound():
    offloader = Counting(prefetch_bytes=1)
    model(offloader, leaf(3, 3), 3).sum().backward()
    assert max(outstanding(offloader.log)) == 1
    assert offloader.count("prefetch") == offloader.count("onload") - 1


def test_bound_of_zero_asks_for_nothing_and_a_missing_one_for_all():
    offloader = Counting(prefetch_bytes=0)
    model(offloader, leaf(3, 3), 3).sum().backward()
    assert offloader.count("prefetch") == 0
    del offloader.prefetch_bytes
    model(offloader, leaf(3, 3), 3).sum().backward()
    assert offloader.count("prefetch") == 11


def test_failing_prefetch_does_no_harm():
    class Failing(Counting):
        def prefetch(self, ticket):
            raise OSError("not now")

    offloader, x = Failing(prefetch_bytes=1000), leaf(3, 3)
    y = model(offloader, x, 3, offload_inputs=True)
    expected = torch.autograd.grad(model(Counting(), x, 3).sum(), x)
    assert_same(expected, torch.autograd.grad(y.sum(), x))
    offloader.assert_all_released_once()


def test_second_backward_of_a_kept_graph_asks_again_and_drops_what_the_first_left():
    offloader, x = Counting(prefetch_bytes=3 * BYTES), leaf(3, 3)
    y = model(offloader, x, 3, offload_inputs=True)
    for keep in (True, True, False):
        start = len(offloader.log)
        torch.autograd.grad(y.sum(), x, retain_graph=keep)
        log = offloader.log[start:]
        assert sum(done == "prefetch" for done, _ in log) >= 11
        assert max(outstanding(log)) <= 3
    offloader.assert_all_released_once()


def test_backward_of_a_part_leaves_no_more_than_the_bound():
    offloader, x = Counting(prefetch_bytes=2 * BYTES), leaf(3, 3)
    one = model(offloader, x, 2)
    two = model(offloader, one, 2)
    (grad,) = torch.autograd.grad(two.sum(), one, retain_graph=True)
    assert outstanding(offloader.log)[-1] <= 2
    one.backward(grad)
    assert_same(x.grad, torch.autograd.grad(model(Counting(), model(Counting(), x, 2), 2).sum(), x)[0])
    del one, two
    offloader.assert_all_released_once()


def test_two_graphs_in_turn_are_asked_for_each_in_its_own_order():
    offloader = Counting(prefetch_bytes=2 * BYTES)
    x = leaf(3, 3)
    losses = [model(offloader, x, 2, offload_inputs=True).sum() for _ in range(3)]
    for loss in losses:  # the first first, as in a pipeline
        loss.backward()
    assert offloader.count("prefetch") >= offloader.count("onload") - 3 - 2
    del loss, losses
    offloader.assert_all_released_once()
