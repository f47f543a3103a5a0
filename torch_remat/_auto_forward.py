"""`auto_forward` and `op`: a RematHandle around an ordinary forward, and its name and policy from the call site."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch.compiler import is_compiling

from torch_remat._compiled import compiled_part
from torch_remat._handle import get_handle
from torch_remat._names import scoped
from torch_remat.dispatch.handle.op import RematHandle
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy

# The name and policy that `op` gives to the next forward, and a list that tells it whether one took them.
_given: ContextVar[tuple[str, CheckpointPolicy, list[bool]] | None] = ContextVar("torch_remat_op", default=None)


def auto_forward(*tensor_names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the forward of a custom autograd Function remat-aware; the body stays as it is.

    The decorated forward takes two more arguments than its inputs, the last ones: ``op_name`` and ``remat_policy``.
    Called through `op`, it takes its inputs only. Its ``ctx.save_for_backward(...)`` is intercepted.

    Args:
        *tensor_names: A name for each argument of ``ctx.save_for_backward``, in order.

    Returns:
        A decorator for ``forward(ctx, ...)``, below or above ``@staticmethod``.

    Raises:
        UsageError: At once, if a name is no string, empty, contains ``.`` or comes twice. From the call, if the body
            saves another number of tensors than there are names, and all that `get_handle` and the handle raise.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @remat.auto_forward("x")
        ...     def forward(ctx, x, op_name, remat_policy):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         (x,) = ctx.saved_tensors
        ...         return 2 * x * grad, None, None
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = remat.checkpoint()(lambda x: Square.apply(x, "square", remat.CheckpointPolicy.SAVE))(x)
    """
    for name in tensor_names:
        if not isinstance(name, str) or not name or "." in name:
            raise UsageError(
                f"{name!r} is no name for a saved tensor",
                remedy='The form is @remat.auto_forward("x", "y"), with non-empty strings without dots.',
            )
    if len(set(tensor_names)) != len(tensor_names):
        raise UsageError(f"auto_forward{tensor_names} names two saved tensors alike", remedy="Give each its own name.")

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(forward, staticmethod):
            return staticmethod(decorate(forward.__func__))

        @wraps(forward)
        def aware(ctx: Any, *args: Any) -> Any:
            if is_compiling():
                return forward(ctx, *args)
            given = _given.get()
            if given is None:
                if len(args) < 2:
                    raise UsageError(
                        "a forward with auto_forward got no op_name and remat_policy",
                        remedy="Pass them last, Fn.apply(x, 'name', policy), or call remat.op(Fn.apply, 'name')(x).",
                    )
                *inputs, op_name, policy = args
                rest: tuple[Any, ...] = (op_name, policy)
            else:
                _given.set(None)
                op_name, policy, taken = given
                taken.append(True)
                inputs, rest = list(args), ()
            return _run(forward, tensor_names, ctx, inputs, rest, op_name, policy)

        return aware

    return decorate


def op(
    function: Callable[..., Any], op_name: str, *, policy: CheckpointPolicy = CheckpointPolicy.SAVE
) -> Callable[..., Any]:
    """Give a name and a policy to one call of a Function whose forward has `auto_forward`.

    Args:
        function: The Function's ``apply``, or a callable that calls it once.
        op_name: The op's name, unique within the region.
        policy: Whether replay skips the op (SAVE, OFFLOAD) or runs it again (RECOMPUTE).

    Returns:
        A callable that takes the forward's own arguments.

    Raises:
        UsageError: The name is no string or empty; the policy is no `CheckpointPolicy`; or, from the call, no forward
            with `auto_forward` ran.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     @remat.auto_forward()
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad
        >>> y = remat.op(Double.apply, "double")(torch.ones(3))
    """
    scoped(op_name)
    if not isinstance(policy, CheckpointPolicy):
        raise UsageError(
            f"{policy!r} is no policy",
            op=op_name,
            remedy="Policies are remat.CheckpointPolicy.SAVE, OFFLOAD and RECOMPUTE.",
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return compiled_part(policy, function, args, kwargs)
        taken: list[bool] = []
        token = _given.set((op_name, policy, taken))
        try:
            result = function(*args, **kwargs)
        finally:
            _given.reset(token)
        if not taken:
            raise UsageError(
                "remat.op called a function that runs no forward with auto_forward",
                op=op_name,
                remedy="Decorate the Function's forward with @remat.auto_forward(...), and pass Fn.apply.",
            )
        return result

    return call


def _run(
    forward: Callable[..., Any],
    tensor_names: tuple[str, ...],
    ctx: Any,
    inputs: list[Any],
    rest: tuple[Any, ...],
    op_name: str,
    policy: CheckpointPolicy,
) -> Any:
    handle = get_handle(ctx, op_name, policy)
    skipped = handle.load(tuple(inputs))
    if skipped is not None:
        return skipped
    if inputs:
        loaded = handle.save_or_load_inputs(*inputs)
        inputs = [loaded] if len(inputs) == 1 else loaded
    out = forward(_NamingContext(ctx, handle, tensor_names), *inputs, *rest)
    return handle.record_outputs(*out, as_tuple=True) if isinstance(out, tuple) else handle.record_outputs(out)


_set = object.__setattr__


class _NamingContext:
    """A Function's context whose ``save_for_backward`` gives the tensors their names; all else passes through."""

    __slots__ = ("_ctx", "_handle", "_names")

    def __init__(self, ctx: Any, handle: RematHandle, names: tuple[str, ...]) -> None:
        # All else that is set here goes to the context.
        _set(self, "_ctx", ctx)
        _set(self, "_handle", handle)
        _set(self, "_names", names)

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        if len(tensors) != len(self._names):
            raise self._handle.misused(
                f"the body saves {len(tensors)} tensors and auto_forward names {len(self._names)}: each argument of "
                "ctx.save_for_backward needs one name"
            )
        self._handle.save_for_backward(dict(zip(self._names, tensors, strict=True)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ctx, name)
