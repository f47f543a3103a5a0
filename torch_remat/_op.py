"""Named calls: `op` of anything, `native_save_region` of native ops; `recompute_needs_tensor`: values read unseen."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.compiler import is_compiling

from torch_remat._compiled import compiled_part
from torch_remat._names import scoped
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.naming import scope
from torch_remat.dispatch.region.forward import Recording
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy, require_policy

_SAVE = CheckpointPolicy.SAVE
P = ParamSpec("P")
R = TypeVar("R")

_NATIVE_FORM = "The form is native_save_region('name', function, *args, **kwargs)."
_FORM = (
    "The form is remat.op(function, 'name', policy=...)(*args, **kwargs), or, before a def, "
    "@remat.op(name='name', policy=...)."
)


@overload
def op(function: Callable[P, R], name: str, *, policy: CheckpointPolicy = _SAVE) -> Callable[P, R]: ...


@overload
def op(
    function: None = None, name: str | None = None, *, policy: CheckpointPolicy = _SAVE
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def op(function: Any = None, name: str | None = None, *, policy: CheckpointPolicy = _SAVE) -> Any:
    """Give one call inside a checkpointed region a name and a policy: a call of anything.

    With SAVE, the default, replay skips the call. The graph keeps what autograd saves inside, except arguments and
    variables that replay recomputes, and parameters. The result is kept too, if replay goes on after the call. What the
    call modified outside the region is modified once, and its other effects (prints, numbers, lists created outside the
    region) happen once. `native_save_region` is the careful alternative: its Python runs again in replay, and only its
    ops do not.

    Replay runs the whole call, with a `RematWarning` and right gradients, if a result of it was modified in place after
    it, or if it modified an argument or a variable that the region had made. Every other way in which its tensors reach
    the region is a `UsageError` in forward.

    Args:
        function: What is called: a module, a function, a wrapper around kernels, the ``apply`` of a custom autograd
            Function (if its forward has `auto_forward`, reports use the names of its saved tensors). Omitted,
            ``op(name=...)`` is a decorator for a function or method.
        name: The call's name, unique within the region; `name_scope` prefixes it.
        policy: SAVE (the default); OFFLOAD: as SAVE, and what is kept leaves the device; RECOMPUTE: replay runs the
            call, and those of its arguments that come from saved calls are kept for that.

    Returns:
        A function that takes what ``function`` takes and returns what it returns. Outside of regions, and inside of a
        saved call, it is the plain call, and claims no name.

    Raises:
        UsageError: At once, if the function is not callable, the name is no string or empty, or the policy is no
            `CheckpointPolicy`. From the call, if the region has another op of this name; if a variable, container,
            object or iterator of the region holds other tensors after it; if the result is no tree of tensors and plain
            values; or if a gradient is taken through it inside the region. At the end of forward, if the region goes on
            with a tensor that it did not return, or if it must run again and modified something outside that replay
            cannot put back.
        MismatchError: In backward, if replay called another function here, or on tensors of other shapes or strides.
        MutationError: In backward, if a kept tensor was modified in place.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> def block(x):
        ...     y, _ = remat.op(attention, "attention")(x, x, x, need_weights=False)
        ...     return torch.sin(x + y)
        >>> y = remat.checkpoint()(block)(torch.randn(2, 4, 8, requires_grad=True))
        >>> y.sum().backward()
    """
    if function is not None and not is_compiling() and not callable(function):
        raise UsageError(
            f"remat.op got a {type(function).__name__} in the place of the function, which cannot be called",
            op=name if isinstance(name, str) else None,
            remedy=_FORM,
        )
    if name is None:
        raise UsageError("remat.op() got no name", remedy=f"remat.op(function, 'attention')(x) has one. {_FORM}")
    scoped(name)
    require_policy(policy, name)
    if function is None:
        return lambda decorated: wraps(decorated)(op(decorated, name, policy=policy))

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return compiled_part(policy, function, args, kwargs)
        mode = current_mode()
        if mode is None:
            return function(*args, **kwargs)
        return mode.run_native(scope.get() + name, policy, function, args, kwargs, False)

    return call


def native_save_region(op_name: str, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Run a function at once as one named call, whose Python runs again in replay and whose ops do not.

    Replay answers each op with a placeholder, a tensor without data, and calls such as ``.item()`` with what they
    returned; when the function returns, the kept results take their places. What the function modified outside the
    region is not modified again. Kept from forward are the tensors made inside that backward needs, and the result if
    replay goes on after the call. Tensors that replay will have, and parameters, are not kept.

    Replay runs all of it, with a `RematWarning` and right gradients, if a result of it was modified in place after it,
    or if it modified a tensor that the region had made. Replay starts over, and runs all native regions, if something
    other than an op reads the data of a placeholder, as NumPy does.

    Args:
        op_name: The op's name, unique within the region; `name_scope` prefixes it.
        function: What runs; it may take tensors from where it is defined.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What the function returns. In replay a tensor in an object that is no pytree is a placeholder.

    Raises:
        UsageError: The name is no string, empty or taken, or the function is not callable. At the end of forward, if
            it must run again and modified something outside the region that replay cannot put back.
        MismatchError: In backward, if the function ran other kinds of ops in replay than in forward.
        MutationError: In backward, if a kept tensor was modified in place.
        PlaceholderError: In backward, if something reads the data of a placeholder and replay cannot start over, since
            a call modified something outside the region, or random numbers cannot be drawn again.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> weight = torch.nn.Parameter(torch.randn(8, 8))
        >>> def block(x):
        ...     return torch.sin(remat.native_save_region("matmul", torch.mm, x, weight))
        >>> y = remat.checkpoint()(block)(torch.randn(4, 8, requires_grad=True))
        >>> y.sum().backward()
    """
    name = scoped(op_name)
    compiling = is_compiling()
    if not compiling and not callable(function):
        raise UsageError(f"a native region cannot run a {type(function).__name__}", op=name, remedy=_NATIVE_FORM)
    result: R
    if compiling:
        result = compiled_part(_SAVE, function, args, kwargs)
    elif (mode := current_mode()) is None:
        result = function(*args, **kwargs)
    else:
        result = mode.run_native(name, _SAVE, function, args, kwargs)
    return result


def recompute_needs_tensor(*tensors: torch.Tensor) -> None:
    """Say that replay reads these tensors, where forward cannot see it: outputs of handles, results under a policy.

    The output of an op with a handle is kept only if another handle, a call or an inner region takes it as an argument.
    Under a policy, a result is kept only if an op reads it. For other readers (a native op after a handle, ``numpy()``
    under a policy) this keeps it. What calls and native regions return is kept without this.

    Args:
        *tensors: Results, or views of them. For others, and outside of regions, this does nothing.

    Raises:
        UsageError: One of them is no tensor.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> def block(x):
        ...     y = x.sin()
        ...     remat.recompute_needs_tensor(y)
        ...     return x * float(y.detach().numpy().max())
        >>> policy = [torch.ops.aten.sin.default]
        >>> remat.checkpoint(policy=policy)(block)(torch.ones(3, requires_grad=True)).sum().backward()
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"recompute_needs_tensor() takes tensors, not a {type(tensor).__name__}",
                remedy="Pass each tensor as an argument of its own.",
            )
    mode = None if is_compiling() else current_mode()
    if isinstance(mode, Recording) and mode.ops is not None and not mode.ops.skips():
        mode.ops.note_readers(tensors)
