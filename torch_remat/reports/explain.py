"""`explain`: why each named tensor is kept or not, and what each op's other policies would cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_remat._compat import as_written, eager_only
from torch_remat._form import with_form
from torch_remat._storages import tensors_in
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.observe import observed_by
from torch_remat.errors import UsageError
from torch_remat.reports.explanation import Explanation
from torch_remat.reports.graph import is_released, nodes_below
from torch_remat.reports.notes import Notes

_FORM = "remat.explain(function)(*args, **kwargs)"


@eager_only
@with_form(_FORM)
def explain(function: Callable[..., Any], *, alternatives: bool = True) -> Callable[..., Explanation]:
    """Run a function forward and backward once, and say why each named tensor in its regions is kept or not.

    Backward starts from all tensors that the function returns, also in containers and dataclasses, and that need a
    gradient, with ones; gradients are dropped, not accumulated. A function that calls backward itself, such as a
    training step, may return anything.

    For each op it also says what the other policies would cost: the log of this one run tells which storages each op
    reads, makes and saves, how large they are, and how many FLOPs it has. So these are computed, not measured. Not in
    them is random state. OFFLOAD is priced as if all tensors left that are as large as the offloader's ``min_bytes``.
    Ops of regions inside other regions have no prices.

    Args:
        function: What contains the regions, such as a model; called with the arguments of the second call.
        alternatives: Whether to say what other policies would cost.

    Returns:
        A callable that takes the function's arguments and returns the explanation: plain data, and text with ``print``.

    Raises:
        UsageError: It was called inside a region, or ``function`` cannot be called, or its arguments stand beside it.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @remat.auto_forward("x")
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad * ctx.saved_tensors[0]
        >>> def block(x):
        ...     return remat.op(Square.apply, "square")(x.sin())
        >>> x = torch.randn(4, requires_grad=True)
        >>> explanation = remat.explain(remat.checkpoint(region_name="block")(block))(x)
        >>> [(tensor.label, tensor.state) for tensor in explanation.regions[0].ops[0].tensors]
        [('x', 'elided'), ('out', 'not kept')]
    """
    if not callable(function):
        raise UsageError(
            f"explain() cannot run a {type(function).__name__}",
            remedy=f"The form is {_FORM}.",
        )

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        if current_mode() is not None:
            raise UsageError("explain() was called inside a region", remedy="Call it around the whole model.")
        notes = Notes(alternatives)
        with as_written(), torch.enable_grad(), observed_by(notes), notes:
            no_backward = _backward(function(*args, **kwargs))
        return Explanation(tuple(region.told for region in notes.regions.values()), no_backward)

    return explained


def _backward(output: Any) -> str | None:
    """Run backward from what needs a gradient, without accumulating any; return why none ran, if so."""
    found = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    released = {node for node in nodes_below(found) if is_released(node)}
    roots = [root for root in found if not released or released.isdisjoint(nodes_below([root]))]
    variables = [variable for node in nodes_below(roots) if (variable := getattr(node, "variable", None)) is not None]
    if variables:
        torch.autograd.grad(roots, variables, [torch.ones_like(root) for root in roots], allow_unused=True)
        return None
    if found:
        return "the function has run that of what it returned itself"
    return (
        f"it found no tensor that needs a gradient in what the function returned ({type(output).__name__}). "
        "Return the loss, in a container or dataclass if need be, or run backward in the function."
    )
