"""One remat-aware op while forward runs.

In: what a handle's methods are told. Kept: on the tape, the op's record. Out: the op's outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torch import Tensor

from torch_remat._compat import has_returned
from torch_remat.dispatch.offloading import know_parameters
from torch_remat.dispatch.op import RematHandle
from torch_remat.dispatch.placeholder import geometry_of, new_tuple
from torch_remat.dispatch.record import Output, Record
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.forward_ops import ForwardOps

_RECOMPUTE = CheckpointPolicy.RECOMPUTE


class Body(NamedTuple):
    """The body of an op while it runs. Unlike the handle it keeps nothing alive: the body may raise.

    Attributes:
        record: The op's record.
        ctx: Its autograd context.
        place: The address of the frame in which the body runs; the frame itself would keep the body's tensors alive.
        code: The body's code.
        outer: The body in which it runs, if any.
    """

    record: Record
    ctx: ref[Any]
    place: int
    code: CodeType
    outer: Body | None

    @classmethod
    def of(cls, record: Record, ctx: Any, frame: FrameType, outer: Body | None) -> Body:
        """Return the body that runs in a frame."""
        made: Body = new_tuple(cls, (record, ref(ctx), id(frame), frame.f_code, outer))
        return made

    def is_running(self) -> bool:
        """Whether it is on this thread's stack."""
        return self._is_at_or_above(sys._getframe(1))

    def is_around(self, frame: FrameType, ctx: Any) -> bool:
        """Whether it is on the stack above the body of another op, or is that body.

        If it has raised, the other body may have its address and its code: then only the context tells them apart.
        """
        return self._is_at_or_above(frame if self.ctx() is ctx else frame.f_back)

    def _is_at_or_above(self, frame: FrameType | None) -> bool:
        if self.ctx() is None:  # the body has raised
            return False
        while frame is not None:
            if id(frame) == self.place and frame.f_code is self.code:
                return True
            frame = frame.f_back
        return False

    def check_ended(self, region_name: str) -> None:
        """Raise if it returned without telling its outputs; one that raised may be forgotten."""
        ctx = self.ctx()
        if ctx is not None and has_returned(ctx):
            raise UsageError(
                "the op's forward returned without handle.record_outputs",
                region=region_name,
                op=self.record.name,
                remedy="End the forward with `return handle.record_outputs(out)`.",
            )


class ForwardOp(RematHandle):
    """An op in forward.

    Args:
        ops: The ops of its region.
        body: Its body.
        ctx: Its autograd context.
    """

    __slots__ = ("_args", "_body", "_ops", "_policy", "_random_start")

    def __init__(self, ops: ForwardOps, body: Body, ctx: Any, name: str, policy: CheckpointPolicy) -> None:
        self._ctx = ctx
        self._name = name
        self._step = -1
        self._named = {}
        self._args: tuple[Any, ...] = ()
        self._ops = ops
        self._body = body
        self._policy = policy
        self._random_start: Sequence[Tensor] | None = None
        if policy is not _RECOMPUTE and (rng := ops.region.rng) is not None:
            self._random_start = rng.mark()

    def load(self, args: tuple[Any, ...]) -> None:
        """Note the inputs; forward skips nothing."""
        self.maybe_load_saved()
        self._args = args
        if self._policy is CheckpointPolicy.OFFLOAD:
            know_parameters(self._ops.region, args)

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Keep the inputs that replay would not have."""
        if self._step != 0:
            raise self._out_of_order(1)
        self._step = 1
        if self._policy is _RECOMPUTE:
            self._args = args
            if self._ops.skipped_any:
                self._ops.keep_inputs(self._body.record, args)
        elif self._policy is CheckpointPolicy.OFFLOAD:
            know_parameters(self._ops.region, args)
        return args[0] if len(args) == 1 else args

    def record(self, outs: tuple[Tensor, ...], as_tuple: bool) -> Any:
        """Note the outputs and, for a SAVE op, all that its placeholders must show."""
        self._end(outs)
        ctx, ops = self._ctx, self._ops
        record, _, _, _, ops.opened = self._body
        record.as_tuple = as_tuple
        # An input that is returned as it is would be known as the input; autograd makes a view of it, too.
        dirty = {id(tensor) for tensor in ctx.dirty_tensors} if ctx.dirty_tensors else ()
        for out in outs:
            if out.requires_grad:
                outs = tuple([o.view_as(o) if o.requires_grad and id(o) not in dirty else o for o in outs])
                break
        if self._policy is _RECOMPUTE:
            ops.provenance.note_recomputed(record, outs, self._args)
        else:
            if dirty:
                raise UsageError(
                    f"an op with policy {record.policy.name} cannot mark inputs as dirty: replay would not change "
                    "them again",
                    region=ops.region.name,
                    op=record.name,
                    remedy="Return a new tensor instead, or give the op the policy RECOMPUTE.",
                )
            plain = {id(tensor) for tensor in ctx.non_differentiable} if ctx.non_differentiable else ()
            record.outputs = [
                new_tuple(
                    Output,
                    (str(index) if as_tuple else "out", geometry_of(out), out.dtype, out.device, id(out) not in plain),
                )
                for index, out in enumerate(outs)
            ]
            if self._random_start is not None and ops.region.rng is not None:
                record.drawn = ops.region.rng.drawn_since(self._random_start)
            ops.expect_saved(record, self._named, self._args)
            ops.note_skipped(record, outs, ctx)
        self._named = {}
        self._args = ()
        return outs if as_tuple else outs[0]
