"""The ops of a region in forward: names, slots, residents.

In: ops as they run, and the tensors that autograd saves for them. Kept: records on the tape; until forward ends, where
tensors come from. Out: the holders of SAVE ops.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from torch_remat._compat import sequence_number
from torch_remat.dispatch.ambient import RngState
from torch_remat.dispatch.holder import Anchor, Holder, OpHolder, metadata_of, parameter_behind
from torch_remat.dispatch.inputs import leaves_of
from torch_remat.dispatch.op import Op
from torch_remat.dispatch.placeholder import geometry_of
from torch_remat.dispatch.policy import CheckpointPolicy
from torch_remat.dispatch.provenance import Provenance
from torch_remat.dispatch.record import Elided, Output, Record, Slot, offset_in_bytes
from torch_remat.errors import UsageError

if TYPE_CHECKING:
    from torch_remat.dispatch.region import Region


class ForwardOps:
    """The ops of one region's forward.

    Args:
        region: The region.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self._provenance = Provenance()
        self._open: ForwardOp | None = None
        # The record, names and tensors whose saving comes next, since its body has just ended, before any other node.
        self._expected: tuple[Record, list[tuple[str, torch.Tensor]], int] | None = None
        self._known_args: tuple[Any, ...] = ()

    def begin(self, name: str, policy: CheckpointPolicy, ctx: Any, body: FrameType) -> Op:
        """Begin an op; see `RematMode.begin_op`."""
        if self._expected is not None:
            self._forget_expected()
        opened = self._open
        if opened is not None and opened.is_running():
            if opened.record.policy is CheckpointPolicy.SAVE:
                return Op()  # NOTE [ What is kept for an op ], 3
        elif opened is not None:
            opened.check_ended()
        records = self.region.tape.records
        if name in records:
            raise UsageError(
                "the region already has an op of this name",
                region=self.region.name,
                op=name,
                remedy="Give each call a name of its own; remat.name_scope('block.0') prefixes the names inside it.",
            )
        record = records[name] = Record(name, policy)
        self._open = op = ForwardOp(self, record, ctx, body, opened)
        return op

    def end(self, op: ForwardOp) -> None:
        """Note that an op's body has ended."""
        self._open = op.outer

    def finish(self) -> None:
        """Check at the region's end that the last op was ended."""
        if self._open is not None:
            self._open.check_ended()

    def forget(self) -> None:
        """Let go of the op that an exception has left open."""
        self._open = None
        self._forget_expected()

    def keep_inputs(self, record: Record, args: Iterable[Any]) -> None:
        """Keep those inputs of an op in slots that replay would not have."""
        for place, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                made = self._provenance.maker_of(arg)
                if made is not None and made.record.policy is CheckpointPolicy.SAVE:
                    record.slots[place] = Slot(arg, self.region.hooks)

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Keep those inputs of an inner region in slots that replay would not have."""
        self._forget_expected()
        record = Record("", CheckpointPolicy.RECOMPUTE)
        self.keep_inputs(record, leaves_of(args, kwargs))
        self.region.tape.regions.append(record)
        return args, kwargs

    def note_outputs(self, record: Record, outputs: tuple[torch.Tensor, ...], inputs: tuple[Any, ...]) -> None:
        """Note what an op made of its inputs, as far as they are known."""
        self._provenance.note(record, outputs, inputs)

    def expect_saved(
        self, record: Record, named: Mapping[str, torch.Tensor | None], known_args: tuple[Any, ...]
    ) -> None:
        """Note what autograd saves next, if it records the op at all, and the op's inputs, if they are known."""
        self._known_args = known_args
        tensors = [(name, tensor) for name, tensor in named.items() if tensor is not None]
        self._expected = (record, tensors[::-1], sequence_number()) if tensors else None

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor | None:
        """Return the holder for a tensor that a SAVE op saves, or None for a tensor that something else saves."""
        if self._expected is None:
            return None
        record, tensors, number = self._expected
        name, expected = tensors[-1]
        if tensor is not expected or number != sequence_number():
            self._forget_expected()  # autograd did not record the op
            return None
        tensors.pop()
        held = self._hold(record, name, tensor)
        if not tensors:
            self._forget_expected()
        return held

    def _forget_expected(self) -> None:
        self._expected = None
        self._known_args = ()

    def _hold(self, record: Record, name: str, tensor: torch.Tensor) -> Holder | Anchor:
        region = self.region
        owner = tensor if tensor._base is None else tensor._base
        if parameter_behind(owner) is owner:
            return (tensor if tensor is owner else tensor.detach(), tensor._version, region)
        holder = OpHolder()
        holder.region = region
        holder.op = record.name
        holder.tensor_name = name
        holder.metadata = metadata_of(tensor)
        holder.origin = None
        holder.producer = type(None)
        holder.value = holder.packed = holder.unpack = None
        holder.resident = not self._elide(record, tensor, owner, holder)
        if not holder.resident:
            region.tape.elided.append(ref(holder))
        elif region.hooks is None:
            holder.value = tensor.detach()
        else:
            pack, holder.unpack = region.hooks
            holder.packed = pack(tensor)
        return holder

    def _elide(self, record: Record, tensor: torch.Tensor, owner: torch.Tensor, holder: OpHolder) -> bool:
        """Let replay take a saved tensor from what it makes again, if it does; return whether it does."""
        made = self._provenance.maker_of(tensor)
        if made is not None:
            if made.record is record or not made.replayed_as(tensor):
                return False
            made.record.elided_outputs.append(Elided.of(tensor, holder, made.output, made.offset_in_bytes))
            return True
        inputs = self.region.inputs
        if inputs is None or inputs.contains(owner):
            return False  # it shares the storage of a region input
        for place, arg in enumerate(self._known_args):
            if isinstance(arg, torch.Tensor) and (arg is tensor or arg is owner or arg._base is owner):
                record.elided_inputs.append(Elided.of(tensor, holder, place, offset_in_bytes(arg)))
                return True
        return False


