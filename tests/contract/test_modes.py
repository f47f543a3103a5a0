"""What stands around a region: grad modes, autocast, device contexts, dispatch modes, subclasses."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

import torch_remat as remat
from tests.helpers import (
    Mlp,
    alive,
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    collector_off,
    leaf,
    no_other_regions,
    pairwise,
    parameter_gradients,
    watch,
)
from tests.ways import PLAIN_AUTOGRAD, WAYS


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_caller_without_gradients_keeps_nothing(mode):
    inner = []

    def block(x):
        h = x.sin()
        inner.extend(watch(h))
        return h.exp()

    with collector_off(), mode():
        x = torch.randn(3)
        inputs = watch(x)
        y = checkpointed(block)(x)
        assert not y.requires_grad
        assert_same(y, x.sin().exp())
        del x
        assert alive(inputs + inner) == 0


OUTSIDE = {
    "none": contextlib.nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "disabled": lambda: torch.autocast("cpu", enabled=False),
    "no_cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
}


@pytest.mark.parametrize("backward", ["none", "bfloat16"])
@pytest.mark.parametrize("forward", OUTSIDE)
def test_replay_runs_under_the_autocast_of_forward(forward, backward):
    def program(wrap):
        mlp = Mlp(4)
        x = leaf(2, 4)
        with OUTSIDE[forward]():
            y = wrap(mlp)(x)
            y = wrap(mlp)(y)
        loss = y.float().square().sum()
        with OUTSIDE[backward]():
            loss.backward()
        return y, x.grad, *parameter_gradients(mlp)

    assert_same_program(program, replays=2)


@pytest.mark.parametrize(("forward", "backward"), [("meta", None), (None, "meta")])
def test_replay_makes_tensors_on_the_default_device_of_forward(forward, backward):
    seen = []

    def block(x):
        seen.append(torch.empty(1).device.type)
        return x.sin().exp()

    def device(name):
        return torch.device(name) if name else contextlib.nullcontext()

    x = leaf(3)
    with device(forward):
        y = checkpointed(block)(x).sum()
    with device(backward):
        y.backward()
    assert seen == [forward or "cpu"] * 2
    assert_same(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


# --- Torch-function modes around a region


class Halved(TorchFunctionMode):
    """Halves the results of linear layers, as recipes of low precision do something to them."""

    entered = 0

    def __enter__(self):
        self.entered += 1
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 0.5 if function is torch.nn.functional.linear else result


class Sines(TorchFunctionMode):
    """Has each exponential become a sine."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.sin if function is torch.Tensor.exp else function
        return function(*args, **(kwargs or {}))


def in_modes(region, keep, *, around_backward, modes):
    x, linear = leaf(4, 8), nn.Linear(8, 8)
    inner = region(lambda x: linear(x).exp())
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        loss = region(lambda x: inner(keep("kept", torch.tanh, linear(x))).exp() * torch.ones(8))(x).sum()
        if around_backward == "method":
            loss.backward()
        elif around_backward == "function":
            torch.autograd.backward(loss)
    if around_backward is None:
        loss.backward()
    return [loss, x.grad, *parameter_gradients(linear)]


