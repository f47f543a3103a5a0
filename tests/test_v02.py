"""Programs written for torch_remat 0.2.x, run by that release and by `torch_remat.v02`.

The release is installed aside as the benchmarks do it. On builds of torch without CUDA it lacks a function that
sets the message of its placeholders' errors; here that function does nothing.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import io
import subprocess
import sys
import weakref
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import torch_remat
from benchmarks import peers
from torch_remat import v02
from torch_remat.errors import MutationError, RematError

VERSION = "0.2.2"
_MESSAGE_SETTER = "_set_storage_data_ptr_access_error_msg"


@cache
def release() -> ModuleType | None:
    """Return the release; None where it cannot be installed."""
    with suppress(RuntimeError, OSError):  # no network, or another process has just installed it
        peers.install(VERSION)
    is_installed = (peers.FOLDER / f"{peers.PACKAGE}-{VERSION}").is_dir()
    return peers.load(VERSION) if is_installed else None


@pytest.fixture(params=["theirs", "ours"])
def remat(request, monkeypatch):
    if request.param == "ours":
        return v02
    found = release()
    if found is None:
        pytest.skip(f"torch_remat {VERSION} cannot be installed here")
    native = importlib.import_module("torch._C")
    if not hasattr(native, _MESSAGE_SETTER):
        monkeypatch.setattr(native, _MESSAGE_SETTER, lambda storage, message: None, raising=False)
    return found


def seeded(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def named_function(remat):
    """Return a custom Function that saves tensors by name."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * x
            remat.save_for_backward(ctx, {"x": x, "nothing": None, "twice": 2 * x})
            return y

        @staticmethod
        def backward(ctx, grad):
            x, nothing, twice = ctx.saved_tensors
            assert nothing is None
            return twice * grad + 0 * x

    return Square.apply


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


# Programs: each takes the release, and returns a function of (x, weight).


def saved_and_recomputed(remat):
    def block(x, weight):
        a = torch.sin(x)
        b = remat.region(lambda a: torch.tanh(a @ weight) * x, "matmul", recompute=False)(a)
        remat.recompute_needs_tensor(b)
        c = torch.exp(b)
        return remat.region(torch.cos, "cos", recompute=True)(c) * 2

    return block


def chain_of_saved_calls(remat):
    def block(x, weight):
        for name in ("sigmoid", "cos", "sin"):
            x = remat.region(getattr(torch, name), name, recompute=False)(x)
        return remat.region(torch.mm, "mm", recompute=True)(x, weight)

    return block


def custom_function(remat):
    square = named_function(remat)

    def block(x, weight):
        y = remat.region(square, "square", recompute=False)(x @ weight)
        z = remat.region(square, "again", recompute=True)(y)
        return remat.region(lambda z: square(z).sin(), "third", recompute=False)(z)

    return block


def several_outputs(remat):
    def block(x, weight):
        p, q = remat.region(lambda x: (x.sin(), x @ weight), "tuple", recompute=False)(x)
        r, nothing = remat.region(lambda p: [p.exp(), None], "list", recompute=False)(p)
        assert nothing is None
        pair = remat.region(lambda r: Pair(r.cos(), None), "named", recompute=False)(r)
        assert type(pair) is Pair
        assert pair.second is None
        remat.recompute_needs_tensor(q)
        return remat.region(torch.mul, "mul", recompute=True)(pair.first, q), q.cos()

    return block


def repeated_block(remat):
    def part(x, weight):
        y = remat.region(lambda x: torch.tanh(x @ weight), "attention", recompute=False)(x)
        remat.recompute_needs_tensor(y)
        return torch.sin(x + y)

    def block(x, weight):
        for index in range(3):
            with remat.name_scope(f"block.{index}"), remat.name_scope("a/b"):
                x = part(x, weight)
        return x

    return block


def nested_calls(remat):
    def inner(x):
        y = remat.region(torch.sigmoid, "inner", recompute=False)(x)
        return remat.region(torch.cos, "innermost", recompute=True)(y)

    def inert(x):
        return remat.region(torch.sin, "inert", recompute=False)(x).exp()

    def block(x, weight):
        y = remat.region(inner, "recomputed", recompute=True)(x @ weight)
        z = remat.region(inert, "saved", recompute=False)(y)
        return remat.region(inert, "inert", recompute=False)(z)

    return block


def views(remat):
    def block(x, weight):
        y = remat.region(lambda x: torch.tanh(x @ weight), "saved", recompute=False)(x)
        return remat.region(torch.cos, "read", recompute=True)(y.t()[1:].unsqueeze(0))

    return block


def module_as_region(remat):
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(seeded(index, *parameter.shape))

    def block(x, weight):
        y = remat.region(module, "mlp", recompute=False)(x @ weight)
        remat.recompute_needs_tensor(y)
        return (x + y).sin()

    return block


PROGRAMS = [
    saved_and_recomputed,
    chain_of_saved_calls,
    custom_function,
    several_outputs,
    repeated_block,
    nested_calls,
    views,
    module_as_region,
]
SHAPES = [program.__name__ for program in PROGRAMS]


def results(run, *, backwards: int = 1):
    """Return outputs and gradients of a function of (x, weight)."""
    x, weight = seeded(1, 4, 4).requires_grad_(), torch.nn.Parameter(seeded(2, 4, 4))
    outputs = run(x, weight)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    loss = sum((out * seeded(3 + place, *out.shape)).sum() for place, out in enumerate(outputs))
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return [*(out.detach() for out in outputs), x.grad, weight.grad]


