"""Calls in forward: ops with handles, and functions of torch's own in native regions.

In: ops as they begin and end, and the tensors that autograd saves for them. Kept: records in the region's log; until
forward ends, where tensors come from. Out: the holders of what SAVE calls save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch

from torch_remat._compat import node_number, sequence_number
from torch_remat.dispatch.check.inner_ops import Around
from torch_remat.dispatch.handle.body import Body
from torch_remat.dispatch.handle.elision import elide
from torch_remat.dispatch.handle.forward_op import begin
from torch_remat.dispatch.handle.provenance import Provenance
from torch_remat.dispatch.handle.whole_call import CallForward, is_whole_call
from torch_remat.dispatch.holder import Anchor, Holder, OpHolder, is_parameter
from torch_remat.dispatch.log.record import Record, Stretch
from torch_remat.dispatch.log.recorder import Forward, Recorder
from torch_remat.dispatch.log.slot import Slot
from torch_remat.dispatch.offloading import offload_resident, slot_hooks
from torch_remat.dispatch.options import DEFAULTS
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.policies.decision import CheckpointPolicy


class CallRecorder(Recorder):
    """The log of one region's forward, with its calls.

    Args:
        forward: The forward's mode.

    Attributes:
        expected: The record, names and tensors whose saving comes next, since its body has just ended, before any other
            node.
        known_args: The inputs of the op whose tensors are expected, if they are known.
        opened: The body of the op with a handle that was begun last and has not ended.
        provenance: Where tensors come from.
        calling: The function of torch's own that runs.
    """

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self.provenance = Provenance(self.region)
        self.opened: Body | None = None
        self.expected: tuple[Record, list[tuple[str, torch.Tensor]], int] | None = None
        self.known_args: Sequence[Any] = ()
        self.calling: CallForward | None = None
        self._around: Around | None = None
        self._views: list[tuple[Stretch, int, torch.Tensor, int]] = []

    def note_record(self, record: Record) -> None:
        """Note what has a name, here and in the regions around."""
        super().note_record(record)
        if self.mode.parent is not None:
            if self._around is None:
                self._around = Around(self.mode)
            self._around.note(record)

    # Ops with handles.

    begin = begin

    def is_part_of_skipped(self, is_running: bool) -> bool:
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

    def passes_over(self) -> bool:
        """Whether the body of a skipped op runs, to which replay does not come."""
        opened = self.opened
        return opened is not None and opened.record.policy is not CheckpointPolicy.RECOMPUTE and opened.is_running()

    def in_recomputed_op(self) -> bool:
        """Whether the body of a RECOMPUTE op runs: replay runs all of it."""
        return self.opened is not None and self.opened.is_running()

    def note_skipped(self, record: Record, outputs: tuple[torch.Tensor, ...], ctx: Any) -> None:
        """Note what a SAVE op made, and its autograd node: in replay that reads nothing."""
        self.skipped_any = True
        if self.watch is not None and (self.has_policy or self.watch.group):
            self.watch.note_handle(record, outputs)
        elif self.watch is not None:
            self.watch.skipped_op = None
        number = node_number(ctx)
        self.skipped.append((number, number + 1))
        self.provenance.note_skipped(record, outputs)

    def expect_saved(
        self, record: Record, named: Mapping[str, torch.Tensor | None], known_args: tuple[Any, ...]
    ) -> None:
        """Note what autograd saves next, if it records the op at all, and the op's inputs, if they are known."""
        self.known_args = known_args
        tensors = [(name, tensor) for name, tensor in named.items() if tensor is not None]
        tensors.reverse()
        self.expected = (record, tensors, sequence_number()) if tensors else None

    def forget_expected(self) -> None:
        """Expect nothing: something else has come."""
        self.expected = None
        self.known_args = ()

    def keep_inputs(self, record: Record, args: Iterable[Any]) -> None:
        """Keep those inputs of an op in slots that replay would not have."""
        slots: dict[int, Slot] = {}
        for place, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and not self.note_reader(arg):
                source = self.source_of(arg)
                if source is not None:
                    slots[place] = self._slot_for(record.name, f"input {place}", arg, source)
        if slots:
            record.slots = slots

    def _slot_for(self, op: str, name: str, tensor: torch.Tensor, source: tuple[str, int]) -> Slot:
        hooks = self.region.hooks
        away = self.region.tape.records[source[0]].policy is CheckpointPolicy.OFFLOAD and not tensor.is_inference()
        if hooks is None and away:
            hooks = slot_hooks(self.region, op or None, name, tensor)
        return Slot(tensor, hooks, None, False, source)

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Keep those inputs of an inner region that replay would not have."""
        self.forget_expected()
        if self.has_policy:
            return args, kwargs  # it sees what the inner region reads
        record = Record("", CheckpointPolicy.RECOMPUTE)
        self.keep_inputs(record, leaves_of(args, kwargs))
        self.region.tape.regions.append(record)
        return args, kwargs

    def source_of(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return name and place of the skipped op's output that a tensor is, or is a view of, if it is one."""
        writer = self.storages.writer_of(tensor) if self.entries else None
        if writer is not None:
            return writer[0].group, writer[1]
        made = self.provenance.maker_of(tensor)
        if made is None or made.record.policy is CheckpointPolicy.RECOMPUTE:
            return None
        return made.record.name, made.output

    # What autograd saves.

    def pack_in_call(self, tensor: torch.Tensor) -> Holder | Anchor | None:
        """Do what `pack` does where a call runs, or a SAVE op is expected to save."""
        if self.expected is not None:
            record, tensors, number = self.expected
            name, expected = tensors[-1]
            if tensor is expected and number == sequence_number():
                tensors.pop()
                held = self.hold(record, name, tensor, record.policy)
                if not tensors:
                    self.forget_expected()
                return held
            self.forget_expected()  # autograd did not record the op
        if self.calling is not None:
            return self.calling.pack(tensor)
        return self.pack(tensor)

    def pack_of_call(self, tensor: torch.Tensor) -> OpHolder | None:
        """Return the holder for the output of a SAVE op that is saved in a native region."""
        source = self.source_of(tensor) if self.watch is not None and self.watch.stretch is not None else None
        if source is None or self.watch is None:
            return None
        name = f"{source[0].rpartition('/')[2]}_{source[1]}"
        return self.resident(self.watch.group, name, tensor, self.watch.group_policy)

    def hold(self, record: Record, name: str, tensor: torch.Tensor, policy: CheckpointPolicy) -> Holder | Anchor:
        """Return the holder for a tensor that a skipped op or a whole call saves."""
        region, owner = self.region, tensor._base
        if owner is None:
            owner = tensor
        if type(owner) is not torch.Tensor and is_parameter(owner):
            return (tensor if tensor is owner else tensor.detach(), tensor._version, region)
        holder = self.holder_for(record.name, name, tensor)
        if elide(self, record, tensor, owner, holder):
            holder.resident = False
            region.tape.note_elided(ref(holder))
            if region.options is not DEFAULTS:
                self.mode.note_value(holder, tensor)
        elif not (
            policy is CheckpointPolicy.OFFLOAD and region.hooks is None and offload_resident(region, holder, tensor)
        ):
            self.keep(holder, tensor)
        return holder

    # Native regions.

    def run_native(
        self, name: str, policy: CheckpointPolicy, function: Callable[..., Any], args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Run a native region; see `RematMode.run_native`."""
        if self.expected is not None:
            self.forget_expected()
        opened = self.opened
        if (opened is not None and self.is_part_of_skipped(opened.is_running())) or self.skips():
            return function(*args, **kwargs)
        if policy is CheckpointPolicy.RECOMPUTE and not self.has_policy:
            record = Record(name, policy)
            self.note_record(record)
            self.keep_inputs(record, leaves_of(args, kwargs))
            return function(*args, **kwargs)
        if policy is CheckpointPolicy.RECOMPUTE or self.has_policy or not is_whole_call(function, args, kwargs):
            return super().run_native(name, policy, function, args, kwargs)
        call = CallForward(self, name, policy, function, args if not kwargs else (*args, *kwargs.values()))
        self.note_record(call.record)
        self.skipped_any = self.packs = True
        self.calling, self.known_args = call, call.args
        try:
            result = function(*args, **kwargs)
            call.returns(result)
        except BaseException as error:
            call.left_by(error)
            raise
        finally:
            self.calling, self.known_args = None, ()
        return result

    def skips(self) -> bool:
        """Whether a native region runs that replay skips."""
        return self.calling is not None or (self.watch is not None and bool(self.watch.group))

    def note_returned_view(self, stretch: Stretch, place: int, leaf: torch.Tensor, last: int) -> None:
        """Note a view of a SAVE op's output that a native region returns: code outside may read it."""
        if self.source_of(leaf) is not None:
            self._views.append((stretch, place, leaf, last))

    # The end.

    def finish(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """Check at the region's end that the last op was ended, and keep what replay reads."""
        if self.opened is not None:
            self.opened.check_ended(self.region.name)
        if self._views:
            self._keep_views(boundary)
        super().finish(boundary)

    def _keep_views(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        views, self._views = self._views, []
        for stretch, place, leaf, last in views:
            if self.is_read(boundary, leaf, last) and (source := self.source_of(leaf)) is not None:
                name = "out" if place == 0 else str(place)
                slot = self._slot_for(stretch.name, name, leaf, source)
                stretch.returned = {**stretch.returned, place: slot}

    def forget(self) -> None:
        """Let go of the op that an exception has left open, and of the graph."""
        self.opened = self._around = self.calling = None
        self._views = []
        self.forget_expected()
        super().forget()
