"""Whether a tensor that replay saves is the one that forward saved at the same place, and the errors that say no.

In: a holder and replay's tensor for it, where a quick look found a difference; or what else replay did otherwise. Kept:
nothing. Out: an error, or None where the difference is harmless. With ``debug=True`` a `MismatchError` shows the ops of
both phases side by side.
"""

from __future__ import annotations

from types import NoneType
from typing import Any
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction

from torch_remat._compat import has_memory, without_dispatch_modes
from torch_remat.dispatch.call.entry import Call
from torch_remat.dispatch.holder import (
    CHANGED,
    UNKNOWN_LAYOUT,
    Holder,
    Layout,
    OpHolder,
    is_parameter,
    layout_of,
    metadata_of,
)
from torch_remat.dispatch.keys import parts_of
from torch_remat.dispatch.placeholder import Placeholder, refuse
from torch_remat.dispatch.reach import reach
from torch_remat.dispatch.region.region import SAME_OPS, Region
from torch_remat.errors import MismatchError, MutationError, RematError, at_user_line
from torch_remat.policies.decision import CheckpointPolicy

_COMPARING = ("default", "bitwise")
SAME_ORDER = (
    "The ops of a region must have the same names and policies in the same order in both phases: derive names from the "
    "code's structure, not from counters or other state."
)
REPLACED = (
    "Was a parameter replaced between forward and backward (torch.func.functional_call around the region, a reassigned "
    "module attribute)? Run backward while forward's parameter is in place, or pass the tensor to the region as an "
    "argument."
)


def described(tensor: torch.Tensor | Holder) -> str:
    """Return shape, dtype and device of a tensor, or of what forward saved, as messages show them."""
    _, shape, dtype, device = tensor.metadata if isinstance(tensor, Holder) else metadata_of(tensor)
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}] on {device}"


def another_op(
    region: Region,
    name: str,
    policy: CheckpointPolicy,
    expected: Call | None,
    is_known: bool,
) -> MismatchError:
    """Return the error about a named op that forward did not run here."""
    place = at_user_line()
    if expected is not None and expected.name == name:
        what = f"this op has policy {policy.name} in replay{place}, but had {expected.policy.name} in forward"
    elif expected is not None and is_known:
        what = f"replay runs this op{place}, but forward ran {expected.name!r}"
    else:
        what = f"replay runs this op{place}, but forward did not"
    return region.mismatch(what, SAME_ORDER, op=name)


def other_source(region: Region, holder: OpHolder, tensor: Any) -> MismatchError:
    """Return the error about a SAVE op's input of which the op saved a view in forward."""
    found = described(tensor) if isinstance(tensor, torch.Tensor) else "no tensor"
    found += f" in replay{at_user_line()}, from which that tensor cannot be taken"
    return region.differs_at(holder, f"forward saved {described(holder)} here, but the op gets {found}")


def another_parameter(
    region: Region, place: str, op: str | None, parameter: torch.Tensor | None, tensor: torch.Tensor
) -> MismatchError:
    """Return the error about a parameter, or another tensor created outside the region, that forward did not use."""
    owner = tensor if tensor._base is None else tensor._base
    used = "a tensor" if parameter is None else f"a {_named(region, parameter)}{described(parameter)}, or a view of it,"
    if owner.grad_fn is not None and parameter is not None:
        now, remedy = f"saved {described(tensor)} made by {_op_behind(type(owner.grad_fn))}", SAME_OPS
    elif is_parameter(owner):
        now, remedy = f"used another one, {_named(region, owner)}{described(tensor)}", REPLACED
    else:
        now, remedy = f"used another one, {described(tensor)}", REPLACED
    what = f"forward used {used} created outside the region here, but replay {now}"
    return region.mismatch(f"{what}{at_user_line()}", remedy, place, op)


def _named(region: Region, parameter: torch.Tensor) -> str:
    """Return what an error calls a parameter, with its name if a module that the function reaches has it."""
    kind = "parameter" if is_parameter(parameter) else "leaf"
    inputs = region.inputs
    if region.function is None or inputs is None:
        return f"{kind} "
    for module in reach(region.function, inputs.modules()).modules:
        for name, other in module.named_parameters():
            if other is parameter:
                return f"{kind} {name!r}, "
    return f"{kind} "


