"""What a region keeps that runs in a native region: its own, and not what the region around it keeps.

In: a slot or a resident of such a region. Kept: the tensor. Out: the same, unless it was changed in place.

In the replay around it the ops of such a region have no values, so that it could not keep the same tensors again. Only
its inputs go through the hooks of the region around it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from torch_remat._compat import SavedTensorHooks
from torch_remat.dispatch.placeholder import Packed, Placeholder
from torch_remat.errors import MutationError


class Own(NamedTuple):
    """A kept tensor, and its version counter when it was kept."""

    tensor: torch.Tensor
    version: int


def own_hooks(region: str) -> SavedTensorHooks:
    """Return hooks that keep a tensor as it is; ``region`` is the name of the region that does."""
    return _pack, partial(_unpack, region)


def _pack(tensor: torch.Tensor) -> Own | Packed:
    return Packed.of(tensor) if isinstance(tensor, Placeholder) else Own(tensor.detach(), tensor._version)


def _unpack(region: str, kept: Own | Packed) -> torch.Tensor:
    if type(kept) is Packed:
        return kept()
    tensor, version = kept  # type: ignore[misc]
    if tensor._version != version:
        raise MutationError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after it was kept",
            region=region,
            remedy="Use the out-of-place form of the op that changes it, or change it after backward.",
        )
    return tensor