def results_of_one(run):
    """Return the same of a function of one tensor."""
    return results(lambda x, weight: run(x @ weight))


def same(found, expected) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("program", PROGRAMS, ids=SHAPES)
def test_values_and_gradients_are_those_of_the_code_without_checkpoint(remat, program):
    block = program(remat)
    assert same(results(remat.checkpoint(region_name="layers.0")(block)), results(block))


@pytest.mark.parametrize("program", PROGRAMS, ids=SHAPES)
def test_values_and_gradients_are_those_of_the_code_without_checkpoint_under_hooks(remat, program):
    block = program(remat)
    hooks = (lambda tensor: tensor.clone(), lambda packed: packed)
    assert same(results(remat.checkpoint(saved_tensors_hooks=hooks)(block)), results(block))

    def hooked(x, weight):
        with remat.saved_tensors_hooks(*hooks):
            return block(x, weight)

    assert same(results(remat.checkpoint()(hooked)), results(block))


@pytest.mark.parametrize("program", PROGRAMS, ids=SHAPES)
def test_two_backwards_give_the_sum_of_gradients(remat, program):
    block = program(remat)
    assert same(results(remat.checkpoint()(block), backwards=2), results(block, backwards=2))


@pytest.mark.parametrize("program", PROGRAMS, ids=SHAPES)
def test_without_gradients_it_is_the_plain_call(remat, program):
    block = program(remat)
    x, weight = seeded(1, 4, 4), seeded(2, 4, 4)
    with torch.no_grad():
        found, expected = remat.checkpoint()(block)(x, weight), block(x, weight)
    as_list = [found] if isinstance(found, torch.Tensor) else found
    assert same(as_list, [expected] if isinstance(expected, torch.Tensor) else expected)


def test_saved_calls_are_left_out_and_recomputed_ones_are_made_again(remat):
    calls = []

    def told(name, function):
        def run(x):
            calls.append((name, remat.is_recomputing()))
            return function(x)

        return run

    def block(x):
        y = remat.region(told("saved", torch.sigmoid), "saved", recompute=False)(x)
        z = remat.region(told("recomputed", torch.cos), "recomputed", recompute=True)(y)
        return remat.region(told("last", torch.sin), "last", recompute=False)(z)

    x = seeded(1, 3).requires_grad_()
    assert not remat.is_recomputing()
    y = remat.checkpoint()(block)(x)
    assert calls == [("saved", False), ("recomputed", False), ("last", False)]
    calls.clear()
    y.sum().backward()
    assert calls == [("recomputed", True)]
    assert not remat.is_recomputing()


def test_a_result_that_python_reads_is_kept_where_the_code_says_so(remat):
    def block(x):
        y = remat.region(lambda x: x.tanh() * 2, "saved", recompute=False)(x.sin())
        remat.recompute_needs_tensor(y.view(-1))
        return x.exp() * float(y.detach().numpy().max())

    assert same(results_of_one(remat.checkpoint()(block)), results_of_one(block))


def test_a_checkpointed_function_is_named_after_what_it_runs(remat):
    def block(x):
        """Say what it does."""

    checkpointed = remat.checkpoint()(block)
    assert (checkpointed.__name__, checkpointed.__doc__) == ("block", "Say what it does.")
    assert inspect.unwrap(checkpointed) is block
    assert remat.checkpoint()(torch.nn.Linear(2, 2))(torch.ones(2)).shape == (2,)


def test_a_result_that_nothing_reads_in_replay_is_a_placeholder_there(remat):
    seen = []

    def block(x):
        y = remat.region(torch.exp, "first", recompute=False)(x.sin())
        z = remat.region(lambda y: y.sum(0), "second", recompute=False)(y)
        seen.append((remat.is_placeholder(z), remat.is_placeholder(z.view(1, -1)), tuple(z.shape), z.dtype))
        return remat.region(torch.square, "third", recompute=False)(z), x.exp().sin()

    x = seeded(1, 2, 3).requires_grad_()
    sum(out.sum() for out in remat.checkpoint()(block)(x)).backward()
    assert seen == [(False, False, (3,), torch.float32), (True, True, (3,), torch.float32)]
    assert not remat.is_placeholder(x)


# Hooks.


class Log:
    """A pair of hooks that notes what passes."""

    def __init__(self, remat):
        self.remat = remat
        self.packed: list[Any] = []
        self.unpacked: list[Any] = []

    def pack(self, tensor):
        info = self.remat.current_saved_tensor_info()
        if not isinstance(tensor, torch.nn.Parameter) and tensor.shape != (5, 5):
            self.packed.append((info.kind.name, info.context, round(tensor.double().sum().item(), 4)))
        return tensor.clone()

    def unpack(self, packed):
        if packed.shape != (5, 5):  # the parameter
            self.unpacked.append((round(packed.double().sum().item(), 4), self.remat.is_recomputing()))
        return packed

    @property
    def pair(self):
        return self.pack, self.unpack


