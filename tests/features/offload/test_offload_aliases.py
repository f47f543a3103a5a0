"""Tensors that share memory and no history of changes (`detach`, `.data`): when one ticket serves them all."""

from __future__ import annotations

import threading

import pytest
import torch

import torch_remat as remat
from tests.features.offload.disk_model import stored
from tests.features.offload.offloaders import OFFLOAD, Counting
from tests.helpers import assert_same, checkpointed, collector_off, leaf, no_other_regions, plain
from torch_remat.offload import files
from torch_remat.offload.table import Batch, Table

INFO = remat.offload.OffloadInfo("r", None, "t", "input", 0)

ALIASES = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view of detach": lambda x: x.detach().t(),
    "detach of view": lambda x: x[1:].detach(),
    "other dtype": lambda x: x.detach().view(torch.int32),
    "a change before": lambda x: x.data.mul_(2),
}


def product(a, b):
    b = b.view(torch.float32) if b.dtype is torch.int32 else b
    return a.sin().sum() * b.cos().sum() * (a.exp().sum() + b.sum())


def gradient(wrap, alias, x):
    h = x * 1
    other = alias(h)
    (grad,) = torch.autograd.grad(wrap(product)(h, other), x)
    return grad


@pytest.mark.parametrize("alias", ALIASES)
def test_inputs_of_one_region_that_share_memory_travel_once(alias):
    offloader, x = Counting(), leaf(4, 4)
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=True, region_name="r")
    assert_same(gradient(plain, ALIASES[alias], x), gradient(wrap, ALIASES[alias], x))
    assert offloader.names == ["r::args[0]"]
    assert offloader.count("onload") == 2
    offloader.assert_all_released_once()


class Aliased(torch.autograd.Function):
    """Saves a tensor and an alias of it."""

    @staticmethod
    @remat.auto_forward("y", "alias")
    def forward(ctx, x, alias):
        y = x.exp()
        ctx.save_for_backward(y, alias(y))
        return y * 2

    @staticmethod
    def backward(ctx, grad):
        y, other = ctx.saved_tensors
        return grad * y * 2 + product(y, other), None


@pytest.mark.parametrize("alias", ALIASES)
def test_what_one_op_saves_and_shares_memory_travels_once(alias):
    offloader, x = Counting(), leaf(4, 4)

    def run(x):
        return remat.op(Aliased.apply, "a", policy=OFFLOAD)(x, ALIASES[alias])

    (expected,) = torch.autograd.grad(run(x * 1).sum(), x)
    y = checkpointed(run, offloader=offloader, region_name="r")(x * 1)
    for _ in range(2):
        (actual,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert_same(expected, actual)
    assert offloader.names == ["r::a.y"]
    with collector_off():
        del y
        offloader.assert_all_released_once()


def test_what_one_op_in_a_native_region_saves_and_shares_memory_travels_once():
    offloader, x = Counting(), leaf(4, 4)

    def run(x):
        def body(x):
            h = x.exp()
            return torch.atan2(h, h.detach())

        return remat.op(body, "n", policy=OFFLOAD)(x) * 2

    (expected,) = torch.autograd.grad(run(x * 1).sum(), x)
    y = checkpointed(run, offloader=offloader)(x * 1)
    assert len(offloader.sent) == 1
    assert_same(expected, torch.autograd.grad(y.sum(), x)[0])
    offloader.assert_all_released_once()


def test_alias_that_is_sent_later_travels_by_itself():
    """Its version counter does not tell whether the memory was changed since."""
    offloader, x = Counting(), leaf(4, 4)

    def model(wrap):
        h = x * 1
        first = wrap(torch.sin)(h)
        h.data.mul_(2)
        fresh = h.data
        assert fresh._version == h._version == 0
        return first, wrap(lambda a, b: (a * b).sin())(x, fresh)

    (expected,) = torch.autograd.grad(model(plain)[1].sum(), x)
    first, y = model(remat.checkpoint(offloader=offloader, offload_inputs=True))
    assert_same(expected, torch.autograd.grad(y.sum(), x)[0])
    assert len(offloader.sent) == 2
    del first
    offloader.assert_all_released_once()


@pytest.mark.parametrize("alias", ["detach", "data"])
@pytest.mark.parametrize("changed", [0, 1])
def test_in_place_change_of_either_is_an_error(alias, changed):
    offloader, x = Counting(), leaf(4, 4)
    h = x * 1
    both = h, ALIASES[alias](h)
    y = checkpointed(product, offloader=offloader, offload_inputs=True, region_name="r")(*both)
    with torch.no_grad():
        both[changed].add_(1)
    with pytest.raises(remat.MutationError, match="r::args") as caught:
        y.backward()
    assert caught.value.tensor == f"args[{changed if alias == 'data' else 0}]"
    del y, caught
    offloader.assert_all_released_once()


def test_versions_of_the_tensors_stay_while_the_first_one_is_still_there(tmp_path, monkeypatch):
    may_write, write = threading.Event(), files.write

    def wait_and_write(*args):
        may_write.wait(20)
        return write(*args)

    monkeypatch.setattr(files, "write", wait_and_write)
    offloader, x = remat.DiskOffloader(tmp_path, min_bytes=0), leaf(4, 4)
    h = x * 1
    with torch.no_grad():
        h.mul_(1)
    other, content = h.data, h.detach().clone()
    y = checkpointed(product, offloader=offloader, offload_inputs=True)(h, other)
    assert (h._version, other._version) == (1, 0)
    expected = gradient(plain, ALIASES["data"], x)
    assert_same(expected, torch.autograd.grad(y, x, retain_graph=True)[0])
    assert (h._version, other._version) == (1, 0)
    may_write.set()
    offloader.flush()
    assert len(stored(offloader)) == 1
    del other
    h.data = torch.zeros(4, 4)
    assert_same(expected, torch.autograd.grad(y, x)[0])
    assert_same(content, x.detach())
    del y
    assert offloader.offloaded_bytes == 0


def test_reports_count_what_aliases_share_once():
    offloader, x = Counting(), leaf(4, 4)
    with no_other_regions():
        h = x * 1
        y = checkpointed(product, offloader=offloader, offload_inputs=True, region_name="r")(h, h.detach())
        report = remat.memory_report()
        assert report.offloaded_bytes == offloader.bytes == 64
        (tensor,) = [one for one in report.all_tensors() if one.offloaded]
        assert (tensor.label, tensor.aliases) == ("args[0]", ("args[1]",))
        del y


def test_ticket_of_several_transfers_is_released_once_by_the_thread_that_drops_the_last():
    offloader = Counting()
    table = Table()
    for step in range(100):
        h = torch.ones(4)
        batch = Batch()
        transfers = [[table.send(offloader, tensor, INFO, batch)] for tensor in (h, h.detach(), h.data, h.detach())]
        together = threading.Barrier(len(transfers))

        def drop(held, together=together):
            together.wait()
            held.clear()

        threads = [threading.Thread(target=drop, args=(held,)) for held in transfers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(offloader.sent) == step + 1
        offloader.assert_all_released_once()


def test_offloaded_input_that_the_function_also_closes_over_is_that_input():
    """In replay the variable is the tensor itself, and the argument another one with its values."""
    x = leaf(6, 6)
    h = x * 2

    def function(given):
        return torch.nn.functional.smooth_l1_loss(given.sin(), h) * h

    expected = torch.autograd.grad(function(h), x, torch.ones(6, 6), retain_graph=True)
    y = checkpointed(function, offloader=Counting(), offload_inputs=True)(h)
    assert_same(expected, torch.autograd.grad(y, x, torch.ones(6, 6)))
