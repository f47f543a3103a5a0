"""The forward of a custom autograd Function as a named op: `get_handle` by hand, `auto_forward` around a plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
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


def auto_forward(*tensor_names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the forward of a custom autograd Function remat-aware; the body stays as it is.

    Called with a name and a policy as its last two arguments, which the forward takes as ``op_name`` and
    ``remat_policy``, the Function is an op with a handle. Called without them, it is the plain Function, and
    ``remat.op(Fn.apply, "name")(...)`` names and saves the call; reports and errors use the names of its tensors.

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
                f"{name!r} is not a name for a saved tensor",
                remedy='The form is @remat.auto_forward("x", "y"), with non-empty strings without dots.',
            )
    if len(set(tensor_names)) != len(tensor_names):
        raise UsageError(f"auto_forward{tensor_names} gives two saved tensors the same name", remedy="Rename one.")

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(forward, staticmethod):
            return staticmethod(decorate(forward.__func__))

        named = _takes_policy(forward)

        @wraps(forward)
        def aware(ctx: Any, *args: Any) -> Any:
            if is_compiling():
                return forward(ctx, *args)
            if named or (len(args) > 1 and isinstance(args[-1], CheckpointPolicy)):
                return _run(forward, tensor_names, ctx, args)
            return _run_plain(forward, tensor_names, ctx, args)

        return aware

    return decorate


def _takes_policy(forward: Callable[..., Any]) -> bool:
    """Whether a forward declares two last parameters by the names of the handle's form."""
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_varnames[: code.co_argcount][-2:] == ("op_name", "remat_policy")


def _run(forward: Callable[..., Any], tensor_names: tuple[str, ...], ctx: Any, args: tuple[Any, ...]) -> Any:
    """Run a forward that got name and policy as its last arguments, as an op with a handle."""
    if len(args) < 2:
        raise UsageError(
            "a forward that takes op_name and remat_policy got neither",
            remedy="Pass them last, Fn.apply(x, 'name', policy); or leave both out of the forward's parameters and "
            "call remat.op(Fn.apply, 'name')(x).",
        )
    *inputs, op_name, policy = args
    handle = get_handle(ctx, op_name, policy)
    skipped = handle.load(tuple(inputs))
    if skipped is not None:
        return skipped
    if inputs:
        loaded = handle.save_or_load_inputs(*inputs)
        inputs = [loaded] if len(inputs) == 1 else loaded
    out = forward(_NamingContext(ctx, handle, tensor_names), *inputs, op_name, policy)
    return handle.record_outputs(*out, as_tuple=True) if isinstance(out, tuple) else handle.record_outputs(out)


def _run_plain(forward: Callable[..., Any], tensor_names: tuple[str, ...], ctx: Any, args: tuple[Any, ...]) -> Any:
    """Run a forward that got neither; inside a call of `op` its saved tensors have their names."""
    out = forward(ctx, *args)
    mode = current_mode()
    if mode is not None:
        saved = getattr(ctx, "to_save", None) or ()
        if len(saved) != len(tensor_names):
            raise UsageError(_wrong_number(saved, tensor_names), region=mode.region.name)
        mode.name_saved(tuple(zip(tensor_names, saved, strict=True)))
    return out


def _wrong_number(saved: Sequence[Any], names: Sequence[str]) -> str:
    return (
        f"the body saves {len(saved)} tensors and auto_forward names {len(names)}: each argument of "
        "ctx.save_for_backward needs one name"
    )


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
            raise self._handle.misused(_wrong_number(tensors, self._names))
        self._handle.save_for_backward(dict(zip(self._names, tensors, strict=True)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ctx, name)
