"""`get_handle`: a small hook into the runtime for the forward of a custom autograd Function."""

from __future__ import annotations

from typing import Any

from torch.compiler import is_compiling

from torch_remat._compat import is_transformed
from torch_remat._names import scoped
from torch_remat.dispatch.call.handle import RematHandle
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.naming import scope
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy, require_policy


def get_handle(ctx: Any, op_name: str, remat_policy: CheckpointPolicy) -> RematHandle:
    """Begin a named op inside the forward of a custom autograd Function.

    In replay the outputs of a SAVE op are placeholders, and a recomputed native op that reads one is a
    `PlaceholderError`. Calling the Function by `remat.op` instead keeps what recomputed code reads.

    Args:
        ctx: The Function's context.
        op_name: The op's name, unique within the region; `name_scope` prefixes it.
        remat_policy: Whether replay skips the op (SAVE, OFFLOAD) or runs it again (RECOMPUTE).

    Returns:
        The handle, whose methods the forward calls.

    Raises:
        UsageError: The name is no string, empty or taken; the policy is no `CheckpointPolicy`; ``ctx`` is no context.
            From `record_outputs`, if a SAVE op marked an input as dirty or modified one that the region had made.
        MismatchError: In replay, if forward had another op or policy here.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, op_name, remat_policy):
        ...         handle = remat.get_handle(ctx, op_name, remat_policy)
        ...         if (ret := handle.maybe_load_saved()) is not None:
        ...             return ret
        ...         x = handle.save_or_load_inputs(x)
        ...         handle.save_for_backward({"x": x})
        ...         return handle.record_outputs(x * x)
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * grad, None, None
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = remat.checkpoint()(lambda x: Square.apply(x, "square", remat.CheckpointPolicy.SAVE))(x)
        >>> y.sum().backward()
    """
    mode = None if is_compiling() else current_mode()
    name = scope.get() + op_name if mode is not None and type(op_name) is str and op_name else scoped(op_name)
    if type(remat_policy) is not CheckpointPolicy:
        require_policy(remat_policy, name, None if mode is None else mode.region.name)
    if not hasattr(ctx, "save_for_backward"):
        raise UsageError(
            f"get_handle needs the context of an autograd Function, not a {type(ctx).__name__}",
            region=None if mode is None else mode.region.name,
            op=name,
            remedy="Call it first thing in `forward(ctx, ...)`, with that ctx.",
        )
    ops = None if mode is None else mode.ops or mode.ops_now()
    if mode is None or ops is None or is_transformed():
        return RematHandle(ctx, name)
    handle: RematHandle = ops.begin(name, remat_policy, ctx) or RematHandle(ctx, name)
    if mode.observed is not None:
        mode.observed.watch(handle, name, ctx)
    return handle
