"""Calls in forward: ops with handles, and functions of torch's own in native regions.

In: ops as they begin and end, and the tensors that autograd saves for them. Kept: records in the region's log; until
forward ends, where tensors come from. Out: the holders of what SAVE calls save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from sys import _getframe
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, strided
from torch.autograd.graph import Node

from torch_remat._compat import has_returned, is_compiled, node_number, sequence_number, storage_key
from torch_remat.dispatch.ambient import Draws
from torch_remat.dispatch.check.inner_ops import Around
from torch_remat.dispatch.handle.op import RematHandle
from torch_remat.dispatch.handle.running_call import (
    Given,
    UnwatchedCall,
    WatchedCall,
    check_needs,
    mark_calls_made_again,
)
from torch_remat.dispatch.handle.whole_call import CallForward, is_whole_call
from torch_remat.dispatch.holder import AUTOCAST_DTYPES, Anchor, Holder, OpHolder, is_parameter, parameter_behind
from torch_remat.dispatch.log.entry import Entry, HandleCall
from torch_remat.dispatch.log.meta import Meta, described, parts_of
from torch_remat.dispatch.log.record import NO_SLOTS, Record, Stretch
from torch_remat.dispatch.log.recorder import Recorder
from torch_remat.dispatch.log.slot import Slot, version_of
from torch_remat.dispatch.mode import RematMode
from torch_remat.dispatch.offloading import offload_resident, sender_of, slot_hooks
from torch_remat.dispatch.options import DEFAULTS
from torch_remat.dispatch.placeholder import NOT_LAZY, Placeholder, new_tuple
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.views import Elided
from torch_remat.errors import UsageError
from torch_remat.policies.decision import CheckpointPolicy

_RECOMPUTE, _OFFLOAD = CheckpointPolicy.RECOMPUTE, CheckpointPolicy.OFFLOAD
_BODY = 2  # frames from `CallRecorder.begin` to the body: by way of `get_handle`
_new = object.__new__  # without a call of `__init__`, which would be a tenth of what an op costs


class ForwardOp(RematHandle):
    """An op with policy RECOMPUTE in forward, and what all ops in forward have in common.

    Attributes:
        ops: The ops of its region.
        record: Its record.
        outer: The op in whose body it runs, if any.
        place: The address of the frame in which its body runs; the frame itself would keep the body's tensors alive.
        code: The body's code.
        args: The op's inputs, as far as they are known and matter.
    """

    ops: CallRecorder
    record: Record
    outer: ForwardOp | None
    place: int
    code: CodeType
    args: tuple[Any, ...] = ()

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Keep the inputs that replay would not have."""
        if self._step != 0:
            raise self._out_of_order(1)
        self._step = 1
        if self.ops.skipped_any:
            self.args = args
            self.ops.keep_inputs(self.record, args)
        return args[0] if len(args) == 1 else args

    def record_outputs(self, *outs: Tensor, as_tuple: bool = False) -> Any:
        """Note the outputs: SAVE ops may save them, or views of them."""
        if 0 <= self._step < 3 and len(outs) == 1 and type(out := outs[0]) is Tensor and not out.requires_grad:
            self._step = 3
        else:
            outs = self._end(outs)
        ops = self.ops
        ops.opened = self.outer
        ops.made.note(self.record, outs, self.args)
        if self.args:
            self.args = ()
        if not as_tuple and len(outs) == 1:
            return outs[0]
        self.record.as_tuple = True
        return outs

    def _end(self, outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Check the last step; an input that is returned as it is becomes a view, as autograd does, too."""
        super()._end(outs)
        for out in outs:
            if out.requires_grad:
                dirty = {id(tensor) for tensor in self._ctx.dirty_tensors or ()}
                return tuple([o.view_as(o) if o.requires_grad and id(o) not in dirty else o for o in outs])
        return outs

    def is_running(self) -> bool:
        """Whether its body is on this thread's stack."""
        return self._is_at_or_above(_getframe(1))

    def is_around(self, frame: FrameType, ctx: Any) -> bool:
        """Whether its body is on the stack above that of another op, or is that one.

        If it has raised, the other body may have its address and its code: then only the context tells them apart.
        """
        return self._is_at_or_above(frame if self._ctx is ctx else frame.f_back)

    def _is_at_or_above(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if id(frame) == self.place and frame.f_code is self.code:
                return True
            frame = frame.f_back
        return False

    def check_ended(self) -> None:
        """Raise if the body returned without telling its outputs; one that raised may be forgotten."""
        if has_returned(self._ctx):
            raise UsageError(
                "the op's forward returned without handle.record_outputs",
                region=self.ops.region.name,
                op=self.record.name,
                remedy="End the forward with `return handle.record_outputs(out)`.",
            )


class SavedOp(ForwardOp):
    """An op with policy SAVE or OFFLOAD in forward.

    Attributes:
        before: What the region reaches, before the op.
    """

    record: HandleCall
    before: Sequence[Any] = ()

    def load(self, args: tuple[Any, ...]) -> None:
        """Note the inputs; forward skips nothing."""
        self.maybe_load_saved()
        self.args = args
        self._know_parameters(args)

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Keep nothing: replay does not run the body."""
        if self._step != 0:
            raise self._out_of_order(1)
        self._step = 1
        self._know_parameters(args)
        return args[0] if len(args) == 1 else args

    def _know_parameters(self, args: tuple[Any, ...]) -> None:
        if self.record.policy is _OFFLOAD:
            sender_of(self.ops.region).know_parameters(args)

    def record_outputs(self, *outs: Tensor, as_tuple: bool = False) -> Any:
        """Note the outputs, all that placeholders must show, and what autograd is to save next."""
        ctx, ops, record = self._ctx, self.ops, self.record
        region, watch = ops.region, ops.watch
        out: Any = outs[0] if outs else None
        usual = type(out) is Tensor and not (out.requires_grad or out.is_complex()) and out.layout is strided
        if usual and len(outs) == 1 and 0 <= self._step < 3:
            self._step = 3
        else:
            outs = self._end(outs)
            out = outs[0]
        ops.opened = self.outer
        if ctx.dirty_tensors:
            raise UsageError(
                f"an op with policy {record.policy.name} cannot mark inputs as dirty: replay would not change them "
                "again",
                region=region.name,
                op=record.name,
                remedy="Return a new tensor instead, or give the op the policy RECOMPUTE.",
            )
        if as_tuple or len(outs) > 1:
            record.as_tuple = as_tuple = True
            record.results = described(outs, None)
        elif usual:
            geometry = out.shape, out.stride(), out.storage_offset()
            record.results = new_tuple(Meta, (geometry, out.dtype, out.device, False, NOT_LAZY))
        else:
            record.results = described(out, None)
        if plain := ctx.non_differentiable:
            record.plain = [place for place, out in enumerate(outs) if any(out is tensor for tensor in plain)]
        if ops.draws is not None:
            record.drawn = ops.draws.end()
        if region.outside is not None:
            region.outside.note_skipped(self.before, len(region.tape.records))
            self.before = ()
        ops.skipped_any = True
        if watch is not None and (ops.has_policy or watch.native is not None):
            watch.note_handle(record, outs)
        number = node_number(ctx)  # in replay its node reads nothing
        ops.skipped.append((number, number + 1))
        ops.made.note(record, outs)
        if self._named:
            expected = [*self._named.items()]
            expected.reverse()
            ops.expected, ops.known_args = (record, expected, sequence_number()), self.args
            self._named, self.args = {}, ()
        return outs if as_tuple else out


class Made(NamedTuple):
    """An op's output; without a record a tensor of which one is a view."""

    record: Any
    place: int
    version: int
    tensor: ref[Tensor]


class MadeByOps:
    """Which tensors of one region are outputs of its ops with handles; until forward ends, by weak references.

    A tensor is known by itself, by the tensor that it is a view of, or by its storage: a detached alias has no other
    link. What shares a storage with an output of a skipped op counts as made by it, so that it is kept, unless it is
    the tensor of which that is a view, or older: taken for one by mistake it costs memory; else replay would fail.

    Attributes:
        tensors: The outputs, by the id of the tensor.
    """

    __slots__ = ("_region", "_storages", "_unindexed", "tensors")

    def __init__(self, region: Any) -> None:
        self._region = region
        self.tensors: dict[int, Made] = {}
        # By the storage's address, with the storage, which tells whether another has the address now; and whether the
        # output is a view of a tensor that the op has not made.
        self._storages: dict[int, tuple[ref[UntypedStorage], Made, bool]] = {}
        # Outputs of recomputed ops that are not in `_storages` yet: few are ever looked for there.
        self._unindexed: list[Made] = []

    def note(self, record: Record, outputs: tuple[Tensor, ...], inputs: tuple[Any, ...] = ()) -> None:
        """Note the outputs of an op; one that is an input, returned as it is, stays what it was if replay runs it."""
        for place, tensor in enumerate(outputs):
            for value in inputs:
                if value is tensor:
                    break
            else:
                self.tensors[id(tensor)] = made = new_tuple(Made, (record, place, version_of(tensor), ref(tensor)))
                if record.policy is _RECOMPUTE:
                    self._unindexed.append(made)
                else:
                    self._index(tensor, made)
                    if (base := tensor._base) is not None and self._known(base) is None:
                        self.tensors[id(base)] = new_tuple(Made, (None, 0, 0, ref(base)))

    def maker_of(self, tensor: Tensor) -> Made | None:
        """Return the op's output that a tensor is, or is a view or an alias of; None for all other tensors."""
        known = self._known(tensor)
        if known is not None and known[0] is not None:  # by place, which is faster than by name
            return known
        for made in self._unindexed:
            output = made.tensor()
            if output is not None and output._base is None:
                self._index(output, made)
        self._unindexed.clear()
        if self._storages and (found := self._at(next(_with_storage(tensor), None))) is not None:
            _, made, is_view = found
            if not is_view or (known is None and not self._is_older(tensor)):
                return made
        base = tensor._base
        known = None if base is None else self._known(base)
        return known if known is not None and known[0] is not None else None

    def _known(self, tensor: Tensor) -> Made | None:
        made = self.tensors.get(id(tensor))
        return made if made is not None and made[3]() is tensor else None

    def _index(self, tensor: Tensor, made: Made) -> None:
        """Note the storage of an output; a skipped op's takes the place of a recomputed one's."""
        for part in (tensor,) if type(tensor) is Tensor and tensor.layout is strided else _with_storage(tensor):
            storage = part.untyped_storage()
            known = self._at(part) if storage._cdata in self._storages else None
            if known is None or (known[1].record.policy is _RECOMPUTE and made.record.policy is not _RECOMPUTE):
                self._storages[storage._cdata] = ref(storage), made, tensor._base is not None

    def _at(self, part: Tensor | None) -> tuple[Any, Made, bool] | None:
        """Return what is noted of a tensor's storage."""
        if part is None:
            return None
        storage = part.untyped_storage()
        known = self._storages.get(storage._cdata)
        return known if known is not None and known[0]() is storage else None

    def _is_older(self, tensor: Tensor) -> bool:
        """Whether a tensor was there before the region: then none of its ops made it.

        In the replay of a region around this one the same tensor may be no view.
        """
        inputs, node = self._region.inputs, tensor.grad_fn
        known = inputs is not None and inputs.contains(tensor)
        return known or (node is not None and node_number(node) < self._region.first_number)


def _with_storage(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the parts of a tensor that have a storage of their own."""
    for part in (tensor,) if type(tensor) is Tensor else parts_of(tensor):
        if not isinstance(part, Placeholder) and part.layout is strided:
            yield part


class CallRecorder(Recorder):
    """The log of one region's forward, with its calls.

    Attributes:
        expected: The record, names and tensors whose saving comes next, since its body has just ended, before any other
            node; the last ones first.
        known_args: The inputs of the op whose tensors are expected, or of the call that runs, if they are known.
        made: What ops with handles made.
        calls: The saved calls of `op`.
        draws: Which calls draw random numbers; None where nobody cares.
        recomputing: In how many native regions of the policy RECOMPUTE code runs.
    """

    opened: ForwardOp | None
    calling: CallForward | WatchedCall | None

    def __init__(self, forward: RematMode) -> None:
        super().__init__(forward)
        self.made = MadeByOps(self.region)
        self.expected: tuple[Record, list[tuple[str, Tensor | None]], int] | None = None
        self.known_args: Iterable[Any] = ()
        self.calls: list[WatchedCall | UnwatchedCall] = []
        self.draws = None if self.region.rng is None else Draws(self.region.rng)
        self.recomputing = 0
        # Whether most saved tensors of calls need nothing but a holder.
        self.is_usual = self.region.options is DEFAULTS and self.region.hooks is None
        self._around: Around | None = None
        self._views: list[tuple[Stretch, int, Tensor, int]] = []

    def note_record(self, record: Record) -> None:
        """Note what has a name, here and in the regions around."""
        super().note_record(record)
        if self.mode.parent is not None:
            if self._around is None:
                self._around = Around(self.mode)
            self._around.note(record)

    # Ops with handles.

    def begin(self, name: str, policy: CheckpointPolicy, ctx: Any) -> ForwardOp | None:
        """Begin an op; None if it is part of one that replay skips. Only `get_handle` calls it, called by the body."""
        if self.expected is not None:
            self.forget_expected()
        if self.calling is not None:
            return None  # it is part of the call
        frame, watch = _getframe(_BODY), self.watch
        if self.opened is not None and self.is_part_of_skipped(self.opened.is_around(frame, ctx)):
            return None
        if watch is not None and watch.native is not None:
            policy = CheckpointPolicy.SAVE  # it follows the native region around it
        op: ForwardOp
        record: Record
        # What is read of it is set, also where the class has the same: Python finds the former far sooner.
        if policy is _RECOMPUTE:
            op, record = _new(ForwardOp), _new(Record)
            record.slots = NO_SLOTS
            record.elided_outputs = None
        else:
            op, record = _new(SavedOp), _new(HandleCall)
            record.group = name
            record.as_tuple = False
            record.elided_inputs = record.drawn = None
            record.plain = ()
            if self.draws is not None:
                self.draws.begin()
            if self.region.outside is not None:
                op.before = self.region.outside.states()
        record.name = name
        record.policy = policy
        tape = self.region.tape
        if name in tape.records or self.mode.parent is not None:
            self.note_record(record)
        else:  # what it does, for the usual op
            tape.records[name] = record
            record.saved_before = len(tape.saved)
        op._ctx = ctx
        op._name = name
        op._step = -1
        op.args = ()
        op.ops = self
        op.record = record
        op.outer = self.opened
        op.place = id(frame)
        op.code = frame.f_code
        self.opened = op
        return op

    def is_part_of_skipped(self, is_running: bool) -> bool:
        """Whether a skipped op's body runs, if that of the last op does: see NOTE [ What is kept for an op ], 3."""
        opened = self.opened
        assert opened is not None
        if is_running:
            return opened.record.policy is not _RECOMPUTE
        opened.check_ended()
        self.opened = opened.outer
        return False

    def passes_over(self) -> bool:
        """Whether the body of a skipped op runs, to which replay does not come."""
        opened = self.opened
        if self.calling is not None:
            return True
        return opened is not None and opened.record.policy is not _RECOMPUTE and opened.is_running()

    def argument_of(self, holder: Holder) -> Tensor | None:
        """Return what an empty holder of the call that runs waits for, if it is an argument: the call may read it."""
        waiting = () if self.calling is None else self.calling.record.elided_inputs or ()
        for elided in waiting:
            if elided.holder() is holder:
                return elided.value(list(self.known_args)[elided.place])
        return None

    def forget_expected(self) -> None:
        """Expect nothing: something else has come."""
        self.expected = None
        self.known_args = ()

    def keep_inputs(self, record: Record, args: Iterable[Any]) -> None:
        """Keep those inputs of an op in slots that replay would not have."""
        slots: dict[int, Slot] = {}
        for place, arg in enumerate(args):
            if isinstance(arg, Tensor) and not (self.entries and self.note_reader(arg)):
                made = self.made.maker_of(arg)
                if made is not None:
                    maker, output, _, _ = made
                    if maker.policy is not _RECOMPUTE:
                        slots[place] = self._slot_for(record.name, f"input {place}", arg, maker, output)
        if slots:
            record.slots = slots

    def _slot_for(self, op: str, name: str, tensor: Tensor, maker: Record, place: int) -> Slot:
        hooks = self.region.hooks
        if hooks is None and maker.policy is _OFFLOAD and not tensor.is_inference():
            hooks = slot_hooks(self.region, op or None, name, tensor)
        return Slot(tensor, hooks, None, False, (maker.name, place))

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Keep those inputs of an inner region that replay would not have."""
        self.forget_expected()
        if self.has_policy:
            return args, kwargs  # it sees what the inner region reads
        record = Record("", _RECOMPUTE)
        self.keep_inputs(record, leaves_of(args, kwargs))
        self.region.tape.regions.append(record)
        return args, kwargs

    def note_readers(self, tensors: Sequence[Tensor]) -> None:
        """Keep tensors that replay reads here; outputs of ops with handles whole, and from where they are made."""
        for tensor in tensors:
            if self.note_reader(tensor) or self.has_policy or (made := self.made.maker_of(tensor)) is None:
                continue
            maker, place, version, known = made
            output = known()
            if maker.policy is not _RECOMPUTE and output is not None and version_of(output) == version:
                slot = self._slot_for("", "", output.detach(), maker, place)
                maker.slots = {**maker.slots, place: slot}

    def _source_of(self, tensor: Tensor) -> tuple[Record, int] | None:
        """Return record and place of the skipped op's output that a tensor is, or is a view of, if it is one."""
        made = self.made.maker_of(tensor)
        return None if made is None or made.record.policy is _RECOMPUTE else (made.record, made.place)

    # What autograd saves.

    def pack_expected(self, tensor: Tensor) -> Holder | Anchor | None:
        """Do what `pack` does where a SAVE op is expected to save."""
        assert self.expected is not None
        record, tensors, number = self.expected
        name, expected = tensors.pop()
        while expected is None and tensors:
            name, expected = tensors.pop()
        if tensor is expected and number == sequence_number():
            held = self.hold(record, name, tensor, record.policy)
            if not tensors:
                self.expected, self.known_args = None, ()
            return held
        self.forget_expected()  # autograd did not record the op
        return self.pack(tensor)

    def pack_of_call(self, tensor: Tensor) -> OpHolder | None:
        """Return the holder for the output of a SAVE op that is saved in a native region."""
        native = None if self.watch is None or not self.made.tensors else self.watch.native
        if native is None or (source := self._source_of(tensor)) is None:
            return None
        return self.resident(native.name, f"{source[0].name.rpartition('/')[2]}_{source[1]}", tensor, native.policy)

    def hold(self, record: Record, name: str, tensor: Tensor, policy: CheckpointPolicy) -> Holder | Anchor:
        """Return the holder for a tensor that a skipped op or a whole call saves."""
        region, owner = self.region, tensor._base
        if owner is None:
            owner = tensor
        is_leaf = owner.requires_grad and owner.grad_fn is None  # the graph owns it anyway
        if (is_leaf and not region.inputs.shares(owner)) or (type(owner) is not Tensor and is_parameter(owner)):
            return (tensor if tensor is owner else tensor.detach(), tensor._version, region, record.name)
        holder = self.holder_for(record.name, name, tensor)
        made = self.made.maker_of(tensor) if self.made.tensors else None
        if (
            made[0].policy is _RECOMPUTE and self._elide_output(made, record, tensor, holder)
            if made is not None
            else self.known_args and self._elide_input(record, tensor, owner, holder)
        ):
            holder.resident = False
            region.tape.note_elided(ref(holder))
            if region.values is not None:
                region.values.add(holder, tensor)
        elif policy is not _OFFLOAD or region.hooks is not None or not offload_resident(region, holder, tensor):
            self.keep(holder, tensor)
        return holder

    def elide_made(self, record: Record, name: str, tensor: Tensor, node: Node, place: int) -> OpHolder | None:
        """Do what `hold` does for an argument that replay makes again, by a node; None where `hold` has to look."""
        region = self.region
        if tensor._base is not None or id(tensor) in region.inputs.originals or tensor.dtype in AUTOCAST_DTYPES:
            return None
        if self.made.tensors or tensor.layout is not strided or storage_key(tensor) in self.storages.writers:
            return None
        holder = self.holder_for(record.name, name, tensor)
        holder.resident = False
        holder.producer = type(node)
        holder.origin = None if node._sequence_nr() >= region.first_number else ref(tensor)
        region.tape.note_elided(entry := ref(holder))
        if record.elided_inputs is None:
            record.elided_inputs = []
        record.elided_inputs.append(new_tuple(Elided, (entry, place, None, None)))
        return holder

    def _elide_output(self, made: Made, record: Record, tensor: Tensor, holder: OpHolder) -> bool:
        """Let replay take a saved tensor from the output of an op that it runs again; return whether it can."""
        maker, place, version, output = made
        source = output()
        # Of an alias of an output that is gone nobody knows where it lies.
        if maker is record or tensor._version != version or source is None:
            return False
        if self.has_policy and self.watch is not None and not self.watch.runs_writer(tensor):
            return False  # written since, past its version counter, by an op that replay need not run
        if maker.elided_outputs is None:
            maker.elided_outputs = []
        maker.elided_outputs.append(Elided.of(tensor, holder, place, source))
        return True

    def _elide_input(self, record: Record, tensor: Tensor, owner: Tensor, holder: OpHolder) -> bool:
        """Do the same with an input of the op or the call itself, where the inputs are known."""
        writer = self.storages.writer_of(tensor) if self.entries else None
        if writer is not None and not (self.has_policy and self._runs_again(record, *writer)):
            return False
        inputs = self.region.inputs
        if inputs is None or inputs.shares(owner):
            return False  # it shares the storage of a region input
        for place, arg in enumerate(self.known_args):
            # Of a view of a skipped op's output replay has no data.
            if arg is tensor or (
                isinstance(arg, Tensor)
                and (arg is owner or arg._base is owner)
                and (self.has_policy or self._source_of(arg) is None)
            ):
                if record.elided_inputs is None:
                    record.elided_inputs = []
                record.elided_inputs.append(Elided.of(tensor, holder, place, arg))
                if type(self.known_args) is Given:
                    self.known_args.use(place)
                _note_origin(holder, owner, self.region.first_number)
                if isinstance(record, Stretch) and writer is not None:
                    self.note_reader(tensor, record.start)
                return True
        return False

    def _runs_again(self, record: Record, entry: Entry, place: int) -> bool:
        """Whether an argument of a call is made, under a policy, by an entry before it that is not saved."""
        return isinstance(record, Stretch) and place >= 0 and place not in entry.saved and entry.group != record.name

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
        if policy is _RECOMPUTE:
            record = Record(name, policy)
            self.note_record(record)
            if not self.has_policy:
                self.keep_inputs(record, leaves_of(args, kwargs))
            self.recomputing += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.recomputing -= 1
        if self.has_policy:
            return self.run_group(Stretch(name, policy), function, args, kwargs)
        if not is_whole_call(function, args, kwargs):
            return self.run_stretch(Stretch(name, policy), function, args, kwargs)
        return self._run_whole(name, policy, function, args, kwargs)

    def _run_whole(
        self, name: str, policy: CheckpointPolicy, function: Callable[..., Any], args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Run a call of a function of torch's own."""
        call = CallForward(self, name, policy, function, args if not kwargs else (*args, *kwargs.values()))
        self.note_record(call.record)
        self.skipped_any = self.packs = True
        self.calling, self.known_args = call, call.args
        before = None if type(function) is BuiltinFunctionType else self.states_outside()
        try:
            result = function(*args, **kwargs)
            self.note_skipped(before)
            call.returns(result)
        except BaseException as error:
            call.left_by(error)
            raise
        finally:
            self.calling, self.known_args = None, ()
        return result

    def run_call(
        self, opaque: bool, name: str, policy: CheckpointPolicy, function: Callable[..., Any], args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Run a call of `op`; see `RematMode.run_call`."""
        if policy is _RECOMPUTE or (self.has_policy and is_compiled(function)):
            return self.run_native(name, policy, function, args, kwargs)
        if self.expected is not None:
            self.forget_expected()
        opened = self.opened
        if (opened is not None and self.is_part_of_skipped(opened.is_running())) or self.skips():
            return function(*args, **kwargs)
        if not self.has_policy and is_whole_call(function, args, kwargs):
            return self._run_whole(name, policy, function, args, kwargs)
        call: WatchedCall | UnwatchedCall
        if opaque and not self.has_policy:
            call = UnwatchedCall(self, name, policy, function, args, kwargs)
            self.note_record(call.record)
            self.skipped_any = True
        else:
            call = WatchedCall(self, name, policy, function, args, kwargs)
        self.packs = True
        self.calling, self.known_args = call, call.given
        try:
            if isinstance(call, UnwatchedCall):
                before = self.states_outside()
                result = function(*args, **kwargs)
                self.note_skipped(before)
            else:
                run = self.run_group if self.has_policy else self.run_stretch
                result = run(call.record, function, args, kwargs)
            call.returns(result)
        except BaseException as error:
            call.left_by(error)
            raise
        finally:
            self.calling, self.known_args = None, ()
            call.let_go()
            self.calls.append(call)
        return result

    def note_returned_view(self, stretch: Stretch, place: int, leaf: Tensor, last: int) -> None:
        """Note a view of a SAVE op's output that a native region returns: code outside may read it."""
        if self._source_of(leaf) is not None:
            self._views.append((stretch, place, leaf, last))

    # The end.

    def finish(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        """Check at the region's end that the last op was ended, and keep what replay reads."""
        if self.opened is not None:
            self.opened.check_ended()
        if self._views:
            self._keep_views(boundary)
        if self.calls:
            mark_calls_made_again(self.calls, self, boundary)
        super().finish(boundary)
        if self.calls:
            check_needs(self.region, self.calls, self.entries)

    def _keep_views(self, boundary: Sequence[torch.autograd.graph.Node | None]) -> None:
        views, self._views = self._views, []
        for stretch, place, leaf, last in views:
            if self.is_read(boundary, leaf, last) and (source := self._source_of(leaf)) is not None:
                slot = self._slot_for(stretch.name, "out" if place == 0 else str(place), leaf, *source)
                stretch.returned = {**stretch.returned, place: slot}

    def forget(self) -> None:
        """Let go of the op that an exception has left open, and of the graph."""
        self.opened = self._around = self.calling = None
        self._views, self.calls = [], []
        self.forget_expected()
        super().forget()


def _note_origin(holder: OpHolder, owner: Tensor, first_number: int) -> None:
    """Note where an input comes from, which replay compares as it does for what is recomputed."""
    node = owner.grad_fn
    holder.producer = type(node)
    holder.origin = None
    if type(owner) is not Tensor or owner.dtype in AUTOCAST_DTYPES:
        holder.origin = parameter_behind(owner)
    outside = owner.requires_grad if node is None else node_number(node) < first_number
    if outside and holder.origin is None:
        holder.origin = ref(owner)
