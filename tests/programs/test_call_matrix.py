"""The matrix of calls that replay skips: what is called, what it returns, who reads the result, and what is around.

A cell is one program. It runs with plain autograd, then in regions. The gradients must be equal bit for bit, and the
call must run once in forward and not in replay; or it runs whole there, with one warning; or the error is raised that
`expected` names. A cell that plain autograd refuses does not exist.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import LiveStorages, collector_off

pytestmark = pytest.mark.slow

SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE
SHARE = float(os.environ.get("REMAT_MATRIX_SHARE", "0.15"))  # of the cells with odd surroundings; 1 runs them all
Pair = namedtuple("Pair", "first second")


@optree.dataclasses.dataclass(namespace="")
class Boxed:
    first: Tensor
    second: Tensor


class Cell(NamedTuple):
    """One program. The tables below say what the words mean."""

    callee: str
    result: str = "new tensor"
    reader: str = "recomputed op"
    around: str = "nothing"


# --- What the call returns: the result of h, a weight, a buffer and noise; and what its reader takes of it.

RESULTS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "new tensor": (lambda h, w, b, n: (h * n).sin() @ w, lambda r: r),
    "tuple": (lambda h, w, b, n: ((h * n).sin() @ w, h.exp()), lambda r: r[1]),
    "dict": (lambda h, w, b, n: {"a": h.exp(), "b": [(h * n).sin() @ w]}, lambda r: r["b"][0]),
    "named tuple": (lambda h, w, b, n: Pair((h * n).sin() @ w, h.exp()), lambda r: r.second),
    "dataclass": (lambda h, w, b, n: Boxed((h * n).sin() @ w, h.exp()), lambda r: r.second),
    "None among": (lambda h, w, b, n: (None, (h * n).sin() @ w, None), lambda r: r[1]),
    "argument": (lambda h, w, b, n: h, lambda r: r),
    "argument among": (lambda h, w, b, n: (h, (h * n).sin() @ w), lambda r: r[0]),
    "view of argument": (lambda h, w, b, n: h.t()[1:], lambda r: r),
    "view of weight": (lambda h, w, b, n: w.t()[1:], lambda r: r),
    "view of buffer": (lambda h, w, b, n: b[1:, ::2], lambda r: r),
    "view of new": (lambda h, w, b, n: ((h * n).sin() @ w).t()[1:], lambda r: r),
    "integers": (lambda h, w, b, n: (h * n).argmax(1), lambda r: r),
    "no gradient": (lambda h, w, b, n: (h.detach() * n).exp(), lambda r: r),
    "number": (lambda h, w, b, n: float((h.detach() * n).mean()), lambda r: r),
}
OF_TORCH: dict[str, Callable[..., Any]] = {
    "new tensor": lambda call, h, w: call(torch.mm, h, w),
    "tuple": lambda call, h, w: call(torch.split, h.clone(), 2),
    "named tuple": lambda call, h, w: Pair(None, call(torch.topk, h, 2).values),
    "view of argument": lambda call, h, w: call(torch.transpose, h, 0, 1),
    "view of weight": lambda call, h, w: call(torch.transpose, w, 0, 1),
    "integers": lambda call, h, w: call(torch.argmax, h, 1),
}
OF_FUNCTIONS = ("new tensor", "tuple", "None among", "integers", "no gradient", "view of new")


# --- What is called.


class State(nn.Module):
    """What the call reaches, and how often its Python ran."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)
        self.register_buffer("buffer", torch.randn(4, 4))
        self.cell, self.runs = cell, [0]

    def noise(self) -> Any:
        return torch.rand(4, 4) if self.cell.around == "random" else 1.5

    def forward(self, h):
        self.runs[0] += 1
        return RESULTS[self.cell.result][0](h, self.weight, self.buffer, self.noise())

    @remat.op(name="c", policy=SAVE)
    def decorated(self, h):
        return State.forward(self, h)


