"""A tensor that outlives a region is changed in it, or between its forward and its replay.

Each cell of the matrix (who changes what, how, when it is read, where) is one program, run with plain autograd and as
checkpointed regions. Either the gradients and the tensor afterwards are equal, bit for bit; or an error names the
tensor, and the tensor is as after one forward.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import leaf, pairwise

SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE
ROWS = {"small buffer": 4, "large buffer": 2080}  # of 8 floats: 128 bytes, and a little more than 64 KiB


class Cell(NamedTuple):
    """One program.

    Attributes:
        who: Who changes the tensor.
        what: What kind of tensor it is.
        how: How it is changed.
        read: When recomputed code reads it.
        through: Whether it is changed itself, or through a view.
        nest: Which of it is in an inner region.
        times: How often, and whether the user changes it before backward.
    """

    who: str
    what: str
    how: str = "in place"
    read: str = "after"
    through: str = "itself"
    nest: str = "alone"
    times: str = "once"


# --- Who changes it: `update` is the code that does, and returns a result that needs a gradient.


class Update(Function):
    """A saved op with a handle, which changes a tensor that it was not given."""

    @staticmethod
    def forward(ctx, x, update, name, policy):
        handle = remat.get_handle(ctx, name, policy)
        if (result := handle.maybe_load_saved()) is not None:
            return result
        x = handle.save_or_load_inputs(x)
        y = update(x)
        handle.save_for_backward({"y": y})
        return handle.record_outputs(y)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y), None, None, None


class UpdateGiven(Update):
    """The same; the tensor is an argument."""

    @staticmethod
    def forward(ctx, x, average, function, name, policy):
        return Update.forward(ctx, x, lambda x: function(x, average), name, policy)

    @staticmethod
    def backward(ctx, grad):
        return *Update.backward(ctx, grad), None


# Their arguments: x, the function that changes the tensor and finds it itself, the one that is given it, the tensor.
WRITERS: dict[str, Callable[..., Tensor]] = {
    "plain code": lambda x, update, given, average: update(x),
    "handle": lambda x, update, given, average: Update.apply(x, update, "update", SAVE),
    "handle, given": lambda x, update, given, average: UpdateGiven.apply(x, average, given, "update", SAVE),
    "native region": lambda x, update, given, average: remat.native_save_region("update", update, x),
    "native region, given": lambda x, update, given, average: remat.native_save_region("update", given, x, average),
    "saved call": lambda x, update, given, average: remat.op(update, "update")(x),
    "saved call, given": lambda x, update, given, average: remat.op(given, "update")(x, average),
    "recomputed call": lambda x, update, given, average: remat.op(update, "update", policy=RECOMPUTE)(x),
    "nobody": lambda x, update, given, average: x.tanh(),
}
aten = torch.ops.aten
UPDATES = {aten.mul_.Tensor, aten.add_.Tensor, aten.copy_.default, aten.native_batch_norm.default}
POLICIES: dict[str, Callable[..., bool]] = {
    "policy, operand saved": lambda ctx, op, *args, **kwargs: op is aten.mm.default,
    "policy, operand recomputed": lambda ctx, op, *args, **kwargs: op is aten.tanh.default,
    "policy, update saved": lambda ctx, op, *args, **kwargs: op is aten.mm.default or op in UPDATES,
}
WRITERS |= dict.fromkeys(POLICIES, WRITERS["plain code"])
for _who in ("handle", "native region", "saved call"):
    POLICIES[f"{_who} under a policy"] = POLICIES["policy, operand saved"]
    WRITERS[f"{_who} under a policy"] = WRITERS[_who]


# --- What is changed: each holder's `run` is the region's function, and `find` returns the tensor.


class Program:
    """What the region computes: reads, changes and reads again a tensor that its holder passes on.

    Args:
        cell: The cell.
        options: Options of the regions; none: there are no regions.
    """

    def __init__(self, cell: Cell, options: dict[str, Any]) -> None:
        self.cell, self.options, self.is_reference = cell, options, not options
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.view: Any = None

    def checkpointed(self, function: Callable, policy: bool = True) -> Callable:
        if self.is_reference:
            return function
        return remat.checkpoint(policy=POLICIES.get(self.cell.who) if policy else None, **self.options)(function)

    def read(self, x: Tensor, average: Tensor, when: str) -> Tensor:
        """Compute something whose gradient depends on the tensor's value, if recomputed code reads it then."""
        if when in self.cell.read or self.cell.read == "both":
            average = self.view.mean(0) if self.cell.through == "read by a view made before" else average
            if "as a number" in self.cell.read:
                x = x * (2 + float(average.mean()))
            elif "by NumPy" in self.cell.read:
                x = x * (2 + float(average.numpy().mean()))
            elif "saved" in self.cell.read:  # autograd saves the tensor itself
                x = x * (average.clone() if self.is_reference else average)
            else:
                x = x + average
        return x.sin() @ self.weight

    def write(self, x: Tensor, average: Tensor) -> tuple[Tensor, Tensor]:
        """Change the tensor; return a result of x, and what has the tensor's place afterwards."""
        how, given = self.cell.how, x.detach()
        value = given.cos() if self.cell.who == "policy, operand recomputed" else given @ self.weight.detach()
        views = {"a view made in the region": average[1:], "a view made before": self.view}
        written = views.get(self.cell.through, average)
        value = value[-len(written) :]
        if how == "in place":
            written.mul_(0.5).add_(value)
        elif how == "in parts":
            written[0].mul_(0.5)
            written[2:].add_(value[2:])
        elif how == "as a whole":
            written.copy_(value)
        elif how == ".data":
            written.data.mul_(0.5).add_(value)
        elif how == "rebound":
            average = average * 0.5 + value
        elif how == "batch norm":
            return F.batch_norm(x, written[0], written[1], training=True, momentum=0.5).tanh(), average
        return x.tanh(), average

    def given(self, x: Tensor, average: Tensor) -> Tensor:
        return self.write(x, average)[0]

    def change(self, x: Tensor, update: Callable, average: Tensor) -> Tensor:
        """Let the cell's writer change the tensor."""

        def writer(x: Tensor) -> Tensor:
            return WRITERS[self.cell.who](x, update, self.given, average)

        inner = {"update in an inner region": True, "update in an inner region without a policy": False}
        nest = self.cell.nest
        return self.checkpointed(writer, policy=inner[nest])(x) if nest in inner else writer(x)

    def end(self, x: Tensor) -> Tensor:
        return (x.cos() @ self.weight).exp()


