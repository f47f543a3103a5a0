"""`op`: one call of anything. The programs, around which the surroundings vary; then what single calls promise.

Each program is written once, as a function of how a call is made: plainly, or by `op`. Equal means bit for bit:
outputs, gradients, buffers with their versions, and the random state.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import (
    CountOps,
    LiveStorages,
    assert_same,
    assert_same_program,
    chain,
    checkpointed,
    collector_off,
    leaf,
    no_other_regions,
    watch,
)
from tests.native_programs import SAVE, keep

OFFLOAD, RECOMPUTE = remat.CheckpointPolicy.OFFLOAD, remat.CheckpointPolicy.RECOMPUTE
Pair = namedtuple("Pair", "first second")
RUNS: list[bool] = []  # for each run of a call's Python, whether it was in replay


def ran() -> None:
    RUNS.append(remat.is_recomputing())


class PMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ran()
        ctx.save_for_backward(x, y)
        return x * y + x.sin()

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * (y + x.cos()), g * x


class Several(torch.autograd.Function):
    """Three results, the second without a gradient."""

    @staticmethod
    def forward(ctx, x, y):
        ran()
        mask = x > y
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(x, y, mask)
        return x * y, mask, x.sin()

    @staticmethod
    def backward(ctx, g, _, h):
        x, y, mask = ctx.saved_tensors
        return g * y + h * x.cos() * mask, g * x


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ran()
        ctx.mark_dirty(x)
        return x.mul_(1.5)

    @staticmethod
    def backward(ctx, g):
        return g * 1.5


class Scaled:
    def __init__(self, tensor: Tensor, factor: float = 2.0) -> None:
        self.tensor, self.factor = tensor, factor

    def times(self, x: Tensor) -> Tensor:
        ran()
        return (x * self.tensor).sin() * self.factor


@dataclasses.dataclass
class Boxed:
    tensor: Tensor


class Env(SimpleNamespace):
    """What lies outside of the regions, made anew for each run."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            w=nn.Parameter(torch.randn(4, 4)),
            bias=nn.Parameter(torch.randn(4)),
            buf=torch.randn(4, 4),
            lin=nn.Linear(4, 4),
            bn=nn.BatchNorm1d(4),
            gen=torch.Generator().manual_seed(5),
        )

    def leaves(self) -> list[Tensor]:
        modules = [self.lin, self.bn]
        return [self.w, self.bias, *(p for module in modules for p in module.parameters())]

    def state(self) -> list[Tensor]:
        buffers = [self.buf, *self.bn.buffers()]
        versions = torch.tensor([b._version for b in buffers])
        return [*(b.clone() for b in buffers), versions, self.gen.get_state(), torch.get_rng_state()]


PROGRAMS: dict[str, tuple[Callable, bool]] = {}


def program(whole: bool = False, name: str | None = None) -> Callable[[Callable], Callable]:
    """Add a program; `whole` says whether replay runs its calls whole, with a warning."""

    def add(function: Callable) -> Callable:
        PROGRAMS[name or function.__name__] = (function, whole)
        return function

    return add


