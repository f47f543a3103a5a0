"""Remat-aware Functions for the tests of handles: each kernel in every form in which a user can write it.

A kernel's backward need not be a true derivative: it must only tell apart what it was given, bit by bit.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef

import torch_remat as remat

SAVE, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.RECOMPUTE
POLICIES = [RECOMPUTE, SAVE]
STYLES = ["handle", "auto"]


def policy_ids(policies: Any) -> str:
    """Return a policy, or some, as a test id: `"SRS"`."""
    return "".join("S" if policy is SAVE else "R" for policy in as_tuple(policies))


class Trace:
    """What the bodies of ops did: how often each ran, and weak references to what its first run made.

    Attributes:
        runs: Label of the op to the number of times that its body ran.
        storages: `"label.out"`, `"label.0"`, `"label.m"` to the storage that the first run made; not what it was given.
    """

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.storages: dict[str, StorageWeakRef] = {}

    def ran(
        self, label: str, inputs: Any = (), outputs: Any = (), saved: dict[str, Tensor | None] | None = None
    ) -> None:
        """Count a run of a body and, the first time, watch what it made."""
        self.runs[label] += 1
        if self.runs[label] > 1:
            return
        names = ["out"] if len(outputs) == 1 else [str(index) for index in range(len(outputs))]
        known = {x.untyped_storage()._cdata for x in inputs if isinstance(x, Tensor)}
        for key, tensor in [*zip(names, outputs, strict=True), *(saved or {}).items()]:
            if tensor is not None and tensor.untyped_storage()._cdata not in known:
                known.add(tensor.untyped_storage()._cdata)
                self.storages[f"{label}.{key}"] = StorageWeakRef(tensor.untyped_storage())

    def alive(self) -> set[str]:
        """Return the names of the watched storages that are alive."""
        return {name for name, reference in self.storages.items() if not reference.expired()}


@dataclass(frozen=True)
class Kernel:
    """What an op computes, without its form.

    Attributes:
        names: Names of the saved tensors, in order.
        forward: `(ctx, *inputs)` to `(output or tuple of outputs, saved tensors by name)`.
        backward: `(ctx, saved tensors, *gradients)` to the gradient of the input, or a tuple of gradients.
        arity: How many tensors it takes.
    """

    name: str
    names: tuple[str, ...]
    forward: Callable
    backward: Callable
    arity: int = 1

    def __str__(self) -> str:
        return self.name


def as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def kernel(*names: str, arity: int = 1) -> Callable[[type], Kernel]:
    return lambda cls: Kernel(cls.__name__, names, cls.forward, cls.backward, arity)


def run_body(kernel: Kernel, ctx: Any, mark: tuple[Trace, str], inputs: tuple) -> tuple[tuple, dict]:
    """Run a kernel's forward, tell the trace, and return outputs and saved tensors."""
    outputs, saved = kernel.forward(ctx, *inputs)
    trace, label = mark
    trace.ran(label, inputs, as_tuple(outputs), saved)
    return outputs, saved


def handle_forward(ctx, mark, *args, kernel):
    *inputs, op_name, policy = args
    handle = remat.get_handle(ctx, op_name, policy)
    if (ret := handle.maybe_load_saved()) is not None:
        return ret
    inputs = as_tuple(handle.save_or_load_inputs(*inputs))
    outputs, saved = run_body(kernel, ctx, mark, inputs)
    if saved:
        handle.save_for_backward(saved)
    return handle.record_outputs(*as_tuple(outputs))


def auto_forward(ctx, mark, *args, kernel):
    outputs, saved = run_body(kernel, ctx, mark, args[: kernel.arity])
    if saved:
        ctx.save_for_backward(*saved.values())
    return outputs


@functools.cache
def function_for(kernel: Kernel, style: str) -> type[Function]:
    """Return the kernel as a Function: by `handle`, by `auto_forward`, for `op`; without remat: `plain`."""
    body = functools.partial(auto_forward, kernel=kernel)
    if style == "handle":
        body = functools.partial(handle_forward, kernel=kernel)
    extra = 2 if style in ("handle", "auto") else 0

    class Op(Function):
        @staticmethod
        def forward(ctx, mark, *args):
            return body(ctx, mark, *args)

        @staticmethod
        def backward(ctx, *grads):
            return None, *as_tuple(kernel.backward(ctx, ctx.saved_tensors, *grads)), *([None] * extra)

    if style in ("auto", "op"):
        Op.forward = staticmethod(remat.auto_forward(*kernel.names)(Op.forward))
    return Op


def call(style: str, kernel: Kernel, trace: Trace, name: str, policy: Any, *inputs: Tensor) -> Any:
    """Call the kernel as a named op; the trace knows it by the same name."""
    apply = function_for(kernel, style).apply
    if style == "op":
        return remat.op(apply, name, policy=policy)((trace, name), *inputs)
    if style == "plain":
        return apply((trace, name), *inputs)
    return apply((trace, name), *inputs, name, policy)


