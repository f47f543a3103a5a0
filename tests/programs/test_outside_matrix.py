"""The whole matrix of tensors that outlive a region and change: who writes, what, how, read when, where, how often.

A cell is one program. It runs with plain autograd, then in regions. It passes if the gradients and the tensor
afterwards are equal bit for bit, or if a `RematError` names the tensor and the tensor is as after one forward. The
cells of `is_documented` are limits that docs/limits.md lists; there only an error that is not ours is a failure.

`test_outside.py` pins which of the two outcomes single cells have, and that bitwise comparison finds the limits.
"""

from __future__ import annotations

import functools
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import torch_remat as remat

pytestmark = pytest.mark.slow

SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE
SHARE = float(os.environ.get("REMAT_MATRIX_SHARE", "0.01"))  # of the cells far from the plain ones; 1 runs them all
aten = torch.ops.aten
GLOBAL: Tensor
GLOBAL_VIEW: Tensor


class Cell(NamedTuple):
    """One program. The tables below say what the words mean."""

    who: str
    what: str
    part: str = "itself"
    how: str = "mul_"
    read: str = "after"
    where: str = "alone"
    times: str = "once"


# --- Who writes: the function that does so, its argument x, and the tensor if it is given; the result needs a gradient.


class SeedHandle(Function):
    @staticmethod
    def forward(ctx, update, x, given, op_name, remat_policy):
        handle = remat.get_handle(ctx, op_name, remat_policy)
        if (result := handle.maybe_load_saved()) is not None:
            return result
        x = handle.save_or_load_inputs(x)
        y = update(x, given)
        handle.save_for_backward({"y": y})
        return handle.record_outputs(y)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return None, grad * (1 - y * y), None, None, None


class AutoForward(SeedHandle):
    @staticmethod
    @remat.auto_forward("y")
    def forward(ctx, update, x, given, op_name, remat_policy):
        y = update(x, given)
        ctx.save_for_backward(y)
        return y


WHO: dict[str, Callable[[Callable, Tensor, Tensor | None], Tensor]] = {
    "plain code": lambda update, x, given: update(x, given),
    "seed handle": lambda update, x, given: SeedHandle.apply(update, x, given, "w", SAVE),
    "auto_forward": lambda update, x, given: AutoForward.apply(update, x, given, "w", SAVE),
    "native region": lambda update, x, given: remat.native_save_region("w", update, x, given),
    "op": lambda update, x, given: remat.op(update, "w")(x, given),
    "opaque op": lambda update, x, given: remat.op(update, "w", opaque=True)(x, given),
    "recomputed op": lambda update, x, given: remat.op(update, "w", policy=RECOMPUTE)(x, given),
    "nobody": lambda update, x, given: x.tanh(),
}
HANDLES = ("seed handle", "auto_forward")
WRITES = [aten.mul_.Tensor, aten.add_.Tensor, aten.copy_.default, aten.native_batch_norm.default]
POLICIES: dict[str, Callable[..., bool]] = {
    "policy of mm": lambda ctx, op, *args, **kwargs: op is aten.mm.default,
    "policy of the write": lambda ctx, op, *args, **kwargs: op in WRITES,
    "policy of mean": lambda ctx, op, *args, **kwargs: op is aten.mean.dim,
}
WHO |= dict.fromkeys(POLICIES, WHO["plain code"])


# --- What is written: functions that return the tensor, return a view of it, and bind its place anew.


class Place(NamedTuple):
    get: Callable[[], Tensor]
    view: Callable[[], Tensor]
    put: Callable[[Tensor], None]
    name: str  # how an error may name the tensor: a pattern


class Holder(nn.Module):
    """A module that has the tensor as a buffer, or as the running mean of a batch norm."""

    def __init__(self, tensor: Tensor, is_statistic: bool) -> None:
        super().__init__()
        self.owner = nn.BatchNorm1d(8, momentum=0.5) if is_statistic else nn.Module()
        self.name = "running_mean" if is_statistic else "average"
        self.owner.register_buffer(self.name, tensor[0] if is_statistic else tensor)
        self.part = tensor[:1]

    def get(self) -> Tensor:
        return getattr(self.owner, self.name)

    def put(self, tensor: Tensor) -> None:
        setattr(self.owner, self.name, tensor)

    def forward(self, x):
        return self.run(x)


