"""One remat-aware op while forward runs.

In: what a handle's methods are told. Kept: on the tape, the op's record. Out: the op's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from sys import _getframe
from typing import Any, Protocol

from torch import Tensor

from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.handle.body import Body
from torch_remat.dispatch.handle.op import RematHandle
from torch_remat.dispatch.handle.provenance import Provenance
from torch_remat.dispatch.log.record import Output, Record
from torch_remat.dispatch.offloading import sender_of
from torch_remat.dispatch.placeholder import geometry_of, new_tuple
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy

_RECOMPUTE = CheckpointPolicy.RECOMPUTE


class Ops(Protocol):
    """What of a region's recorder is asked here."""

    region: Any
    opened: Body | None
    expected: Any
    skipped_any: bool
    provenance: Provenance
    watch: Any

    def note_record(self, record: Record) -> None:
        """Note what has a name."""

    def forget_expected(self) -> None:
        """Expect nothing: something else has come."""

    def is_part_of_skipped(self, is_running: bool) -> bool:
        """Whether a skipped op's body runs."""

    def keep_inputs(self, record: Record, args: Iterable[Any]) -> None:
        """Keep those inputs of an op in slots that replay would not have."""

    def expect_saved(self, record: Record, named: Mapping[str, Tensor | None], known_args: tuple[Any, ...]) -> None:
        """Note what autograd saves next."""

    def note_skipped(self, record: Record, outputs: tuple[Tensor, ...], ctx: Any) -> None:
        """Note what a SAVE op made."""


_BODY = 3  # frames from `begin` to the body: by way of `RematMode.begin_op` and `get_handle`


def begin(ops: Ops, name: str, policy: CheckpointPolicy, ctx: Any) -> ForwardOp | None:
    """Begin an op in forward; see `RematMode.begin_op`."""
    if ops.expected is not None:
        ops.forget_expected()
    frame = _getframe(_BODY)
    if ops.opened is not None and ops.is_part_of_skipped(ops.opened.is_around(frame, ctx)):
        return None
    watch = ops.watch
    if watch is not None and watch.group:
        policy = CheckpointPolicy.SAVE  # it follows the native region around it
    record = Record(name, policy)
    ops.note_record(record)
    ops.opened = body = Body.of(record, ctx, frame, ops.opened)
    if watch is not None and policy is not _RECOMPUTE:
        watch.skipped_op = body
    return ForwardOp(ops, body, ctx, name, policy)


class ForwardOp(RematHandle):
    """An op in forward.

    Args:
        ops: The ops of its region.
        body: Its body.
        ctx: Its autograd context.
    """

    __slots__ = ("_args", "_body", "_ops", "_policy", "_random_start")

    def __init__(self, ops: Ops, body: Body, ctx: Any, name: str, policy: CheckpointPolicy) -> None:
        self._ctx = ctx
        self._name = name
        self._step = -1
        self._named = {}
        self._args: tuple[Any, ...] = ()
        self._ops = ops
        self._body = body
        self._policy = policy
        self._random_start: RngState | None = None
        if policy is not _RECOMPUTE and (rng := ops.region.rng) is not None:
            self._random_start = rng.present()

    def load(self, args: tuple[Any, ...]) -> None:
        """Note the inputs; forward skips nothing."""
        self.maybe_load_saved()
        self._args = args
        if self._policy is CheckpointPolicy.OFFLOAD:
            sender_of(self._ops.region).know_parameters(args)

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
            sender_of(self._ops.region).know_parameters(args)
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
                record.drawn = self._random_start.drawn()
            ops.expect_saved(record, self._named, self._args)
            ops.note_skipped(record, outs, ctx)
        self._named = {}
        self._args = ()
        return outs if as_tuple else outs[0]
