"""Runs a program, in regions or with plain autograd: the tables of its ops, its state, its custom Functions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.offloaders import Counting
from tests.programs.priced import PRICED
from tests.programs.program import RECOMPUTE, Body, Fault, Program, Step, steps_of
from torch_remat.dispatch.call import survey

SIDE = 4
DECISIONS = {policy.name: policy for policy in remat.CheckpointPolicy}

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "exp": lambda a: (a * 0.3).exp(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "square": lambda a: a * a,
    "clone": torch.clone,
    "gelu": F.gelu,
    "softmax": lambda a: a.softmax(-1),
    "norm": lambda a: F.layer_norm(a, (SIDE,)),
    "detach": lambda a: a.detach() * 1.1,
    "clamp": lambda a: a.clamp(-1, 1),
    "cumsum": lambda a: a.cumsum(0),
    "sort": lambda a: a.sort(-1).values,
    "max": lambda a: a.max(-1, keepdim=True).values * a,
    "filled": lambda a: torch.zeros(SIDE, SIDE).copy_(a).mul_(2).tanh(),
    "written": lambda a: (a * 1.5).index_fill_(0, torch.tensor([1]), 0.5).exp_(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "matmul": torch.matmul,
    "cat": lambda a, b: torch.cat([a[:2], b[2:]]),
    "stack": lambda a, b: torch.stack([a, b]).mean(0),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "gather": lambda a, b: a.gather(1, b.argsort(1)),
}
VIEW: dict[str, Callable[[Tensor], Tensor]] = {
    "t": torch.t,
    "reshape": lambda a: a.reshape(2, 8).reshape(SIDE, SIDE),
    "slice": lambda a: a[:, :],
    "expand": lambda a: a[:1].expand(SIDE, SIDE),
    "select": lambda a: a.unsqueeze(0)[0],
    "unbind": lambda a: a.unbind(0)[1].expand(SIDE, SIDE),
    "column": lambda a: a[:, 2:3].expand(SIDE, SIDE),
    "split": lambda a: torch.cat(a.split(2)),
    "diagonal": lambda a: a.diagonal().unsqueeze(0).expand(SIDE, SIDE),
}


def _without_gradient(update: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.no_grad():
            return update(*args)

    return run


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda a, b: a.mul_(0.9),
    "add_": lambda a, b: a.add_(b),
    "copy_": lambda a, b: a.copy_(b),
    "relu_": lambda a, b: torch.relu_(a),
    "row": lambda a, b: a[0].mul_(0.5),
    "zero every third": lambda a, b: a.view(-1)[::3].zero_(),
    "transposed": lambda a, b: a.t().sub_(1),
    "mul_ detached": lambda a, b: a.detach().mul_(0.9),
    "mul_ in no_grad": _without_gradient(lambda a, b: a.mul_(0.9)),
    "bernoulli_": lambda a, b: a.mul_(torch.empty(SIDE, SIDE).bernoulli_(0.6)),
}
# What reads data into Python, runs in no_grad or draws random numbers.
READ: dict[str, Callable[[State, Tensor, Tensor], Tensor]] = {
    "weight": lambda s, a, b: a @ s.weight,
    "dropout": lambda s, a, b: F.dropout(a, 0.3),
    "noise": lambda s, a, b: a * torch.rand(SIDE, SIDE),
    "generator": lambda s, a, b: a * torch.rand(SIDE, SIDE, generator=None if s.has_torch else s.generator),
    "no_grad": _without_gradient(lambda s, a, b: a * s.weight),
    "mask": lambda s, a, b: torch.where(_without_gradient(torch.gt)(a, b), a, b),
    "number": lambda s, a, b: a * float(b.detach().mean()),
    "numpy": lambda s, a, b: a * float(b.detach().float().numpy().mean()),
    "branch": lambda s, a, b: a.sin() if b.detach().sum() > 0 else a.cos(),
    "rows": lambda s, a, b: torch.cat([a[: 1 + int(b.detach().argmax()) % SIDE], a])[-SIDE:],
}
STATE: dict[str, Callable[[State, Tensor], Tensor]] = {
    "read": lambda s, a: a * s.inner.buffer,
    "update": _without_gradient(lambda s, a: s.inner.buffer.mul_(0.5).add_(a.detach().abs().mean(0)) * 1.0),
    "batch norm": lambda s, a: s.batch_norm(a),
    "closed": lambda s, a: a * s.closed,
    "update closed": _without_gradient(lambda s, a: s.closed.add_(a.detach().abs().mean(0)) * 1.0),
    "scale": lambda s, a: (a * s.scale).sin(),
}
OPS_OF: dict[str, set[str] | None] = {
    "products": {"mm"},
    "sines": {"sin", "exp"},
    "all": None,
    "small": {"mul", "tanh", "add"},
    "in place": {"mul_", "add_", "copy_", "mm"},
    "random": {"native_dropout", "bernoulli_", "where", "sigmoid"},
}
POLICIES: dict[str, Any] = {
    name: (lambda ctx, op, *args, _names=names, **kwargs: _names is None or op.overloadpacket.__name__ in _names)
    for name, names in OPS_OF.items()
}
POLICIES["list"] = [torch.ops.aten.mm.default, torch.ops.aten.sin.default]
POLICIES["names"] = remat.save_names("mul_*")
POLICIES["ready"] = remat.policies.save_matmuls
OF_FUNCTIONS: dict[str, list[Any]] = {
    "products by function": [torch.matmul, F.linear],
    "functions": [
        torch.matmul, torch.sin, torch.exp, torch.mul, torch.softmax, F.layer_norm, F.dropout, torch.sort, torch.t,
        torch.Tensor.clone, torch.Tensor.max, torch.cumsum, F.gelu, torch.stack, torch.where, torch.relu, torch.zeros,
    ],
    "functions and ops": [torch.matmul, torch.Tensor.exp, F.dropout, torch.ops.aten.sin.default, torch.ops.aten.mul],
}  # fmt: skip
POLICIES |= OF_FUNCTIONS
USUAL = tuple(POLICIES)
POLICIES |= PRICED


class State(nn.Module):
    """What a program reaches outside of its region.

    Attributes:
        closed: An attribute that is no buffer.
        scale: A tensor with a history, made before the region.
        has_torch: Whether torch's checkpoint runs a part.
        wraps: Whether there are regions; else the program runs with plain autograd.
        saved: What is entered while a saved call runs: the byte model watches it.
        whole: What is entered while a handle runs that replay recomputes as a whole.
        note: Called with what the outermost region keeps as an input and an op made.
        offloader: Takes the inputs of regions and what is marked; None without one.
        functions: Weak references to what regions ran.
        after_forward: Copies of what `changing` returned after forward, where a fault is injected.
    """

    def __init__(self, wraps: bool, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE) / 2)
        self.inner = nn.Module()
        self.inner.register_buffer("buffer", torch.rand(SIDE, SIDE) + 0.5)
        self.batch_norm = nn.BatchNorm1d(SIDE)
        self.generator = torch.Generator().manual_seed(3)
        self.closed = torch.rand(SIDE, SIDE) + 0.5
        self.scale_leaf = torch.rand(SIDE, SIDE).requires_grad_()
        self.scale = self.scale_leaf * 2
        self.parameters_at_first = [self.weight, self.batch_norm.weight, self.scale_leaf]
        self.wraps, self.program = wraps, program
        kinds = {step.kind for step in steps_of(program.body)}
        self.has_torch = "torch" in kinds or program.around == "torch"  # which draws from other generators twice
        self.saved: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.whole: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.note: Callable[[Tensor], Any] = lambda tensor: None
        self.functions: list[ref[Callable]] = []
        self.after_forward: list[Tensor] | None = None
        self.offloader = Counting() if program.offload and wraps else None

    def region(self, policy: str | None, **options: Any) -> Callable[[Callable], Callable]:
        """Return what wraps a function as a region."""
        if not self.wraps:
            return lambda function: function
        if policy is not None:
            options["policy"] = POLICIES[policy]
        if self.offloader is not None:
            options |= {"offloader": self.offloader, "offload_inputs": True}

        def wrap(function: Callable) -> Callable:
            self.functions.append(ref(function))
            return remat.checkpoint(**options)(function)

        return wrap

    def changing(self) -> list[Tensor]:
        """Return what a forward changes: buffers, and the state of generators."""
        norm = self.batch_norm
        buffers = [self.inner.buffer, self.closed, norm.running_mean, norm.running_var, norm.num_batches_tracked]
        return [*buffers, self.generator.get_state(), torch.get_rng_state()]


# --- Custom Functions: their backward runs the body again, without random numbers.


class Plain(Function):
    """Saves its arguments."""

    @staticmethod
    def forward(ctx, state, body, path, one, two):
        return _compute(ctx, state, body, path, (one, two), lambda: ctx.save_for_backward(one, two))

    @staticmethod
    def backward(ctx, *gradients):
        return _differentiated(ctx, gradients)


class Seed(Plain):
    """The form of the seed: it takes its name and decision and asks a handle, by hand."""

    @staticmethod
    def forward(ctx, state, body, path, one, two, name, decision):
        handle = remat.get_handle(ctx, name, decision) if state.wraps else None
        if handle is None:
            return _compute(ctx, state, body, path, (one, two), lambda: ctx.save_for_backward(one, two))
        if (result := handle.maybe_load_saved()) is not None:
            return result
        one, two = handle.save_or_load_inputs(one, two)
        given = {"one": one, "two": two}
        out = _compute(ctx, state, body, path, (one, two), lambda: handle.save_for_backward(given))
        return handle.record_outputs(*out) if isinstance(out, tuple) else handle.record_outputs(out)

    @staticmethod
    def backward(ctx, *gradients):
        return *_differentiated(ctx, gradients), None, None


class NamedSeed(Seed):
    """The form of the seed with `auto_forward`."""

    @staticmethod
    @remat.auto_forward("one", "two")
    def forward(ctx, state, body, path, one, two, op_name, remat_policy):
        return _compute(ctx, state, body, path, (one, two), lambda: ctx.save_for_backward(one, two))


FUNCTIONS = {"op Function": Plain, "seed": Seed, "named seed": NamedSeed}


def _compute(ctx: Any, state: State, body: Body, path: str, given: Sequence[Tensor], save: Callable) -> Any:
    ctx.state, ctx.body, ctx.path = state, body, path
    out = run_body(state, body, [tensor.detach() for tensor in given], path, in_function=True)
    save()
    out = tuple(tensor.clone() for tensor in out)
    return out[0] if len(out) == 1 else out


def _differentiated(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        out = run_body(ctx.state, ctx.body, given, ctx.path, in_function=True)
    pairs = [(y, g) for y, g in zip(out, gradients, strict=True) if y.requires_grad and g is not None]
    if not pairs:
        return (None,) * 5
    found = torch.autograd.grad([y for y, _ in pairs], given, [g for _, g in pairs], allow_unused=True)
    return None, None, None, *found


# --- Running a body.


def run_body(
    state: State, body: Body, inputs: Sequence[Tensor], path: str = "p", in_function: bool = False
) -> tuple[Tensor, ...]:
    """Run the steps of a function over its inputs; return the values that it returns."""
    values = list(inputs)
    for index, step in enumerate(body.steps):
        values += run_step(state, step, values, f"{path}.{index}", in_function)
    return tuple(_pick(values, pick) for pick in body.returns)


@dataclass
class Pair:
    """A result tree with names."""

    first: Tensor
    last: Tensor


TREES: dict[str, Callable[[tuple[Tensor, ...]], Any]] = {
    "tuple": lambda out: out,
    "bare": lambda out: out[0] if len(out) == 1 else out,
    "dict": lambda out: {"first": out[0], "rest": list(out[1:])},
    "with None": lambda out: (None, *out),
    "dataclass": lambda out: Pair(out[0], out[-1]),
    "nested": lambda out: [out, {"again": out[-1]}],
}


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a result tree."""
    if isinstance(tree, Pair):
        return [tree.first, tree.last]
    if isinstance(tree, Tensor):
        return [tree]
    leaves = tree.values() if isinstance(tree, dict) else tree or ()
    return [tensor for leaf in leaves for tensor in tensors_of(leaf)]