class Custom(Function):
    """A custom Function of any of these results; its backward differentiates them."""

    @staticmethod
    def forward(ctx, h, weight, state):
        state.runs[0] += 1
        noise = state.noise()
        ctx.save_for_backward(h, weight)
        return _compute(ctx, h, weight, state, noise)

    @staticmethod
    def backward(ctx, *grads):
        h, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = RESULTS[ctx.result][0](h, weight, None, ctx.noise)
        outs = out if isinstance(out, tuple) else (out,)
        pairs = [(y, g) for y, g in zip(outs, grads, strict=True) if y is not None and y.requires_grad]
        if not pairs:
            return (None,) * 5
        found = torch.autograd.grad([y for y, _ in pairs], [h, weight], [g for _, g in pairs], allow_unused=True)
        return *found, None, None, None


def _compute(ctx: Any, h: Tensor, weight: Tensor, state: State, noise: Any) -> Any:
    ctx.noise, ctx.result = noise, state.cell.result
    out = RESULTS[ctx.result][0](h, weight, None, noise)
    if ctx.result in ("integers", "no gradient"):
        ctx.mark_non_differentiable(out)
    return out.clone() if ctx.result == "view of new" else out


class Named(Custom):
    @staticmethod
    @remat.auto_forward("h", "weight")
    def forward(ctx, h, weight, state):
        return Custom.forward(ctx, h, weight, state)


class Given(Custom):
    """The form of the seed, with `auto_forward`."""

    @staticmethod
    @remat.auto_forward("h", "weight")
    def forward(ctx, h, weight, state, op_name, remat_policy):
        return Custom.forward(ctx, h, weight, state)


class Seed(Custom):
    """The form of the seed, by hand."""

    @staticmethod
    def forward(ctx, h, weight, state, op_name, remat_policy):
        handle = remat.get_handle(ctx, op_name, remat_policy)
        if (result := handle.maybe_load_saved()) is not None:
            return result
        h, weight = handle.save_or_load_inputs(h, weight)
        state.runs[0] += 1
        out = _compute(ctx, h, weight, state, state.noise())
        handle.save_for_backward({"h": h, "weight": weight})
        return handle.record_outputs(*out) if isinstance(out, tuple) else handle.record_outputs(out)


CALLEES: dict[str, Callable[[State, Tensor], Any]] = {
    "function": lambda s, h: remat.op(lambda h: s(h), "c")(h),
    "closure": lambda s, h: remat.op(lambda: s(h), "c")(),
    "opaque": lambda s, h: remat.op(lambda h: s(h), "c", opaque=True)(h),
    "module": lambda s, h: remat.op(s, "c")(h),
    "method": lambda s, h: s.decorated(h),
    "Function": lambda s, h: remat.op(Custom.apply, "c")(h, s.weight, s),
    "Function with names": lambda s, h: remat.op(Named.apply, "c")(h, s.weight, s),
    "recomputed": lambda s, h: remat.op(s, "c", policy=RECOMPUTE)(h),
    "native": lambda s, h: remat.native_save_region("c", s, h),
    "native closure": lambda s, h: remat.native_save_region("c", lambda: s(h)),
    "torch": lambda s, h: OF_TORCH[s.cell.result](lambda f, *args: remat.op(f, "c")(*args), h, s.weight),
    "native torch": lambda s, h: OF_TORCH[s.cell.result](
        lambda f, *args: remat.native_save_region("c", f, *args), h, s.weight
    ),
    "seed": lambda s, h: Seed.apply(h, s.weight, s, "c", SAVE),
    "seed with names": lambda s, h: Given.apply(h, s.weight, s, "c", SAVE),
}
SEED = ("seed", "seed with names")
FUNCTIONS = ("Function", "Function with names", *SEED)
NATIVE = ("native", "native closure")
TORCH = ("torch", "native torch")


# --- Who reads the result.


def use(h: Tensor, y: Any) -> Tensor:
    """Read a result so that autograd saves it."""
    return h * (y.to(h.dtype).sin().sum() if isinstance(y, Tensor) else y)