@kernel("x", "w", arity=2)
class Affine:
    """Saves both inputs."""

    def forward(ctx, x, w):
        return x * w + x.sin(), {"x": x, "w": w}

    def backward(ctx, saved, grad):
        x, w = saved
        return grad * (w + x.cos()), grad * x


@kernel("m")
class Inner:
    """Saves what is neither input nor output."""

    def forward(ctx, x):
        m = x.tanh()
        return m * m + m, {"m": m}

    def backward(ctx, saved, grad):
        return grad * (2 * saved[0] + 1) * (1 - saved[0] * saved[0])


@kernel("y")
class Result:
    """Saves its output."""

    def forward(ctx, x):
        y = x.sigmoid()
        return y, {"y": y}

    def backward(ctx, saved, grad):
        return grad * saved[0] * (1 - saved[0])


@kernel("x", "y")
class Both:
    """Saves input and output."""

    def forward(ctx, x):
        y = (-x * x).exp()
        return y, {"x": x, "y": y}

    def backward(ctx, saved, grad):
        return grad * saved[1] * -2 * saved[0]


@kernel()
class Shift:
    """Saves nothing."""

    def forward(ctx, x):
        return x * 0.5 + 1, {}

    def backward(ctx, saved, grad):
        return grad * 0.5


@kernel("x")
class Power:
    """Sets an attribute on `ctx`."""

    def forward(ctx, x):
        ctx.k, ctx.scale = 3, {"by": 0.25}
        return x**3 * 0.25, {"x": x}

    def backward(ctx, saved, grad):
        return grad * ctx.k * ctx.scale["by"] * saved[0] ** (ctx.k - 1)


@kernel("x")
class SinCos:
    """Two outputs."""

    def forward(ctx, x):
        return (x.sin(), x.cos()), {"x": x}

    def backward(ctx, saved, grad_sin, grad_cos):
        return grad_sin * saved[0].cos() - grad_cos * saved[0].sin()


@kernel("index")
class Sort:
    """A second output of integers, which is also saved."""

    def forward(ctx, x):
        values, index = x.sort(-1)
        return (values, index), {"index": index}

    def backward(ctx, saved, grad, _):
        return torch.zeros_like(grad).scatter(-1, saved[0], grad)


@kernel("index", "x", arity=2)
class Gather:
    """Takes integers."""

    def forward(ctx, x, index):
        return x.gather(-1, index).sin(), {"index": index, "x": x}

    def backward(ctx, saved, grad):
        index, x = saved
        return torch.zeros_like(x).scatter_add(-1, index, grad * x.gather(-1, index).cos()), None


@kernel("mask")
class Noise:
    """Dropout."""

    def forward(ctx, x):
        mask = (torch.rand_like(x) > 0.4).to(x.dtype) / 0.6
        return x * mask, {"mask": mask}

    def backward(ctx, saved, grad):
        return grad * saved[0]


@kernel("x")
class Transpose:
    """Its output is a view of its input."""

    def forward(ctx, x):
        return x.t(), {"x": x}

    def backward(ctx, saved, grad):
        return grad.t() * saved[0].cos()


@kernel("x")
class Identity:
    """Its output is its input."""

    def forward(ctx, x):
        return x, {"x": x}

    def backward(ctx, saved, grad):
        return grad * saved[0].cos()


@kernel("v", "y")
class InnerView:
    """Saves a view of its input and a view of its output, both made in the body."""

    def forward(ctx, x):
        v = x.t()[1:]
        y = (x.sin() + x.t()).contiguous()
        return y, {"v": v, "y": y.view(-1)}

    def backward(ctx, saved, grad):
        v, y = saved
        return grad.t() * v.cos().sum(0) + grad * y.view(grad.shape)


@kernel("none", "x", "hole", "y")
class Holes:
    """Saves None between tensors."""

    def forward(ctx, x):
        y = x.cos()
        return y, {"none": None, "x": x, "hole": None, "y": y}

    def backward(ctx, saved, grad):
        none, x, hole, y = saved
        assert (none, hole) == (None, None)
        return grad * (x + y)


@kernel("mask")
class Gated:
    """Its second output is marked as not differentiable."""

    def forward(ctx, x):
        mask = (x > 0).to(x.dtype) + 0.5
        ctx.mark_non_differentiable(mask)
        return (x * mask, mask), {"mask": mask}

    def backward(ctx, saved, grad, _):
        return grad * saved[0]


@kernel("x")
class Half:
    """Sees None for a missing gradient."""

    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return (x * 0.5, x * x), {"x": x}

    def backward(ctx, saved, grad, grad_square):
        parts = [] if grad is None else [0.5 * grad]
        parts += [] if grad_square is None else [2 * saved[0] * grad_square]
        return sum(parts) if parts else None


KERNELS = [Affine, Inner, Result, Both, Shift, Power, Noise, Transpose, Identity, InnerView, Holes]
KERNELS += [SinCos, Sort, Gather, Gated, Half]
