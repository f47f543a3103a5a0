"""Every ticket is released exactly once, at the right moment; prefetch asks in the order of backward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import torch_remat as remat
from tests.features.offload.blocks import block, expected_gradient, run, soon, stored
from tests.handle_ops import RECOMPUTE, Affine, Inner, Trace, call
from tests.helpers import LiveStorages, assert_same, checkpointed, collector_off, in_threads, leaf
from tests.offloaders import OFFLOAD, Counting


@pytest.fixture(scope="module", autouse=True)
def _without_collector():
    with LiveStorages():
        leaf(1).detach().sin()  # what torch loads when it first needs it leaves cycles
    with collector_off():
        yield


@pytest.fixture(params=[0, 100], ids=["no prefetch", "prefetch"])
def offloader(request):
    return Counting(prefetch_bytes=request.param)


def test_backward_releases_each_ticket_as_its_node_runs(offloader):
    x = leaf(3, 3)
    y = run(offloader, x)
    assert offloader.bytes == 12 * 36  # input, a.m, b.x and b.y of each region
    assert offloader.released == {}
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x))
    offloader.assert_all_released_once()
    order = [ticket for done, ticket in offloader.log if done == "release"]
    assert [ticket // 4 for ticket in order] == [2] * 4 + [1] * 4 + [0] * 4


def test_kept_graph_keeps_tickets_and_each_backward_is_equal(offloader):
    x = leaf(3, 3)
    y = run(offloader, x)
    expected = expected_gradient(x)
    for _ in range(3):
        assert_same(expected, torch.autograd.grad(y.sum(), x, retain_graph=True)[0])
        assert offloader.released == {}
    assert_same(expected, torch.autograd.grad(y.sum(), x)[0])
    offloader.assert_all_released_once()


@pytest.mark.parametrize("phase", ["forward", "replay", "backward"])
def test_exception_in_the_middle_releases_all(offloader, phase):
    def fail(*_):
        raise KeyError(phase)

    def failing(x):
        h = block(x)
        if phase == "backward":
            h.register_hook(fail)
        elif phase == ("replay" if remat.is_recomputing() else "forward"):
            fail()
        return h.sin()

    def attempt():
        h = run(offloader, leaf(3, 3), 1)
        checkpointed(failing, offloader=offloader, offload_inputs=True)(h).sum().backward()

    message = ""
    try:
        attempt()
    except KeyError as error:  # a traceback that is kept would keep tensors
        message = str(error)
    assert phase in message
    offloader.assert_all_released_once()


def test_offloader_that_fails_in_backward_leaves_a_clear_error_and_backward_can_run_again(offloader):
    x = leaf(3, 3)
    y = run(offloader, x)
    offloader.lose = ValueError("gone with the wind")
    with pytest.raises(remat.OffloadError, match="Counting could not bring this tensor back: ValueError") as caught:
        y.sum().backward(retain_graph=True)
    assert (caught.value.region, caught.value.op, caught.value.tensor) == ("block", None, "args[0]")
    assert "check_offloader" in str(caught.value)
    assert type(caught.value.__cause__) is ValueError
    offloader.lose = None  # whose traceback knows what was read
    y.sum().backward()
    assert_same(x.grad, expected_gradient(x))
    del y, caught
    gc.collect()  # pytest.raises keeps the traceback in a cycle
    offloader.assert_all_released_once()


def test_exception_of_the_offloader_that_is_no_error_passes_as_it_is(offloader):
    y = run(offloader, leaf(3, 3))
    offloader.lose = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    offloader.lose = None
    del y
    gc.collect()
    offloader.assert_all_released_once()


def test_offloader_dies_with_its_last_tensor():
    offloader = Counting()
    reference = weakref.ref(offloader)
    y = run(offloader, leaf(3, 3))
    del offloader
    assert reference() is not None
    y.sum().backward()
    del y
    assert reference() is None


def test_offloader_that_cannot_be_known_weakly_works():
    class Tuple(tuple):
        offload, prefetch, onload, release = (
            lambda self, *args, _name=name: getattr(self[0], _name)(*args)
            for name in ("offload", "prefetch", "onload", "release")
        )
        __hash__ = None

    inner = Counting()
    offloader, x = Tuple([inner]), leaf(3, 3)
    y = run(offloader, x)
    assert_same(torch.autograd.grad(y.sum(), x)[0], expected_gradient(x))
    inner.assert_all_released_once()


@pytest.mark.parametrize("kind", ["counting", "disk"])
def test_regions_on_many_threads_release_all(kind, tmp_path):
    offloader = Counting(prefetch_bytes=200)
    if kind == "disk":
        offloader = remat.DiskOffloader(tmp_path, min_bytes=0, queue_bytes=20_000)
    errors = []

    def work(place):
        try:
            torch.manual_seed(0)
            x = leaf(3, 3)
            for keep in (True, False, None):
                y = run(offloader, x)
                if keep is not None:
                    assert_same(torch.autograd.grad(y.sum(), x, retain_graph=keep)[0], expected_gradient(x))
                del y
        except BaseException as error:
            errors.append(error)

    in_threads(work, 20)
    assert errors == []
    if kind == "disk":
        assert soon(lambda: stored(offloader) == [])
        assert offloader.offloaded_bytes == 0
    else:
        offloader.assert_all_released_once()


BYTES = 36


def three_ops(x):
    for name in "abc":
        x = call("handle", Inner, Trace(), name, OFFLOAD, x)
    return call("handle", Affine, Trace(), "d", RECOMPUTE, x, x)


def model(offloader, x, depth, **options):
    h = x * 1
    for index in range(depth):
        h = checkpointed(three_ops, offloader=offloader, region_name=f"r{index}", **options)(h)
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


@pytest.mark.parametrize("bound", [1, 3])
def test_bytes_that_are_asked_for_and_not_read_stay_within_the_bound(bound):
    offloader = Counting(prefetch_bytes=bound * BYTES)
    y = model(offloader, leaf(3, 3), 4, offload_inputs=True)
    y.sum().backward()
    assert max(outstanding(offloader.log)) == bound
    assert offloader.count("prefetch") == offloader.count("onload") - 1
    offloader.assert_all_released_once()


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


def test_part_of_a_graph_that_is_dropped_is_not_asked_for():
    def both(x):
        with remat.name_scope("other"):
            other = three_ops(x.cos())
        return three_ops(x), other

    offloader = Counting(prefetch_bytes=1000 * BYTES)
    y, other = checkpointed(both, offloader=offloader)(leaf(3, 3) * 1)
    del other
    y.sum().backward()
    assert offloader.count("prefetch") == offloader.count("onload") - 1
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