def in_cell(tensor: Tensor) -> Place:
    view = tensor[:1]

    def put(value):
        nonlocal tensor
        tensor = value

    return Place(lambda: tensor, lambda: view, put, "tensor|view")


def in_globals(tensor: Tensor) -> Place:
    global GLOBAL, GLOBAL_VIEW
    GLOBAL, GLOBAL_VIEW = tensor, tensor[:1]

    def put(value):
        global GLOBAL
        GLOBAL = value

    return Place(lambda: GLOBAL, lambda: GLOBAL_VIEW, put, "GLOBAL|GLOBAL_VIEW")


def in_list(tensor: Tensor) -> Place:
    held, view = [tensor], tensor[:1]
    return Place(lambda: held[0], lambda: view, lambda value: held.__setitem__(0, value), "entry 0|view")


WHAT = dict.fromkeys(["small buffer", "statistic", "closure", "list entry", "global", "argument"], 4)
WHAT |= {"large buffer": 2080, "statistic": 1}  # rows of 8 numbers
PLACES = {"closure": in_cell, "list entry": in_list, "global": in_globals, "argument": in_cell}


# --- What the region does: it reads, writes and reads again.


def body_of(cell: Cell, weight: Tensor, place: Place, owner: nn.Module | None, inner: Callable) -> tuple:
    """Return the region's function and the one that writes; they reach the tensor as user code does."""
    get, view, put = place.get, place.view, place.put

    def read(x: Tensor, given: Tensor | None, when: str) -> Tensor:
        if cell.read in (when, "both"):
            tensor = view() if cell.part == "read by a view" else get() if given is None else given
            x = x + tensor.view(-1, 8).mean(0).sin()
        return x.sin() @ weight

    def update(x: Tensor, given: Tensor | None) -> Tensor:
        value = (x.detach() @ weight.detach())[0]
        tensor = get() if given is None else given
        written = {"a view": tensor.view(-1, 8)[:1], "an old view": view()}.get(cell.part, tensor)
        if cell.how == "mul_":
            written.mul_(0.5).add_(value)
        elif cell.how == "copy_":
            written.copy_(value)
        elif cell.how == ".data":
            written.data.mul_(0.5).add_(value)
        elif cell.how == "rebound":
            put(tensor * 0.5 + value)
        elif isinstance(owner, nn.BatchNorm1d):
            return owner(x).tanh()
        elif cell.how == "batch norm":
            rows = written.view(-1, 8)
            return F.batch_norm(x, rows[0], rows[-1].clone().abs(), training=True, momentum=0.5).tanh()
        return x.tanh()

    def body(x: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = read(x, given, "before")
        side = inner(lambda x, given: WHO[cell.who](update, x, given))(x, given)
        x = read(x, given, "after")
        return (x.cos() @ weight).exp(), side

    return body, update


class Outcome(NamedTuple):
    gradients: list[Tensor]
    tensor: Tensor | None
    error: RuntimeError | None
    name: str


def run_cell(cell: Cell, checkpoints: bool) -> Outcome:
    """Run the cell's program in regions, or with plain autograd."""

    def region(function: Callable, policy: bool = True) -> Callable:
        options = {"policy": POLICIES[cell.who]} if policy and cell.who in POLICIES else {}
        return remat.checkpoint(**options)(function) if checkpoints else function

    torch.manual_seed(0)
    weight, tensor = nn.Parameter(torch.randn(8, 8) / 3), torch.rand(WHAT[cell.what], 8)
    inner = region if cell.where.startswith("write inside") else lambda function: function
    if cell.what in PLACES:
        place = PLACES[cell.what](tensor)
        run, update = body_of(cell, weight, place, None, inner)
    else:
        run = holder = Holder(tensor, cell.what == "statistic")
        place = Place(holder.get, lambda: holder.part, holder.put, "average|running_mean|part")
        holder.run, update = body_of(cell, weight, place, holder.owner, inner)
    args = (tensor,) if cell.what == "argument" else ()
    del tensor
    nested = region(run) if cell.where.startswith("all inside") else run
    around = run if cell.where == "alone" else lambda x, *args: nested(x.cos(), *args)
    whole = region(around, policy="no policy around" not in cell.where)
    xs = [torch.randn(4, 8, requires_grad=True) for _ in range(2 if cell.times == "two forwards" else 1)]
    error = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.RematWarning)
            outs = [whole(x, *args) for x in xs]
            if cell.times == "two regions":
                outs = [(*whole(outs[0][0], *args), outs[0][1])]
            if cell.times == "changed by the user":
                update(xs[0].detach(), args[0] if args else None)
            for ys in outs:
                for turn in range(2 if cell.times == "two backwards" else 1):
                    sum(y.sum() for y in ys).backward(retain_graph=turn == 0 and cell.times == "two backwards")
    except RuntimeError as raised:
        error = raised
    left = place.get()
    gradients = [torch.zeros(0) if leaf.grad is None else leaf.grad for leaf in (*xs, weight)]
    return Outcome(gradients, None if remat.is_placeholder(left) else left.clone(), error, place.name)