class Module(nn.Module):
    """A module with the tensor as a buffer, or as an attribute."""

    def __init__(self, program: Program, average: Tensor, is_buffer: bool = True) -> None:
        super().__init__()
        self.program = program
        if is_buffer:
            self.register_buffer("average", average)
        else:
            self.average = average

    def update(self, x):
        result, self.average = self.program.write(x, self.average)
        return result

    def forward(self, x):
        x = self.program.read(x, self.average, "before")
        side = self.program.change(x, self.update, self.average)
        x = self.program.read(x, self.average, "after")
        return self.program.end(x), side


class Holder(NamedTuple):
    """A tensor with the code that uses it.

    Attributes:
        run: The region's function; its first argument is x.
        update: Changes the tensor.
        find: Returns the tensor, or the one that has its place now.
        name: How an error may name the tensor, as a pattern.
        args: Further arguments of the region.
    """

    run: Callable
    update: Callable
    find: Callable[[], Tensor]
    name: str
    args: tuple[Tensor, ...] = ()


def buffer(program: Program, average: Tensor, is_buffer: bool = True) -> Holder:
    module = Module(program, average, is_buffer)
    return Holder(module, module.update, lambda: module.average, "average")


def closure(program: Program, average: Tensor) -> Holder:
    def update(x):
        nonlocal average
        result, average = program.write(x, average)
        return result

    def run(x):
        x = program.read(x, average, "before")
        side = program.change(x, update, average)
        return program.end(program.read(x, average, "after")), side

    return Holder(run, update, lambda: average, "average")


