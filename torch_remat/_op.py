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
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy

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

    With SAVE, the default, replay does not make the call. The graph keeps what autograd saves inside, but for
    arguments, variables that the function closes over, and parameters, which replay has anyway. Of the result, the
    tensors that recomputed code reads are kept; the others are placeholders. What the call changed in tensors that
    outlive the region is changed once, and its other effects (prints, attributes, appended lists) happen once.
    `native_save_region` is the careful alternative: its Python runs again in replay, and only its ops do not.

    A call that reaches its region otherwise than by its result runs again in replay, as `native_save_region` does, and
    a warning says why: if the region goes on with a tensor that was not returned, if a variable or a container made in
    the region was changed, if a result that replay needs was modified in place, or if the result holds other objects
    than containers, tensors and plain values. A gradient that is taken through a call before the region's forward ends
    is a `UsageError`.

    Args:
        function: What is called: a module, a function, a wrapper around kernels, the ``apply`` of a custom autograd
            Function (if its forward has `auto_forward`, reports use the names of its saved tensors). Left out,
            ``op(name=...)`` is a decorator for a function or method.
        name: The call's name, unique within the region; `name_scope` prefixes it.
        policy: SAVE (the default); OFFLOAD: as SAVE, and what is kept leaves the device; RECOMPUTE: replay makes the
            call, and those of its arguments that come from saved calls are kept for that.
        opaque: Promises that the call changes nothing outside of it in place. Its ops are not watched then, in either
            phase, which is faster for functions that run many small ops. In a region with a policy, which watches all
            ops in forward, it makes no difference.

    Returns:
        A function that takes what ``function`` takes and returns what it returns. Outside of regions, and inside of a
        saved call, it is the plain call, and claims no name.

    Raises:
        UsageError: At once, if the function is not callable, the name is no string or empty, or the policy is no
            `CheckpointPolicy`; from the call, if the region has another op of this name, or an opaque call changed an
            argument in place, where no policy watches it.
        MismatchError: In backward, if replay called another function here, or on tensors of other shapes or strides.
        MutationError: In backward, if a kept tensor was changed in place.
        PlaceholderError: In backward, if replay reads a result that was not kept, and the call cannot run again.

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
    if type(name) is not str or not name:
        scoped(name)
    assert name is not None
    if not isinstance(policy, CheckpointPolicy):
        raise UsageError(
            f"{policy!r} is no policy",
            op=name,
            remedy="Policies of calls are remat.CheckpointPolicy.SAVE, OFFLOAD and RECOMPUTE.",
        )
    if function is None:
        return lambda decorated: wraps(decorated)(op(decorated, name, policy=policy, opaque=opaque))

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return compiled_part(policy, function, args, kwargs)
        mode = current_mode()
        if mode is None:
            return function(*args, **kwargs)
        return mode.run_native(scope.get() + name, policy, function, args, kwargs, opaque)

    return call


def recompute_needs_tensor(*tensors: torch.Tensor) -> None:
    """Say that replay reads these tensors, where forward cannot see it; those that a saved call made are kept.

    What reads a saved result by an op that autograd records, or as an argument of an op with a handle, an inner region
    or another call, is seen without this. Data that is taken past all ops (``numpy()``, ``tolist()``), and ops without
    a history, are not: without this, replay starts over once and warns.

    Args:
        *tensors: Results of saved calls, native regions or ops with handles, or views of them. For others, and outside
            of regions, this does nothing.

    Raises:
        UsageError: One of them is no tensor.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> def block(x):
        ...     y = remat.op(torch.sin, "sin")(x)
        ...     remat.recompute_needs_tensor(y)
        ...     return y * float(y.detach().numpy().max())
        >>> remat.checkpoint()(block)(torch.ones(3, requires_grad=True)).sum().backward()
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"recompute_needs_tensor() takes tensors, not a {type(tensor).__name__}",
                remedy="Pass each tensor as an argument of its own.",
            )
    mode = None if is_compiling() else current_mode()
    if mode is not None and not mode.replaying and mode.ops is not None and not mode.ops.skips():
        mode.ops.note_readers(tensors)