class Reader(Function):
    @staticmethod
    def forward(ctx, h, y, op_name, policy):
        handle = remat.get_handle(ctx, op_name, policy)
        if (result := handle.maybe_load_saved()) is not None:
            return result
        h, y = handle.save_or_load_inputs(h, y)
        handle.save_for_backward({"h": h, "y": y})
        return handle.record_outputs(h * y.to(h.dtype).sum())

    @staticmethod
    def backward(ctx, grad):
        h, y = ctx.saved_tensors
        given = (grad * h).sum().expand(y.shape) if y.is_floating_point() else None
        return grad * y.to(h.dtype).sum(), given, None, None


READERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "recomputed op": use,
    "nobody": lambda h, y: h.sin(),
    "inner region": lambda h, y: remat.checkpoint()(use)(h, y),
    "saved call": lambda h, y: remat.op(use, "reader")(h, y),
    "native region": lambda h, y: remat.native_save_region("reader", use, h, y),
    "recomputed handle": lambda h, y: Reader.apply(
        h, y if isinstance(y, Tensor) else torch.full((), y), "r", RECOMPUTE
    ),
    "saved handle": lambda h, y: Reader.apply(h, y if isinstance(y, Tensor) else torch.full((), y), "r", SAVE),
    "in place": lambda h, y: use(h, y.mul_(2)),
    "numpy": lambda h, y: h * float(y.detach().float().numpy().sum()),
    "tolist": lambda h, y: h * y.flatten()[:1].tolist()[0],
    "metadata": lambda h, y: h * y.shape[0] if isinstance(y, Tensor) else h,
}


# --- Running a cell.


def saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.mm.default


def regions(cell: Cell, block: Callable, wrap: bool) -> Callable:
    if not wrap:
        return (lambda x: block(x.tanh())) if cell.around in ("region", "torch's region") else block
    inner = remat.checkpoint(policy=saves_products if cell.around == "policy" else None)(block)
    if cell.around == "region":
        return remat.checkpoint()(lambda x: inner(x.tanh()))
    if cell.around == "torch's region":
        return lambda x: torch_checkpoint(lambda x: inner(x.tanh()), x, use_reentrant=False)
    return inner


class Outcome(NamedTuple):
    gradients: list[Tensor | None]
    error: Exception | None
    phase: str
    runs: int
    warned: int


def run_cell(cell: Cell, wrap: bool) -> Outcome:
    """Run the cell's program in regions, or with plain autograd."""
    torch.manual_seed(0)
    state, x = State(cell), torch.randn(4, 4, requires_grad=True)

    def block(x):
        h = x.cos() * 1.5
        y = RESULTS[cell.result][1](CALLEES[cell.callee](state, h))
        z = READERS[cell.reader](h, y)
        if cell.around == "random":
            z = F.dropout(z, 0.4)
        return z if cell.reader == "saved handle" else z.exp(), y if cell.reader == "nobody" else None

    error, phase = None, "forward"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", remat.RematWarning)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=cell.around == "autocast"):
                out = regions(cell, block, wrap)(x)
            phase = "backward"
            loss = sum(y.float().sum() for y in out if isinstance(y, Tensor) and y.requires_grad)
            if cell.around == "second backward":
                loss.backward(retain_graph=True)
            loss.backward()
        except RuntimeError as raised:
            error = raised
    warned = sum(issubclass(one.category, remat.RematWarning) for one in caught)
    return Outcome([x.grad, state.weight.grad], error, phase, state.runs[0], warned)


def is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


# --- What must hold.

AROUND = ["nothing", "policy", "region", "torch's region", "autocast", "second backward", "random"]
PAST_AUTOGRAD = ("numpy", "tolist")
NATIVE_READERS = ("recomputed op", "in place", *PAST_AUTOGRAD)


def exists(cell: Cell) -> bool:
    """Return whether there is such a program."""
    if cell.result == "number" and cell.reader in ("in place", *PAST_AUTOGRAD):
        return False
    if cell.reader == "saved handle" and cell.around == "random":  # dropout would read what must not be read
        return False
    results = OF_TORCH if cell.callee in TORCH else OF_FUNCTIONS if cell.callee in FUNCTIONS else RESULTS
    return cell.result in results


