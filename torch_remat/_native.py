"""`native_save_region`: native PyTorch ops that replay does not run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import is_compiling

from torch_remat._compiled import compiled_part
from torch_remat._names import scoped
from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.naming import scope
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy

R = TypeVar("R")

_FORM = "The form is native_save_region('name', function, *args, **kwargs)."


def native_save_region(op_name: str, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Run a function at once as one named call, whose Python runs again in replay and whose ops do not.

    Replay answers each op with a placeholder, a tensor without data, and calls such as ``.item()`` with what they
    returned; when the function returns, the kept results take their places. What the function modified outside the
    region is not modified again. Kept from forward are the tensors made inside that backward needs, and of the
    returned ones those that recomputed code reads. Tensors that replay will have, and parameters, are not kept.

    Replay runs all of it, with a `RematWarning` and right gradients, if a result of it was modified in place after it,
    if it modified a tensor that the region had made, or if replay reads a placeholder of it.

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
        PlaceholderError: In backward, if replay reads a result that was not kept, and cannot start over.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> weight = torch.nn.Parameter(torch.randn(8, 8))
        >>> def block(x):
        ...     return torch.sin(remat.native_save_region("matmul", torch.mm, x, weight))
        >>> y = remat.checkpoint()(block)(torch.randn(4, 8, requires_grad=True))
        >>> y.sum().backward()
    """
    compiling = is_compiling()
    usual = type(op_name) is str and op_name and not compiling
    name = scope.get() + op_name if usual else scoped(op_name)
    if not compiling and not callable(function):
        raise UsageError(f"a native region cannot run a {type(function).__name__}", op=name, remedy=_FORM)
    result: R
    if compiling:
        result = compiled_part(CheckpointPolicy.SAVE, function, args, kwargs)
    elif (mode := current_mode()) is None:
        result = function(*args, **kwargs)
    else:
        result = mode.run_native(name, CheckpointPolicy.SAVE, function, args, kwargs)
    return result
