"""What needs a CUDA device: its generators, its backward thread, its autocast, its streams and its memory."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import (
    Stack,
    assert_same_program,
    chain,
    checkpointed,
    collector_off,
    leaf,
    parameter_gradients,
    plain,
)
from tests.ways import BY_HANDLE, WAYS, assert_same_in

pytestmark = pytest.mark.gpu


def noisy(x):
    return F.dropout(x.sin(), 0.5) * torch.randn_like(x) + x.exp()


def test_model_whose_saved_tensors_wait_in_pinned_memory_is_equal():
    def program(wrap):
        model = Stack(wrap, depth=2).cuda()
        x = leaf(2, 6, 8, device="cuda")
        with save_on_cpu(pin_memory=True):
            y = model(x)
        y.square().sum().backward()
        return y, x.grad, *parameter_gradients(model)

    assert_same_program(program, replays=4)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_random_numbers_of_cpu_and_device_are_equal(device):
    def program(wrap):
        x = leaf(50, device=device)
        y = wrap(lambda x: noisy(noisy(x).cuda()).to(device))(wrap(noisy)(x))
        results = [torch.autograd.grad(y.sum(), x, retain_graph=True) for _ in range(2)]
        return y, results, torch.rand(3), torch.rand(3, device="cuda")

    assert_same_program(program)


@pytest.mark.parametrize("raises", [False, True])
def test_replay_leaves_the_generator_of_the_device_where_it_was_also_by_an_exception(raises):
    def block(x):
        h = noisy(x)
        if raises and remat.is_recomputing():
            raise KeyError("in replay")
        return h.cos()

    y = checkpointed(block)(leaf(50, device="cuda"))
    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state()
    with pytest.raises(KeyError, match="in replay") if raises else contextlib.nullcontext():
        y.sum().backward()
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_replay_runs_in_the_backward_thread_of_the_device_with_its_ambient_state():
    seen = []

    def block(x):
        ident = threading.get_ident()
        seen.append((ident, remat.is_recomputing(), torch.is_autocast_enabled("cuda"), torch.empty(1).device.type))
        return (x @ x).sin()

    x = leaf(4, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.device("meta"):
        y = checkpointed(block)(x)
    y.float().sum().backward()
    assert [entry[1:] for entry in seen] == [(False, True, "meta"), (True, True, "meta")]
    assert not remat.is_recomputing()


def test_region_over_cpu_and_device_replays_once_for_both_backward_threads():
    def block(x, y):
        return x.sin().exp(), y.cos().tanh()

    def program(wrap):
        x, y = leaf(6), leaf(6, device="cuda")
        one, two = wrap(block)(x, y)
        (one.sum() + two.sum().cpu()).backward()
        return x.grad, y.grad

    for _ in range(20):
        assert_same_program(program, replays=1)


def test_region_on_a_side_stream_is_equal():
    def program(wrap):
        x = leaf(256, 256, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = wrap(lambda x: ((x @ x).sin() @ x).cos())(x)
        torch.cuda.current_stream().wait_stream(stream)
        z = wrap(lambda y: (y @ y).tanh())(y)
        z.sum().backward()
        torch.cuda.synchronize()
        return z, x.grad

    for _ in range(5):
        assert_same_program(program, replays=2)


def test_dropping_the_output_and_backward_free_the_devices_memory():
    with collector_off():
        x = leaf(1024, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        y = checkpointed(chain)(x * 1)
        assert torch.cuda.memory_allocated() - before == 2 * x.nbytes
        del y
        assert torch.cuda.memory_allocated() == before
        checkpointed(chain)(x * 1).sum().backward()
        assert torch.cuda.memory_allocated() - before == x.grad.nbytes


def attend(qkv, x):
    q, k, v = F.linear(x, qkv).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind()
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def mlp(x, up, down):
    return x + F.linear(F.gelu(F.linear(x, up)), down)


def step_of_blocks(way, dtype):
    """A step of two blocks whose MLP is kept, with dropout, on the device."""
    weights = [[leaf(*shape, device="cuda") for shape in ((96, 32), (64, 32), (32, 64))] for _ in range(2)]
    x = leaf(2, 16, 32, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        h = x
        for qkv, up, down in weights:

            def block(h, qkv=qkv, up=up, down=down):
                h = h + F.dropout(attend(qkv, h), 0.2)
                return way.keep("mlp", mlp, h, up, down)

            h = way.region(block)(h)
    loss = h.float().square().sum()
    gradients = torch.autograd.grad(loss, [x, *(weight for block in weights for weight in block)])
    return h, *gradients, torch.rand(3, device="cuda")


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *((way, torch.float32) for way in WAYS),
        *((way, torch.bfloat16) for way in WAYS if way is not BY_HANDLE),  # whose backward knows no autocast
    ],
    ids=str,
)
def test_each_way_is_equal_on_the_device(way, dtype):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # whose backward adds in one order
        assert_same_in(way, lambda way: step_of_blocks(way, dtype))


@pytest.mark.parametrize("limit", ["0%", "50%", "100%", "64 KiB"])
def test_steps_under_a_budget_are_equal_on_the_device(limit):
    def program(wrap):
        model = Stack(wrap, depth=2).cuda()
        budget = contextlib.nullcontext() if wrap is plain else remat.budget(limit)
        results = []
        for _ in range(4):  # the reserve is learned from the first steps
            x = leaf(2, 6, 8, device="cuda")
            with budget:
                model(x).square().sum().backward()
            results += [x.grad, *parameter_gradients(model)]
            model.zero_grad()
        return results

    assert_same_program(program)