def saved_otherwise(region: Region, replayed: int, missing: Holder | None = None) -> MismatchError:
    """Return the error about a replay that saved fewer tensors than forward, or, run to its end, more."""
    what = f"replay saved {replayed} tensor{'s' * (replayed != 1)} where forward saved {len(region.tape.saved)}"
    if missing is None:
        return region.mismatch(what, SAME_OPS)
    return region.differs_at(missing, f"{what}; the first missing tensor is {described(missing)}")


def what_differs(
    region: Region,
    holder: Holder,
    tensor: torch.Tensor,
    owner: torch.Tensor,
    origin: torch.Tensor | None,
    loaded: bool,
    same_modes: bool,
) -> RematError | None:
    """Return the error about a difference between forward and replay, if there is one.

    Args:
        region: The region.
        holder: What forward knows of the tensor. Where hooks around the region count versions anew, its version is set.
        tensor: What replay saves.
        owner: The tensor that it is a view of, or itself.
        origin: The parameter that it is, or is a cast of.
        loaded: Whether the owner was kept for replay, so that it has no `grad_fn`.
        same_modes: Whether there are as many dispatch modes as in forward. If not, ops made of others, such as
            ``F.linear``, may modify a tensor in place in one phase and return a new one in the other.
    """
    if isinstance(owner, Placeholder) and owner.source.is_of(region):
        refuse(owner.source, "saving it for backward")
    version, *metadata = holder.metadata
    if version == CHANGED:
        return None  # an error if backward reads it, as in plain autograd
    if _is_another(holder, owner, origin):
        return another_parameter(region, holder.name, holder.op, None, tensor)
    if region.options.determinism_check in _COMPARING:
        if metadata != [tensor.shape, tensor.dtype, tensor.device]:
            what = f"forward saved {described(holder)} here, but replay saved {described(tensor)}{at_user_line()}"
            return region.differs_at(holder, what)
        if not loaded and _is_by_another_op(region, holder, owner):
            before, now = _op_behind(holder.producer), _op_behind(type(owner.grad_fn))
            what = f"forward saved {described(holder)} made by {before} here, but replay saved one made by {now}"
            return region.differs_at(holder, f"{what}{at_user_line()}")
    if version != tensor._version:
        # Inputs that hooks around the region restored may count their versions anew, and so does what was kept for
        # replay where its changes are allowed.
        made_inside = not isinstance(holder.origin, ref) or holder.origin() is not owner
        if not (
            (region.options.allow_cache_entry_mutation and made_inside)
            or (not same_modes and _is_new(holder, tensor))
            or (region.inputs is not None and region.inputs.packed and not _is_the_same(region, holder, owner))
        ):
            return modified_since(holder)
        holder.metadata = (tensor._version, *holder.metadata[1:])
    return None


def modified_since(holder: Holder) -> MutationError:
    """Return the error about a saved tensor that was modified in place before replay."""
    return MutationError(
        f"this {described(holder)}, which the region saves for backward and replay reads{at_user_line()}, was "
        "modified in place between forward and replay (or a different number of times in replay)",
        region=holder.region.name,
        op=holder.op,
        tensor=holder.name,
        remedy="Buffers and other tensors that the region reads must stay unmodified until backward: modify "
        "a clone, or pass a clone to the region as an argument.",
    )


def _is_the_same(region: Region, holder: Holder, owner: torch.Tensor) -> bool:
    """Whether a tensor that forward saved and did not make is the very one of replay, which counts its own versions."""
    return any(entry() is holder and known() is owner for entry, known, _ in region.tape.others)


def _is_new(holder: Holder, tensor: torch.Tensor) -> bool:
    """Whether it is plain to see that a saved tensor is one of the region's own: versions of others only grow."""
    return holder.origin is None and (holder.producer is not NoneType or tensor._version < holder.metadata[0])