def _pick(values: Sequence[Tensor], index: int) -> Tensor:
    return values[-1 - index % len(values)]


def run_step(state: State, step: Step, values: list[Tensor], path: str, in_function: bool) -> Sequence[Tensor]:
    """Run one step; return what is new."""
    one, two = _pick(values, step.one), _pick(values, step.two)
    if step.kind == "unary":
        return [UNARY[step.what](one)]
    if step.kind == "binary":
        return [BINARY[step.what](one, two)]
    if step.kind == "view":
        return [VIEW[step.what](one)]
    if step.kind == "read":
        random = step.what in ("dropout", "noise", "generator") or (step.what == "weight" and in_function)
        return [one * 0.7] if in_function and random else [READ[step.what](state, one, two)]
    if step.kind == "state":
        return [STATE[step.what](state, one)]
    if step.kind == "in_place":
        fresh = [one.clone()] if one.is_leaf and one.requires_grad else []
        IN_PLACE[step.what](fresh[0] if fresh else one, two)
        return fresh

    def function(*tensors: Tensor) -> Any:
        return TREES[step.body.tree](run_body(state, step.body, tensors, path, in_function))

    if step.kind == "region":
        return tensors_of(state.region(step.policy)(function)(one, two))
    if step.kind == "torch":
        run = (lambda *args: torch_checkpoint(function, *args, use_reentrant=False)) if state.wraps else function
        return tensors_of(run(one, two))
    return run_call(state, step, function, (one, two), path, in_function)