@pytest.mark.parametrize("around_backward", [None, "method", "function"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_torch_function_modes_around_a_region_are_there_in_replay(way, around_backward):
    def program(way, modes):
        torch.manual_seed(1)
        return in_modes(way.region, way.keep, around_backward=around_backward, modes=modes)

    for modes in ([Halved], [Halved, Sines], [lambda: torch.device("cpu"), Halved]):
        entered = [mode() for mode in modes]
        expected = program(PLAIN_AUTOGRAD, [mode() for mode in modes])
        assert_same(expected, program(way, entered))
        assert all(mode.entered == 1 for mode in entered if isinstance(mode, Halved))
    with pytest.raises(AssertionError):
        assert_same(expected, program(PLAIN_AUTOGRAD, []))


def test_torch_function_mode_that_a_region_enters_itself_is_its_own():
    def block(x):
        with Sines():
            h = x.exp()
        return h.exp()

    def program(wrap):
        x = leaf(4)
        with Halved():
            wrap(block)(x).sum().backward()
        return x.grad

    assert_same_program(program, replays=1)


def test_torch_function_mode_that_holds_the_output_is_freed_after_backward():
    class Holding(Halved):
        output = None

    with collector_off(), no_other_regions():
        mode = Holding()
        with mode:
            mode.output = checkpointed(lambda x: x.sin().exp())(leaf(4)).sum()
        output = watch(mode.output)
        mode.output.backward()
        del mode
        assert alive(output) == 0


# --- Wrapper subclasses, dispatch modes


def test_plain_region_runs_under_no_dispatch_mode_in_either_phase():
    stacks = []

    def block(x):
        stacks.append(list(_get_current_dispatch_mode_stack()))
        return chain(x)

    checkpointed(block)(leaf(3)).sum().backward()
    assert stacks == [[], []]


def _tokens(linear, x):
    """A linear layer on pixels: torch adds its bias in place, but in a new tensor where a dispatch mode is active."""
    y = linear(x.flatten(2).permute(0, 2, 1)).square()
    return y.permute(0, 2, 1).reshape(x.shape).sin()


def _gradient_inside(layer, x):
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + layer(gradient)


# Each takes what makes a region, what makes a call, a layer and a batch norm.
_UNDER_MODES = {
    "call after": lambda region, call, layer, norm: region(lambda x: call(norm, "norm")(layer(x))),
    "policy": lambda region, call, layer, norm: region(
        layer, policy=[torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    ),
    "gradient": lambda region, call, layer, norm: region(partial(_gradient_inside, layer)),
}


@pairwise(name=_UNDER_MODES, active=["never", "in forward", "in backward"])
def test_ops_that_write_in_place_only_where_no_dispatch_mode_is_active_are_equal(name, active):
    torch.manual_seed(0)
    linear, norm = nn.Linear(8, 8), nn.BatchNorm2d(8)
    start = torch.randn(2, 8, 2, 2)

    def gradients(region, call):
        function = _UNDER_MODES[name](region, call, partial(_tokens, linear), norm)
        x = start.clone().requires_grad_()
        with FlopCounterMode(display=False) if active == "in forward" else contextlib.nullcontext():
            y = function(x)
        with FlopCounterMode(display=False) if active == "in backward" else contextlib.nullcontext():
            return list(torch.autograd.grad(y.sum(), [x, *linear.parameters()]))

    plain = gradients(lambda function, **_options: function, lambda function, _name: function)
    assert_same(plain, gradients(checkpointed, remat.op))


def test_cast_of_a_weight_in_the_memory_of_a_result_that_is_gone_is_not_taken_for_it():
    """A native region keeps what it makes, but not a cast that autocast keeps: both phases must say the same of it."""
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def product(x):
        (x.cos(), x.bfloat16(), x.bfloat16())  # the two casts that `mm` needs take their memory
        return torch.mm(x, weight)

    with torch.autocast("cpu", torch.bfloat16), no_other_regions():
        out = remat.checkpoint()(lambda x: remat.native_save_region("product", product, x.sin()).sin())(x)
        report = str(remat.memory_report())
    assert "product.out" in report
    assert "product.cos_0_0" not in report
    out.sum().backward()


HOOKED = {
    "plain": checkpointed,
    "policy": partial(checkpointed, policy=remat.policies.save_matmuls),
    "nested": lambda f: checkpointed(checkpointed(f)),
    "bitwise": partial(checkpointed, determinism_check="bitwise"),
    "saved call before": lambda f: checkpointed(lambda x: f(remat.op(torch.sin, "sin")(x))),
    "in a native region": lambda f: checkpointed(lambda x: remat.native_save_region("f", f, x.sin()).exp()),
}


@pytest.mark.parametrize("everywhere", [False, True], ids=["of modules", "global"])
@pytest.mark.parametrize("way", HOOKED)
def test_always_called_forward_hooks_are_called_where_replay_ends(way, everywhere):
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Tanh(), nn.Linear(64, 64)))
    opened, handles = [], []

    def close(*_):
        opened.pop()

    if everywhere:
        handles.append(nn.modules.module.register_module_forward_pre_hook(lambda *_: opened.append(1)))
        handles.append(nn.modules.module.register_module_forward_hook(close, always_call=True))
    else:
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: opened.append(1))
            module.register_forward_hook(close, always_call=True)
    try:
        HOOKED[way](model)(leaf(64, 64)).sum().backward()
        assert opened == []
    finally:
        for handle in handles:
            handle.remove()
