"""The error of a replay that did something else than its forward, and how it names what it is about.

In: the region, what differs, and the holder where the phases part. Kept: nothing. Out: a `MismatchError`; with
``debug=True`` it shows the ops of both phases side by side.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_remat.dispatch.holder import Holder, OpHolder, metadata_of
from torch_remat.errors import MismatchError, at_user_line
from torch_remat.policies.decision import CheckpointPolicy

SAME_OPS = (
    "The function must do the same in both phases: look for state that changed in between (a counter, a cache, a "
    "module attribute, train/eval, a global), for random numbers from a source that torch does not know, and for "
    "branches on data."
)
SAME_ORDER = (
    "The ops of a region must have the same names and policies in the same order in both phases: derive names from the "
    "code's structure, not from counters or other state."
)
REPLACED = (
    "Was a parameter replaced between forward and backward (torch.func.functional_call around the region, a module "
    "attribute that was set anew)? Run backward while it is still in place, or pass the tensor to the region as an "
    "argument."
)


def mismatched(region: Any, what: str, remedy: str, tensor: str | None = None, op: str | None = None) -> MismatchError:
    """Return the error, with both phases' ops if the region recorded them."""
    if region.op_log is None:
        remedy += " checkpoint(debug=True) shows the ops of both phases side by side."
    else:
        remedy += "\n" + region.op_log.side_by_side()
    return MismatchError(what, region=region.name, op=op, tensor=tensor, remedy=remedy)


def differs_at(region: Any, holder: Holder, what: str, remedy: str = SAME_OPS) -> MismatchError:
    """Return the error about what replay saves, or does not, where forward saved what the holder stands for."""
    return mismatched(region, what, remedy, holder.name, holder.op)


def described(tensor: torch.Tensor | Holder) -> str:
    """Return shape, dtype and device of a tensor, or of what forward saved, as messages say them."""
    _, shape, dtype, device = tensor.metadata if isinstance(tensor, Holder) else metadata_of(tensor)
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}] on {device}"


def another_op(
    region: Any, name: str, policy: CheckpointPolicy, expected: Any, is_known: bool, replay: str = "replay"
) -> MismatchError:
    """Return the error about an op with a name that forward did not run here."""
    place = at_user_line()
    if expected is not None and expected.name == name:
        what = f"this op has policy {policy.name} in {replay}{place} and had {expected.policy.name} in forward"
    elif expected is not None and is_known:
        what = f"{replay} runs this op{place} where forward ran {expected.name!r}"
    else:
        what = f"{replay} runs this op{place}, forward did not"
    return mismatched(region, what, SAME_ORDER, op=name)


def other_source(region: Any, holder: OpHolder, tensor: Any, is_input: bool) -> MismatchError:
    """Return the error about a SAVE op's input, or another op's output, of which the op saved a view in forward."""
    verb = "is given" if is_input else "that made it returns"
    found = described(tensor) if isinstance(tensor, torch.Tensor) else "no tensor"
    found += f" in replay{at_user_line()}, of which that cannot be taken"
    return differs_at(region, holder, f"forward saved {described(holder)} here, the op {verb} {found}")


def another_parameter(
    region: Any, place: str, op: str | None, parameter: torch.Tensor | None, tensor: torch.Tensor
) -> MismatchError:
    """Return the error about a parameter, or another tensor from outside the region, that forward did not use."""
    used = "another tensor" if parameter is None else f"a parameter {described(parameter)}, or a view of it,"
    what = f"forward used {used} from outside the region here, replay {described(tensor)} from elsewhere"
    return mismatched(region, f"{what}{at_user_line()}", REPLACED, place, op)


def saved_otherwise(region: Any, replayed: int, missing: Holder | None = None) -> MismatchError:
    """Return the error about a replay that saved fewer tensors than forward, or, run to its end, more."""
    what = f"replay saved {replayed} tensor{'s' * (replayed != 1)} where forward saved {len(region.tape.saved)}"
    if missing is None:
        return mismatched(region, what, SAME_OPS)
    return differs_at(region, missing, f"{what}; the first one missing is {described(missing)}")