def argument(program: Program, average: Tensor) -> Holder:
    def run(x, average):
        x = program.read(x, average, "before")
        side = program.change(x, lambda x: program.given(x, average), average)
        return program.end(program.read(x, average, "after")), side

    return Holder(run, lambda x: program.given(x, average), lambda: average, r"args\[1\]", (average,))


HOLDERS: dict[str, Callable[[Program, Tensor], Holder]] = {
    "small buffer": buffer,
    "large buffer": buffer,
    "closure": closure,
    "argument": argument,
}
ATTRIBUTE = "attribute"  # of a module, and no buffer: for a limit


# --- Where and how often.


def twice(function: Callable) -> Callable:
    """Return a function that calls this one twice, under other names, the second time with the first result."""

    def run(x, *args):
        sides = []
        for use in ("first", "second"):
            with remat.name_scope(use):
                x, side = function(x, *args)
            sides.append(side)
        return x, *sides

    return run


def regions_of(program: Program, holder: Holder) -> Callable:
    """Return the function that the cell checkpoints, with the regions that it puts inside."""
    nest, times = program.cell.nest, program.cell.times
    inner = program.checkpointed(holder.run) if nest.startswith("all in an inner region") else holder.run
    run = twice(inner) if times == "twice in one region" else inner
    whole = run if nest == "alone" else lambda x, *args: run(x.cos(), *args)
    return program.checkpointed(whole, policy=nest != "all in an inner region, no policy around")


class Outcome(NamedTuple):
    """What a program did: gradients, the tensor afterwards (None for a placeholder), the error, the tensor's name."""

    gradients: list[Tensor]
    average: Tensor | None
    error: RuntimeError | None
    name: str


def run_cell(cell: Cell, **options: Any) -> Outcome:
    """Run the cell's program from a fresh average, in regions with these options; without any: with plain autograd."""
    torch.manual_seed(0)
    rows = ROWS.get(cell.what, 4)
    program = Program(cell, options)
    average = torch.rand(rows, 8)
    program.view = average[1:] if "a view made before" in cell.through else None
    holder = buffer(program, average, False) if cell.what == ATTRIBUTE else HOLDERS[cell.what](program, average)
    del average
    xs = [torch.randn(rows, 8, requires_grad=True) for _ in range(2 if "two forwards" in cell.times else 1)]
    region, error = regions_of(program, holder), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.RematWarning)
            losses = [sum(y.sum() for y in region(x, *holder.args)) for x in xs]
            if cell.times == "changed before backward":
                holder.update(xs[0].detach())
            for loss in [sum(losses)] if cell.times == "two forwards, one backward" else losses:
                if cell.times == "two backwards":
                    loss.backward(retain_graph=True)
                loss.backward()
    except RuntimeError as raised:
        error = raised
    gradients = [torch.zeros(0) if leaf.grad is None else leaf.grad for leaf in (*xs, program.weight)]
    left = holder.find()
    return Outcome(gradients, None if remat.is_placeholder(left) else left.clone(), error, holder.name)


def verdict(cell: Cell) -> str:
    """Return `"equal"`, the name of an error that is right, or what is wrong, which begins with `"wrong"`."""
    expected, found = run_cell(cell), run_cell(cell, determinism_check="default")
    assert expected.error is None, expected.error
    kept = found.average is not None and torch.equal(expected.average, found.average)
    error = found.error
    if error is None:
        wrong = [] if all(map(torch.equal, expected.gradients, found.gradients)) else ["gradient"]
        wrong += [] if kept else ["tensor"]
        return f"wrong: {' and '.join(wrong)}" if wrong else "equal"
    kind = type(error).__name__
    if not isinstance(error, remat.RematError):
        return f"wrong: {kind}: {error}"
    if not kept and not isinstance(error, remat.UsageError):  # which forward raises
        return f"wrong: tensor after {kind}"
    if not is_named(error, found.name):
        return f"wrong: {kind} that does not name the tensor: {error}"
    return kind


