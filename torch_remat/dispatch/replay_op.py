"""One remat-aware op while replay runs.

In: the op's record. Kept: nothing. Out: placeholders for what a skipped op returned, the kept inputs of one that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torch_remat.dispatch.op import SKIPPED, RematHandle
from torch_remat.dispatch.placeholder import Source, new_tuple, placeholder_at, refuse
from torch_remat.dispatch.record import Record
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.replay_ops import ReplayOps

_RECOMPUTE = CheckpointPolicy.RECOMPUTE


class ReplayOp(RematHandle):
    """An op in replay."""

    __slots__ = ("_ops", "_record")

    def __init__(self, ops: ReplayOps, record: Record, ctx: Any) -> None:
        self._ctx = ctx
        self._name = record.name
        self._step = -1
        self._ops = ops
        self._record = record

    def maybe_load_saved(self) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Return placeholders for the outputs of a SAVE op, and leave the generators where its body left them."""
        if self._step == -1 and self._record.policy is _RECOMPUTE:
            self._step = 0
            return None
        return self.load(())

    def load(self, args: tuple[Any, ...]) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
        """Do the same, and fill what waits for the op's inputs."""
        if self._step != -1:
            raise self._out_of_order(0)
        self._step = 0
        record, ops, ctx = self._record, self._ops, self._ctx
        if record.policy is _RECOMPUTE or not record.outputs:  # without outputs its body has raised
            return None
        if record.elided_inputs or ops.made:
            ops.fill_elided(record, args)
        if record.drawn is not None:
            record.drawn.restore()
        region = ops.region_name
        made = []
        for name, geometry, dtype, device, _ in record.outputs:
            made.append(placeholder_at(geometry, dtype, device, new_tuple(Source, (region, record.name, name))))
        outputs: tuple[Any, ...] = tuple(made)
        source = outputs[0].source
        if (native := ops.native) is not None:
            for place, placeholder in enumerate(outputs):
                placeholder.compute = partial(native.compute_output, record.name, place)
        if ops.policy is not None:
            loaded = ops.policy.load_op(record)
            outputs = tuple([out if real is None else real for out, real in zip(outputs, loaded, strict=True)])
        for kept in record.outputs:
            if not kept.differentiable:
                plain = [out for out, kept in zip(outputs, record.outputs, strict=True) if not kept.differentiable]
                ctx.mark_non_differentiable(*plain)
                break
        # The graph of the replay has nothing that this op's backward could work on.
        ctx.register_prehook(partial(_refuse_backward, source))
        self._step = SKIPPED
        return outputs if record.as_tuple else outputs[0]

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Replace the inputs that are placeholders by the kept ones."""
        if self._step != 0:
            raise self._out_of_order(1)
        self._step = 1
        record = self._record
        if record.policy is _RECOMPUTE:  # else its body has raised: nothing was kept for it
            args = tuple(self._ops.load_inputs(record, args, record.name))
        return args[0] if len(args) == 1 else args

    def record(self, outs: tuple[torch.Tensor, ...], as_tuple: bool) -> Any:
        """Note the outputs that SAVE ops wait for."""
        self._end(outs)
        record = self._record
        if record.policy is not _RECOMPUTE:
            self._ops.fail_returned(record)
        if record.elided_outputs:
            self._ops.note_made(record, outs)
        return outs if as_tuple else outs[0]


def _refuse_backward(source: Source, _grad_outputs: Sequence[torch.Tensor | None]) -> None:
    refuse(source, "a gradient taken inside the region")