def counted(function: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        ran()
        return function(*args, **kwargs)

    return run


def complex_of(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.sin().view(4, 2, 2))


def filled(h: Tensor) -> Tensor:
    """Fill a new tensor part by part, and return a view of it."""
    out = torch.empty_like(h)
    out[:2] = h[:2].sin()
    out.view(16)[8:] = h[2:].reshape(8) * 2
    return out.T


for name_, one_call in {
    "mm": lambda call, e, x: call("k", torch.mm, x.sin(), e.w).sin(),
    "batch norm": lambda call, e, x: call("k", e.bn, x.sin()).sin(),
    "dropout": lambda call, e, x: F.dropout(call("k", F.dropout, x.sin(), 0.3).sin(), 0.3),
    "custom function": lambda call, e, x: call("k", PMul.apply, x.sin(), e.w).sin(),
    "several results": lambda call, e, x: (
        lambda r: torch.where(r[1], r[0], r[2])
    )(call("k", Several.apply, x.sin(), e.w)),
    "partial": lambda call, e, x: call("k", partial(counted(torch.mul), e.w), x.cos()).sin(),
    "bound method": lambda call, e, x: call("k", Scaled(x.sin()).times, x.cos()).sin(),
    "pytree arguments": lambda call, e, x: call(
        "k", counted(lambda t: t["a"][0] * t["b"].first), {"a": [x.sin(), None], "b": Pair(x.cos(), 3)}
    ).sin(),
    "closure": lambda call, e, x: (lambda h: call("k", counted(lambda: (h @ e.w).sin() * h)).sin())(x.sin()),
    "named tuple": lambda call, e, x: call(
        "k", counted(lambda h: Pair(h.sin(), {"a": [h.exp(), None, 3, "s"]})), x.sin()
    ).second["a"][0].sin(),
    "same twice": lambda call, e, x: torch.mul(*call("k", counted(lambda h: (h.sin(),) * 2), x.sin())).sin(),
    "dataclass result": lambda call, e, x: call("k", counted(lambda h: Boxed(h.sin())), x.cos()).tensor.exp(),
    "a result and its view": lambda call, e, x: torch.mul(
        *call("k", counted(lambda h: (lambda s: (s, s.t()))(h.sin())), x.sin())
    ).sin(),
    "view of an inner tensor": lambda call, e, x: call("k", counted(lambda h: h.sin()[1:, ::2].t()), x.sin()).exp(),
    "the argument": lambda call, e, x: call("k", counted(lambda h: (h.sin(), h)), x.sin())[1].exp(),
    "view of the argument": lambda call, e, x: call("k", counted(lambda h: (h.sin(), h.t()[1:])), x.sin())[1].exp(),
    "parameter": lambda call, e, x: call("k", counted(lambda: (e.w, e.bias)))[0] @ x.sin(),
    "no grad": lambda call, e, x: x.sin() * call("k", counted(torch.no_grad()(lambda h: h.exp() * e.w)), x.sin()),
    "number": lambda call, e, x: x.sin() * call("k", counted(lambda h: h.mean().item()), x.sin()),
    "inner draws": lambda call, e, x: call("k", counted(lambda h: h * torch.rand(4)), x.sin()).sin() * torch.rand(4),
    "call in a call": lambda call, e, x: call(
        "k", counted(lambda h: call("k", torch.mm, h, e.w).sin()), x.sin()
    ).sin(),
    "checkpoint in a call": lambda call, e, x: call(
        "k", counted(lambda h: remat.checkpoint()(lambda t: chain(t) * e.w)(h)), x.sin()
    ).sin(),
    "native in a call": lambda call, e, x: call(
        "k", counted(lambda h: keep("k", torch.mm, h, e.w).sin()), x.sin()
    ).sin(),
    "autocast in a call": lambda call, e, x: call(
        "k", counted(torch.autocast("cpu", torch.bfloat16)(lambda h: e.lin(h))), x.sin()
    ).sin(),
    "leaf": lambda call, e, x: (call("k", counted(lambda: e.buf.clone().requires_grad_())) * x.sin()).sin(),
    "method that draws": lambda call, e, x: (
        lambda h: (h * call("k", h.sigmoid().detach().bernoulli) * torch.rand_like(h)).sin()
    )(x.sin()),
    "detached part": lambda call, e, x: (
        lambda h: (h[1:] * call("k", counted(lambda t: t.detach()[1:]), h)).sin()
    )(x.sin()),
    "imaginary part": lambda call, e, x: call("k", counted(lambda z: z.conj().imag), complex_of(x)).exp(),
    "filled part by part": lambda call, e, x: call("k", counted(filled), x.cos()).sigmoid() @ x,
}.items():  # fmt: skip
    program(name=name_)(one_call)


# What writes, or leaves something in Python.


@program()
def counter_in_a_buffer(call, e, x):
    y = call("k", counted(lambda h: e.buf.add_(1).sin() * h), x.sin())
    return y.sin()


@program(whole=True)
def dirty_argument(call, e, x):
    h = x.sin() * 1.0
    call("k", Dirty.apply, h)
    return h.sin()


@program(whole=True)
def variable_that_gets_a_history(call, e, x):
    h = torch.zeros(4, 4)
    call("k", counted(lambda: h.copy_(x)))
    return h * x


@program(whole=True)
def base_of_a_variable(call, e, x):
    h = x.sin()
    part = h[1:3]
    call("k", counted(torch.no_grad()(lambda: part.mul_(0.5) is None)))
    return h.exp()


def doubled_and_tripled(h):
    h.mul_(2)
    return h * 3


@program(whole=True)
def argument_and_result_are_written(call, e, x):
    h = x.sin()
    y = call("k", counted(doubled_and_tripled), h)
    y.add_(1)
    return y.sin() * x + h.exp()


@program(whole=True)
def result_that_was_filled_part_by_part_and_is_written(call, e, x):
    h = call("k", counted(filled), x.cos())
    h[1:3].cos_()
    return h.sigmoid() @ x


@program(whole=True)
def relu_on_the_result(call, e, x):
    return F.relu(call("k", counted(lambda h: h @ e.w), x.sin()), inplace=True).sin()


@program()
def gradient_in_the_call(call, e, x):
    def run(h):
        ran()
        t = h.detach().requires_grad_()
        return torch.autograd.grad((t.sin() * e.w).sum(), t)[0] * h

    return call("k", run, x.sin()).sin()


@program()
def caught(call, e, x):
    def fails(h):
        torch.rand(3)
        h.exp()
        raise ValueError("no")

    try:
        y = call("k", fails, x.sin())
    except ValueError:
        y = call("j", torch.mm, x.sin(), e.w)
    return y.sin() * torch.rand(4)


@program()
def result_to_numpy(call, e, x):
    y = call("k", counted(lambda h: h.sin()), x.exp())
    return (x.exp() * float(y.detach().numpy().max())).sin()


@program()
def numpy_that_is_said(call, e, x):
    y = call("k", counted(lambda h: h.sin()), x.exp())
    remat.recompute_needs_tensor(y[1:])
    return (x.exp() * float(y.detach().numpy().max())).sin()


@program()
def shared_casts(call, e, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = call("k", e.lin, x.sin())
        y = call("j", counted(lambda h: e.lin(h).tanh()), y.float()) + e.lin(x)
        return call("i", torch.mm, y, e.w).float().sin()


@program()
def twice_read_buffer(call, e, x):
    y = call("a", counted(lambda h: e.bn(h)), x.sin())
    return call("b", counted(lambda h: e.bn(h).sin()), y.exp()).sin()


class Noted:
    """How a program's calls are made in a region, and by it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        options = {"recompute": {"policy": RECOMPUTE}, "offload": {"policy": OFFLOAD}}
        if self.how == "plain":
            return function(*args, **kwargs)
        if self.how == "native":
            return remat.native_save_region(name, function, *args, **kwargs)
        return remat.op(function, name, **options.get(self.how, {}))(*args, **kwargs)


def measure(function: Callable, how: str, wrap: Callable, mode: str = "once") -> list[Tensor]:
    """Run a program in one region and return everything that must be equal."""
    e = Env()
    torch.manual_seed(2)
    x = leaf(4, 4)
    RUNS.clear()
    y = wrap(lambda t: function(Noted(how), e, t))(x)
    out = [y.detach().clone(), *e.state()]
    loss, leaves = (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum(), [x, *e.leaves()]

    def grad(**options: Any) -> tuple[Tensor | None, ...]:
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, **options)
        out.extend(torch.full((), 7.0) if g is None else g.detach().clone() for g in gradients)
        return gradients

    if mode == "double":
        first = grad(create_graph=True)
        loss = loss + sum(g.sin().sum() for g in first if g is not None and g.requires_grad)
    elif mode == "kept":
        grad(retain_graph=True)
        torch.rand(2)
        grad(retain_graph=True)
    grad()
    return [*out, *e.state()]


def programs(skip: frozenset[str] = frozenset()) -> list[str]:
    """Return the names of all programs but some."""
    return [name for name in PROGRAMS if name not in skip]


def compared(name: str, how: str, wrap: Callable, mode: str = "once", around: Callable = lambda f: f) -> list[str]:
    """Assert that a program is right, and return the warnings of it."""
    function, _ = PROGRAMS[name]
    expected = measure(function, "plain", around, mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = measure(function, how, wrap, mode)
    assert_same(expected, actual, name)
    return [str(w.message) for w in caught if issubclass(w.category, remat.RematWarning)]


WRITES = frozenset(name for name, (_, whole) in PROGRAMS.items() if whole) | {
    "batch norm",
    "counter_in_a_buffer",
    "twice_read_buffer",
}


def native(function: Callable, name: str) -> Callable:
    return lambda *args: remat.native_save_region(name, function, *args)


@pytest.mark.parametrize("name", programs())
def test_equals_autograd_and_runs_its_python_again_only_where_it_warns(name):
    caught = compared(name, "save", remat.checkpoint())
    assert bool(caught) == PROGRAMS[name][1], caught
    assert caught or True not in RUNS, RUNS  # replay may end before it comes to a call that it would run
    caught = compared(name, "save", remat.checkpoint(policy=lambda *_, **__: RECOMPUTE))
    assert caught or True not in RUNS, RUNS
    assert not caught or PROGRAMS[name][1], caught
    compared(name, "native", remat.checkpoint())


@pytest.mark.parametrize("kept", [SAVE, OFFLOAD])
def test_a_call_in_a_region_with_a_policy_is_left_out_and_keeps_no_argument(kept):
    runs = []

    def call(h):
        runs.append(remat.is_recomputing())
        return (h * h).sin()

    def block(x):
        return remat.op(call, "k", policy=kept)(x * 2.0).tanh() * x

    x = leaf(64, 64)
    expected = torch.autograd.grad(block(x).sum(), x)
    runs.clear()
    live = LiveStorages()
    with live, warnings.catch_warnings():
        warnings.simplefilter("error")
        y = remat.checkpoint(policy=lambda *_, **__: RECOMPUTE)(block)(x)
    # The output, what the sine saves, and the result, which tanh reads; not the argument, which replay makes again.
    assert live.bytes() <= 3 * x.nbytes
    assert_same(expected, torch.autograd.grad(y.sum(), x))
    assert runs == [False]


@pytest.mark.parametrize("only_replay", [False, True])
def test_an_op_before_a_call_that_only_one_phase_runs_is_a_mismatch_under_a_policy(only_replay):
    def block(x):
        h = x.exp()
        if remat.is_recomputing() is only_replay:
            h = h.abs()
        return remat.op(lambda t: t.sin() * t, "k")(h).tanh() * x

    y = remat.checkpoint(policy=lambda *_, **__: RECOMPUTE)(block)(leaf(4))
    with pytest.raises(remat.MismatchError, match=None if only_replay else "k"):
        y.sum().backward()


@pytest.mark.parametrize("mode", ["double", "kept"])
def test_equals_autograd_in_several_backward_passes(mode):
    for name in programs():
        compared(name, "save", remat.checkpoint(), mode)


OWNS = frozenset(["call in a call", "native in a call"])  # a recomputed call does not own the names inside


@pytest.mark.parametrize("how", ["recompute", "offload"])
def test_other_policies_equal_autograd(how):
    wrap = remat.checkpoint(offloader=remat.CpuOffloader() if how == "offload" else None)
    for name in programs(WRITES | OWNS):
        compared(name, how, wrap)


def lives(name: str, backward: bool) -> int:
    """Run a program and return how many storages of it are alive when all names are gone."""
    live = LiveStorages()

    def run() -> None:
        e = Env()
        with live:
            x = leaf(4, 4)
            y = remat.checkpoint()(lambda t: PROGRAMS[name][0](Noted("save"), e, t))(x)
        for tensor in (*e.leaves(), e.buf, *e.bn.buffers()):
            live.watch(tensor)
        if backward:
            torch.autograd.grad(y.sum(), x, allow_unused=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
        return live.count()


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_outlives_its_graph(backward):
    with collector_off():
        assert [name for name in programs() if lives(name, backward)] == []


def test_as_a_decorator_it_keeps_the_method_and_is_plain_outside():
    class Block(nn.Module):
        calls = 0

        @remat.op(name="mix", policy=SAVE)
        def mix(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
            """Mix."""
            self.calls += 1
            return x.sin() * factor

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x.cos(), factor=2.0).exp()

    block, x = Block(), leaf(4)
    (got,) = torch.autograd.grad(remat.checkpoint()(block)(x).sum(), x)
    assert block.calls == 1
    assert Block.mix.__doc__ == "Mix."
    assert torch.equal(got, torch.autograd.grad(block(x).sum(), x)[0])
    with pytest.raises(remat.UsageError, match="mix"):
        remat.checkpoint()(lambda t: block.mix(block.mix(t)))(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda: remat.op(3, "k"),
        lambda: remat.op(torch.sin),
        lambda: remat.op(torch.sin, ""),
        lambda: remat.op(torch.sin, 3),
        lambda: remat.op(torch.sin, "k", policy="save"),
        lambda: remat.op(torch.sin, "k", policy=None),
        lambda: remat.op(name="k", policy="save"),
        lambda: remat.op("k", torch.sin),
        lambda: remat.op(),
        lambda: remat.recompute_needs_tensor([torch.ones(1)]),
        lambda: remat.checkpoint()(lambda x: keep("k", torch.sin, remat.op(torch.cos, "k")(x)))(leaf(1)),
    ],
)  # fmt: skip
def test_wrong_use_is_an_error(call):
    with pytest.raises(remat.UsageError):
        call()


@pytest.mark.parametrize("change", ["function", "python function", "shape", "missing", "policy"])
def test_another_call_in_replay_is_a_mismatch(change):
    state = {"function": lambda t: t.sum() * t, "length": 4, "policy": SAVE, "call": True}

    def block(x):
        h = x.exp()[: state["length"]]
        if state["call"]:
            h = remat.op(state["function"], "k", policy=state["policy"])(h)
        return h.exp().sin()

    y = remat.checkpoint()(block)(leaf(4))
    changes = {
        "function": {"function": torch.tanh},
        "python function": {"function": lambda t: t.sum() * t},
        "shape": {"length": 3},
        "missing": {"call": False},
        "policy": {"policy": RECOMPUTE},
    }
    state.update(changes[change])
    told = {"shape": "different shapes", "missing": "k", "policy": "k"}.get(change, "different function")
    with pytest.raises(remat.MismatchError, match=told) as caught:
        y.sum().backward()
    assert caught.value.op == "k"


@pytest.mark.parametrize("form", ["argument", "closure"])
def test_an_argument_dies_in_forward_with_its_last_use(form):
    dead = []

    def block(x):
        h = x * 2  # saved by nobody, and too large to be held until forward ends
        (reference,) = watch(h)
        if form == "argument":
            y = remat.op(lambda t: t.exp(), "k")(h)
        else:
            y = (lambda t: remat.op(lambda: t.exp(), "k")())(h)
        del h
        dead.append(reference.expired())
        return y.sum()

    remat.checkpoint()(block)(leaf(1024, 1024)).backward()
    assert dead[0]


def test_a_copy_that_was_cast_before_the_region_need_not_follow_its_leaf():
    w = leaf(4, 4)
    cast = w.to(torch.bfloat16)
    x = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    expected = (x.sin() @ cast).sin()
    y = remat.checkpoint()(lambda x: remat.op(lambda t: t @ cast, "k")(x.sin()).sin())(x)
    with torch.no_grad():
        w.add_(1)
    assert_same(torch.autograd.grad(expected.sum(), x), torch.autograd.grad(y.sum(), x))


def test_the_warning_says_what_runs_again_and_where_it_is_defined():
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    def block(x, function):
        return remat.op(function, "k")(x * 2).add_(1) * x

    for function in (Sine(), lambda x: Sine()(x)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            remat.checkpoint()(block)(leaf(4), function).sum().backward()
        (warning,) = caught
        assert "a result of it was modified in place afterwards" in str(warning.message)
        assert (warning.filename, warning.lineno > 0) == (__file__, True)


def test_a_weights_copy_under_autocast_is_not_kept():
    w, x = nn.Parameter(torch.randn(16, 48)), leaf(4, 16)

    def block(x):
        return remat.op(lambda t: t @ w, "k")(x.sin()).sin()

    with no_other_regions(), torch.autocast("cpu", torch.bfloat16):
        y = remat.checkpoint(region_name="r")(block)(x)
        expected = torch.autograd.grad((x.sin() @ w).sin().sum(), [x, w])
        rows = [row for row in remat.memory_report(y).regions[0].all_tensors() if row.shape == (16, 48)]
    assert sum(row.bytes for row in rows if row.kind != "parameter") == 0
    assert_same(expected, torch.autograd.grad(y.sum(), [x, w]))


def test_a_call_that_runs_whole_modifies_a_buffer_once():
    def program(wrap):
        module = nn.BatchNorm1d(4)

        def block(x):
            h = x * 1.0
            return remat.op(lambda h: (h.add_(1), module(h))[1], "k")(h).cos().sin()

        x = leaf(4, 4)
        return torch.autograd.grad(wrap(block)(x).square().sum(), x), list(module.buffers())

    with pytest.warns(remat.RematWarning, match="k: replay recomputes this call, since it modified a tensor"):
        assert_same_program(program)


def test_call_of_another_checkpointed_function_is_noticed():
    """All of them are of one class; what they run tells them apart."""
    functions = [remat.checkpoint()(torch.sin), remat.checkpoint()(torch.cos)]

    def block(x):
        return remat.op(functions[remat.is_recomputing()], "f")(x).exp()

    y = remat.checkpoint()(block)(torch.ones(3, requires_grad=True))
    with pytest.raises(remat.MismatchError, match="with a different function"):
        y.sum().backward()


# --- What is rare: each guard of calls that no other program needs is needed here


class HandleExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        handle = remat.get_handle(ctx, name, SAVE)
        if (made := handle.maybe_load_saved()) is not None:
            return made
        y = handle.save_or_load_inputs(x).exp()
        handle.save_for_backward({"y": y})
        return handle.record_outputs(y)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


COMPILED = torch.compile(torch.sin, backend="aot_eager")


def needed(x):
    y = HandleExp.apply(x, "h")
    remat.recompute_needs_tensor(y)
    return y


def gradient_by_an_argument_in_a_call(x):
    def inner(y):
        t = x.detach().requires_grad_()
        return torch.autograd.grad((t.sin() * y).sum(), t)[0]

    return remat.op(inner, "k")(x + x) * x.sin()


class Holder:
    """Holds a tensor two levels deep."""

    def __init__(self, tensor):
        self.inner = [[tensor]]


def test_call_that_modifies_a_tensor_of_the_region_that_it_does_not_reach_is_loud_where_it_is_saved_afterwards():
    def function(x):
        h = x * 2
        holder = Holder(h)
        remat.op(lambda holder: holder.inner[0][0].neg_().sum(), "k")(holder)
        return h.exp().sin()

    with pytest.raises(remat.RematError):
        checkpointed(function)(leaf(4)).sum().backward()


def test_replay_ends_with_the_call_whose_argument_waits_though_a_parameter_follows():
    weight = nn.Parameter(torch.randn(4, 4))

    def function(x):
        made = remat.op(torch.mm, "kept")(x * 2, weight)
        return remat.op(torch.mm, "runs", policy=remat.CheckpointPolicy.RECOMPUTE)(made, weight)

    y = remat.checkpoint()(function)(leaf(4, 4))
    with warnings.catch_warnings(), CountOps() as ran:
        warnings.simplefilter("error")  # of a replay that starts over
        y.sum().backward()
    assert ran.counts["mm"] == 4  # two for each product's backward