def is_named(error: remat.RematError, name: str) -> bool:
    """Return whether the error says which tensor; of others than a MutationError it is enough that they name an op."""
    if isinstance(error, remat.MutationError):
        return re.search(rf"\b{name}|[\[(]\d+, 8[\])]", str(error)) is not None
    return bool(error.op or error.tensor)


# --- The cells.

HOWS = ["in place", "in parts", "as a whole", ".data", "rebound", "batch norm"]
READS = ["before", "after", "both", "never", "after, saved", "before, as a number"]
TIMES = [
    "once",
    "twice in one region",
    "two forwards, one backward",
    "two forwards, in order",
    "two backwards",
    "changed before backward",
]
NESTS = ["alone", "all in an inner region", "update in an inner region"]
OF_POLICIES = ["all in an inner region, no policy around", "update in an inner region without a policy"]
VIEWS = ["a view made in the region", "a view made before", "read by a view made before"]
VIEW_TIMES = ["once", "two forwards, one backward", "changed before backward"]


def cells(who: str, what: str) -> Iterator[Cell]:
    """Yield the cells of one writer and one kind of tensor, limits among them."""
    found = dict.fromkeys([*by_how(who, what), *by_place(who, what), *by_view(who, what)])
    for cell in found:
        if cell.how == "rebound" and (what == "argument" or "given" in who or cell.through != "itself"):
            continue  # nothing of the caller's to bind anew
        if who == "nobody" and cell.times != "changed before backward":
            continue  # nothing changes
        yield cell


def by_how(who: str, what: str) -> Iterator[Cell]:
    times = "changed before backward" if who == "nobody" else "once"
    for how, read in product(HOWS, READS):
        yield Cell(who, what, how, read, times=times)


def by_place(who: str, what: str) -> Iterator[Cell]:
    variant = "given" in who or "under" in who
    nests = NESTS[:1] if variant else NESTS + OF_POLICIES * (who in POLICIES)
    for nest, times, read in product(nests, TIMES, ["before", "after", "never"]):
        yield Cell(who, what, read=read, nest=nest, times=times)
    hows = ["rebound", ".data"] if what == "small buffer" else ["rebound"]
    for how, nest, times, read in product(hows, nests, TIMES, ["before", "after"]):
        if nest == "alone" or times in ("once", "two forwards, one backward"):
            yield Cell(who, what, how, read, nest=nest, times=times)


def by_view(who: str, what: str) -> Iterator[Cell]:
    hows = ["in place", ".data"] if what == "small buffer" else ["in place"]
    for view, how, read, times in product(VIEWS, hows, ["before", "after"], VIEW_TIMES):
        yield Cell(who, what, how, read, view, times=times)


def is_limit(cell: Cell) -> bool:
    """Return whether nothing notices the change, as docs/limits.md says: no version tells, and no copy is kept."""
    if cell.how not in (".data", "batch norm"):
        return False
    if cell.what == "small buffer":  # of which a copy is kept only if the region changes it
        return cell.who == "nobody" and cell.read != "never"
    if cell.who in ("plain code", "recomputed call"):  # which changes it twice
        return True
    if cell.who == "nobody":
        return cell.read != "never"
    if cell.how == ".data" and not re.match("handle|saved call", cell.who):  # else ops are watched
        return False
    if "policy" in cell.who and "as a number" in cell.read:  # which is an op, and kept
        return False
    return "before" in cell.read or cell.read == "both"


@pairwise(who=WRITERS, what=HOLDERS)
def test_outside(who, what):
    """Right or loud, in each cell that is no limit."""
    found = {cell: verdict(cell) for cell in cells(who, what) if not is_limit(cell)}
    wrong = [f"{' | '.join(cell[2:])}: {text}" for cell, text in found.items() if text.startswith("wrong")]
    assert found
    assert not wrong, f"{len(wrong)} of {len(found)} cells of {who}, {what}:\n" + "\n".join(wrong)