def _is_another(holder: Holder, owner: torch.Tensor, origin: torch.Tensor | None) -> bool:
    """Whether a leaf, or another tensor created outside the region, is not the one that forward used.

    Which phase has made a tensor its autograd node cannot tell: nodes are numbered in each thread, and backward may run
    in another one. So what is older than the region must be the same object.
    """
    if origin is not None or not isinstance(holder.origin, ref):
        if isinstance(holder.origin, torch.Tensor) and origin is not None:
            return origin is not holder.origin and not is_same_leaf(holder.origin, origin)
        return origin is not holder.origin
    before = holder.origin()
    if before is owner:
        return False
    return before is None or not is_same_leaf(before, owner)


def is_same_leaf(before: torch.Tensor, now: torch.Tensor, may_change: bool = False) -> bool:
    """Whether another leaf of replay stands for one of forward: it was made in the region with the same values.

    Of one that was changed since nobody knows. It may be, if a backward that reads it, and not replay's, is an error.
    """
    if is_parameter(before) or before.grad_fn is not None or now.grad_fn is not None or not now.requires_grad:
        return False
    if may_change and before._version > now._version:
        return True
    with without_dispatch_modes():
        return _have_equal_values(before, now)


def _have_equal_values(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether two tensors are equal; those of a subclass without memory of its own are if what they consist of is.

    Of what has no memory, such as a tensor on the meta device, nothing more can be told apart than its description, and
    of a placeholder, which stands for what forward made in a wrapper of replay.
    """
    olds, news = list(parts_of(before)), list(parts_of(now))
    if (before.shape, before.dtype, len(olds)) != (now.shape, now.dtype, len(news)):
        return False
    return all(
        (old.shape, old.dtype) == (new.shape, new.dtype)
        and (isinstance(new, Placeholder) or not (has_memory(old) and has_memory(new)) or torch.equal(old, new))
        for old, new in zip(olds, news, strict=True)
    )


def _is_by_another_op(region: Region, holder: Holder, owner: torch.Tensor) -> bool:
    """Whether a tensor was made by another op than in forward; only ops of torch itself are compared.

    Hooks of wrappers such as FSDP pass tensors through Functions of their own in one phase and not in the other.
    """
    kinds = {holder.producer, type(owner.grad_fn)}
    if len(kinds) < 2 or any(issubclass(kind, BackwardCFunction) for kind in kinds):
        return False
    if {kind.__name__ for kind in kinds} == _RESHAPES:
        return False
    inputs = region.inputs
    if holder.producer is not NoneType or inputs is None or type(owner) is not torch.Tensor:
        return True
    return not inputs.was_given(owner)


# `Tensor.reshape` is the one or the other by whether a dispatch mode is active.
_RESHAPES = {"ViewBackward0", "ReshapeAliasBackward0"}


def _op_behind(node: type) -> str:
    return "no recorded op" if node is type(None) else node.__name__.removesuffix("0")


def lies_otherwise(
    region: Region, position: int, tensor: torch.Tensor, owner: torch.Tensor, before: Layout | None
) -> RematError | None:
    """Return the error about a view whose placement in its base differs from forward, if it does.

    Where that itself lies otherwise, as inputs may that hooks around the region restored, nothing can be told; and what
    was kept of a view for replay has the view's strides, but is no view.

    Args:
        region: The region.
        position: Which of the saved tensors it is.
        tensor: What replay saves.
        owner: The tensor that it is a view of, or itself.
        before: The placement of forward's tensor.
    """
    now = layout_of(tensor, owner)
    if before and tensor is owner and before[0] == tensor.stride():
        return None
    if before in (now, UNKNOWN_LAYOUT) or region.options.determinism_check not in _COMPARING:
        return None
    if (before[2:] != now[2:]) if before and now else region.inputs is None or not region.inputs.as_given:
        return None
    forward, replay = (
        "a view with strides {} and offset {}".format(*layout) if layout else "a whole tensor"
        for layout in (before, now)
    )
    what = f"forward saved {forward} here, but replay saved {replay}{at_user_line()}"
    return region.mismatch(what, SAME_OPS, f"saved tensor {position}")