def run_call(
    state: State, step: Step, function: Callable, given: tuple[Tensor, Tensor], path: str, in_function: bool
) -> Sequence[Tensor]:
    """Run a call that replay may skip; return its results."""
    if step.what in FUNCTIONS and in_function:
        return []
    name, decision = path.replace(".", "_"), DECISIONS[step.policy]
    entered = contextlib.nullcontext
    if step.policy != RECOMPUTE or step.what.startswith("native"):
        entered = state.saved
    elif step.what.endswith("seed"):
        entered = state.whole
    if step.what in FUNCTIONS:
        function, args = FUNCTIONS[step.what].apply, (state, step.body, path, *given)
        if step.what != "op Function":
            args = (*args, name, decision)
    elif step.what.endswith("mm"):
        function, args = torch.mm, (given[0], state.weight)
    else:
        inner, args = function, () if step.closes else given
        function = (lambda: inner(*given)) if step.closes else inner
    if state.wraps and not step.what.endswith("seed"):
        if step.what.startswith("native"):
            run = function
            function, args = remat.native_save_region, (name, run, *args)
        else:
            function = remat.op(function, name, policy=decision)
    with entered():
        return tensors_of(function(*args))


# --- Running a program.


class Injected(Exception):
    """The error that a program injects."""


class Injecting(TorchDispatchMode):
    """Raises an error at the op that a fault names."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.count, self.phase = fault, 0, "forward"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        phase = "replay" if self.phase == "backward" and remat.is_recomputing() else self.phase
        if phase == self.fault.phase:
            self.count += 1
            if self.count == self.fault.index + 1:
                raise Injected
        return func(*args, **(kwargs or {}))


def exact_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, which kernels may tell apart by the last bit."""
    with torch.no_grad():
        storage = tensor.untyped_storage().clone()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def copying() -> contextlib.AbstractContextManager:
    """Return saved-tensor hooks that keep a copy of all that is saved."""
    return torch.autograd.graph.saved_tensors_hooks(exact_copy, lambda tensor: tensor)