# Outcomes in one region, in place, of reads before the change and after it: equal (E) or MutationError (M).
PINNED = {
    "plain code": {"small buffer": "E E", "large buffer": "M M", "closure": "M M"},
    "recomputed call": {"small buffer": "E E", "large buffer": "M M", "closure": "M M"},
    "handle": {"small buffer": "E E", "large buffer": "M E", "closure": "M E"},
    "native region": {"small buffer": "E E", "large buffer": "M E", "closure": "M E"},
    "saved call": {"small buffer": "E E", "large buffer": "M E", "closure": "M E"},
    "policy, operand saved": {"small buffer": "E E", "large buffer": "M E", "closure": "M E"},
    "policy, operand recomputed": {"small buffer": "E E", "large buffer": "M E", "closure": "M E"},
    "nobody": {"small buffer": "M M", "large buffer": "M M", "closure": "M M"},  # the user, before backward
}
LETTERS = {"equal": "E", "MutationError": "M"}


@pytest.mark.parametrize("who", PINNED)
def test_outcomes_of_the_main_plane(who):
    """An error where the rules say so, and nowhere else."""
    times = "changed before backward" if who == "nobody" else "once"
    wrong = []
    for what, letters in PINNED[who].items():
        for read, allowed in zip(("before", "after", "never"), [*letters.split(), "E"], strict=True):
            found = verdict(Cell(who, what, read=read, times=times))
            if LETTERS.get(found) != allowed:
                wrong.append(f"{what}, read {read}: {found}, not {allowed}")
    assert not wrong, "\n".join(wrong)


def unversioned(how: str) -> list[Cell]:
    return [
        cell
        for who, what in product(WRITERS, HOLDERS)
        for cell in cells(who, what)
        if is_limit(cell)
        if cell.how == how
    ]


def read_by_numpy() -> Iterator[Cell]:
    for who, what in product(PINNED, ["small buffer", "large buffer", "closure"]):
        as_found = what == "small buffer" and who != "nobody"
        if who not in POLICIES and not as_found:
            times = "changed before backward" if who == "nobody" else "once"
            yield Cell(who, what, read="before, by NumPy", times=times)


LIMITS = {
    ".data": unversioned(".data"),
    "batch norm": unversioned("batch norm"),
    "read by NumPy": [*read_by_numpy()],
}
SILENT = ("wrong: gradient", "wrong: tensor", "wrong: gradient and tensor")


@pytest.mark.parametrize("limit", LIMITS)
def test_limits(limit, monkeypatch):
    """Silently wrong in a region of which no values are compared, as docs/limits.md says; to compare them finds a wrong
    gradient. A right cell is no limit.
    """
    monkeypatch.setattr("torch_remat.dispatch.region.forward.takes_samples", lambda serial: False)
    found = {cell: verdict(cell) for cell in LIMITS[limit]}
    gone = [f"{cell}: {text}" for cell, text in found.items() if text not in SILENT]
    assert not gone, f"{len(gone)} of {len(found)} are no limit any more:\n" + "\n".join(gone)
    missed = [cell for cell, text in found.items() if "gradient" in text and not is_found_bitwise(cell)]
    assert not missed, "bitwise comparison does not find:\n" + "\n".join(map(str, missed))
    assert found


@pytest.mark.parametrize("who", ["handle", "saved call"])
def test_attribute_that_a_call_binds_anew_is_read_as_the_call_of_the_same_forward_left_it(who):
    assert verdict(Cell(who, ATTRIBUTE, "rebound", times="two forwards")) == "equal"


@pytest.mark.parametrize("when", ["by the region", "before backward"])
def test_tensor_that_a_call_binds_and_that_is_modified_later_is_not_read(when):
    module = Module(None, torch.rand(4), is_buffer=False)

    def update(x):
        module.average = module.average * 0.5
        return x.tanh()

    def block(x):
        x = remat.op(update, "update")(x) * module.average.clone()
        if when == "by the region":
            module.average.add_(1)
        return x.sin()

    y = remat.checkpoint()(block)(torch.randn(4, requires_grad=True))
    if when == "before backward":
        module.average.add_(1)
    left = module.average.clone()
    with pytest.raises(remat.MutationError, match="average"):
        y.sum().backward()
    assert torch.equal(module.average, left)