def hooked_block(remat, weight):
    """Return a block whose saved call saves a parameter, a tensor that it makes, and an argument of the block."""

    def block(x, other):
        b = remat.region(lambda a: torch.tanh(a @ weight) * other, "save", recompute=False)(torch.sin(x))
        remat.recompute_needs_tensor(b)
        return remat.region(torch.cos, "re", recompute=True)(torch.exp(b)) * 2

    return block


def events(remat, run):
    """Return what passes the hooks in forward and in backward; ``run`` takes the log, block and arguments."""
    log = Log(remat)
    weight = torch.nn.Parameter(seeded(9, 5, 5))
    out = run(log, hooked_block(remat, weight), (seeded(1, 2, 5).requires_grad_(), seeded(2, 2, 5)))
    packed = log.packed.copy()
    out.sum().backward()
    assert log.packed == packed  # nothing is packed in backward
    return packed, log.unpacked


X, OTHER = (round(seeded(seed, 2, 5).double().sum().item(), 4) for seed in (1, 2))
TANH = round(torch.tanh(torch.sin(seeded(1, 2, 5)) @ seeded(9, 5, 5)).double().sum().item(), 4)
RESULT = torch.tanh(torch.sin(seeded(1, 2, 5)) @ seeded(9, 5, 5)) * seeded(2, 2, 5)
RESULT = round(RESULT.double().sum().item(), 4)


def test_hooks_of_checkpoint_take_inputs_and_what_saved_calls_keep(remat):
    packed, unpacked = events(
        remat, lambda log, block, args: remat.checkpoint(saved_tensors_hooks=log.pair)(block)(*args)
    )
    inputs = [("CHECKPOINT_INPUT", None, X), ("CHECKPOINT_INPUT", None, OTHER)]
    kept = [("BACKWARD", None, TANH), ("BACKWARD", None, OTHER), ("SAVE_OUTPUT", None, RESULT)]
    assert packed == inputs + kept
    assert unpacked[:2] == [(X, False), (OTHER, False)]
    assert unpacked[2:] == [(RESULT, True), (OTHER, False), (TANH, False)]


def test_hooks_around_checkpoint_take_the_same_and_what_is_saved_outside(remat):
    def run(log, block, args):
        with remat.saved_tensors_hooks(*log.pair, capture_context=lambda: "here"):
            return remat.checkpoint()(block)(*args).exp()

    packed, _ = events(remat, run)
    inputs = [("CHECKPOINT_INPUT", None, X), ("CHECKPOINT_INPUT", None, OTHER)]
    kept = [("BACKWARD", "here", TANH), ("BACKWARD", "here", OTHER), ("SAVE_OUTPUT", "here", RESULT)]
    assert packed[:-1] == inputs + kept
    assert packed[-1][:2] == ("BACKWARD", None)


def test_hooks_in_checkpoint_take_what_the_saved_calls_in_them_keep(remat):
    log, places = Log(remat), []

    def block(x):
        with remat.saved_tensors_hooks(*log.pair, capture_context=lambda: "one"):
            a = remat.region(torch.sigmoid, "a", recompute=False)(x.sin())
            remat.recompute_needs_tensor(a)
            y = a.exp()  # replay makes it again
        with remat.saved_tensors_hooks(*log.pair, capture_context=lambda: places.append(1) or len(places)):
            b = remat.region(torch.cos, "b", recompute=False)(a)
            c = remat.region(torch.sin, "c", recompute=False)(b)
            e = remat.region(torch.tanh, "e", recompute=True)(c)
        d = remat.region(torch.exp, "d", recompute=False)(x.cos())  # no hooks are around it
        return e + y + d

    x = seeded(1, 2, 3).requires_grad_()
    out = remat.checkpoint()(block)(x)
    a = x.detach().sin().sigmoid()
    sums = [round(one.double().sum().item(), 4) for one in (a, a.cos(), a.cos().sin())]
    (first, *others), kinds = log.packed, [kind for kind, _, _ in log.packed]
    assert first == ("BACKWARD", "one", sums[0])
    assert [value for kind, _, value in others if kind == "BACKWARD"] == [sums[0], sums[1]]
    assert kinds.count("SAVE_OUTPUT") == len({value for kind, _, value in log.packed if kind == "SAVE_OUTPUT"})
    assert ("SAVE_OUTPUT", sums[2]) in [(kind, value) for kind, _, value in log.packed]
    assert all(context is not None for _, context, _ in log.packed)
    out.sum().backward()
    z = x.detach().clone().requires_grad_()
    a = z.sin().sigmoid()
    (a.cos().sin().tanh() + a.exp() + z.cos().exp()).sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_the_innermost_hooks_take_a_tensor(remat):
    outer, inner, option = Log(remat), Log(remat), Log(remat)

    def block(x):
        with remat.saved_tensors_hooks(*outer.pair):
            with remat.saved_tensors_hooks(*inner.pair):
                a = remat.region(torch.sigmoid, "a", recompute=False)(x.sin())
            b = remat.region(torch.exp, "b", recompute=False)(a)
        return remat.region(torch.tanh, "c", recompute=False)(b)

    x = seeded(1, 2, 3).requires_grad_()
    remat.checkpoint(saved_tensors_hooks=option.pair)(block)(x).sum().backward()
    assert [len(log.packed) for log in (option, outer, inner)] == [2, 1, 1]
    assert [kind for kind, _, _ in option.packed] == ["CHECKPOINT_INPUT", "BACKWARD"]


