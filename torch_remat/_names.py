"""Names that users give: `name_scope`, so that a repeated sub-block keeps its ops' names unique, `checkpoint_name`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.compiler import is_compiling

from torch_remat.dispatch.mode import current_mode
from torch_remat.dispatch.naming import scope, scope_restored
from torch_remat.errors import UsageError, shown


@contextmanager
def name_scope(name: str) -> Iterator[None]:
    """Prefix the names of all remat-aware ops inside with ``name/``; scopes nest.

    Args:
        name: A non-empty string without ``/``, such as ``"block.0"``.

    Yields:
        None.

    Raises:
        UsageError: The name is empty, no string, or contains ``/``.

    Example:
        >>> import torch_remat as remat
        >>> with remat.name_scope("block.0"):
        ...     pass  # an op named "attention" is "block.0/attention" here
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise UsageError(
            f"name_scope({shown(name)}) is not possible",
            remedy="The name of a scope is a non-empty string without '/'; nest scopes instead.",
        )
    if is_compiling():  # where ops have no names
        yield
        return
    with scope_restored(f"{scope.get()}{name}/"):
        yield


def scoped(name: object) -> str:
    """Return an op's name with the scopes around it.

    Raises:
        UsageError: The name is empty or no string.
    """
    if not isinstance(name, str) or not name:
        mode = None if is_compiling() else current_mode()
        raise UsageError(
            f"{shown(name)} is not a name for an op",
            region=None if mode is None else mode.region.name,
            op=shown(name),
            remedy="An op's name is a non-empty string, unique within its region.",
        )
    return name if is_compiling() else scope.get() + name


def checkpoint_name(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Give a tensor inside a region a name of its own, by which policies can save it.

    Outside of regions, and in regions without a policy, it does nothing.

    Args:
        tensor: The tensor. The name of a view is one of what it is a view of.
        name: A non-empty string; several tensors may have the same.

    Returns:
        The tensor itself.

    Raises:
        UsageError: The name is no string or empty, or the value is no tensor.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> def block(x):
        ...     hidden = remat.checkpoint_name(torch.exp(x), "hidden")
        ...     return torch.sin(hidden)
        >>> x = torch.randn(3, requires_grad=True)
        >>> y = remat.checkpoint(policy=remat.save_names("hidden"))(block)(x)
    """
    if not isinstance(name, str) or not name or not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"checkpoint_name({type(tensor).__name__}, {shown(name)}) is not possible",
            remedy="The form is tensor = checkpoint_name(tensor, 'name'), with a non-empty string.",
        )
    mode = None if is_compiling() else current_mode()
    if mode is not None:
        mode.give_name(tensor, name)
    return tensor