def is_found_bitwise(cell: Cell) -> bool:
    return isinstance(run_cell(cell, determinism_check="bitwise").error, remat.RematError)


class Losing(nn.Module):
    """Keeps a loss of its own where the trainer reads it, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), None

    def forward(self, x):
        h = self.linear(x).sin()
        self.loss = h.square().mean()
        return h


@pairwise(
    keep=[lambda module, x: module(x), lambda module, x: remat.native_save_region("m", module, x)],
    policy=[None, [torch.ops.aten.addmm.default]],
)
def test_attribute_that_forward_sets_is_no_placeholder_after_backward(keep, policy):
    module, x = Losing(), leaf(2, 4)
    holder = SimpleNamespace()  # an argument

    def block(x, holder):
        h = keep(module, x)
        holder.seen = h.cos()
        return h.exp().sin()

    for _ in range(2):
        y = remat.checkpoint(policy=policy)(block)(x, holder)
        loss, seen = module.loss, holder.seen
        (y.sum() + loss).backward()
        assert not remat.is_placeholder(module.loss)
        assert not remat.is_placeholder(holder.seen)
        assert policy is None or (module.loss is loss and holder.seen is seen)
        module.loss = holder.seen = None  # what forward finds is no tensor


class Filled(nn.Module):
    """A cache that is a buffer, and a number that says how much of it is filled: as in `rotary-embedding-torch`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 4))
        self.filled = 0

    def forward(self, x):
        if len(x) > self.filled:
            made = torch.arange(len(x))[:, None] * torch.linspace(0.1, 1, 4)
            self.cache[: len(x)] = made
            self.filled = len(x)
        else:
            made = self.cache[: len(x)]
        return x * made.cos()


class Grown(nn.Module):
    """A tensor that is bound anew when it is too short, and its length: as in `flash-attn`."""

    def __init__(self):
        super().__init__()
        self.length, self.cos = 1, torch.ones(1, 4)

    def forward(self, x):
        if len(x) > self.length:
            self.length, self.cos = len(x), (torch.arange(len(x))[:, None] * torch.linspace(0.1, 1, 4)).cos()
        return x * self.cos[: len(x)]


class Counted(nn.Module):
    """An average, and how many it is of."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.count = 0

    def forward(self, x):
        self.count += 1
        self.average.lerp_(x.detach().mean(0), 1 / self.count)
        return x * self.average


class Replaced(nn.Module):
    """A tensor whose place something else takes."""

    def __init__(self):
        super().__init__()
        self.latest = torch.zeros(4)

    def forward(self, x):
        self.latest = ("no", "tensor")
        return x.sin()


KEEPS = {
    "nothing": {},
    "early stop off": {"early_stop": False},
    "by op": {"policy": [aten.mm.default]},
    "by function": {"policy": [torch.matmul]},
    "by module": {"policy": remat.save_modules("0")},
    "the product": {"policy": remat.save_modules("1")},
}


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("kind", [Filled, Grown, Counted, Replaced])
def test_numbers_of_a_module_go_with_its_tensors(kind, keeps, monkeypatch):
    """No values are compared: the gradients are right."""
    monkeypatch.setattr("torch_remat.dispatch.region.forward.takes_samples", lambda serial: False)

    def program(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(kind(), Product())
        found, left = [], []
        for length in (2, 2, 3):
            x = torch.randn(length, 4, requires_grad=True)
            wrap(model)(x).exp().sum().backward()
            found += [x.grad, model[1].weight.grad.clone()]
            left.append({name: value for name, value in vars(model[0]).items() if type(value) in (int, tuple)})
        return [*found, *model.buffers()], left

    expected, got = program(lambda model: model), program(remat.checkpoint(**KEEPS[keeps]))
    assert all(map(torch.equal, expected[0], got[0]))
    assert expected[1] == got[1]
