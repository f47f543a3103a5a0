"""Whether a tensor that replay saves is the one that forward saved at the same place.

In: a holder and replay's tensor for it, where a quick look found a difference. Kept: nothing. Out: an error, or None
where the difference is harmless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction

from torch_remat._compat import node_number, without_dispatch_modes
from torch_remat.dispatch.check.mismatch import (
    another_parameter,
    other_layout,
    other_metadata,
    other_producer,
    outside_changed,
)
from torch_remat.dispatch.holder import CHANGED, Holder, Layout
from torch_remat.dispatch.placeholder import Placeholder, refuse
from torch_remat.errors import RematError

if TYPE_CHECKING:
    from torch_remat.dispatch.region.region import Region


def what_differs(
    holder: Holder,
    tensor: torch.Tensor,
    owner: torch.Tensor,
    origin: torch.Tensor | None,
    first_number: int,
    loaded: bool,
) -> RematError | None:
    """Return the error about a difference between forward and replay, if there is one.

    Args:
        holder: What forward knows of the tensor. Where hooks around the region count versions anew, its version is set.
        tensor: What replay saves.
        owner: The tensor that it is a view of, or itself.
        origin: The parameter that it is, or is a cast of.
        first_number: The sequence number of the replay's first autograd node.
        loaded: Whether the owner was kept for replay, so that it has no history.
    """
    if isinstance(owner, Placeholder):
        refuse(owner.source, "saving it for backward")
    region = holder.region
    version, *metadata = holder.metadata
    if version == CHANGED:
        return None  # an error if backward reads it, as in plain autograd
    if _is_another(holder, owner, origin, first_number):
        return another_parameter(region, holder.name, holder.op, None, tensor)
    if region.options.determinism_check in _COMPARING:
        if metadata != [tensor.shape, tensor.dtype, tensor.device]:
            return other_metadata(region, holder, tensor)
        if not loaded and _is_by_another_op(holder, owner, first_number):
            return other_producer(region, holder, owner)
    if version != tensor._version:
        # Inputs that hooks around the region restored may count their versions anew, and so does what was kept for
        # replay where its changes are allowed.
        made_inside = not isinstance(holder.origin, ref) or holder.origin() is not owner
        if not (region.options.allow_cache_entry_mutation and made_inside) and (
            region.inputs is None or not region.inputs.packed
        ):
            return outside_changed(region, holder)
        holder.metadata = (tensor._version, *holder.metadata[1:])
    return None


def _is_another(holder: Holder, owner: torch.Tensor, origin: torch.Tensor | None, first_number: int) -> bool:
    """Whether a parameter, or another tensor from outside the region, is not the one that forward used."""
    if origin is not None or not isinstance(holder.origin, ref):
        return origin is not holder.origin
    before = holder.origin()
    if before is owner:
        return False
    node = owner.grad_fn
    if node is not None:
        # One that the replay itself made is a recomputation of it.
        return node_number(node) < first_number
    if before is None:
        return False
    # A leaf: from outside, or made in the region. If forward's is still there, the values tell.
    with without_dispatch_modes():
        return before.grad_fn is not None or not torch.equal(before, owner)


def _is_by_another_op(holder: Holder, owner: torch.Tensor, first_number: int) -> bool:
    """Whether a tensor was made by another op than in forward; only ops of torch itself are compared.

    Hooks of wrappers such as FSDP pass tensors through Functions of their own in one phase and not in the other.
    """
    node = owner.grad_fn
    if node is not None and node_number(node) < first_number:
        return False  # from outside: `_is_another` has judged it
    kinds = {holder.producer, type(node)}
    return len(kinds) > 1 and not any(issubclass(kind, BackwardCFunction) for kind in kinds)


def lies_otherwise(region: Region, position: int, now: Layout | None) -> RematError | None:
    """Return the error about a view that lies otherwise in what it is a view of than in forward, if it does.

    Where that itself lies otherwise, as inputs may that hooks around the region restored, nothing can be told.

    Args:
        region: The region.
        position: Which of the saved tensors it is.
        now: What `layout_of` says of replay's tensor.
    """
    before = region.tape.layouts.get(position, _AS_OWNER)
    if before is None or before == (now or _AS_OWNER) or region.options.determinism_check not in _COMPARING:
        return None
    if (before[2:] != now[2:]) if before and now else region.inputs is None or not region.inputs.as_given:
        return None
    return other_layout(region, f"saved tensor {position}", before[:2], (now or _AS_OWNER)[:2])


_AS_OWNER: Any = ()
_COMPARING = ("default", "bitwise")
