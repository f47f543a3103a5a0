"""The workloads of ops with handles: chains of a small autograd Function in one region."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .contenders import FLOOR, NONE, OURS, REMAT_0_1, REMAT_0_2, TORCH, Wrap, full_recompute, package_of, versions
from .workloads import Workload

HANDLES = 512
ALTERNATING_OPS = (8, 64, 512)


def handles_recompute() -> Workload:
    """Calls of a small autograd Function with a handle, all replayed: what a handle costs."""
    x, chains = _sine_functions(("RECOMPUTE",), with_handle=(REMAT_0_1, *versions(OURS)), without=(NONE, FLOOR, TORCH))
    return Workload(
        name="handles",
        about=f"one region, {HANDLES} calls of an autograd Function (sin of 4 x 16 floats), handles with RECOMPUTE",
        leaves={"x": x},
        output_grad=torch.randn_like(x),
        forwards=chains,
        ideal_retained_bytes=x.nbytes,
        steps=1,
    )


def handles_save() -> Workload:
    """The same with all outputs kept, so that no body runs again. 0.1.0 is omitted: its SAVE needs a CUDA build."""
    x, chains = _sine_functions(("SAVE",), with_handle=tuple(versions(OURS)), without=(NONE, FLOOR, TORCH))
    return Workload(
        name="handles-save",
        about=f"one region, {HANDLES} calls of an autograd Function (sin of 4 x 16 floats), handles with SAVE",
        leaves={"x": x},
        output_grad=torch.randn_like(x),
        forwards=chains,
        ideal_retained_bytes=HANDLES * x.nbytes,
        steps=1,
    )


def handles_alternating(ops: int) -> Workload:
    """The same with SAVE and RECOMPUTE in turn, so that each kept output is an input of a recomputed op.

    torch_remat 0.2.2 has no handles; there each Function stands in a ``region()``, which means the same.
    """
    x, chains = _sine_functions(
        ops=ops, with_handle=tuple(versions(OURS)), in_region=(REMAT_0_2,), without=(NONE, FLOOR, TORCH)
    )
    return Workload(
        name=f"handles-alternating-{ops}",
        about=f"one region, {ops} calls of an autograd Function (sin of 4 x 16 floats), SAVE and RECOMPUTE in turn",
        leaves={"x": x},
        output_grad=torch.randn_like(x),
        forwards=chains,
        ideal_retained_bytes=ops * x.nbytes,  # what each SAVE op saves, but the region's input; its outputs; the output
        steps=max(1, 64 // ops),
        ops=ops,
    )


WORKLOADS: dict[str, dict[str, Callable[[], Workload]]] = {
    "handles": {"handles": handles_recompute},
    "handles-save": {"handles-save": handles_save},
    "handles-alternating": {f"handles-alternating-{ops}": partial(handles_alternating, ops) for ops in ALTERNATING_OPS},
}
"""By the name on the command line: workloads that are measured in the same rounds, by their own names."""


class Sine(torch.autograd.Function):
    """The sine as a Function of a user's own; the one with a handle has to match its arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class SineWithHandle(torch.autograd.Function):
    """``Sine`` in the form that torch_remat asks for; ``remat`` is the release that the handle comes from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, remat: Any, name: str, policy: Any) -> Tensor:
        handle = remat.get_handle(ctx, name, policy)
        if (skipped := handle.maybe_load_saved()) is not None:
            return skipped
        x = handle.save_or_load_inputs(x)
        handle.save_for_backward({"x": x})
        return handle.record_outputs(x.sin())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return grad * x.cos(), None, None, None


def _sine_functions(
    policies: tuple[str, ...] = ("SAVE", "RECOMPUTE"),
    ops: int = HANDLES,
    *,
    with_handle: tuple[str, ...],
    in_region: tuple[str, ...] = (),
    without: tuple[str, ...],
) -> tuple[Tensor, dict[str, Callable[[], Tensor]]]:
    """Return the input and the forward of each contender named: a chain of Functions in one region.

    Args:
        policies: The ops' policies, in turn.
        ops: How many Functions.
        with_handle: Contenders that run the Function with a handle.
        in_region: Contenders that run the plain Function in a ``region()`` of the package.
        without: Contenders that run the plain Function.
    """
    torch.manual_seed(0)
    x = torch.randn(4, 16).requires_grad_()
    named = [(f"sine_{index}", policies[index % len(policies)]) for index in range(ops)]

    def plain(x: Tensor) -> Tensor:
        for _ in named:
            x = Sine.apply(x)
        return x

    def aware(package: Any) -> Callable[[Tensor], Tensor]:
        chosen = [(name, package.CheckpointPolicy[policy]) for name, policy in named]

        def chain(x: Tensor) -> Tensor:
            for name, policy in chosen:
                x = SineWithHandle.apply(x, package, name, policy)
            return x

        return chain

    def annotated(package: Any) -> Callable[[Tensor], Tensor]:
        chosen = [(name, policy == "RECOMPUTE") for name, policy in named]

        def chain(x: Tensor) -> Tensor:
            for name, recompute in chosen:
                x = package.region(Sine.apply, name, recompute=recompute)(x)
            return x

        return chain

    functions = {
        **dict.fromkeys(without, plain),
        **{name: aware(package_of(name)) for name in with_handle},
        **{name: annotated(package_of(name)) for name in in_region},
    }
    return x, {
        name: partial(_run, wrap, functions[name], x) for name, wrap in full_recompute().items() if name in functions
    }


def _run(wrap: Wrap, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return wrap(function)(x)
