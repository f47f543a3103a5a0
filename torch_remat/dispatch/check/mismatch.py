"""What a region says when its replay did something else than its forward.

In: the region and the holder where they part. Kept: nothing. Out: a `MismatchError`, or a `MutationError` where an
in-place change explains it; with ``debug=True`` it shows the ops of both phases side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_remat.dispatch.holder import Holder, OpHolder, OwnRegion
from torch_remat.errors import MismatchError, MutationError

_SAME_OPS = (
    "The function must do the same in both phases: look for state that changed in between (a counter, a cache, a "
    "module attribute, train/eval, a global), for random numbers from a source that torch does not know, and for "
    "branches on data."
)

SAME_ORDER = (
    "The ops of a region must have the same names and policies in the same order in both phases: derive names from the "
    "code's structure, not from counters or other state."
)

_REPLACED = (
    "Was a parameter replaced between forward and backward (torch.func.functional_call around the region, a module "
    "attribute that was set anew)? Run backward while it is still in place, or pass the tensor to the region as an "
    "argument."
)


def mismatched(
    region: OwnRegion, what: str, remedy: str, tensor: str | None = None, op: str | None = None
) -> MismatchError:
    """Return the error, with both phases' ops if the region recorded them."""
    if region.op_log is None:
        remedy += " checkpoint(debug=True) shows the ops of both phases side by side."
    else:
        remedy += "\n" + region.op_log.side_by_side()
    return MismatchError(what, region=region.name, op=op, tensor=tensor, remedy=remedy)


def other_metadata(region: OwnRegion, holder: Holder, tensor: torch.Tensor) -> MismatchError:
    """Forward and replay saved tensors of different shape, dtype or device at one position."""
    return mismatched(
        region, f"forward saved {_forward(holder)} here, replay {_describe_tensor(tensor)}",
        _SAME_OPS, holder.name, holder.op,
    )  # fmt: skip


def other_source(region: OwnRegion, holder: OpHolder, tensor: Any, is_input: bool) -> MismatchError:
    """The input of a SAVE op, or the output of another, that it saved or saved a view of is not that of forward."""
    verb = "is given" if is_input else "that made it returns"
    found = _describe_tensor(tensor) if isinstance(tensor, torch.Tensor) else "no tensor"
    return mismatched(
        region,
        f"forward saved {_forward(holder)} here, the op {verb} {found} in replay, of which that cannot be taken",
        _SAME_OPS,
        holder.name,
        holder.op,
    )


def other_producer(region: OwnRegion, holder: Holder, owner: torch.Tensor) -> MismatchError:
    """Forward and replay saved results of different ops at one position."""
    return mismatched(
        region,
        f"forward saved {_forward(holder)} made by {_node_name(holder.producer)} here, "
        f"replay one made by {_node_name(type(owner.grad_fn))}",
        _SAME_OPS,
        holder.name,
        holder.op,
    )


def _node_name(kind: type) -> str:
    return "no recorded op" if kind is type(None) else kind.__name__.removesuffix("0")


def other_layout(region: OwnRegion, place: str, before: Sequence[Any], now: Sequence[Any]) -> MismatchError:
    """Forward and replay saved views that lie otherwise in what they are views of, such as a transposed one."""
    forward, replay = (
        "all of a tensor as it is" if not layout else "a view with strides {} from element {} on".format(*layout)
        for layout in (before, now)
    )
    return mismatched(region, f"forward saved {forward} here, replay {replay}", _SAME_OPS, place)


def other_value(region: OwnRegion, holder: Holder, value: Any) -> MismatchError:
    """The determinism check found different values at one position."""
    shown = "" if isinstance(value, bytes) else f" ({holder.fingerprint!r} in forward, {value!r} in replay)"
    return mismatched(
        region,
        f"the saved {_forward(holder)} has other values in replay than in forward{shown}; this is the first difference",
        _SAME_OPS + " Ops that are not deterministic on this device differ too "
        "(torch.use_deterministic_algorithms(True) reports them).",
        holder.name,
        holder.op,
    )


def fewer_saved(region: OwnRegion, first: Holder, replayed: int) -> MismatchError:
    """Replay ended before it saved what forward saved."""
    return mismatched(
        region,
        f"replay saved {replayed} tensors where forward saved {len(region.tape.saved)}; "
        f"the first one missing is {_forward(first)}",
        _SAME_OPS,
        first.name,
        first.op,
    )


def more_saved(region: OwnRegion, replayed: int) -> MismatchError:
    """Replay saved another number of tensors than forward (found only without early stop)."""
    total = len(region.tape.saved)
    return mismatched(region, f"replay saved {replayed} tensors where forward saved {total}", _SAME_OPS)


def another_parameter(
    region: OwnRegion, place: str, op: str | None, parameter: torch.Tensor | None, tensor: torch.Tensor
) -> MismatchError:
    """A parameter, or another tensor from outside the region, is not the one that forward used."""
    used = "another tensor" if parameter is None else f"a parameter {_describe_tensor(parameter)}, or a view of it,"
    return mismatched(
        region,
        f"forward used {used} from outside the region here, replay {_describe_tensor(tensor)} from elsewhere",
        _REPLACED,
        place,
        op,
    )


def replaced_parameter(
    region: OwnRegion, name: str, one: torch.Tensor | None, other: torch.Tensor | None
) -> MismatchError:
    """A module that the region runs has another parameter than in forward."""
    before, now = ("none" if it is None else _describe_tensor(it) for it in (one, other))
    return mismatched(
        region,
        f"this parameter was replaced between forward and replay ({before}, then {now})",
        _REPLACED,
        name,
    )


def changed_parameter(region: OwnRegion, name: str, parameter: torch.Tensor) -> MutationError:
    """Replay reads a parameter that was changed in place since forward."""
    return MutationError(
        f"replay reads this parameter, {_describe_tensor(parameter)}, which was changed in place since forward",
        region=region.name,
        tensor=name,
        remedy="Change parameters (a step of an optimizer, an average of weights) after backward.",
    )


def outside_changed(region: OwnRegion, holder: Holder) -> MutationError:
    """A tensor from outside the region was changed in place between the phases."""
    return MutationError(
        f"this {_forward(holder)}, which the region saves for backward, was "
        "changed in place between forward and replay (or another number of times in replay)",
        region=region.name,
        op=holder.op,
        tensor=holder.name,
        remedy="Buffers and other tensors that the region reads must stay as they are until backward: change a clone, "
        "or pass a clone to the region as an argument.",
    )


def _describe(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}] on {device}"


def _forward(holder: Holder) -> str:
    return _describe(*holder.metadata[1:])


def _describe_tensor(tensor: torch.Tensor) -> str:
    return _describe(tensor.shape, tensor.dtype, tensor.device)