class ForwardOp(Op):
    """An op in forward.

    Args:
        ops: The ops of its region.
        record: Its record.
        ctx: Its autograd context.
        body: The frame in which its body runs.
        outer: The op in whose body it runs, if any.
    """

    def __init__(self, ops: ForwardOps, record: Record, ctx: Any, body: FrameType, outer: ForwardOp | None) -> None:
        self.record = record
        self.outer = outer
        self._ops = ops
        self._ctx = ref(ctx)
        self._body = id(body), body.f_code  # the frame itself would keep the body's tensors alive
        self._named: Mapping[str, torch.Tensor | None] = {}
        self._args: tuple[Any, ...] = ()
        rng = ops.region.rng if record.policy is CheckpointPolicy.SAVE else None
        self._rng: RngState | None = None if rng is None else rng.present()

    def is_running(self) -> bool:
        """Whether the op's body is on this thread's stack."""
        place, code = self._body
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame) == place and frame.f_code is code:
                return True
            frame = frame.f_back
        return False

    def check_ended(self) -> None:
        """Raise if the body returned without telling its outputs; one that raised may be forgotten."""
        if self._ctx() is not None:
            raise UsageError(
                "the op's forward returned without handle.record_outputs",
                region=self._ops.region.name,
                op=self.record.name,
                remedy="End the forward with `return handle.record_outputs(out)`.",
            )
        self._ops.end(self)

    def load(self, ctx: Any, args: tuple[Any, ...]) -> None:
        """Note the inputs, if they are known; forward skips nothing."""
        self._args = args

    def inputs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep the inputs that replay would not have."""
        if self.record.policy is CheckpointPolicy.RECOMPUTE:
            self._args = args
            self._ops.keep_inputs(self.record, args)
        return args

    def save(self, named: Mapping[str, torch.Tensor | None]) -> None:
        """Note the saved tensors by name."""
        self._named = named

    def outputs(self, ctx: Any, outputs: tuple[torch.Tensor, ...], as_tuple: bool) -> tuple[torch.Tensor, ...]:
        """Note the outputs and, for a SAVE op, all that its placeholders must show."""
        record, ops = self.record, self._ops
        ops.end(self)
        # An input that is returned as it is would be known as the input; autograd makes a view of it, too.
        dirty = {id(tensor) for tensor in ctx.dirty_tensors or ()}
        outputs = tuple([out.view_as(out) if out.requires_grad and id(out) not in dirty else out for out in outputs])
        if record.policy is CheckpointPolicy.SAVE:
            if dirty:
                raise UsageError(
                    "an op with policy SAVE cannot mark inputs as dirty: replay would not change them again",
                    region=ops.region.name,
                    op=record.name,
                    remedy="Return a new tensor instead, or give the op the policy RECOMPUTE.",
                )
            record.as_tuple = as_tuple
            plain = {id(tensor) for tensor in ctx.non_differentiable or ()}
            record.outputs = [
                Output(
                    str(index) if as_tuple else "out",
                    geometry_of(out),
                    out.dtype,
                    out.device,
                    id(out) not in plain,
                )
                for index, out in enumerate(outputs)
            ]
            if self._rng is not None:
                record.drawn = self._rng.drawn()
            ops.expect_saved(record, self._named, self._args)
        ops.note_outputs(record, outputs, self._args)
        self._named = {}
        self._args = ()
        return outputs
