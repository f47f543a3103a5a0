"""Which saved tensors of a SAVE op replay makes again, so that forward does not keep them.

In: a tensor that a SAVE op saves. Kept: on the tape its description, with the op's own record or its producer's. Out:
whether it is elided; see NOTE [ What is kept for an op ].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

import torch

from torch_remat._compat import node_number
from torch_remat.dispatch.handle.provenance import Provenance
from torch_remat.dispatch.holder import AUTOCAST_DTYPES, OpHolder, parameter_behind
from torch_remat.dispatch.log.record import Record
from torch_remat.dispatch.views import Elided, offset_in_bytes


class Ops(Protocol):
    """What of a region's recorder is asked here."""

    region: Any
    provenance: Provenance
    known_args: Sequence[Any]
    watch: Any
    storages: Any
    has_policy: bool

    def source_of(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return the skipped op's output that a tensor is, or is a view of."""


def elide(ops: Ops, record: Record, tensor: torch.Tensor, owner: torch.Tensor, holder: OpHolder) -> bool:
    """Let replay take a saved tensor from what it makes again, if it does; return whether it does.

    Args:
        ops: The ops of the region.
        record: The record of the op that saves it.
        tensor: The saved tensor.
        owner: The tensor that it is a view of, or itself.
        holder: Its holder.
    """
    made = ops.provenance.maker_of(tensor) if ops.provenance else None
    if made is not None:
        if made.record is record or not made.replayed_as(tensor):
            return False
        if ops.has_policy and not ops.watch.runs_writer(tensor):
            return False  # written since, past its version counter, by an op that replay need not run
        made.record.elide_output(Elided.of(tensor, holder, made.output, made.tensor(), made.offset_in_bytes))
        return True
    if ops.has_policy or ops.storages.knows(tensor):
        return False
    inputs = ops.region.inputs
    if inputs is None or inputs.contains(owner):
        return False  # it shares the storage of a region input
    for place, arg in enumerate(ops.known_args):
        # Of a view of a skipped op's output replay has no data.
        if arg is tensor or (
            isinstance(arg, torch.Tensor) and (arg is owner or arg._base is owner) and ops.source_of(arg) is None
        ):
            record.elide_input(Elided.of(tensor, holder, place, arg, 0 if arg is tensor else offset_in_bytes(arg)))
            _note_origin(holder, owner, ops.region.first_number)
            return True
    return False


def _note_origin(holder: OpHolder, owner: torch.Tensor, first_number: int) -> None:
    """Note where an input comes from, which replay compares as it does for what is recomputed."""
    node = owner.grad_fn
    holder.producer = type(node)
    if type(owner) is not torch.Tensor or owner.dtype in AUTOCAST_DTYPES:
        holder.origin = parameter_behind(owner)
    outside = owner.requires_grad if node is None else node_number(node) < first_number
    if outside and holder.origin is None:
        holder.origin = ref(owner)