def test_hooks_in_a_saved_call_take_what_is_saved_in_them(remat):
    inside, option = Log(remat), Log(remat)

    def call(a):
        with remat.saved_tensors_hooks(*inside.pair, capture_context=lambda: "inside"):
            b = a.exp()
        return b.tanh()

    def block(x):
        return remat.region(call, "saved", recompute=False)(x.sin())

    x = seeded(1, 2, 3).requires_grad_()
    out = remat.checkpoint(saved_tensors_hooks=option.pair)(block)(x)
    assert [(kind, context) for kind, context, _ in inside.packed] == [("BACKWARD", "inside")]
    assert [kind for kind, _, _ in option.packed] == ["CHECKPOINT_INPUT", "BACKWARD"]
    out.sum().backward()
    assert len(inside.unpacked) == 1


def test_an_option_comes_before_hooks_around(remat):
    around, option = Log(remat), Log(remat)
    block = hooked_block(remat, torch.nn.Parameter(seeded(9, 5, 5)))
    with remat.saved_tensors_hooks(*around.pair):
        out = remat.checkpoint(saved_tensors_hooks=option.pair)(block)(
            seeded(1, 2, 5).requires_grad_(), seeded(2, 2, 5)
        )
    assert around.packed == []
    assert len(option.packed) == 5
    out.sum().backward()