@functools.lru_cache(4096)
def reference(cell: Cell) -> Outcome:
    return run_cell(cell, False)


def verdict(cell: Cell) -> str:
    """Return `"equal"`, `"error"`, or what is wrong."""
    who = cell.who if cell.who in ("nobody", *HANDLES) else "plain code"  # the others compute the same
    expected, found = reference(cell._replace(who=who, where=cell.where.partition(",")[0])), run_cell(cell, True)
    assert expected.error is None, expected.error
    kept = found.tensor is not None and torch.equal(expected.tensor, found.tensor)
    if (error := found.error) is None:
        same = all(map(torch.equal, expected.gradients, found.gradients))
        return "equal" if same and kept else "wrong, silently: " + "gradient " * (not same) + "tensor" * (not kept)
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, remat.RematError):
        return f"wrong error: {text}"
    if not kept and not isinstance(error, remat.UsageError):  # which forward raises
        return f"tensor after {text}"
    if isinstance(error, remat.MutationError):
        named = re.search(rf"\b({found.name}|args\[\d\])|[(\[]\d+(, 8|,)?[)\]]", str(error)) is not None
    else:
        named = bool(error.op or error.tensor)
    return "error" if named else f"names nothing: {text}"


# --- The cells.

PARTS = ["itself", "a view", "an old view", "read by a view"]
HOWS = ["mul_", "copy_", ".data", "rebound", "batch norm"]
READS = ["before", "after", "both", "never"]
WHERES = ["alone", "all inside", "write inside", "all inside, no policy around", "write inside, no policy around"]
TIMES = ["once", "two regions", "two forwards", "changed by the user", "two backwards"]
PLAIN = Cell("", "")


def exists(cell: Cell) -> bool:
    """Return whether there is such a program."""
    if cell.who == "nobody" and cell.times != "changed by the user":
        return False
    if "no policy" in cell.where and cell.who not in POLICIES:
        return False
    if cell.how == "rebound":
        return cell.what != "argument" and cell.part == "itself"
    if cell.what == "statistic":  # one row, and a batch norm updates it itself
        return cell.part == "itself" or cell.how != "batch norm"
    return True


def cells(who: str, what: str) -> Iterator[Cell]:
    """Yield the cells that are plain in all but two ways, and a sample of the others."""
    draw = random.Random(f"{who} {what}")
    for rest in product(PARTS, HOWS, READS, WHERES, TIMES):
        cell = Cell(who, what, *rest)
        odd = sum(one != plain for one, plain in zip(cell[2:], PLAIN[2:], strict=True))
        if exists(cell) and (odd <= 2 or draw.random() < SHARE):
            yield cell


def is_documented(cell: Cell) -> bool:
    """Return whether docs/limits.md says that nothing notices the change: no version tells, and no copy is kept."""
    if cell.how not in (".data", "batch norm") or (cell.read == "never" and cell.who == "nobody"):
        return False
    if cell.what == "statistic" and cell.how == ".data" and cell.who in POLICIES:
        return cell.read != "never"
    return cell.what not in ("small buffer", "statistic") or cell.who == "nobody"


DOCUMENTED = ("wrong, silently", "tensor after MutationError")


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("who", WHO)
def test_outside(who, what):
    found = {cell: verdict(cell) for cell in cells(who, what)}
    assert found
    wrong = [
        f"{' | '.join(cell[2:])}: {text}"
        for cell, text in found.items()
        if text not in ("equal", "error") and not (is_documented(cell) and text.startswith(DOCUMENTED))
    ]
    assert not wrong, f"{len(wrong)} of {len(found)} cells of {who}, {what}:\n" + "\n".join(wrong)
