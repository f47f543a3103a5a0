"""`save_names`, `offload_names` and `checkpoint_name`: what a region keeps, chosen by name."""

from __future__ import annotations

import torch

from torch_remat.dispatch.mode import current_mode
from torch_remat.errors import PolicyError, UsageError, shown
from torch_remat.policies.decision import Decision
from torch_remat.policies.names import NamePolicy
from torch_remat.policies.policy import OpPolicy


def save_names(*patterns: str) -> NamePolicy:
    """Return a policy that saves results by name.

    Each result of an op in a region has an automatic name, the same in each run: the path of its module from the
    region's root, the op, how many such ops ran in that module before, and which of the op's results it is, as in
    ``attention.mm_2_0``. `checkpoint_name` gives a tensor another; `list_names` shows all.

    Args:
        *patterns: Shell patterns (``*``, ``?``, ``[...]``) that are compared with the whole name, case included.

    Returns:
        A policy for ``checkpoint(policy=...)``; ``|`` combines it with others. ``policy & ~save_names(...)`` leaves the
        names out of any policy: they are recomputed, whatever the parts of it say. A pattern that matches nothing is
        an error at the end of the region's forward.

    Raises:
        PolicyError: There is no pattern, or one is no string or empty.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> y = remat.checkpoint(policy=remat.save_names("0.addmm_*"))(block)(x)
        >>> policy = remat.policies.save_matmuls & ~remat.save_names("2.*")
        >>> y = remat.checkpoint(policy=policy)(block)(x)
    """
    return NamePolicy(_checked("save_names", patterns), Decision.MUST_SAVE)


def offload_names(*patterns: str) -> OpPolicy:
    """Return a policy that offloads results by name: `save_names`, but what is kept leaves the device.

    Where a policy saves some names and offloads others, ``save_names(...) | offload_names(...)``, saving is stronger.

    Args:
        *patterns: Shell patterns (``*``, ``?``, ``[...]``) that are compared with the whole name, case included.

    Returns:
        A policy for ``checkpoint(policy=...)``. A pattern that matches nothing is an error at the end of the region's
        forward. The offloader is that of ``checkpoint(offloader=...)`` or of `offload_to`.

    Raises:
        PolicyError: There is no pattern, or one is no string or empty.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> y = remat.checkpoint(policy=remat.offload_names("0.addmm_*"))(block)(x)
    """
    return NamePolicy(_checked("offload_names", patterns), Decision.MUST_OFFLOAD)


def _checked(function: str, patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise PolicyError(
            f"{function}({', '.join(map(shown, patterns))}) is not possible",
            remedy=f'The form is {function}("attention.*", "*.mm_2_0"), with at least one non-empty string.',
        )
    return patterns


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
    mode = None if torch.compiler.is_compiling() else current_mode()
    if mode is not None:
        mode.give_name(tensor, name)
    return tensor
