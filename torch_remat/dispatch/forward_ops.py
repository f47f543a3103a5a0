"""The ops of a region in forward: names, slots, residents.

In: ops as they run, and the tensors that autograd saves for them. Kept: records on the tape; until forward ends, where
tensors come from. Out: the holders of SAVE ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import _getframe
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import torch

from torch_remat._compat import node_number, sequence_number, without_dispatch_modes
from torch_remat.dispatch.check.inner_ops import Around
from torch_remat.dispatch.departures import Departures
from torch_remat.dispatch.elision import elide
from torch_remat.dispatch.forward_op import Body, ForwardOp
from torch_remat.dispatch.holder import Anchor, Holder, OpHolder, ResidentRef, is_parameter, metadata_of
from torch_remat.dispatch.natives import Natives
from torch_remat.dispatch.offloading import offload_resident, slot_hooks
from torch_remat.dispatch.options import DEFAULTS
from torch_remat.dispatch.policy_forward import PolicyForward
from torch_remat.dispatch.provenance import Provenance
from torch_remat.dispatch.record import NativeRecord, Record, Slot, WholeCallRecord
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.whole_call import is_whole_call
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy

if TYPE_CHECKING:
    from torch_remat.dispatch.region.forward import Recording

_R = TypeVar("_R", bound=Record)
_BODY = 3  # frames from `ForwardOps.begin` to the body: by way of `RematMode.begin_op` and `get_handle`


class ForwardOps:
    """The ops of one region's forward.

    Args:
        mode: The forward's mode.

    Attributes:
        expected: The record, names and tensors whose saving comes next, since its body has just ended, before any other
            node.
        known_args: The inputs of the op whose tensors are expected, if they are known.
        opened: The body of the op with a handle that was begun last and has not ended.
        provenance: Where tensors come from.
        natives: The native regions, once there is one.
        skipped_any: Whether there was an op that replay skips, so that it may lack an input of another.
    """

    def __init__(self, mode: Recording) -> None:
        self.region = mode.region
        self.mode = mode
        self.provenance = Provenance(mode.region)
        self.opened: Body | None = None
        self.skipped_any = False
        self.expected: tuple[Record, list[tuple[str, torch.Tensor]], int] | None = None
        self.known_args: tuple[Any, ...] = ()
        self._around: Around | None = None
        self.departures = Departures(mode)
        self.natives: Natives | None = None
        self.policy: PolicyForward | None = None

    def begin(self, name: str, policy: CheckpointPolicy, ctx: Any) -> ForwardOp | None:
        """Begin an op; see `RematMode.begin_op`."""
        if self.expected is not None:
            self._forget_expected()
        frame = _getframe(_BODY)
        if self.opened is not None and self._is_part_of_skipped(self.opened.is_around(frame, ctx)):
            return None
        native = self.natives.running if self.natives is not None else None
        if native is not None or (self.policy is not None and self.policy.native):
            policy = CheckpointPolicy.SAVE  # it follows the native region around it
        record = self._new(Record(name, policy))
        self.opened = body = Body.of(record, ctx, frame, self.opened)
        if policy is not CheckpointPolicy.RECOMPUTE:
            if native is not None:
                native.skipped_op = body
            elif self.policy is not None:
                self.policy.skipped_op = body
        return ForwardOp(self, body, ctx, name, policy)

    def _is_part_of_skipped(self, is_running: bool) -> bool:
        """Whether a skipped op's body runs; see NOTE [ What is kept for an op ], 3.

        Args:
            is_running: Whether the body of the op that was begun last runs; if not, the op is over.
        """
        opened = self.opened
        assert opened is not None
        if is_running:
            return opened.record.policy is not CheckpointPolicy.RECOMPUTE
        opened.check_ended(self.region.name)
        self.opened = opened.outer
        return False

    def skips(self) -> bool:
        """Whether a native region runs that replay skips."""
        if self.policy is not None:
            return bool(self.policy.native)
        return self.natives is not None and self.natives.running is not None

    def passes_over(self) -> bool:
        """Whether the body of a skipped op runs, to which replay does not come."""
        opened = self.opened
        return opened is not None and opened.record.policy is not CheckpointPolicy.RECOMPUTE and opened.is_running()

    def _new(self, record: _R) -> _R:
        records = self.region.tape.records
        if record.name in records:
            raise UsageError(
                "the region already has an op of this name",
                region=self.region.name,
                op=record.name,
                remedy="Give each call a name of its own; remat.name_scope('block.0') prefixes the names inside it.",
            )
        records[record.name] = record
        record.saved_before = len(self.region.tape.saved)
        if self.mode.parent is not None:
            if self._around is None:
                self._around = Around(self.mode)
            self._around.note(record)
        return record

    def run_native(
        self,
        name: str,
        policy: CheckpointPolicy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a native region; see `RematMode.run_native`."""
        if self.expected is not None:
            self._forget_expected()
        opened = self.opened
        if (opened is not None and self._is_part_of_skipped(opened.is_running())) or self.skips():
            return function(*args, **kwargs)
        if self.policy is not None:
            self._new(Record(name, policy))
            return self.policy.run_native(name, policy, function, args, kwargs)
        if policy is CheckpointPolicy.RECOMPUTE:
            record = self._new(Record(name, policy))
            self.keep_inputs(record, leaves_of(args, kwargs))
            return function(*args, **kwargs)
        if self.natives is None:
            self.natives = Natives(self)
        self.skipped_any = True
        if is_whole_call(function, args, kwargs):
            return self.natives.run_whole(self._new(WholeCallRecord(name, policy, function)), function, args, kwargs)
        return self.natives.run(self._new(NativeRecord(name, policy)), function, args, kwargs)

    def finish(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """Check at the region's end that the last op was ended, and keep what replay reads of native regions."""
        if self.opened is not None:
            self.opened.check_ended(self.region.name)
        if self.natives is not None:
            self.natives.keep_returned(boundary)
        if self.policy is not None:
            self.policy.finish()

    def forget(self) -> None:
        """Let go of the op that an exception has left open, and of the graph."""
        self.opened = self.natives = self.policy = self._around = None
        del self.mode, self.departures
        self._forget_expected()

    def keep_inputs(self, record: Record, args: Iterable[Any]) -> None:
        """Keep those inputs of an op in slots that replay would not have."""
        region = self.region
        slots: dict[int, Slot] = {}
        for place, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and (source := self.source_of(arg)) is not None:
                hooks = region.hooks
                away = region.tape.records[source[0]].policy is CheckpointPolicy.OFFLOAD and not arg.is_inference()
                if hooks is None and away:
                    hooks = slot_hooks(region, record.name or None, f"input {place}", arg)
                slots[place] = Slot(arg, hooks, None, False, source)
        if slots:
            record.slots = slots

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Keep those inputs of an inner region in slots that replay would not have."""
        self._forget_expected()
        if self.policy is not None:
            return args, kwargs  # it sees what the inner region reads
        record = Record("", CheckpointPolicy.RECOMPUTE)
        self.keep_inputs(record, leaves_of(args, kwargs))
        self.region.tape.regions.append(record)
        return args, kwargs

    def note_skipped(self, record: Record, outputs: tuple[torch.Tensor, ...], ctx: Any) -> None:
        """Note what a SAVE op made, and its autograd node: in replay that reads nothing."""
        self.skipped_any = True
        if self.natives is not None:
            number = node_number(ctx)
            self.natives.skipped.append((number, number + 1))
        if self.policy is not None:
            self.policy.note_op(record, outputs)
        elif self.natives is not None and self.natives.running is not None:
            self.natives.running.note_op(record, outputs)
        self.provenance.note_skipped(record, outputs)

    def expect_saved(
        self, record: Record, named: Mapping[str, torch.Tensor | None], known_args: tuple[Any, ...]
    ) -> None:
        """Note what autograd saves next, if it records the op at all, and the op's inputs, if they are known."""
        self.known_args = known_args
        tensors = [(name, tensor) for name, tensor in named.items() if tensor is not None]
        tensors.reverse()
        self.expected = (record, tensors, sequence_number()) if tensors else None

    def pack(self, tensor: torch.Tensor) -> Holder | Anchor | None:
        """Return the holder for a tensor that a SAVE op saves, if one is expected to.

        None for a tensor that something else saves.
        """
        assert self.expected is not None
        record, tensors, number = self.expected
        name, expected = tensors[-1]
        if tensor is not expected or number != sequence_number():
            self._forget_expected()  # autograd did not record the op
            return self._pack_in_native(tensor)
        tensors.pop()
        held = self._hold(record, name, tensor, record.policy)
        if not tensors:
            self._forget_expected()
        return held

    def _pack_in_native(self, tensor: torch.Tensor) -> Holder | Anchor | None:
        if self.policy is not None:
            return self.policy.pack(tensor)
        return None if self.natives is None else self.natives.pack(tensor)

    def _forget_expected(self) -> None:
        self.expected = None
        self.known_args = ()

    def hold(self, record: Record, name: str, tensor: torch.Tensor, args: tuple[Any, ...]) -> Holder | Anchor:
        """Return the holder for a tensor that a whole call saves; ``args`` are the call's arguments."""
        self.known_args = args
        held = self._hold(record, name, tensor, CheckpointPolicy.SAVE)
        leaves = record.policy is CheckpointPolicy.OFFLOAD and self.region.hooks is None
        if leaves and type(held) is OpHolder and held.resident:
            self.departures.waiting.append((held, tensor))
        return held

    def _hold(self, record: Record, name: str, tensor: torch.Tensor, policy: CheckpointPolicy) -> Holder | Anchor:
        region = self.region
        owner = tensor if tensor._base is None else tensor._base
        if type(owner) is not torch.Tensor and is_parameter(owner):
            return (tensor if tensor is owner else tensor.detach(), tensor._version, region)
        holder = self._holder_for(record.name, name, tensor)
        if elide(self, record, tensor, owner, holder):
            holder.resident = False
            region.tape.elided.append(ref(holder))
            if self.natives is not None:
                self.natives.note_elided(holder)
            if region.options is not DEFAULTS:
                self.mode.note_value(holder, tensor)
            return holder
        if policy is CheckpointPolicy.SAVE and region.hooks is None and self.mode.watcher is None:
            holder.value = tensor.detach()
        else:
            self._keep(holder, tensor, policy)
        return holder

    def resident(
        self, op: str, name: str, tensor: torch.Tensor, policy: CheckpointPolicy, may_change: bool = False
    ) -> OpHolder:
        """Return a resident holder for a tensor that replay saves again, as a placeholder, at the same place."""
        holder = self._holder_for(op, name, tensor)
        hooks = self.region.hooks
        if hooks is None and type(tensor) is torch.Tensor:
            with without_dispatch_modes():
                holder.value = tensor.detach()
        else:
            self._keep(holder, tensor, CheckpointPolicy.SAVE)
        if policy is CheckpointPolicy.OFFLOAD and hooks is None:
            self.departures.waiting.append((holder, tensor))
        if may_change and holder.value is not None:
            holder.value = holder.value.data  # with a version counter of its own
            holder.metadata = metadata_of(holder.value)
        self.region.tape.saved.append(ResidentRef(holder))
        return holder

    def _alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or self.mode.watcher is None:
            return tensor.detach()
        with without_dispatch_modes():
            return tensor.detach()

    def undecided(self) -> Iterator[tuple[str, str, torch.Tensor, CheckpointPolicy]]:
        """Yield op, name, tensor and policy of what forward holds until its end tells whether anything needs it."""
        if self.natives is not None:
            yield from self.natives.undecided()
        if self.policy is not None:
            yield from self.policy.results.undecided()
            yield from self.policy.earlier.undecided()

    def in_recomputed_op(self) -> bool:
        """Whether the body of a RECOMPUTE op runs: replay runs all of it."""
        return self.opened is not None and self.opened.is_running()

    def source_of(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return name and place of the skipped op's output that a tensor is, or is a view of, if it is one."""
        if self.natives is not None and (source := self.natives.source_of(tensor)) is not None:
            return source
        made = self.provenance.maker_of(tensor)
        if made is None or made.record.policy is CheckpointPolicy.RECOMPUTE:
            return None
        return made.record.name, made.output

    def _holder_for(self, op: str, name: str, tensor: torch.Tensor) -> OpHolder:
        holder = OpHolder()
        holder.region = self.region
        holder.op = op
        holder.tensor_name = name
        holder.metadata = metadata_of(tensor)
        holder.origin = None
        holder.plain = False
        holder.producer = type(None)
        holder.resident = True
        holder.value = holder.packed = holder.unpack = None
        self.region.tape.holders.append(ref(holder))
        return holder

    def _keep(self, holder: OpHolder, tensor: torch.Tensor, policy: CheckpointPolicy) -> None:
        hooks = self.region.hooks
        if policy is CheckpointPolicy.OFFLOAD and hooks is None and offload_resident(self.region, holder, tensor):
            return
        if hooks is None:
            holder.value = self._alias_of(tensor)
        else:
            pack, holder.unpack = hooks
            with self.mode.unwatched():
                holder.packed = pack(tensor)