def casting(program: Program, phase: str) -> contextlib.AbstractContextManager:
    """Return autocast, enabled if the program asks for it in this phase."""
    return torch.autocast("cpu", torch.bfloat16, enabled=program.autocast == phase)


def forward(state: State, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Run a program's forward; return its outputs."""
    program = state.program

    def block(a: Tensor, b: Tensor) -> Any:
        with copying() if program.hooks == "inside" and state.wraps else contextlib.nullcontext():
            return TREES[program.body.tree](run_body(state, program.body, (a * 1.0, b)))

    region = state.region(program.policy, early_stop=program.early_stop)(block)
    run = region
    if program.around == "twice":

        def run(a: Tensor, b: Tensor) -> Any:
            first = tensors_of(region(a, b))[0]
            state.note(first)
            return region(first, b)

    elif program.around != "nothing":
        outer = lambda a, b: region(a.sin(), b.cos())  # noqa: E731
        if program.around == "torch":
            run = (lambda a, b: torch_checkpoint(outer, a, b, use_reentrant=False)) if state.wraps else outer
        else:
            run = state.region("products" if program.around == "region with policy" else None)(outer)
    hooks = copying() if program.hooks == "around" and state.wraps else contextlib.nullcontext()
    with casting(program, "forward"), hooks:
        return tensors_of(run(*leaves))


@torch.no_grad()
def _replace(state: State, name: str) -> None:
    setattr(state, name, nn.Parameter(getattr(state, name) * 2))


@torch.no_grad()
def _forward_again(state: State, given: Sequence[Tensor]) -> None:
    forward(state, [tensor.detach().clone() for tensor in given])


LATER: dict[str, Callable[[State, Sequence[Tensor], Sequence[Tensor]], Any]] = {
    "input": _without_gradient(lambda s, given, outputs: given[0].mul_(0.5)),
    "other input": _without_gradient(lambda s, given, outputs: given[1].detach().add_(1)),
    "weight": _without_gradient(lambda s, given, outputs: s.weight.mul_(0.5)),
    "buffer": _without_gradient(lambda s, given, outputs: s.inner.buffer.mul_(0.5)),
    "closed": lambda s, given, outputs: s.closed.mul_(0.5),
    "closed replaced": lambda s, given, outputs: setattr(s, "closed", s.closed * 2),
    "output": lambda s, given, outputs: outputs[0].mul_(0.5),
    "output in no_grad": _without_gradient(lambda s, given, outputs: outputs[-1].mul_(0.5)),
    "replaced weight": lambda s, given, outputs: _replace(s, "weight"),
    "replaced buffer": lambda s, given, outputs: setattr(s.inner, "buffer", s.inner.buffer * 2),
    "forward again": lambda s, given, outputs: _forward_again(s, given),
    "random": lambda s, given, outputs: torch.rand(3),
}


def backward(program: Program, outputs: list[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Take the gradients of the outputs as the program says: into the leaves, and into what is returned."""
    with casting(program, "backward"):
        return _gradients(program, outputs, leaves)


def _gradients(program: Program, outputs: list[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    weights = torch.arange(float(SIDE * SIDE)).reshape(SIDE, SIDE)
    loss = sum((y * weights).sum() for y in outputs)
    extra: list[Tensor | None] = []
    if program.backward == "kept":
        loss.backward(retain_graph=True)
    elif program.backward == "two orders":
        extra = list(torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True))
        loss = loss + sum((g * g).sum() for g in extra if g is not None and g.requires_grad)
    elif program.backward == "one by one":
        for y in outputs[1:]:
            y.sum().backward(retain_graph=True)
        loss = outputs[0].sum()
    elif program.backward == "subset":
        extra = list(torch.autograd.grad(loss, leaves[1:], retain_graph=True, allow_unused=True))
    if program.backward == "thread":
        _in_thread(loss.backward)
    else:
        loss.backward()
    return [g if g is None else g.detach() for g in extra]


def _in_thread(work: Callable[[], None]) -> None:
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()


def make_leaves(program: Program, seed: int = 1) -> list[Tensor]:
    """Return the leaves that a program starts from."""
    torch.manual_seed(seed)
    tensors = [torch.randn(SIDE, SIDE) for _ in range(2)]
    if program.inputs == "transposed":
        tensors = [tensor.t() for tensor in tensors]
    elif program.inputs == "subclass":
        tensors = [tensor.as_subclass(Tagged) for tensor in tensors]
    elif program.inputs == "wrapper":
        from torch.testing._internal.two_tensor import TwoTensor

        tensors = [TwoTensor(tensor, tensor * 0.5) for tensor in tensors]
    return [tensor.requires_grad_() for tensor in tensors]


class Tagged(Tensor):
    """A subclass that does nothing."""


class Found(NamedTuple):
    """What must be equal with and without regions: outputs, gradients, and what a forward changes."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    changed: list[Tensor]

    def all(self) -> list[Tensor | None]:
        """Return all of them."""
        return [*self.outputs, *self.gradients, *self.changed]


RECORDED = 3  # so many steps a budget learns from


def in_budget(program: Program) -> Any:
    """Return a program's budget, which knows its regions from some steps: then it keeps what it has room for."""
    budget = remat.budget(program.budget, reserve=0)
    others = program._replace(budget=None, fault=None, later=None, backward="once")
    with patch.object(survey, "perf_counter_ns", count(0, 100_000).__next__):  # each op is worth to be kept
        try:
            for _ in range(RECORDED):
                with budget:
                    run(State(True, others))
        except Exception:  # which the program raises itself, and whose graph may be alive
            return remat.budget(program.budget, reserve=0)
    return budget


def run(state: State, fault: Fault | None = None, seed: int = 1) -> Found:
    """Run a program."""
    program = state.program
    with_budget = program.budget is not None and state.wraps
    budget = in_budget(program) if with_budget else None
    leaves = make_leaves(program, seed)
    given = [leaf * 1.0 for leaf in leaves] if program.later in ("input", "other input") else leaves
    injecting = Injecting(fault) if fault is not None else contextlib.nullcontext()
    with contextlib.nullcontext() if budget is None else budget:
        with injecting:
            outputs = forward(state, given)
            if program.later is not None:
                LATER[program.later](state, given, outputs)
            values = [y.detach().clone() for y in outputs]
            outputs = [y for y in outputs if y.requires_grad]
            extra: list[Tensor | None] = []
            if fault is not None:
                state.after_forward = [tensor.clone() for tensor in state.changing()]
                injecting.phase = "backward"
            if outputs and program.backward != "dropped":
                extra = backward(program, outputs, leaves)
        del outputs
        if budget is not None:
            assert budget.kept_bytes == 0, f"a budget counts {budget.kept_bytes} bytes of graphs that are gone"
    gradients = [leaf.grad for leaf in (*leaves, *state.parameters_at_first)]
    return Found(values, [*extra, *gradients], state.changing())