def fault_of(cell: Cell) -> str | None:
    """Return what is wrong in a cell, or None."""
    expected = run_cell(cell, False)
    if expected.error is not None:  # plain autograd refuses it
        return None
    found = run_cell(cell, True)
    is_refused = cell.callee in SEED and cell.reader in NATIVE_READERS
    if (error := found.error) is not None:
        if not (is_refused and isinstance(error, remat.PlaceholderError) and found.phase == "backward"):
            return f"{type(error).__name__} in {found.phase}: {error}"
        return None if str(error.remedy).startswith(REMEDY) else f"another first remedy: {error}"
    if is_refused and cell.around != "policy":  # which keeps what is read
        return "no PlaceholderError"
    if not all(map(is_equal, expected.gradients, found.gradients)):
        return "wrong gradients"
    if found.warned > (cell.reader in ("in place", *PAST_AUTOGRAD)):
        return f"{found.warned} warnings"
    replays = 2 if cell.around == "second backward" else 1
    most = replays * (cell.callee in RUNS_PYTHON or found.warned)
    most += found.warned * (cell.callee in RUNS_PYTHON)  # the replay that starts over had come that far
    most += cell.around in ("region", "torch's region")  # whose replay runs the forward of the region once more
    again = found.runs - expected.runs
    return f"{again} runs in backward, not {most} or fewer, {found.warned} warnings" if again > most else None


REMEDY = "Either (1) call the op as remat.op("
RUNS_PYTHON = ("recomputed", *NATIVE)


def cells(callee: str, around: str) -> Iterator[Cell]:
    draw = random.Random(f"{callee} {around}")
    for result, reader in product(RESULTS, READERS):
        cell = Cell(callee, result, reader, around)
        if exists(cell) and (around == "nothing" or draw.random() < SHARE):
            yield cell


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("around", AROUND)
def test_calls(around, callee):
    faults = {cell: fault_of(cell) for cell in cells(callee, around)}
    assert faults
    wrong = [f"{cell.result} | {cell.reader}: {text}" for cell, text in faults.items() if text]
    assert not wrong, f"{len(wrong)} of {len(faults)} cells of {callee}, around it {around}:\n" + "\n".join(wrong)


# By result: the bytes that autograd saves inside of the call and nothing else has, and those that its reader needs.
BYTES = {"new tensor": (128, 64), "tuple": (0, 64)} | dict.fromkeys(
    ["argument", "view of argument", "view of weight", "view of buffer", "number"], (0, 0)
)


@pytest.mark.parametrize("reader", ["recomputed op", "metadata", "recomputed handle"])
@pytest.mark.parametrize("callee", CALLEES)
def test_bytes_are_the_hand_count(callee, reader):
    with collector_off():
        for result, (inside, read) in BYTES.items():
            cell = Cell(callee, result, reader)
            is_refused = callee in SEED and reader in NATIVE_READERS
            if exists(cell) and not is_refused and not (callee in TORCH and result == "tuple"):
                if callee == "seed":  # a handle by hand does not know which of the tensors that it saves are arguments
                    inside = 64
                elif callee in (*FUNCTIONS, *TORCH):  # these save arguments and leaves
                    inside = 0
                expected = 0 if callee == "recomputed" or reader == "metadata" else inside + read
                assert kept_bytes(cell) == expected, cell


def kept_bytes(cell: Cell) -> int:
    """Return how many bytes the region keeps besides its input and its output."""
    state, x = State(cell), torch.randn(4, 4, requires_grad=True)

    def block(x):
        h = x.cos() * 1.5
        y = RESULTS[cell.result][1](CALLEES[cell.callee](state, h))
        return READERS[cell.reader](h, y).exp()

    with LiveStorages() as live:
        out = remat.checkpoint()(block)(x)
    return live.bytes() - out.nbytes
