"""`op`: one named call of anything inside a region; `recompute_needs_tensor`: values that replay reads unseen."""

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

_FORM = (
    "The form is remat.op(function, 'name', policy=...)(*args, **kwargs), or, before a def, "
    "@remat.op(name='name', policy=...)."
)


@overload
def op(
    function: Callable[P, R], name: str, *, policy: CheckpointPolicy = _SAVE, opaque: bool = False
) -> Callable[P, R]: ...


@overload
def op(
    function: None = None, name: str | None = None, *, policy: CheckpointPolicy = _SAVE, opaque: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def op(function: Any = None, name: str | None = None, *, policy: CheckpointPolicy = _SAVE, opaque: bool = False) -> Any:
    """Give one call inside a checkpointed region a name and a policy: a call of anything.

    With SAVE, the default, replay skips the call. The graph keeps what autograd saves inside, except arguments and
    variables that replay recomputes, and parameters. Of the result, the tensors that recomputed code reads are kept;
    the others are placeholders in replay. What the call modified outside the region is modified once, and its other
    effects (prints, numbers, lists from outside) happen once. `native_save_region` is the careful alternative: its
    Python runs again in replay, and only its ops do not.

    Replay runs the whole call, with a `RematWarning` and right gradients, if a result of it was modified in place after
    it, if it modified an argument or a variable that the region had made, or if replay reads a placeholder of it.
    Every other way in which its tensors reach the region is a `UsageError` in forward.

    Args:
        function: What is called: a module, a function, a wrapper around kernels, the ``apply`` of a custom autograd
            Function (if its forward has `auto_forward`, reports use the names of its saved tensors). Omitted,
            ``op(name=...)`` is a decorator for a function or method.
        name: The call's name, unique within the region; `name_scope` prefixes it.
        policy: SAVE (the default); OFFLOAD: as SAVE, and what is kept leaves the device; RECOMPUTE: replay runs the
            call, and those of its arguments that come from saved calls are kept for that.
        opaque: Accepted, and changes nothing: no call is watched.

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
        PlaceholderError: In backward, if replay reads a result that was not kept, and cannot start over, since a call
            modified something outside the region or random numbers cannot be drawn again.

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
    if type(name) is not str or not name:
        scoped(name)
    if not isinstance(policy, CheckpointPolicy):
        require_policy(policy, name)
    if function is None:
        return lambda decorated: wraps(decorated)(op(decorated, name, policy=policy, opaque=opaque))

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return compiled_part(policy, function, args, kwargs)
        mode = current_mode()
        if mode is None:
            return function(*args, **kwargs)
        return mode.run_native(scope.get() + name, policy, function, args, kwargs, False)

    return call


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