def test_hooks_of_torch_around_a_checkpoint_take_what_it_keeps(remat):
    packed = []

    def pack(tensor):
        if tensor.shape != (5, 5):
            packed.append(round(tensor.double().sum().item(), 4))
        return tensor

    block = hooked_block(remat, torch.nn.Parameter(seeded(9, 5, 5)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = remat.checkpoint()(block)(seeded(1, 2, 5).requires_grad_(), seeded(2, 2, 5))
    assert sorted(packed) == sorted([X, OTHER, TANH, OTHER, RESULT])
    out.sum().backward()


def test_outside_of_checkpoints_hooks_are_those_of_torch(remat):
    log = Log(remat)
    x = seeded(1, 2, 3).requires_grad_()
    with remat.saved_tensors_hooks(*log.pair, capture_context=lambda: "unused"):
        y = x.exp()
    assert [(kind, context) for kind, context, _ in log.packed] == [("BACKWARD", None)]
    y.sum().backward()
    assert len(log.unpacked) == 1


def test_an_error_in_a_pack_hook_leaves_no_state_behind(remat):
    def pack(tensor):
        raise KeyError("full")

    x = seeded(1, 2, 3).requires_grad_()
    with pytest.raises(KeyError, match="full"):
        remat.checkpoint(saved_tensors_hooks=(pack, lambda packed: packed))(torch.sin)(x)
    with pytest.raises(RuntimeError):
        remat.current_saved_tensor_info()
    x.exp().sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_information_is_plain_data(remat):
    info = remat.SavedTensorInfo(remat.SavedTensorKind.BACKWARD)
    assert (info.kind.name, info.context) == ("BACKWARD", None)
    assert info == remat.SavedTensorInfo(kind=remat.SavedTensorKind.BACKWARD, context=None)
    assert [kind.name for kind in remat.SavedTensorKind] == ["CHECKPOINT_INPUT", "BACKWARD", "SAVE_OUTPUT"]
    with pytest.raises(AttributeError):
        info.kind = remat.SavedTensorKind.SAVE_OUTPUT


def test_what_hooks_hold_goes_with_the_graph(remat):
    class Held:
        def __init__(self, tensor):
            self.tensor = tensor.clone()

    held = []

    def pack(tensor):
        made = Held(tensor)
        held.append(weakref.ref(made))
        return made

    hooks = (pack, lambda packed: packed.tensor)
    gc.collect()
    gc.disable()
    try:
        block = hooked_block(remat, torch.nn.Parameter(seeded(9, 5, 5)))
        out = remat.checkpoint(saved_tensors_hooks=hooks)(block)(seeded(1, 2, 5).requires_grad_(), seeded(2, 2, 5))
        assert sum(one() is not None for one in held) >= 5
        del out, block
        if remat is v02:
            assert [one() for one in held if one() is not None] == []
        block = hooked_block(remat, torch.nn.Parameter(seeded(9, 5, 5)))
        out = remat.checkpoint(saved_tensors_hooks=hooks)(block)(seeded(1, 2, 5).requires_grad_(), seeded(2, 2, 5))
        out.sum().backward()
        if remat is v02:
            assert [one() for one in held if one() is not None] == []
    finally:
        gc.enable()


# State outside of tensors.


class Counter:
    """A counter that seeds random numbers, and the hook that looks after it."""

    def __init__(self):
        self.value = 0
        self.log: list[str] = []

    def snapshot(self):
        self.log.append(f"take {self.value}")
        return self.value

    def restore(self, state):
        self.log.append(f"put {state}")
        self.value = state

    def dropout(self, x):
        self.value += 1
        self.log.append(f"draw {self.value}")
        return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(self.value))


def drawing_block(remat, counter):
    def inner(x):
        y = remat.region(lambda x: counter.dropout(x).exp(), "inner", recompute=False)(x)
        return counter.dropout(y).sin()

    def inert(x):
        return remat.region(lambda x: counter.dropout(x).exp(), "inert", recompute=False)(x)

    def block(x):
        a = counter.dropout(x).sin()
        b = remat.region(lambda a: counter.dropout(a).tanh(), "saved", recompute=False)(a)
        remat.recompute_needs_tensor(b)
        c = remat.region(lambda b: counter.dropout(b).exp(), "recomputed", recompute=True)(counter.dropout(b).cos())
        d = remat.region(inert, "with inert", recompute=False)(c)
        e = remat.region(inner, "with inner", recompute=True)(c)
        remat.recompute_needs_tensor(d)
        return d.sin() + e

    return block


FORWARD = "take 0,draw 1,draw 2,take 2,draw 3,draw 4,draw 5,take 5,draw 6,take 6,draw 7"
REPLAY = "take {0},put 0,draw 1,put 2,draw 3,draw 4,put 5,put 6,draw 7,put {0}"


def test_state_is_that_of_forward_in_each_replay_and_as_before_after_it(remat):
    counter = Counter()
    assert isinstance(counter, remat.RecomputeStateHook)
    assert not isinstance(3, remat.RecomputeStateHook)
    block = drawing_block(remat, counter)
    x = seeded(1, 2, 3).requires_grad_()
    out = remat.checkpoint(recompute_state_hooks=(counter,))(block)(x)
    assert ",".join(counter.log) == FORWARD
    for value in (100, 200):
        counter.value, counter.log = value, []
        out.sum().backward(retain_graph=True)
        assert ",".join(counter.log) == REPLAY.format(value)
    counter.value, z = 0, x.detach().clone().requires_grad_()
    block(z).sum().backward(retain_graph=True)
    assert torch.equal(x.grad, 2 * z.grad)


def test_several_hooks_are_asked_in_order(remat):
    log = []

    class Hook:
        def __init__(self, name):
            self.name = name

        def snapshot(self):
            log.append(f"take {self.name}")
            return self.name

        def restore(self, state):
            log.append(f"put {state}")

    def block(x):
        return remat.region(torch.sigmoid, "saved", recompute=False)(x.sin())

    x = seeded(1, 2, 3).requires_grad_()
    out = remat.checkpoint(recompute_state_hooks=(Hook("a"), Hook("b")))(block)(x)
    assert log == ["take a", "take b"] * 2
    log.clear()
    out.sum().backward()
    assert log[:4] == ["take a", "take b", "put a", "put b"]
    assert log[-2:] == ["put a", "put b"]


def test_state_is_not_looked_after_without_gradients(remat):
    counter = Counter()
    with torch.no_grad():
        remat.checkpoint(recompute_state_hooks=(counter,))(drawing_block(remat, counter))(seeded(1, 2, 3))
    assert {entry.partition(" ")[0] for entry in counter.log} == {"draw"}


# Traces.


def test_trace_shows_calls_in_their_scopes(remat):
    def inner(x):
        return remat.region(torch.cos, "inner cos", recompute=True)(
            remat.region(torch.sigmoid, "inner", recompute=False)(x)
        )

    def block(x):
        a = remat.region(torch.sin, "sin", recompute=False)(x)
        b = remat.trace_scope(inner, "scope", metadata="flag")(a)
        with remat.name_scope("names"):
            c = remat.region(torch.sin, "sin", recompute=False)(b)
            c = remat.trace_scope(lambda c: remat.region(torch.cos, "cos", recompute=True)(c), "second")(c)
        d = remat.region(lambda c: remat.region(torch.tanh, "in", recompute=False)(c), "outer", recompute=True)(c)
        e = remat.region(lambda d: remat.region(torch.sin, "inert", recompute=False)(d), "last", recompute=False)(d)
        return remat.trace_scope(torch.sin, "empty")(e)

    x = seeded(1, 2, 3).requires_grad_()
    with remat.collect_trace() as trace:
        y = remat.trace_scope(remat.checkpoint(region_name="layers.0")(block), "model")(x)
        remat.region(torch.sin, "outside", recompute=False)(x)
        text = trace.format()
        y.sum().backward()
    assert trace.format() == text
    assert text.splitlines() == [
        "torch_remat trace",
        "model",
        "  sin: save",
        "  scope [flag]",
        "    inner: save",
        "    inner cos: recompute",
        "  names/sin: save",
        "  second",
        "    names/cos: recompute",
        "  outer: recompute",
        "  in: save",
        "  last: save",
        "  empty",
    ]


def test_an_inner_trace_takes_what_is_called_in_it(remat):
    call = remat.checkpoint()(lambda x: remat.region(torch.sin, "sin", recompute=False)(x))
    with remat.collect_trace() as outer, remat.collect_trace() as inner:
        call(seeded(1, 3).requires_grad_())
    assert (outer.format(), inner.format()) == ("torch_remat trace", "torch_remat trace\nsin: save")


# Reports.


def test_reports_show_names_and_what_is_said_of_each_tensor(remat):
    square = named_function(remat)
    reports = []

    def block(x):
        with remat.name_scope("scope"):
            y = remat.region(square, "square", recompute=False)(x.sin())
        if not remat.is_recomputing():
            reports.append(remat.format_current_memory_report(annotate=lambda tensor: f"said of {tensor.numel()}"))
            file = io.StringIO()
            remat.print_current_memory_report(file)
            reports.append(file.getvalue())
        return y

    out = remat.checkpoint(region_name="layers.0")(block)(seeded(1, 4, 16).requires_grad_())
    loss = out.tanh().sum()
    reports.append(remat.format_saved_tensors_report())
    reports.append(remat.format_saved_tensors_report([loss], annotate=lambda tensor: None))
    file = io.StringIO()
    remat.print_saved_tensors_report(loss, file=file, annotate=lambda tensor: f"said of {tensor.numel()}")
    reports.append(file.getvalue())
    for report in reports:
        assert "layers.0" in report
        assert "scope/square" in report
        (line,) = (line for line in report.splitlines() if "twice" in line)
        assert "256 B" in line
    assert ["said of 64" in report for report in reports] == [True, False, False, False, True]
    assert ["TanhBackward0" in report for report in reports] == [False, False, False, True, True]
    with pytest.raises(RuntimeError):
        remat.format_current_memory_report()
    with pytest.raises(RuntimeError):
        remat.print_current_memory_report()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the release looks at the attributes of all objects
def test_out_of_memory_reports_find_graphs_by_themselves(remat, capsys):
    x = seeded(1, 4, 16).requires_grad_()
    y = remat.checkpoint(region_name="layers.0")(
        lambda x: remat.region(torch.sigmoid, "sigmoid", recompute=False)(x.sin())
    )(x)
    loss = y.tanh().sum()
    assert any(root is loss for root in remat.discover_autograd_roots())
    report = remat.format_oom_saved_tensors_report(annotate=lambda tensor: "said")
    assert "layers.0" in report
    assert "TanhBackward0" in report
    assert "said" in report
    assert remat.oom_observer(0, 1 << 20, 2 << 20, 3 << 20) is None
    error = capsys.readouterr().err
    assert "layers.0" in error


def snapshot_of(tensor, frames, state="active_allocated", shift=0):
    start = tensor.untyped_storage().data_ptr() + shift
    block = {"address": start, "size": 512, "requested_size": 512, "state": state, "frames": frames}
    return {"segments": [{"address": start, "total_size": 512, "blocks": [block]}], "device_traces": []}


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


def test_a_snapshot_of_cuda_memory_tells_where_a_tensor_was_allocated(remat):
    tensor = torch.zeros(64)
    frames = [frame("/a/torch_remat/_api.py", 3, "region"), frame("/a/model.py", 12, "forward")]
    assert remat.memory_snapshot_annotate(snapshot_of(tensor, frames))(tensor) == "model.py:12 forward"
    assert remat.memory_snapshot_annotate(snapshot_of(tensor, frames))(tensor[3:]) == "model.py:12 forward"
    assert remat.memory_snapshot_annotate(snapshot_of(tensor, frames, shift=-128))(tensor) == "model.py:12 forward"
    assert remat.memory_snapshot_annotate(snapshot_of(tensor, frames, shift=8))(tensor) is None
    assert remat.memory_snapshot_annotate(snapshot_of(tensor, frames, state="inactive"))(tensor) is None
    assert remat.memory_snapshot_annotate(snapshot_of(tensor, []))(tensor) is None
    assert remat.memory_snapshot_annotate({"segments": []})(tensor) is None


def test_the_snapshot_is_taken_once_until_it_is_cleared(remat, monkeypatch):
    taken = []
    tensor = torch.zeros(64)

    def take():
        taken.append(1)
        return snapshot_of(tensor, [frame("/a/model.py", 12, "forward")])

    monkeypatch.setattr(importlib.import_module("torch.cuda.memory"), "_snapshot", take)
    remat.clear_memory_snapshot_cache()
    try:
        assert remat.memory_snapshot_annotate()(tensor) == "model.py:12 forward"
        remat.memory_snapshot_annotate()
        assert len(taken) == 1
        remat.clear_memory_snapshot_cache()
        remat.memory_snapshot_annotate()
        assert len(taken) == 2
    finally:
        remat.clear_memory_snapshot_cache()


# What is refused.


class Context:
    def save_for_backward(self, *tensors):
        self.saved = tensors


def in_checkpoint(call):
    return lambda remat: remat.checkpoint(region_name="layers.0")(lambda x: call(remat, x))(
        seeded(1, 2, 3).requires_grad_()
    )


def twice_the_same_name(remat, x):
    return remat.region(torch.sin, "same", recompute=False)(remat.region(torch.sin, "same", recompute=True)(x))


def empty_scope(remat, prefix=""):
    with remat.name_scope(prefix):
        pass


REFUSED = {
    "a function in the first call": (lambda remat: remat.checkpoint(torch.sin), TypeError),
    "an unknown option": (lambda remat: remat.checkpoint(name="a"), TypeError),
    "no function": (lambda remat: remat.region(3, "a", recompute=False), RuntimeError),
    "no name": (lambda remat: remat.region(torch.sin, "", recompute=False), ValueError),
    "no decision": (lambda remat: remat.region(torch.sin, "a"), TypeError),
    "recompute=1": (lambda remat: remat.region(torch.sin, "a", recompute=1), RuntimeError),
    "a name twice": (in_checkpoint(twice_the_same_name), RuntimeError),
    "no tensor": (lambda remat: remat.recompute_needs_tensor(3), RuntimeError),
    "an empty scope": (empty_scope, ValueError),
    "a scope that is no string": (lambda remat: empty_scope(remat, 3), RuntimeError),
    "a trace of no function": (lambda remat: remat.trace_scope(3, "a"), RuntimeError),
    "a trace without a name": (lambda remat: remat.trace_scope(torch.sin, ""), ValueError),
    "a trace with a number as name": (lambda remat: remat.trace_scope(torch.sin, 3), RuntimeError),
    "empty metadata": (lambda remat: remat.trace_scope(torch.sin, "a", metadata=""), ValueError),
    "metadata that are no string": (lambda remat: remat.trace_scope(torch.sin, "a", metadata=3), RuntimeError),
    "a saved tensor without a name": (lambda remat: remat.save_for_backward(Context(), {"": None}), ValueError),
    "a dot in a name": (lambda remat: remat.save_for_backward(Context(), {"a.b": None}), RuntimeError),
    "a number that is saved": (lambda remat: remat.save_for_backward(Context(), {"a": 3}), RuntimeError),
    "a number as a name": (lambda remat: remat.save_for_backward(Context(), {3: None}), TypeError),
    "information outside of hooks": (lambda remat: remat.current_saved_tensor_info(), RuntimeError),
    "a report of a number": (lambda remat: remat.format_saved_tensors_report(3), TypeError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_with_an_error_of_the_same_type(remat, case):
    call, kind = REFUSED[case]
    with pytest.raises(kind) as caught:
        call(remat)
    if case == "a name twice":
        assert "layers.0::same" in str(caught.value)


def test_names_of_saved_tensors_do_not_change_what_is_saved(remat):
    context, x = Context(), torch.ones(2)
    remat.save_for_backward(context, {"x": x, "nothing": None})
    assert context.saved == (x, None)


# What the release refuses, or does wrong, and this library does.


def test_every_public_name_of_the_release_is_there_with_its_parameters():
    found = release()
    if found is None:
        pytest.skip(f"torch_remat {VERSION} cannot be installed here")
    assert v02.__all__ == sorted(v02.__all__)
    theirs = {name for name in dir(found) if not name.startswith("_")} - {"annotations"}
    assert theirs == set(v02.__all__)
    for name in theirs:
        value = getattr(found, name)
        if inspect.isfunction(value):
            ours = inspect.signature(getattr(v02, name)).parameters
            for parameter in inspect.signature(value).parameters.values():
                assert ours[parameter.name].kind is parameter.kind, f"{name}({parameter.name})"
                required = parameter.default is inspect.Parameter.empty
                assert (ours[parameter.name].default is inspect.Parameter.empty) is required, (
                    f"{name}({parameter.name})"
                )


def test_random_numbers_are_those_of_forward():
    def block(x):
        y = v02.region(lambda x: torch.dropout(x, 0.5, True).tanh(), "saved", recompute=False)(
            torch.dropout(x, 0.5, True)
        )
        return torch.dropout(y, 0.5, True).sin()

    grads = []
    for run in (block, v02.checkpoint()(block), v02.checkpoint(preserve_rng_state=True)(block)):
        torch.manual_seed(0)
        x = seeded(1, 8, 8).requires_grad_()
        run(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("result", [None, 3, {"a": 1}, "text"], ids=["None", "a number", "a dict", "text"])
def test_checkpoints_and_calls_may_return_anything(result):
    def block(x):
        y, other = v02.region(lambda x: (x.tanh(), {"other": result}), "saved", recompute=False)(x)
        assert other == {"other": result}
        return {"y": y.sin(), "other": result}

    x = seeded(1, 3).requires_grad_()
    out = v02.checkpoint()(block)(x)
    assert out["other"] == result
    out["y"].sum().backward()
    z = x.detach().clone().requires_grad_()
    z.tanh().sin().sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_what_replay_reads_is_kept_without_being_told():
    def block(x):
        y = v02.region(lambda x: x.tanh() * 2, "saved", recompute=False)(x)
        return y.sin() + v02.region(lambda many: many["y"].cos(), "read", recompute=True)({"y": y})

    assert same(
        results(lambda x, weight: v02.checkpoint()(block)(x @ weight)), results(lambda x, weight: block(x @ weight))
    )


def test_a_recomputed_call_in_a_saved_one_is_saved():
    def block(x):
        return v02.region(lambda x: v02.region(torch.sin, "in", recompute=True)(x).tanh(), "out", recompute=False)(x)

    assert same(
        results(lambda x, weight: v02.checkpoint()(block)(x @ weight)), results(lambda x, weight: block(x @ weight))
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=SHAPES)
def test_checkpoints_nest(program):
    block, log, counter = program(v02), Log(v02), Counter()

    def outer(x, weight):
        inner = v02.checkpoint(region_name="inner", recompute_state_hooks=(counter,))(block)(x.sin(), weight)
        first = inner if isinstance(inner, torch.Tensor) else inner[0]
        return v02.region(torch.tanh, "mine", recompute=False)(first).cos()

    def plain(x, weight):
        inner = block(x.sin(), weight)
        return (inner if isinstance(inner, torch.Tensor) else inner[0]).tanh().cos()

    expected = results(plain)
    assert same(results(v02.checkpoint(region_name="outer")(outer)), expected)
    assert same(results(v02.checkpoint(saved_tensors_hooks=log.pair)(outer)), expected)


def test_an_error_in_a_state_hook_leaves_nothing_behind():
    class Broken:
        def snapshot(self):
            raise KeyError("no state")

        def restore(self, state):
            pass

    x = seeded(1, 3).requires_grad_()
    with pytest.raises(KeyError, match="no state"):
        v02.checkpoint(recompute_state_hooks=(Broken(),))(torch.sin)(x)
    v02.checkpoint()(torch.sin)(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_a_call_that_raised_raises_again_in_replay():
    def fail(x):
        raise ZeroDivisionError

    def block(x):
        try:
            v02.region(fail, "fails", recompute=False)(x)
        except ZeroDivisionError:
            return x.exp().sin()

    assert same(
        results(lambda x, weight: v02.checkpoint()(block)(x @ weight)), results(lambda x, weight: block(x @ weight))
    )


@pytest.mark.parametrize(
    "options",
    [
        {"saved_tensors_hooks": 3},
        {"saved_tensors_hooks": (1, 2)},
        {"recompute_state_hooks": (3,)},
        {"determinism_check": "sometimes"},
    ],
    ids=["no pair", "no functions", "no state hook", "no check"],
)
def test_wrong_options_are_refused_at_once(options):
    with pytest.raises(RematError):
        v02.checkpoint(**options)


@pytest.mark.parametrize("pack", [lambda tensor: tensor, lambda tensor: [tensor]], ids=["itself", "in a list"])
def test_a_result_that_is_changed_while_hooks_have_it_is_noticed(pack):
    hooks = (pack, lambda packed: packed if isinstance(packed, torch.Tensor) else packed[0])

    def block(x):
        y = v02.region(torch.sigmoid, "saved", recompute=False)(x.sin())
        return y.exp(), y

    out, y = v02.checkpoint(region_name="layers.0", saved_tensors_hooks=hooks)(block)(seeded(1, 3).requires_grad_())
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(MutationError, match=r"layers\.0::saved"):
        out.sum().backward()


def test_a_result_that_is_changed_while_hooks_have_a_copy_is_what_it_was():
    hooks = (lambda tensor: tensor.clone(), lambda packed: packed)

    def block(x):
        y = v02.region(torch.sigmoid, "saved", recompute=False)(x.sin())
        return y.exp(), y

    x = seeded(1, 3).requires_grad_()
    out, y = v02.checkpoint(saved_tensors_hooks=hooks)(block)(x)
    with torch.no_grad():
        y.mul_(2)
    out.sum().backward()
    z = x.detach().clone().requires_grad_()
    z.sin().sigmoid().exp().sum().backward()
    assert torch.equal(x.grad, z.grad)


@pytest.mark.parametrize("kind", ["two tensors", "sparse", "autocast"])
def test_hooks_take_whatever_is_saved(kind):
    square, log = named_function(v02), []

    def block(x):
        y = v02.region(square, "square", recompute=False)(x)
        if kind == "sparse":
            y = v02.region(lambda y: torch.sparse.mm(torch.eye(4).to_sparse(), y), "sparse", recompute=False)(y)
        y = v02.region(lambda y: torch.sigmoid(y @ y), "last", recompute=False)(y)
        return v02.region(torch.cos, "cos", recompute=True)(y)

    hooks = (lambda tensor: log.append(v02.current_saved_tensor_info().kind) or tensor, lambda packed: packed)
    grads = []
    for run in (block, v02.checkpoint(saved_tensors_hooks=hooks)(block)):
        x = seeded(1, 4, 4)
        x = (TwoTensor(x, x.clone()) if kind == "two tensors" else x).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            out = run(x)
        out.sum().backward()
        grads.append(x.grad)
    if kind == "two tensors":
        assert torch.equal(grads[0].a, grads[1].a)
        assert torch.equal(grads[0].b, grads[1].b)
    else:
        assert torch.equal(*grads)
    assert set(log) == set(v02.SavedTensorKind)


@pytest.mark.parametrize("program", PROGRAMS, ids=SHAPES)
def test_runs_of_v02_leave_no_cycle(program):
    counter, log = Counter(), Log(v02)
    run = v02.checkpoint(saved_tensors_hooks=log.pair, recompute_state_hooks=(counter,))(program(v02))
    results(run)
    gc.collect()
    gc.disable()
    try:
        results(run)
        x, weight = seeded(1, 4, 4).requires_grad_(), torch.nn.Parameter(seeded(2, 4, 4))
        found = weakref.ref(x)
        out = run(x, weight)
        del out, x, weight
        assert found() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("program", [saved_and_recomputed, repeated_block, nested_calls], ids=lambda one: one.__name__)
def test_checkpoints_are_compiled(program):
    block = program(v02)
    torch.compiler.reset()
    compiled = torch.compile(v02.checkpoint()(block), backend="aot_eager", fullgraph=True)
    for found, expected in zip(results(compiled), results(block), strict=True):
        torch.testing.assert_close(found, expected)


def test_hooks_of_a_checkpoint_are_refused_under_the_compiler():
    run = v02.checkpoint(saved_tensors_hooks=(lambda tensor: tensor, lambda packed: packed))(torch.sin)
    torch.compiler.reset()
    with pytest.raises(Exception, match="cannot be compiled"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(seeded(1, 3).requires_grad_())


def test_it_is_loaded_only_when_it_is_imported():
    program = "import sys, torch_remat; [getattr(torch_remat, name) for name in torch_remat.__all__]; "
    program += "print([name for name in sys.modules if name.startswith('torch_remat.v02')])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert torch_remat.v02 is v02
